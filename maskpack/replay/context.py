"""Context parallelism of replay: the tokens of a forward pass in equal shards, one a rank.

    T tokens       p p r r r | p r | p p p r r | t        the tail rounds T up to a multiple of the ranks
    rank 0         p p r r r p r
    rank 1                       p p p r r t              each runs the layers, and attention exchanges heads
    predict        ^ ^ ^   ^
                                     ^ ^                  positions in the shard of the rank
    gathered       3 tokens of row 0, 1 of row 1, 2 of row 2 on all ranks

All ranks of the group have the same rows, and compute the same loss. Averaged over the group, as FSDP does, their
gradients are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from maskpack.core.arguments import IntArray
from maskpack.core.ranks import checksum, gathered
from maskpack.errors import ReplayError
from maskpack.ops.context_parallel import once_only

_NUMBERS: Any = int | float | np.number


@dataclass(frozen=True, eq=False)
class ContextShard:
    """The shard of a rank.

    Attributes:
        group: the ranks, in the order of their shards.
        size: the number of tokens of a shard.
        counts: the number of scored tokens of each rank.
        places: int64 [N], where each scored token is among those of all ranks, `max(counts)` a rank.
    """

    group: dist.ProcessGroup
    size: int
    counts: list[int]
    places: Tensor

    @property
    def begin(self) -> int:
        """The first token of this rank among all T."""
        return self.group.rank() * self.size

    def gathered(self, own: Tensor) -> Tensor:
        """[N]: numbers of the scored tokens of all ranks, from those of this rank [n]. Every rank must call. Its
        backward pass adds up the gradients of all ranks."""
        return cast("Any", _Gather).apply(own, self)

    def collected(self, own: Tensor, tokens: IntArray) -> Tensor:
        """[n, ...]: entries of some of all T tokens, from those of the shards [size, ...], without gradient. Every rank
        must call with the same tokens."""
        inside = (tokens >= self.begin) & (tokens < self.begin + self.size)
        wide = torch.promote_types(own.dtype, torch.float32) if own.is_floating_point() else own.dtype
        out = torch.zeros((tokens.size, *own.shape[1:]), dtype=wide, device=own.device)
        at, places = (torch.from_numpy(x).to(own.device) for x in (np.flatnonzero(inside), tokens[inside] - self.begin))
        out[at] = own.detach()[places].to(wide)
        dist.all_reduce(out, group=self.group)  # the other ranks have zeros
        return out.to(own.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        most = max(shard.counts)
        if most == 0:
            return own.clone()
        out = own.new_zeros(len(shard.counts) * most)
        out[shard.group.rank() * most :][: own.shape[0]] = own
        dist.all_reduce(out, group=shard.group)  # the other ranks have zeros there
        return out.index_select(0, shard.places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        once_only()
        shard = cast("ContextShard", ctx.shard)
        most, rank = max(shard.counts), shard.group.rank()
        if most == 0:
            return grads[0], None
        total = grads[0].new_zeros(len(shard.counts) * most).index_copy(0, shard.places, grads[0])
        dist.all_reduce(total, group=shard.group)
        return total[rank * most :][: shard.counts[rank]], None


def shard_of(predict: Tensor, tokens: int, group: dist.ProcessGroup) -> tuple[ContextShard, Tensor]:
    """The shard of this rank of `tokens` tokens, a multiple of the ranks; and int64 [n], which of the outputs at
    `predict` [N] that score tokens are its own. One synchronisation on CUDA."""
    size = tokens // group.size()
    owner = predict // size
    order = owner.argsort(stable=True)
    counts = torch.bincount(owner, minlength=group.size())
    starts = counts.cumsum(0) - counts
    within = torch.arange(predict.shape[0], device=predict.device) - starts[owner[order]]
    on_host = cast("list[int]", counts.tolist())
    places = torch.empty_like(order).index_copy_(0, order, owner[order] * max(on_host) + within)
    begin = sum(on_host[: group.rank()])
    return ContextShard(group, size, on_host, places), order[begin : begin + on_host[group.rank()]]


OPTIONS = (
    *("temperature", "log_probs", "entropy", "heads", "self_check"),
    *("share_prefixes", "gradients", "routed_experts"),
)
"""What ranks compare beside their rows; of heads their number."""
_PARTS = 4  # tensors that they compare


def need_same(
    parts: Mapping[str, Tensor], options: Mapping[str, float | bool | None], group: dist.ProcessGroup, call: str
) -> None:
    """Raises ReplayError on all ranks of a group unless they have the same integers in four tensors and the same ones
    of OPTIONS. Every rank must call, or `tell_failure`. One synchronisation on CUDA."""
    assert len(parts) == _PARTS
    chosen = torch.tensor([_number(options.get(name)) for name in OPTIONS], dtype=torch.float64, device="cpu")
    sizes = torch.tensor([1, *(x.numel() for x in parts.values())], device="cpu")  # 1: no failure
    own = torch.cat([sizes, chosen.view(torch.int64), torch.zeros_like(sizes[1:])])
    seen = gathered(own, group, torch.stack([checksum(x) for x in parts.values()]))
    if not bool(seen[:, 0].all()):
        failed = np.flatnonzero(seen[:, 0].numpy() == 0).tolist()
        raise ReplayError(
            f"{call}: ranks {failed} of the context group have failed; expected rows on all of them. Look for the "
            "error there."
        )
    for name, bits in zip(OPTIONS, seen[:, 1 + _PARTS : -_PARTS].T.contiguous(), strict=True):
        if not bool((bits == bits[0]).all()):  # NaN is NaN
            raise ReplayError(
                f"{call}: {name} is {bits.view(torch.float64).tolist()} on the ranks of the context group; expected "
                "the same on all of them. Give each the same options."
            )
    for name, size, total in zip(parts, seen[:, 1:].T, seen[:, -_PARTS:].T, strict=False):
        if not bool((size == size[0]).all() and (total == total[0]).all()):
            raise ReplayError(
                f"{call}: {name} differ between the {group.size()} ranks of the context group, which have "
                f"{size.tolist()} numbers; expected the same rows on all of them. Give each the same batch."
            )


def tell_failure(group: Any) -> None:
    """Makes `need_same` raise on the other ranks."""
    if isinstance(group, dist.ProcessGroup):
        gathered(torch.zeros(1 + len(OPTIONS) + 2 * _PARTS, dtype=torch.int64, device="cpu"), group)


def _number(option: Any) -> float:
    """A number for an option: -1 for None, and NaN for one that is none, which each rank refuses later."""
    if option is None:
        return -1.0
    return float(option) if isinstance(option, _NUMBERS) else math.nan
