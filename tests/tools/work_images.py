"""What a rank does in the tests of replay with images over ranks."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import tiny_vision as tiny
import torch.distributed as dist
from tiny_models import pair
from tiny_vision import Row, batch_of, samples, truth
from work_rows import far, padded_off, passes_off, said_of
from work_rows import sharded as over_ranks

from maskpack.adapters.transformers import replayable
from maskpack.replay import response_log_probs

OF_RANK = (
    (Row(3, 4, images=[(1, 4, 4)]), Row(5, 6), Row(2, 1, images=[(1, 2, 4), (1, 6, 4)])),
    (Row(2, 3), Row(9, 8), Row(4, 2, videos=[(2, 4, 4)]), Row(1, 1)),
)


def _sharded(name: str) -> tuple[Any, Any]:
    """A model whose text and vision layers are sharded, and the whole one."""
    model, plain = pair(getattr(tiny, name))
    return over_ranks(model, *model.model.language_model.layers, *model.model.visual.blocks), plain


def sharded(*names: str) -> dict[str, dict[str, float]]:
    return {name: _off(name) for name in names}


def _off(name: str) -> dict[str, float]:
    """How far log-probs and gradients (of the mean over ranks) are off those of each row alone."""
    model, plain = _sharded(name)
    replay = replayable(model)
    given = samples(getattr(tiny, name), OF_RANK[dist.get_rank()], seed=dist.get_rank())
    batch, want = batch_of(plain, given), truth(plain, given)
    return passes_off(replay, plain, batch, want, 1e-6) | {"padded": padded_off(replay, batch, want)}


def refused() -> tuple[list[str], str]:
    return images_on_one_rank(), images_in_shards()


def images_on_one_rank() -> list[str]:
    """What each rank says, of packed and of padded rows; both go on afterwards."""
    model, plain = _sharded("qwen25_vl")
    replay, said = replayable(model), []
    rows = OF_RANK[0] if dist.get_rank() == 0 else (Row(2, 3), Row(4, 1))
    batch = batch_of(plain, samples(tiny.qwen25_vl, rows))
    for packing in ("1", "0"):
        with mock.patch.dict(os.environ, MASKPACK_PACKED_REPLAY=packing):
            said.append(said_of(response_log_probs, replay, batch))
    text = samples(tiny.qwen25_vl, [Row(3, 2 + dist.get_rank())])
    assert far(response_log_probs(replay, batch_of(plain, text)), truth(plain, text)) <= 5e-6
    return said


def images_in_shards() -> str:
    """What each rank says to rows with images and a context group."""
    model, plain = pair(tiny.qwen25_vl)
    batch = batch_of(plain, samples(tiny.qwen25_vl, OF_RANK[0]))
    group: Any = dist.group.WORLD
    return said_of(response_log_probs, replayable(model), batch, context_group=group)
