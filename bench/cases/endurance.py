"""Memory of the driver and of a worker over many dispatches of a small batch in one process.

Of three dispatches one has its result back padded, one as a view, and one sends that view. Resident memory is read
after a tenth of the dispatches, when pools and caches of Python, torch and Ray have their size, and at the end: between
the two nothing may grow but noise, for which 8 MB are allowed, less than a kilobyte a dispatch.
"""

from __future__ import annotations

import statistics

import ray
from tensordict import TensorDict

from bench.harness.local_ray import local_ray
from bench.harness.measure import memory, progress
from bench.harness.registry import case
from bench.harness.report import Row
from bench.workloads import PAD_ID, make_batch
from maskpack.dispatch import WorkerGroup, endpoint

_ROWS, _PROMPT, _RESPONSE = 8, 64, 192
_NOISE = 8 << 20


class _Worker:
    @endpoint(format="nested")
    def scale(self, batch: TensorDict) -> TensorDict:
        out = TensorDict({}, batch_size=batch.batch_size)
        return out.set("old_log_probs", batch["old_log_probs"] * 2)

    def memory(self) -> int:
        return memory("VmRSS")


@case(
    "endurance",
    help="memory of driver and workers over 1,000 dispatches a round",
    on="cpu",
    rows=None,
    keeps_memory=False,
    tiny={"each": 40},
)
def run(rounds: int, *, each: int = 1000) -> list[Row]:
    dispatches = each * rounds
    batch = make_batch("reference", _ROWS, prompt_width=_PROMPT, response_width=_RESPONSE)
    seen: list[list[int]] = []
    with local_ray(batch, num_cpus=2):
        group = WorkerGroup.launch(_Worker, 2, pad_token_id=PAD_ID)
        view = group.put(batch)
        for number in range(1, dispatches + 1):
            if number % 3 == 0:
                group.call("scale", view)
            elif number % 3 == 1:
                group.call("scale", batch)
            else:
                view = group.call("scale", batch, format="view")
            if number % max(1, dispatches // 20) == 0:
                workers = ray.get([actor.memory.remote() for actor in group.actors])
                seen.append([memory("VmRSS"), *workers])
                progress(f"  {number} dispatches: {[f'{size >> 20} MB' for size in seen[-1]]}")
    rows: list[Row] = []
    for place, name in enumerate(("driver", "worker 0", "worker 1")):
        sizes = [memories[place] for memories in seen]
        before, after = statistics.median(sizes[1:4]), statistics.median(sizes[-3:])
        rows.append(Row("endurance", f"memory of {name} after {dispatches // 10} dispatches", before, "bytes"))
        growth = f"growth of {name} from there to {dispatches}"
        rows.append(Row("endurance", growth, after - before, "bytes", f"<= {_NOISE}"))
    return rows
