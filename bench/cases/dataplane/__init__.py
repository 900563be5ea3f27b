"""TransferQueue with its own SimpleStorage and with the storage backend of maskpack: bytes, times, and a whole step.

    rows    the samples, as verl's V1 agent loop puts them
    queue   both backends in one Ray cluster, asked by the same calls of `tq.kv_batch_put` and others
    bytes   what is stored
    calls   the time of calls of one client
    step    a step of V1's trainer, with 8 writers that are ranks later

Both have two storage units. The step also runs with a backend that stores nothing: what a backend adds is its time
beyond that. Every get is compared, bit for bit, with what was put, before anything is timed. Rounds are interleaved,
figures are medians. glibc is left as it comes, and torch has as many threads as there are cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from tensordict import TensorDict

from bench.cases.dataplane import bytes, calls
from bench.cases.dataplane.queue import CPUS, MASKPACK, NOTHING, SIMPLE, OwnedQueue, use_threads_of_machine
from bench.cases.dataplane.rows import trajectories
from bench.cases.dataplane.step import RANKS, Step
from bench.harness.local_ray import local_ray, medians
from bench.harness.measure import progress
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from bench.workloads.reference import PROMPT_WIDTH, RESPONSE_WIDTH


@case(
    "dataplane",
    help="bytes and times of TransferQueue, with its own storage and with ours",
    on="cpu",
    keeps_memory=False,
    tiny={"rows": 5, "prompt_width": 37, "response_width": 229},
)
def run(rows: int, rounds: int, *, prompt_width: int = PROMPT_WIDTH, response_width: int = RESPONSE_WIDTH) -> RowGroups:
    """Raises NotExact if a sample does not come back as it was put."""
    widths = {"prompt_width": prompt_width, "response_width": response_width}
    use_threads_of_machine()
    with local_ray(TensorDict({}), num_cpus=CPUS):
        queues = {name: OwnedQueue(name) for name in (SIMPLE, MASKPACK)}
        try:
            samples = trajectories(rows, **widths)
            yield from bytes.measured(queues, samples)
            yield from calls.measured(queues, samples, rounds)
            queues[NOTHING] = OwnedQueue(NOTHING)
            yield _step(queues, rows, rounds, widths)
        finally:
            for queue in queues.values():
                queue.stop()


def _step(queues: Mapping[str, OwnedQueue], rows: int, rounds: int, widths: Mapping[str, int]) -> list[Row]:
    progress("dataplane step")
    case = f"dataplane step, {rows} samples, {RANKS} ranks"
    with closing(Step({name: queue.shared() for name, queue in queues.items()}, rows, widths)) as step:
        for name in queues:
            step.run(name, check=name != NOTHING)
        ms = medians({name: lambda name=name: step.run(name) for name in queues}, rounds)
    added = {name: one["step"] - ms[NOTHING]["step"] for name, one in ms.items()}
    return calls.phases(case, ms, {}) + ratios(
        case, added, [(MASKPACK, SIMPLE, "<= 0.5")], "added to a backend that stores nothing, "
    )
