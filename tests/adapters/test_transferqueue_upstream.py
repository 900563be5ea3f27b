"""TransferQueue's own end-to-end tests, which its wheel brings, over Maskpack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from needs import needs

transfer_queue = needs("transfer_queue")

HERE = Path(__file__).parent
THEIRS = Path(transfer_queue.__file__).parents[1] / "tests" / "e2e"
FILES = ["test_kv_interface_e2e.py", "test_checkpoint_e2e.py", "test_e2e_lifecycle_consistency.py"]
UNFIT = {
    "test_tensor_fields": "looks for the folder that SimpleStorage writes",
    "test_storage_saved_is_true": "looks for the folder that SimpleStorage writes",
    "test_load_raises_on_storage_unit_count_mismatch": "edits a file that SimpleStorage writes",
}


def test_its_own_tests_pass_over_maskpack(tmp_path):
    report = tmp_path / "report.xml"
    path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    unfit = " or ".join(UNFIT)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "transferqueue_upstream", "-q", "--timeout=600", f"--junitxml={report}", f"-k not ({unfit})"]
    environment = {**os.environ, "PYTHONPATH": path, "QUEUE_BACKEND": "Maskpack", "RAY_USAGE_STATS_ENABLED": "0"}
    run = subprocess.run(
        [*command, *(str(THEIRS / name) for name in FILES)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    cases = ElementTree.parse(report).getroot().findall(".//testcase")
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case.get("name", "") for case in cases if case.find("skipped") is not None]
    assert not failed, run.stdout[-5000:]
    assert all("gdr" in name for name in skipped), skipped  # they need a GPU
    assert len(cases) - len(skipped) >= 75, run.stdout[-2000:]
