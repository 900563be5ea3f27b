"""The house: what importing maskpack brings in, and which package may import which."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

import maskpack as mp
from maskpack import dispatch, testing

HOUSE = Path(mp.__file__).parent
SOURCES = {".".join(path.relative_to(HOUSE).with_suffix("").parts): path for path in sorted(HOUSE.rglob("*.py"))}
HEAVY = {"ray", "transformers", "triton", "verl", "transfer_queue", "torchrl", "trl", "accelerate"}
HEAVY |= {"skyrl", "openrlhf"}
HEAVY |= {"hypothesis", "pytest"}

PACKAGES = ("errors", "core", "layout", "fields", "ops", "nesting", "packed", "views", "planning", "dispatch", "replay")
PACKAGES += ("store", "adapters", "tools", "testing")
"""Lowest first: a package imports only those before it."""
NO_TORCH = {f"planning.{name}" for name in ("balance", "costs", "loss_weights", "packing", "plan", "prefixes", "ranks")}
"""Modules that work with numbers alone, as does what they import of `core`."""
KERNELS = {
    "layout.launch_triton",
    "layout.scan_triton",
    "nesting.read_triton",
    "ops.fused_triton",
    "ops.pack_triton",
    "ops.log_probs_fused_triton",
    "ops.log_probs_triton",
    "ops.prefix_attention_triton",
    "packed.cuda.encode_kernel",
    "packed.cuda.kernel",
}
"""The modules that import Triton; they are imported inside functions."""
FRAMEWORKS = {
    "transformers": {"transformers"},
    "verl": {"verl", "ray"},
    "transferqueue": {"transfer_queue", "ray"},
    "torchrl": {"torchrl"},
    "trl": {"transformers", "trl"},
    "skyrl": {"skyrl"},
    "openrlhf": {"openrlhf"},
}
"""What each adapter may import beside the core."""
MAY_IMPORT_RAY = {"dispatch", "tools", "__main__"}


def package(module):
    """`ops.pack_torch` is part of `ops`."""
    return module.split(".")[0]


def place(module):
    """The number of its package; modules at the top come after all."""
    name = package(module)
    if name in ("__init__", "__main__"):
        return len(PACKAGES)
    assert name in PACKAGES, f"maskpack/{name} is no package of PACKAGES; move it into one of them."
    return PACKAGES.index(name)


def imports(source, module="module"):
    """Every module that `source` imports, wherever in the file; names inside maskpack begin with a dot."""
    folders = [part for part in module.split(".")[:-1] if part != "__init__"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _local(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["maskpack", *folders[: len(folders) - node.level + 1], *base.split(".")]).rstrip(".")
            if base == "maskpack":
                for alias in node.names:
                    known = any(name == alias.name or name.startswith(alias.name + ".") for name in SOURCES)
                    yield f".{alias.name}" if known else ".__init__"
            else:
                yield _local(base)


def _local(name):
    parts = name.split(".")
    return (f".{'.'.join(parts[1:])}" if parts[1:] else ".__init__") if parts[0] == "maskpack" else parts[0]


def forbidden(module, source):
    """The imports of a module that the packages do not allow."""
    wrong = []
    for name in imports(source, module):
        if name.startswith("."):
            other = name[1:]
            if module == "__init__":
                if package(other) in {"dispatch", "adapters", "tools", "testing"}:
                    wrong.append(name)
            elif package(other) != package(module) and place(other) >= place(module):
                wrong.append(name)
        elif not may_import(module, name):
            wrong.append(name)
    return wrong


def may_import(module, library):
    if library in {"torch", "tensordict"}:
        return module not in NO_TORCH
    if library == "triton":
        return module in KERNELS
    if package(module) == "adapters":
        return library not in HEAVY or library in FRAMEWORKS.get(module.split(".")[1], ())
    return library not in HEAVY or package(module) in MAY_IMPORT_RAY


@pytest.fixture(scope="module")
def loaded():
    """The modules of a fresh interpreter after one import, and after another one."""
    names = ["torch, tensordict, numpy", "maskpack", "maskpack.dispatch"]
    code = "import sys\n" + "".join(f"import {name}\nprint(*sys.modules)\n" for name in names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(names, (set(line.split()) for line in done.stdout.splitlines()), strict=True))


FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace"),
    *("logspace", "nested_tensor", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
    *("sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
"""The functions of torch that make a tensor on its default device."""


def without_device(source):
    """The lines that call one of FACTORIES and do not say where the tensor lies."""
    for node in ast.walk(ast.parse(source)):
        called = node.func if isinstance(node, ast.Call) else None
        if not isinstance(called, ast.Attribute) or called.attr not in FACTORIES:
            continue
        if ast.unparse(called.value).split(".")[0] == "torch" and "device" not in {word.arg for word in node.keywords}:
            yield node.lineno


# -------------------------------------------------------------------- what an import brings in


def test_importing_maskpack_is_light(loaded):
    modules = loaded["maskpack"]
    assert {"maskpack", "torch", "tensordict", "numpy"} <= modules
    assert modules & HEAVY <= loaded["torch, tensordict, numpy"] & {"triton"}
    assert modules & {f"maskpack.{module}" for module in KERNELS} == set()


def test_the_plugin_of_pytest_imports_no_more_than_pytest():
    """pytest loads it in every run, with or without its option."""
    assert set(imports((HOUSE.parent / "pytest_maskpack.py").read_text())) == {"__future__", "os", "pytest"}


def test_a_heavy_import_would_be_seen(loaded):
    assert "ray" in loaded["maskpack.dispatch"]


# -------------------------------------------------------------------- arrows


@pytest.mark.parametrize("module", SOURCES)
def test_imports_go_down(module):
    assert forbidden(module, SOURCES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("layout.row_layout", "from maskpack.nesting.nest import nest_batch_by_mask", [".nesting.nest"]),
        ("layout.row_layout", "import maskpack.packed.batch", [".packed.batch"]),
        ("layout.row_layout", "from ..packed.batch import compress", [".packed.batch"]),
        ("layout.row_layout", "from .. import packed, errors", [".packed"]),
        ("layout.row_layout", "from . import scan", []),
        ("packed.batch", "from maskpack.dispatch import endpoint", [".dispatch"]),
        ("nesting.nest", "from maskpack import RL_FIELDS", [".__init__"]),
        ("nesting.nest", "def late():\n    from maskpack.packed import batch", [".packed"]),
        ("nesting.nest", "if TYPE_CHECKING:\n    from maskpack.packed.batch import PackedBatch", [".packed.batch"]),
        ("packed.batch", "import ray", ["ray"]),
        ("adapters.transformers.model", "import transformers\nfrom maskpack.replay import PackedInputs", []),
        ("replay.inputs", "from maskpack.adapters.transformers import replayable", [".adapters.transformers"]),
        ("planning.plan", "import torch\nimport numpy", ["torch"]),
        ("ops.pack_torch", "import triton.language as tl", ["triton"]),
        ("ops.pack_triton", "import triton.language as tl", []),
        ("__init__", "from maskpack.dispatch import WorkerGroup", [".dispatch"]),
        ("dispatch.group", "import ray\nfrom maskpack.packed.batch import compress", []),
        ("testing.exact", "import hypothesis", ["hypothesis"]),
        ("testing.covered", "import pytest\nfrom maskpack.tools.suggest import Suggester", ["pytest"]),
        ("tools.doctor", "from maskpack.testing import assert_exact", [".testing"]),
    ],
)
def test_a_forbidden_arrow_would_be_seen(module, source, wrong):
    assert forbidden(module, source) == wrong


def test_a_module_outside_the_packages_would_be_seen():
    with pytest.raises(AssertionError, match=r"maskpack/utils is no package"):
        forbidden("utils", "from maskpack import errors")
    assert {package(module) for module in SOURCES} == {*PACKAGES, "__init__", "__main__"}


TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", [path.relative_to(TESTS).as_posix() for path in sorted(TESTS.rglob("*.py"))])
def test_only_tests_of_benchmarks_import_them(file):
    assert "bench" not in imports((TESTS / file).read_text()) or file.startswith("bench/")


def test_an_import_of_a_benchmark_would_be_seen():
    assert set(imports("def late():\n    from bench.workloads import make_batch\nimport bench.page")) == {"bench"}


# -------------------------------------------------------------------- where tensors lie


@pytest.mark.parametrize("module", SOURCES)
def test_every_new_tensor_is_told_where_it_lies(module):
    """Whoever sets a default device does not set it for maskpack."""
    assert list(without_device(SOURCES[module].read_text())) == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.zeros(3)", [1]),
        ("torch.zeros(3, dtype=torch.int64)", [1]),
        ("x = [\n    torch.tensor(1),\n    torch.full((), 0, device=x.device),\n]", [2]),
        ("torch.nested.nested_tensor(rows, layout=torch.jagged)", [1]),
        ('torch.empty(0, device="cpu")', []),
        ("torch.zeros_like(x); x.new_empty(3); torch.from_numpy(x); np.zeros(3); tl.zeros([4], tl.int32)", []),
    ],
)
def test_a_tensor_on_the_default_device_would_be_seen(source, lines):
    assert list(without_device(source)) == lines


# -------------------------------------------------------------------- output


def printing(source):
    """The lines that print."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("module", [module for module in SOURCES if module != "tools.cli"])
