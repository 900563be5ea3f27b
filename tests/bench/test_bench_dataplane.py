"""The benchmark of TransferQueue's storage ends on a tiny size. It compares every sample that it gets."""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("transfer_queue")

from bench import dataplane
from bench.dataplane_queue import MASKPACK, SIMPLE


def test_the_command_reports_bytes_times_and_a_step(measured):
    rows = measured("dataplane", partial(dataplane.run, prompt_width=37, response_width=229))
    for kind in ("text", "experts", "images", "zstd images"):
        cases = {case for case, _ in rows if case.startswith(f"dataplane {kind}") and "puts of" in case}
        assert len(cases) == 2
        assert {(case, f"{what}, {SIMPLE} / {MASKPACK}") for case in cases for what in ("stored", "moved")} <= set(rows)
    assert ("dataplane text, 1 sample a call", f"put, {SIMPLE} / {MASKPACK}") in rows
    assert ("dataplane step, 5 samples, 8 ranks", f"step, {SIMPLE} / {MASKPACK}") in rows
