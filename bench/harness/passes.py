"""Passes over the micro-batches of a batch by a model, forward alone or with gradients: time, memory, error."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.harness.measure import NotExact, medians_of, peak_bytes, progress, turns
from bench.harness.report import Ratio, Row, ratios

FORWARD, BOTH = "forward", "forward + backward, layers checkpointed"
OURS, ALONE = "ours", "each row alone"
_FASTEST = "fastest rival"
_BFLOAT16 = 2**-7
SEVERAL = 3  # rounds of the command line that are one where a round takes most of a minute


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(model: Any, parts: Callable[[], Iterable[Tensor]], backward: bool) -> Callable[[], object]:
    """A pass over the micro-batches; the gradients of all are summed where they stay, as a trainer does."""

    def run() -> None:
        model.train(backward)
        with torch.set_grad_enabled(backward):
            for log_probs in parts():
                if backward:
                    log_probs.sum().backward()
                del log_probs
        model.zero_grad(set_to_none=True)

    return run


def timed(
    case: str,
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    pairs: Sequence[Ratio],
    *,
    shares: Mapping[str, float] | None = None,
    ours: Sequence[str] = (),
    above_held: bool = False,
    wait: Callable[[], object] | None = None,
) -> list[Row]:
    """Milliseconds and peaks of runs, and their ratios; also of the fastest other run to each of `ours`. `shares` are
    those of all rows that a run has, and times are of all rows. Peaks are those of the first run, which warms up; with
    `above_held`, above what lies on a GPU before. `wait` returns when all is done, by default on the device."""
    peaks: dict[str, float] = {}
    before = torch.cuda.memory_allocated(device) if above_held and device.type == "cuda" else 0
    for name, run in runs.items():
        begin = time.perf_counter()
        peaks[name] = (peak_of(run, device) - before) / 2**30
        progress(f"  {name}: {time.perf_counter() - begin:.1f} s, {peaks[name]:.2f} GiB")
    seconds = wall_seconds(runs, rounds, wait or (lambda: synchronize(device)), shares)
    above_zero = {name: max(peak, 2**-30) for name, peak in peaks.items()}
    best = {_FASTEST: min(one for name, one in seconds.items() if name not in ours)} if ours else {}
    return [
        *(Row(case, name, 1e3 * one, "ms") for name, one in seconds.items()),
        *ratios(case, seconds, pairs),
        *(Row(case, f"peak, {name}", peak, "GiB") for name, peak in peaks.items()),
        *ratios(case, above_zero, [(below, above, None) for above, below, _ in pairs], "peak, "),
        *ratios(case, seconds | best, [(_FASTEST, own, None) for own in ours]),
    ]


def wall_seconds(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    wait: Callable[[], object],
    shares: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Median seconds of runs that have run before, for all rows if a run has a share of them; every round begins with
    another run. `wait` returns when all is done."""
    ms: dict[str, list[float]] = {name: [] for name in runs}
    for order in turns(ms, rounds, "ms", warm=0):
        for name in order:
            gc.collect()
            wait()
            begin = time.perf_counter()
            runs[name]()
            wait()
            ms[name].append(1e3 * (time.perf_counter() - begin) / (shares or {}).get(name, 1))
    return {name: median / 1e3 for name, median in medians_of(ms).items()}


def peak_of(run: Callable[[], object], device: torch.device) -> float:
    """Bytes at the highest point of a run, with all that was there before. On the CPU, how far the memory of the
    process rises."""
    if device.type != "cuda":
        return peak_bytes(run)
    gc.collect()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def errors(case: str, seen: Mapping[str, Tensor], truth: Tensor, pair: tuple[str, str], slack: float) -> list[Row]:
    """How far log-probs are off those of a float32 model that sees each row alone. Raises NotExact if the first of the
    pair is further off than the second, with some slack, because both are of a few rows; or another, which may round
    log-probs to bfloat16."""
    off = {name: (log_probs.double() - truth.double()).abs() for name, log_probs in seen.items()}
    rms = {name: float(one.square().mean().sqrt()) for name, one in off.items()}
    ours, other = pair
    rounding = _BFLOAT16 * float(truth.double().square().mean().sqrt())
    for name, one in rms.items():
        if not one <= slack * rms[other] + (1e-6 if name == ours else rounding):
            raise NotExact(f"{case}: {name} is {one:.2g} off float32 (rms); {other} is {rms[other]:.2g} off.")
    return [
        *(Row(case, f"largest error, {name}", float(one.max()), "nats") for name, one in off.items()),
        *(Row(case, f"rms error, {name}", one, "nats") for name, one in rms.items()),
        Row(case, f"rms error, {ours} / {other}", rms[ours] / max(rms[other], 1e-30), "x", "<= 1.05"),
    ]
