"""`pytest --maskpack-strict` in test runs of their own, which load the plugin by the entry point of pyproject.toml."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import maskpack as mp
from maskpack.fields.options import not_strict

ROOT = Path(__file__).parents[2]
TESTS = """
import os, subprocess, sys
import pytest, torch
import maskpack as mp
from maskpack import compress, nest_batch_by_mask
from maskpack.tools import cli
from tensordict import TensorDict

def batch():
    mask = torch.tensor([[1, 1, 0]])
    return TensorDict({"response_mask": mask, "kl": mask * 0.5, "flaw": mask + 1}, batch_size=[1])

def test_compress():
    compress(batch(), registry=mp.RL_FIELDS | {"flaw": mp.MaskNestingSpec(None)})

def test_nest():
    nest_batch_by_mask(batch(), registry=mp.RL_FIELDS | {"flaw": mp.MaskNestingSpec(None)})

def test_values_under_the_mask():
    compress(batch(), registry=mp.RL_FIELDS | {name: mp.MaskNestingSpec("response") for name in ("kl", "flaw")})

def test_a_process_that_a_test_starts():
    code = "import torch, maskpack; from tensordict import TensorDict;"
    code += "maskpack.compress(TensorDict({'x': torch.ones(1, 2)}, batch_size=[1]))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)

def test_covered():
    compress(batch().exclude("kl", "flaw"))

def test_ignored():
    compress(batch(), registry=mp.RL_FIELDS | dict.fromkeys(("kl", "flaw"), mp.MaskNestingSpec(None)))

def test_tools_show_what_stays_padded(tmp_path):
    assert len(mp.check(batch())) == 2
    torch.save(batch().to_dict(), tmp_path / "batch.pt")
    assert cli.main(["doctor", str(tmp_path / "batch.pt")]) == 1
    assert cli.main(["inspect", str(tmp_path / "batch.pt")]) == 0

def test_one_that_is_let_off(monkeypatch):
    monkeypatch.delenv("MASKPACK_STRICT", raising=False)
    compress(batch())
"""
STRICT = {"test_compress", "test_nest", "test_values_under_the_mask", "test_a_process_that_a_test_starts"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder of tests, and the metadata of an installed distribution with the entry points of this one."""
    (table,) = re.findall(
        r"^\[project\.entry-points\.pytest11\]\n(.*?)\n\n", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    point = re.sub(r'"(\w+)".*', r"\1", table)
    info = tmp_path / "site" / "plugin_of_maskpack-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-maskpack\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[pytest11]\n{point}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_theirs.py").write_text(TESTS)
    return tmp_path


def run(project: Path, *options: str) -> subprocess.CompletedProcess[str]:
    path = [str(project / "site"), str(ROOT)]
    env = {name: value for name, value in os.environ.items() if name not in ("MASKPACK_STRICT", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", *options]
    return subprocess.run(
        command,
        cwd=project,
        env=env | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )


def outcomes(done: subprocess.CompletedProcess[str]) -> tuple[set[str], set[str]]:
    """The tests that passed, and those that failed."""
    lines = re.findall(r"^(PASSED|FAILED) test_theirs\.py::(\w+)", done.stdout, re.MULTILINE)
    return tuple({name for kind, name in lines if kind == wanted} for wanted in ("PASSED", "FAILED"))  # type: ignore[return-value]


def test_with_the_option_every_call_is_strict(project: Path) -> None:
    done = run(project, "--maskpack-strict")
    passed, failed = outcomes(done)
    names = set(re.findall(r"^def (test_\w+)", TESTS, re.MULTILINE))
    assert failed == STRICT, done.stdout
    assert passed == names - STRICT
    assert "CoverageError: compress: 1 field(s) would stay padded; expected none in strict mode:" in done.stdout
    assert "LossyPadError" in done.stdout
    assert "nest_batch_by_mask: 1 field(s) would stay padded" in done.stdout


def test_without_it_nothing_is(project: Path) -> None:
    done = run(project)
    assert outcomes(done)[1] == set(), done.stdout
    assert done.returncode == 0


def test_the_header_says_it_and_the_variable_is_put_back(project: Path) -> None:
    (project / "test_theirs.py").write_text("import os\ndef test_a(): assert os.environ['MASKPACK_STRICT'] == '1'\n")
    code = "import os, pytest; os.environ['MASKPACK_STRICT'] = '0'; print(int(pytest.main(['--maskpack-strict', '-p', "
    code += "'no:cacheprovider'])), os.environ['MASKPACK_STRICT']); os.environ.pop('MASKPACK_STRICT'); "
    code += "print(int(pytest.main(['--maskpack-strict', '-p', 'no:cacheprovider'])), 'MASKPACK_STRICT' in os.environ)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(project / "site"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=project, env=env, capture_output=True, text=True)
    assert done.stdout.count("\nmaskpack: strict mask nesting\n") == 2, done.stdout
    assert "\n0 0\n" in done.stdout
    assert done.stdout.endswith("\n0 False\n")


def test_a_run_without_the_option_imports_neither_maskpack_nor_torch(project: Path) -> None:
    (project / "test_theirs.py").write_text(
        "import sys\n\ndef test_a():\n    assert 'pytest_maskpack' in sys.modules\n"
        "    assert not {'torch', 'maskpack', 'tensordict', 'numpy'} & set(sys.modules)\n"
    )
    done = run(project)
    assert done.returncode == 0, done.stdout
    assert outcomes(done) == ({"test_a"}, set())


def test_the_plugin_names_the_variable_that_maskpack_reads() -> None:
    import pytest_maskpack
    from maskpack.fields.options import STRICT as READ

    assert pytest_maskpack.VARIABLE == READ


def test_values_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = TensorDict({"nobody_knows_it": torch.ones(1, 2)}, batch_size=[1])
    for call in (mp.compress, mp.nest_batch_by_mask):
        for value in ("0", ""):
            monkeypatch.setenv("MASKPACK_STRICT", value)
            with pytest.warns(mp.errors.MaskpackWarning, match="nobody_knows_it"):
                call(batch)
        monkeypatch.setenv("MASKPACK_STRICT", "1")
        with pytest.raises(mp.errors.CoverageError, match="nobody_knows_it"):
            call(batch)
        with not_strict(), not_strict(), pytest.warns(mp.errors.MaskpackWarning, match="nobody_knows_it"):
            call(batch)
        monkeypatch.setenv("MASKPACK_STRICT", " 1")
        expected = f"{call.__name__}: the environment variable MASKPACK_STRICT is ' 1'; expected \"1\" for strict mode"
        with pytest.raises(mp.errors.RegistryError, match=re.escape(expected)):
            call(batch)