def test_only_the_command_line_prints(module):
    """The rest logs, below the logger `maskpack`."""
    assert printing(SOURCES[module].read_text()) == []


def test_a_print_would_be_seen():
    assert printing("x = 1\nprint(x)\nlog.print(x)") == [2]


# -------------------------------------------------------------------- files and names


@pytest.mark.parametrize("module", SOURCES)
def test_every_module_says_what_it_owns(module):
    assert ast.get_docstring(ast.parse(SOURCES[module].read_text()))


def test_types_are_shipped():
    assert (HOUSE / "py.typed").is_file()


PARTS = (mp, mp.nesting, mp.ops, mp.planning, mp.replay, mp.views, dispatch, testing)


def constants():
    """Names that a module assigns, each with the string that stands below it."""
    found = {}
    for path in SOURCES.values():
        body = ast.parse(path.read_text()).body
        for node, below in itertools.pairwise(body):
            if isinstance(node, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found |= {name.id: below.value.value for name in node.targets if isinstance(name, ast.Name)}
    return found


def documentation(name, value):
    if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
        written = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        made_by_dataclass = (written or "").startswith(f"{name}(")
        return "" if made_by_dataclass else written
    return constants().get(name)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_public_name_is_there_and_documented(part):
    assert [name for name in part.__all__ if not documentation(name, getattr(part, name))] == []


def test_missing_documentation_would_be_seen():
    import dataclasses

    @dataclasses.dataclass
    class Bare:
        x: int

    assert not documentation("Bare", Bare)
    assert not documentation("bare", lambda: None)
    assert not documentation("SEVEN", 7)


MAIN_CALLS = (
    *(mp.compress, mp.decompress, mp.nest_batch_by_mask, mp.unnest_batch_by_mask),
    *(mp.planning.plan_micro_batches, mp.planning.plan_ranks),
    *(mp.replay.response_log_probs, mp.replay.response_values, mp.replay.PackedInputs.of, mp.ops.packed_log_probs),
    dispatch.WorkerGroup.call,
)


def test_public_names_are_few():
    """Without adapters. MaskpackError is in `maskpack` and in `maskpack.errors`."""
    names = {f"{part.__name__}.{name}" for part in PARTS for name in part.__all__}
    errors = [
        name for name, value in vars(mp.errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    ]
    names |= {f"maskpack.errors.{name}" for name in errors}
    assert len(names - {"maskpack.errors.MaskpackError"}) <= 63, sorted(names)


def test_the_members_of_a_layout_are_few():
    layout = mp.RowLayout.from_lengths([1])
    assert len([name for name in dir(layout) if not name.startswith("_")]) <= 20


@pytest.mark.parametrize("call", MAIN_CALLS, ids=lambda call: call.__qualname__)
def test_main_calls_take_few_arguments(call):
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    arguments = [name for name, one in inspect.signature(call).parameters.items() if one.kind not in several]
    most = 11 if call is mp.ops.packed_log_probs else 9  # its layer, its sampling and its statistics are three subjects
    assert len({*arguments} - {"self"}) <= most, arguments
