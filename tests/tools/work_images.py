"""What a rank does in the tests of replay with images over ranks."""

from __future__ import annotations

import logging
import os
from typing import Any

import tiny_vision as tiny
import torch
import torch.distributed as dist
from tiny_models import pair
from tiny_vision import Row, batch_of, samples, truth
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from work_replay import said_of

from maskpack.adapters.transformers import replayable
from maskpack.replay import response_log_probs

OF_RANK = (
    (Row(3, 4, images=[(1, 4, 4)]), Row(5, 6), Row(2, 1, images=[(1, 2, 4), (1, 6, 4)])),
    (Row(2, 3), Row(9, 8), Row(4, 2, videos=[(2, 4, 4)]), Row(1, 1)),
)


def _sharded(name: str) -> tuple[Any, Any]:
    """A model whose text and vision layers are sharded, and the whole one."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, plain = pair(getattr(tiny, name))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.model.language_model.layers, *model.model.visual.blocks, model):
        fully_shard(part, mesh=mesh)
    return model, plain


def sharded(*names: str) -> dict[str, dict[str, float]]:
    return {name: _off(name) for name in names}


def _off(name: str) -> dict[str, float]:
    """How far log-probs and gradients (of the mean over ranks) are off those of each row alone."""
    model, plain = _sharded(name)
    replay = replayable(model)
    given = samples(getattr(tiny, name), OF_RANK[dist.get_rank()], seed=dist.get_rank())
    batch, want = batch_of(plain, given), truth(plain, given)
    off = {}
    seen = response_log_probs(replay, batch, self_check=True)
    off["packed"] = float((seen.values() - want).detach().abs().max())
    weights = torch.linspace(0.5, 1.5, want.numel())
    (seen.values() * weights).sum().backward()
    (want * weights).sum().backward()
    off["gradients"] = 0.0
    for path, weight in model.named_parameters():
        expected = plain.get_parameter(path).grad
        expected = torch.zeros_like(plain.get_parameter(path)) if expected is None else expected
        dist.all_reduce(expected)
        apart = float((weight.grad.full_tensor() - expected / dist.get_world_size()).norm())
        off["gradients"] = max(off["gradients"], apart / (float(expected.norm()) + 1e-6))
    os.environ["MASKPACK_PACKED_REPLAY"] = "0"
    off["padded"] = float((response_log_probs(replay, batch).values() - want).detach().abs().max())
    del os.environ["MASKPACK_PACKED_REPLAY"]
    return off


def refused() -> tuple[list[str], str]:
    return images_on_one_rank(), images_in_shards()


def images_on_one_rank() -> list[str]:
    """What each rank says, of packed and of padded rows; both go on afterwards."""
    model, plain = _sharded("qwen25_vl")
    replay, said = replayable(model), []
    rows = OF_RANK[0] if dist.get_rank() == 0 else (Row(2, 3), Row(4, 1))
    batch = batch_of(plain, samples(tiny.qwen25_vl, rows))
    for packing in ("1", "0"):
        os.environ["MASKPACK_PACKED_REPLAY"] = packing
        said.append(said_of(response_log_probs, replay, batch))
    del os.environ["MASKPACK_PACKED_REPLAY"]
    text = samples(tiny.qwen25_vl, [Row(3, 2 + dist.get_rank())])
    off = (response_log_probs(replay, batch_of(plain, text)).values() - truth(plain, text)).abs().max()
    assert float(off) <= 5e-6
    return said


def images_in_shards() -> str:
    """What each rank says to rows with images and a context group."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, plain = pair(tiny.qwen25_vl)
    batch = batch_of(plain, samples(tiny.qwen25_vl, OF_RANK[0]))
    group: Any = dist.group.WORLD
    return said_of(response_log_probs, replayable(model), batch, context_group=group)
