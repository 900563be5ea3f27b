"""The benchmark of dispatch ends on a tiny size, and what it does to the network of the machine is undone."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bench import dispatch, link
from bench.dispatch_forms import FORMS


@pytest.mark.parametrize("workload", ["reference", "tau"])
def test_the_case_ends_and_draws_its_chart(tmp_path, measured, monkeypatch, workload):
    monkeypatch.setattr(dispatch, "keep_memory", lambda: None)
    file = tmp_path / "chart.svg"
    rows = measured(
        "dispatch",
        lambda _, rounds, **more: dispatch.run(33, rounds, scale=0.016, speeds=(), **more),
        *("--workload", workload, "--plot", str(file)),
    )
    assert {f"end to end, {form}" for form in FORMS} <= {name for _, name in rows}
    assert f"33 rows of the {workload} workload" in file.read_text()


@pytest.mark.skipif(
    os.geteuid() != 0 or not all(map(shutil.which, link._TOOLS)),
    reason="network namespaces need root and some tools",
)
def test_a_batch_crosses_a_link_and_nothing_is_left():
    def namespaces() -> list[str]:
        return sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []

    before = namespaces()
    (crossing,) = link.measure("tau", 33, 1, [10], scale=0.016)
    assert list(crossing.ms) == list(link.FORMS)
    assert namespaces() == before
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"bench.dispatch_far" not in entry.read_bytes()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
