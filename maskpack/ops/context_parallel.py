"""Context parallelism: attention of whole rows whose tokens are sharded over ranks, by an exchange of heads (DeepSpeed
Ulysses, Jacobs et al., 2023).

            tokens 0 1          tokens 0 1 2 3
    rank 0  heads a b c d       heads a b          one all-to-all of queries, keys and values, then attention,
    rank 1  heads a b c d       heads c d          then one all-to-all of its outputs
            tokens 2 3          tokens 0 1 2 3

A rank receives the heads of keys and values that its queries read. Where there are fewer of them than ranks, several
ranks receive the same head.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.errors import ReplayError


def need_group(group: Any, call: str) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise ReplayError(
            f"{call}: group is {said(group)}; expected a process group that this rank is in. Pass what "
            "torch.distributed.new_group returned, or get_group() of a device mesh."
        )
    return group


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """The heads of this rank, of the tokens of all ranks.

    Args:
        query: [t, H, D]; key, value: [t, KV, D]: the same number of tokens on all ranks, all of which must call.

    Returns:
        query [ranks * t, H / ranks, D]; key, value [ranks * t, kv, D], differentiable.

    Raises:
        ReplayError: H is not a multiple of the number of ranks.
    """
    ranks = group.size()
    if query.shape[1] % ranks:
        raise ReplayError(
            f"packed_attention: {query.shape[1]} heads over {ranks} ranks of a context-parallel group; expected a "
            "multiple of the ranks. Use fewer ranks."
        )
    heads = _heads_to_send(query.shape[1], key.shape[1], ranks)
    return cast("Any", _ToHeads).apply(query, key, value, heads, group)


def to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The inverse for the output of attention: [ranks * t, h, D] of all tokens -> [t, ranks * h, D] of this rank."""
    return cast("Any", _ToTokens).apply(out, group)


def _heads_to_send(queries: int, keys: int, ranks: int) -> list[int]:
    """Which head of the keys each rank receives, rank after rank: those that its heads of queries read, each once if
    all of them are read equally often, else once for each head of its queries."""
    own, grouped = queries // ranks, queries // keys
    if own % grouped == 0 or grouped % own == 0:
        each = max(own // grouped, 1)
        return [rank * own // grouped + head for rank in range(ranks) for head in range(each)]
    return [head // grouped for head in range(queries)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, heads: list[int], group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        ranks, (tokens, _, size) = group.size(), query.shape
        own, each = query.shape[1] // ranks, len(heads) // ranks
        send = query.new_empty(ranks, tokens, own + 2 * each, size)
        send[:, :, :own] = query.view(tokens, ranks, own, size).transpose(0, 1)
        for x, begin in ((key, own), (value, own + each)):
            chosen = x if heads == list(range(x.shape[1])) else x[:, heads]
            send[:, :, begin : begin + each] = chosen.reshape(tokens, ranks, each, size).transpose(0, 1)
        ctx.heads, ctx.group, ctx.keys = heads, group, key.shape[1]
        received = _all_to_all(send, group).view(ranks * tokens, own + 2 * each, size)
        query, key, value = (received.narrow(1, begin, n) for begin, n in ((0, own), (own, each), (own + each, each)))
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        once_only()
        ranks, heads = ctx.group.size(), cast("list[int]", ctx.heads)
        own, each, size = grads[0].shape[1], grads[1].shape[1], grads[0].shape[2]
        send = torch.cat(grads, 1).view(ranks, -1, own + 2 * each, size)
        received = _all_to_all(send, ctx.group).transpose(0, 1)  # [t, ranks, heads, D]
        query, key, value = (received.narrow(2, begin, n) for begin, n in ((0, own), (own, each), (own + each, each)))
        key, value = (_summed(x.flatten(1, 2), heads, ctx.keys) for x in (key, value))
        return query.flatten(1, 2), key, value, None, None


def _summed(grads: Tensor, heads: list[int], keys: int) -> Tensor:
    """[t, keys, D]: the gradients of the heads of all ranks, added up where several ranks read a head."""
    if len(heads) == keys:
        return grads
    wide = torch.promote_types(grads.dtype, torch.float32)
    total = torch.zeros((grads.shape[0], keys, grads.shape[2]), dtype=wide, device=grads.device)
    return total.index_add_(1, torch.tensor(heads, device=grads.device), grads.to(wide)).to(grads.dtype)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = _all_to_all(out.view(group.size(), -1, *out.shape[1:]), group)
        return received.transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        once_only()
        tokens, heads, size = grads[0].shape
        send = grads[0].view(tokens, ctx.group.size(), heads // ctx.group.size(), size).transpose(0, 1)
        return _all_to_all(send, ctx.group).flatten(0, 1), None


def once_only() -> None:
    """Raises ReplayError in a backward pass with create_graph=True, whose exchanges autograd could not follow."""
    if torch.is_grad_enabled():
        raise ReplayError(
            "context parallelism: backward ran with create_graph=True; it can be differentiated once. Compute second "
            "derivatives on one rank, without a context group."
        )


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks, ...]: entry r goes to rank r; entry r of the result came from it."""
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out
