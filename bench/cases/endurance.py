"""Memory of the driver and of a worker over many dispatches in one process, on one node and on three.

On one node the batch is small. Of three dispatches one has its result back padded, one as a view, and one sends that
view, with its rows shuffled. On three nodes the objects are too large for Ray to send them within a call, so that they
go through the stores. Memory is read after a tenth of the dispatches, when pools and caches of Python, torch and Ray
have their size, and at the end. Between the two, what a process has for itself (RssAnon, once glibc has given back what
is free) may only grow by noise, for which 8 MB are allowed, less than a kilobyte a dispatch. The pages of object stores
that it has touched (RssShmem) are counted apart: they grow until it has touched all of the stores, and are no memory of
its own.
"""

from __future__ import annotations

import statistics

import ray
from tensordict import TensorDict

from bench.harness.local_ray import local_ray
from bench.harness.measure import memory, own_memory, progress
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.workloads import PAD_ID, make_batch
from maskpack.dispatch import WorkerGroup, endpoint

_PROMPT, _SMALL, _LARGE = 64, (8, 192), (32, 16_384)
"""The width of prompts; rows and the width of responses."""
_NOISE = 8 << 20


class _Worker:
    @endpoint(format="nested")
    def scale(self, batch: TensorDict) -> TensorDict:
        return batch.set("old_log_probs", batch["old_log_probs"] * 2)

    def memory(self) -> int:
        return own_memory()


@case(
    "endurance",
    help="memory of driver and workers over 1,000 dispatches a round, on one node and a tenth as many on three",
    on="cpu",
    rows=None,
    keeps_memory=False,
    tiny={"each": 20},
)
def run(rounds: int, *, each: int = 1000) -> RowGroups:
    yield _over(each * rounds, 1, _SMALL)
    yield _over(max(10, each * rounds // 10), 3, _LARGE)


def _over(dispatches: int, nodes: int, size: tuple[int, int]) -> list[Row]:
    batch = make_batch(size[0], prompt_width=_PROMPT, response_width=size[1])
    order = [*range(1, size[0], 2), *range(0, size[0], 2)]
    seen: list[list[int]] = []
    with local_ray(batch, num_cpus=2, nodes=nodes):
        options = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
        group = WorkerGroup.launch(_Worker, 2 * nodes, pad_token_id=PAD_ID, actor_options=options)
        view = group.put(batch)
        for number in range(1, dispatches + 1):
            if number % 3 == 0:
                group.call("scale", view[order])
            elif number % 3 == 1:
                group.call("scale", batch)
            else:
                view = group.call("scale", batch, format="view")
            if number % max(1, dispatches // 20) == 0:
                workers = ray.get([actor.memory.remote() for actor in group.actors[:2]])
                seen.append([own_memory(), *workers, memory("RssShmem")])
                progress(f"  {number} dispatches: {[f'{size >> 20} MB' for size in seen[-1]]}")
    rows: list[Row] = []
    case = "endurance" if nodes == 1 else f"endurance, {nodes} nodes"
    for place, name in enumerate(("driver", "worker 0", "worker 1", "pages of the driver in object stores")):
        sizes = [memories[place] for memories in seen]
        before, after = statistics.median(sizes[1:4]), statistics.median(sizes[-3:])
        rows.append(Row(case, f"memory of {name} after {dispatches // 10} dispatches", before, "bytes"))
        growth = f"growth of {name} from there to {dispatches}"
        rows.append(Row(case, growth, after - before, "bytes", f"<= {_NOISE}" if place < 3 else None))
    return rows
