"""TransferQueue with its own SimpleStorage and with the storage backend of maskpack: bytes, times, and a whole step.

    dataplane_rows     the samples, as verl's V1 agent loop puts them: text, with routed experts, with images
    dataplane_queue    both backends in one Ray cluster, asked by the same calls of `tq.kv_batch_put` and others
    dataplane_bytes    what is stored and moved
    dataplane_calls    the time of calls of one client; what they take without storage, of `dataplane_floor`
    dataplane_step     a step of V1's trainer, with 8 writers that are ranks later

Both have two storage units. Every get is compared, bit for bit, with what was put, before anything is timed. Rounds are
interleaved, figures are medians. glibc is left as it comes, and torch has as many threads as there are cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from tensordict import TensorDict

from bench import dataplane_bytes, dataplane_calls
from bench.dataplane_queue import CPUS, MASKPACK, NOTHING, SIMPLE, OwnedQueue, use_threads_of_machine
from bench.dataplane_rows import GROUP, trajectories
from bench.dataplane_step import RANKS, Step
from bench.dispatch_forms import local_ray, medians
from bench.measure import progress
from bench.report import Row, compared
from bench.workloads import PROMPT_WIDTH, RESPONSE_WIDTH

_FEWER_ROWS, _FEWER_ROUNDS = 8, 3  # with experts or images
_STEP = ">= 2"


def run(
    rows: int = 256, rounds: int = 9, *, prompt_width: int = PROMPT_WIDTH, response_width: int = RESPONSE_WIDTH
) -> list[Row]:
    """The rows of the report. Raises NotExact if a sample does not come back as it was put."""
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    report: list[Row] = []
    use_threads_of_machine()
    with local_ray(TensorDict({}), num_cpus=CPUS):
        queues = {name: OwnedQueue(name) for name in (SIMPLE, MASKPACK)}
        try:
            samples = trajectories(rows, **widths)
            report += dataplane_bytes.run("text", queues, samples)
            floor = OwnedQueue(NOTHING)
            report += dataplane_calls.run("text", {**queues, NOTHING: floor}, samples, rounds)
            floor.stop()
            report += _step(queues, rows, rounds, widths)
            for kind in ("experts", "images", "zstd images"):
                if kind == "zstd images":
                    queues[MASKPACK].stop()
                    queues[MASKPACK] = OwnedQueue(MASKPACK, codec="zstd")
                fewer = max(GROUP, rows // _FEWER_ROWS)
                samples = trajectories(fewer, experts=kind == "experts", image=kind != "experts", **widths)
                report += dataplane_bytes.run(kind, queues, samples)
                report += dataplane_calls.run(kind, queues, samples, max(1, rounds // _FEWER_ROUNDS))
        finally:
            for queue in queues.values():
                queue.stop()
    return report


def _step(queues: Mapping[str, OwnedQueue], rows: int, rounds: int, widths: Mapping[str, int]) -> list[Row]:
    progress("dataplane step")
    with closing(Step({name: queue.shared() for name, queue in queues.items()}, rows, widths)) as step:
        for name in queues:
            step.run(name, check=True)
        case = f"dataplane step, {rows} samples, {RANKS} ranks"
        report = _phases(
            case, medians({name: lambda name=name: step.run(name) for name in queues}, rounds), "step", _STEP
        )
        progress("dataplane, getters at once")
        samples = max(1, rows // RANKS**2)
        for name in queues:
            step.put_rollout(name)
        works = {name: lambda name=name: step.get_at_once(name, samples) for name in queues}
        case = f"dataplane, {RANKS**2} getters at once in {RANKS} processes, {samples} samples each"
        report += _phases(case, medians(works, rounds), "get", None)
        for name in queues:
            step.clear(name)
    return report


def _phases(case: str, ms: Mapping[str, Mapping[str, float]], whole: str, target: str | None) -> list[Row]:
    report: list[Row] = []
    for phase in next(iter(ms.values())):
        took = {name: phases[phase] for name, phases in ms.items()}
        report += [Row(case, f"{phase}, {name}", value, "ms") for name, value in took.items()]
        report += compared(case, phase, took, target if phase == whole else None)
    return report
