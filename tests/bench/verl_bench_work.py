"""What a process does in the test of the benchmark of verl's engine, which replaces the platform of verl."""

from __future__ import annotations

import torch.distributed as dist

from bench import verl_engine
from bench.replay import Sizes
from bench.replay_rivals import Shape

SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
SIZES = Sizes(rows=4, prompt_width=8, response_width=12, fill=0.5, token_budget=24)


def report() -> dict[tuple[str, str], float]:
    dist.destroy_process_group()  # the case makes its own
    rows = verl_engine.run(rounds=1, shape=SHAPE, sizes=SIZES)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {(row.case, row.name): row.value for row in rows}
