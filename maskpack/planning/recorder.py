"""What a loop over micro-batches takes: milliseconds by update, micro-batch and phase, and the marks of CUDA memory.

with recorder.update():
    for batch in ...:
        with recorder.micro_batch():
            with recorder.phase("forward"): ...
    with recorder.phase("optimizer"): ...
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from maskpack.core.arguments import said
from maskpack.core.tensors import device_here
from maskpack.errors import PlanError
from maskpack.planning.plan import MicroBatchPlan
from maskpack.planning.ranks import RankPlans

_UPDATE, _MICRO_BATCH, _PHASE = range(3)


class LoopRecorder:
    """Times the loop over the micro-batches of a plan.

    Args:
        plan: whose `metrics` go into the same dict; None for times alone.
        device: a CUDA device is timed by events on its current stream, which do not make the host wait; the marks of
            its memory begin again with the recorder. Anything else is timed by the clock of the host.
    """

    def __init__(self, plan: MicroBatchPlan | RankPlans | None = None, device: torch.device | str = "cpu") -> None:
        if plan is not None and not isinstance(plan, MicroBatchPlan | RankPlans):
            raise PlanError(
                f"LoopRecorder: plan is {said(plan)}; expected a MicroBatchPlan. Pass None for times alone."
            )
        self._plan = plan
        self._device = device_here(device, "LoopRecorder")
        self._spans: list[tuple[dict[int, str], Any, Any]] = []
        self._open: dict[int, str] = {}  # by level, the outermost first
        self._updates = self._micro_batches = 0
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def update(self) -> Generator[None]:
        """Around one optimizer update."""
        with self._span(_UPDATE, f"update_{self._updates}"):
            self._updates += 1
            yield

    @contextmanager
    def micro_batch(self) -> Generator[None]:
        """Around one micro-batch. They are counted through all updates, as in `plan.micro_batches`."""
        with self._span(_MICRO_BATCH, f"micro_batch_{self._micro_batches}"):
            self._micro_batches += 1
            yield

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Around a part of a micro-batch or of an update, such as "forward"."""
        if not isinstance(name, str):
            raise PlanError(f'LoopRecorder.phase: name is {said(name)}; expected text. Pass a name, such as "forward".')
        with self._span(_PHASE, name):
            yield

    @contextmanager
    def _span(self, level: int, name: str) -> Generator[None]:
        if any(level <= outer for outer in self._open):
            raise PlanError(
                f'LoopRecorder: "{name}" begins inside {list(self._open.values())}; expected updates around '
                "micro-batches around phases. Close what is open."
            )
        self._open[level] = name
        where = dict(self._open)
        begin = self._now()
        try:
            yield
        finally:
            self._spans.append((where, begin, self._now()))
            del self._open[level]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def metrics(self) -> dict[str, float]:
        """Flat, for a logger: those of the plan, and milliseconds. On CUDA it synchronises once.

        time/update_0_ms               time/update_0/forward_ms         of all its micro-batches, and outside them
        time/micro_batch_3_ms          time/micro_batch_3/forward_ms
        memory/allocated_peak_bytes    memory/reserved_peak_bytes       on CUDA, since the recorder was made
        """
        out = {} if self._plan is None else self._plan.metrics()
        cuda = self._device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self._device)
            out["memory/allocated_peak_bytes"] = float(torch.cuda.max_memory_allocated(self._device))
            out["memory/reserved_peak_bytes"] = float(torch.cuda.max_memory_reserved(self._device))
        for where, begin, end in self._spans:
            ms = begin.elapsed_time(end) if cuda else 1e3 * (end - begin)
            *outer, level = where
            names = [where[level]]
            if level == _PHASE:
                names = [f"{where[around]}/{where[level]}" for around in outer] or names
            for name in names:
                out[f"time/{name}_ms"] = out.get(f"time/{name}_ms", 0.0) + ms
        return out
