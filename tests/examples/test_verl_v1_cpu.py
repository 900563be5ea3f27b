"""verl's V1 trainer on a CPU, as the example runs it: both storages leave the same bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from needs import needs

needs("verl")
needs("transfer_queue")

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
sys.path.append(str(Path(__file__).parents[2] / "examples"))

import verl_v1_cpu
from frozen import freeze, same


def run(backend: str, capsys: pytest.CaptureFixture[str]) -> tuple[object, list[str]]:
    """Fields and weights as plain data, and what was printed. Names of prompts, `uid`, are drawn anew."""
    steps, weights = verl_v1_cpu.train(backend)
    columns = [{name: fields.get(name) for name in fields.keys() if name != "uid"} for fields in steps]  # noqa: SIM118
    assert len(columns) == 2
    assert {"responses", "response_mask", "old_log_probs", "advantages", "rm_scores"} <= columns[0].keys()
    return freeze([columns, weights]), capsys.readouterr().out.splitlines()


def test_both_storages_leave_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    expected, plain = run("SimpleStorage", capsys)
    seen, printed = run("Maskpack", capsys)
    same(seen, expected)
    steps = [line for line in printed if line.startswith("step")]
    assert steps == [line for line in plain if line.startswith("step")]
    assert steps[0].startswith("step 1: 12 rows, reward 0.")
    held = [line for line in printed if "maskpack holds" in line]
    assert len(held) == 2
    assert all("maskpack holds 12 samples" in line for line in held)
    assert not any("maskpack" in line for line in plain)
