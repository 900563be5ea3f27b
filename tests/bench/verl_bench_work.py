"""What a process does in the tests of the benchmark of verl's engine, which replaces the platform of verl."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from bench import verl_engine
from bench.measure import NotExact
from bench.replay import Sizes
from bench.replay_rivals import Shape

SHAPE = Shape(32, 2, 4, 2, 8, 48, 97)
SIZES = Sizes(rows=4, prompt_width=8, response_width=12, fill=0.5, token_budget=24)


def report() -> dict[tuple[str, str], float]:
    dist.destroy_process_group()  # the case makes its own
    rows = verl_engine.run(rounds=1, shape=SHAPE, sizes=SIZES)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {(row.case, row.name): row.value for row in rows}


def wrong() -> str:
    dist.destroy_process_group()
    try:
        other = functools.partial(_warmer, verl_engine.response_log_probs)
        with mock.patch.object(verl_engine, "response_log_probs", other):
            verl_engine.run(rounds=1, shape=SHAPE, sizes=SIZES)
    except NotExact as error:
        return str(error)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return "no error"


def _warmer(call: Callable[..., Any], *args: Any, temperature: float, **options: Any) -> Any:
    return call(*args, temperature=temperature * 1.1, **options)
