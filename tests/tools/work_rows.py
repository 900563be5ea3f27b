"""What ranks have in common in the tests of replay: small models, rows, each row alone, shards, and how far they are
off."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import rows_alone
import torch
import torch.distributed as dist
from tensordict import TensorDict
from tiny_models import llama, scaled
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from maskpack.adapters.transformers import model as adapter
from maskpack.errors import MaskpackError
from maskpack.ops.attention import packed_attention
from maskpack.replay import ReplayOptions, response_log_probs

ROWS = ((2, 3), (4, 5), (1, 1), (3, 2), (4, 1), (2, 5))
PROMPT, RESPONSE = 4, 5
SHARE: dict[str, Any] = {"options": ReplayOptions(share_prefixes=True, min_shared=1)}


def tiny(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return scaled(llama(hidden_size=64, tie_word_embeddings=tied), 5)


def batch_of(rows: Any) -> TensorDict:
    return rows_alone.batch_of(rows, PROMPT, RESPONSE, ids="none", seed=len(rows))


def groups() -> TensorDict:
    """Three responses to a prompt, and two to another."""
    batch = batch_of(((4, 5), (4, 2), (4, 3), (2, 1), (2, 4)))
    batch["input_ids"][:, :PROMPT] = batch["input_ids"][[0, 0, 0, 3, 3], :PROMPT]
    return batch


def own_rows() -> TensorDict:
    """Other rows, and other counts, on each rank."""
    rank = dist.get_rank()
    return batch_of(ROWS[: 3 * (rank + 1)][rank:])


def alone(model: Any, batch: TensorDict) -> Tensor:
    return rows_alone.truth_of(model, batch)[0]


def sharded(model: Any, *parts: Any, root: bool = True, mesh: Any = None, **options: Any) -> Any:
    """FSDP2 over all ranks, of the parts and, with `root`, of the model."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*parts, *[model] * root):
        fully_shard(part, mesh=mesh, **options)
    return model


def said_of(call: Any, *given: Any, **more: Any) -> str:
    """The error of a call."""
    try:
        call(*given, **more)
    except MaskpackError as error:
        return str(error)
    return "nothing"


def attending(attend: Any) -> Any:
    """Models for replay attend so, in this context."""
    return mock.patch.object(adapter, "packed_attention", attend)


def merged_rows(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, **more: Any) -> Any:
    """An attention for which all rows are one."""
    return packed_attention(query, key, value, bounds[[0, -1]], int(bounds[-1]), **more)


# -------------------------------------------------------------------- how far numbers are off


def far(seen: Tensor, truth: Tensor) -> float:
    """The largest difference; infinite for other shapes."""
    seen, truth = (x.values() if x.is_nested else x for x in (seen, truth))
    if seen.shape != truth.shape:
        return float("inf")
    return float((seen.detach() - truth.detach()).abs().max()) if truth.numel() else 0.0


def mean_over_ranks(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


def gradients_off(model: Any, plain: Any, *, mean: bool = True, least: float = 0.0) -> float:
    """The relative error of the gradient that is averaged over ranks, weight by weight, the largest; the error itself
    of a gradient of 0. `mean`: those of the plain model are averaged, too; `least` stands for smaller norms."""
    worst = 0.0
    for name, weight in model.named_parameters():
        want, got = plain.get_parameter(name).grad, weight.grad
        if hasattr(got, "full_tensor"):  # averaged by FSDP
            got = got.full_tensor()
        else:
            got = mean_over_ranks(torch.zeros_like(weight) if got is None else got)
        want = torch.zeros_like(got) if want is None else want
        want = mean_over_ranks(want) if mean else want
        size = max(float(want.norm()), least)
        worst = max(worst, float((got - want).norm()) / size if size else far(got, want))
    return worst


def backward(*several: Tensor) -> None:
    """Of a sum of each with weights of their own."""
    for values in several:
        (values * torch.linspace(0.5, 1.5, values.numel())).sum().backward()


def passes_off(replay: Any, plain: Any, batch: TensorDict, truth: Tensor, least: float = 0.0, **options: Any) -> Any:
    """How far log-probs are off, and their gradients."""
    seen = response_log_probs(replay, batch, self_check=True, **options)
    backward(seen.values(), truth)
    return {"packed": far(seen, truth), "gradients": gradients_off(replay.model, plain, least=least)}


def padded_off(replay: Any, batch: TensorDict, truth: Tensor, **options: Any) -> float:
    with mock.patch.dict(os.environ, MASKPACK_PACKED_REPLAY="0"):
        return far(response_log_probs(replay, batch, **options), truth)
