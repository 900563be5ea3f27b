"""Output layers whose rows are split over the ranks of a process group: what ranks agree on, and what they exchange.

    rank 0   weight [V_0, H]   maximum and sum of exp of its logits, [T] --+
    rank 1   weight [V_1, H]   maximum and sum of exp of its logits, [T] --+-- two all-reduces --> log-probs, entropy
    rank 2   weight [V_2, H]   maximum and sum of exp of its logits, [T] --+

A few numbers of each rank come first, so that all ranks raise if one must, or if they differ. A rank that does not
call blocks the others, as with any collective.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from maskpack.core.arguments import said
from maskpack.core.ranks import checksum, gathered
from maskpack.errors import LayoutError
from maskpack.ops.logits import Logits

_CALL = "packed_log_probs"
Message = tuple[list[int], Tensor | None]
"""int64 numbers: 1, or 0 of a failure; the rows of the slice; those of _SAME. The last one, a checksum, lies apart."""


class Split(NamedTuple):
    """The first row of this rank's slice, and the rows V of all slices."""

    group: dist.ProcessGroup
    first: int
    vocabulary: int


# -------------------------------------------------------------------- the slice of a rank


def own_rows(weight: Any, group: dist.ProcessGroup | None) -> Any:
    """The rows of this rank as a plain tensor, whose gradient becomes a DTensor again if the weight is one. Raises
    LayoutError for a DTensor that is sharded in another way, and without a group, when nobody else is asked."""
    if not isinstance(weight, DTensor):
        return weight
    if group is None:
        raise LayoutError(
            f"{_CALL}: lm_head_weight is {_said(weight)}, without group; expected the whole head. Pass what FSDP "
            "gathers, or full_tensor(), if ranks have tokens of their own; if they split the vocabulary and have the "
            "same tokens, add group=weight.device_mesh.get_group()."
        )
    mesh, placements = weight.device_mesh, weight.placements
    if not (mesh.ndim == 1 and type(placements[0]) is Shard and placements[0].dim == 0):
        raise LayoutError(
            f"{_CALL}: lm_head_weight is {_said(weight)}; expected Shard(0) over one mesh dim, that of group. "
            "Redistribute it, or pass the rows of this rank as a plain tensor."
        )
    ranks = dist.get_process_group_ranks(group)
    if mesh.mesh.tolist() != ranks:
        raise LayoutError(
            f"{_CALL}: lm_head_weight is {_said(weight)}, on ranks {mesh.mesh.tolist()}; group has the ranks {ranks}; "
            "expected the same, in one order. Pass group=weight.device_mesh.get_group()."
        )
    return weight.to_local(grad_placements=placements)


def _said(weight: DTensor) -> str:
    return f"a DTensor {tuple(weight.shape)} of {weight.placements} over a mesh {tuple(weight.device_mesh.shape)}"


# -------------------------------------------------------------------- what ranks agree on


@contextmanager
def telling(group: Any) -> Generator[None]:
    """An error of this rank is told to the other ranks of a group, which call `agree`, and raise. Raises LayoutError
    unless this rank is in the group, on this rank alone: it has nobody to tell."""
    if group is None:
        yield
        return
    running = dist.is_available() and dist.is_initialized()
    if not running or not isinstance(group, dist.ProcessGroup):
        seen = said(group) if running else f"{said(group)} without torch.distributed initialised"
        raise LayoutError(
            f"{_CALL}: group is {seen}; expected a process group that this rank is in. Pass what "
            "torch.distributed.new_group returned on its ranks, or leave it out for a whole head."
        )
    try:
        yield
    except Exception:
        _gathered(([0] * (2 + len(_SAME)), None), group)
        raise


def message_of(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, entropy: bool, logits: Logits,
    group: dist.ProcessGroup,
) -> Message:  # fmt: skip
    """What a rank tells the others of its valid arguments. Raises LayoutError if the group cannot reduce tensors of
    their device."""
    config = dist.get_backend_config(group)
    if f"{hidden.device.type}:" not in config:
        raise LayoutError(
            f"{_CALL}: tensors are on {hidden.device}, and the backends of group are {config}; expected one for their "
            "device. Make the group with such a backend."
        )
    cap = math.inf if logits.softcap is None else logits.softcap
    bits = [_bits(number) for number in (temperature, logits.scale, cap, logits.lora_scale)]
    rank = 0 if logits.lora_a is None else logits.lora_a.shape[0]
    parts = int(logits.bias is not None) + 2 * rank
    dtype = _word(str(hidden.dtype).removeprefix("torch."))
    reduces = torch.is_grad_enabled() and hidden.requires_grad  # in the backward pass
    sums = torch.is_grad_enabled() and logits.lora_a is not None and logits.lora_a.requires_grad
    kinds = dtype, _word(hidden.device.type)
    shared = *hidden.shape, *kinds, *bits, parts, int(entropy), int(reduces), int(sums)
    return [1, weight.shape[0], *shared, 0], checksum(ids)


def agree(message: Message, group: dist.ProcessGroup) -> Split:
    """Where this rank's slice lies. One all-reduce, for which the host waits.

    Raises LayoutError on all ranks if one told its failure, if they differ, or if no rank has a row.
    """
    messages = _gathered(message, group)
    ranks = dist.get_process_group_ranks(group)
    failed = [rank for rank, message in zip(ranks, messages, strict=True) if not message[0]]
    if failed:
        raise LayoutError(
            f"{_CALL}: arguments of ranks {failed} are invalid; expected valid ones on all ranks of group. Look for "
            "the error on these ranks."
        )
    for at, (name, read) in enumerate(_SAME, 2):
        seen = [message[at] for message in messages]
        if len(set(seen)) > 1:
            raise LayoutError(
                f"{_CALL}: {name} is {[read(number) for number in seen]} on ranks {ranks}; expected the same on all "
                "ranks of group, which split the vocabulary and not the tokens. Pass the same on each; ranks with "
                "tokens of their own leave group out."
            )
    rows = [message[1] for message in messages]
    if sum(rows) == 0:
        raise LayoutError(
            f"{_CALL}: lm_head_weight has no row on any of the ranks {ranks}; expected slices of a head with V >= 1. "
            "Pass the rows of each rank."
        )
    return Split(group, sum(rows[: dist.get_rank(group)]), sum(rows))


def _word(text: str) -> int:
    """Up to 8 characters as an int64."""
    return int.from_bytes(text.encode()[:8], "little")


def _text(word: int) -> str:
    return word.to_bytes(8, "little").rstrip(b"\0").decode()


def _bits(number: float) -> int:
    return struct.unpack("<q", struct.pack("<d", float(number)))[0]


def _float(word: int) -> float:
    return struct.unpack("<d", struct.pack("<q", word))[0]


_SAME: tuple[tuple[str, Callable[[int], Any]], ...] = (
    ("the number of hidden states", int),
    ("the width of hidden", int),
    ("the dtype of hidden", _text),
    ("the device of hidden", _text),
    ("temperature", _float),
    ("scale", _float),
    ("softcap", _float),
    ("lora_scale", _float),
    ("the bias and LoRA", lambda word: f"{'a' if word % 2 else 'no'} bias, rank {word // 2}"),
    ("entropy", bool),
    ("hidden.requires_grad", bool),
    ("lora_a.requires_grad", bool),
    ("a checksum of token_ids", lambda word: f"{word & (1 << 64) - 1:016x}"),
)
"""What must be the same, as errors name it, and how they show its number."""


def _gathered(message: Message, group: dist.ProcessGroup) -> list[list[int]]:
    """The messages of all ranks. The host waits for the device once, here."""
    numbers, last = message
    own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return cast("list[list[int]]", gathered(own, group, None if last is None else last[None]).tolist())


# -------------------------------------------------------------------- what ranks exchange


_AT_ONCE = 4096
"""The tokens whose slices are summed at once."""


class Parts(NamedTuple):
    """What is known of the S slices of the vocabulary of a rank, of logits * scale; `reduce_rows` writes it:

    token     [T]     the logit of the id, where a slice has it
    top       [S, T]  the largest logit of the slice
    total     [S, T]  sum of exp(logit - top)
    weighted  [S, T]  sum of exp(logit - top) * (logit - top), or None without entropy
    squares   [S, T]  sum of exp(logit - top)^2, or None without statistics
    """

    token: Tensor
    top: Tensor
    total: Tensor
    weighted: Tensor | None
    squares: Tensor | None

    @staticmethod
    def of(
        tokens: int, vocabulary: int, wanted: tuple[bool, bool], wide: torch.dtype, device: torch.device, width: int
    ) -> Parts:
        """Those of empty slices, with `weighted` and `squares` or without."""
        size = max(-(-vocabulary // width), 1), tokens
        token = torch.full((tokens,), math.nan, dtype=wide, device=device)
        top = torch.full(size, torch.finfo(wide).min, dtype=wide, device=device)
        weighted, squares = (torch.zeros_like(top) if want else None for want in wanted)
        return Parts(token, top, torch.zeros_like(top), weighted, squares)


class Combined(NamedTuple):
    """Of the whole vocabulary, [T] each, and the shift [T, S] of the slices of this rank."""

    log_probs: Tensor
    lse: Tensor
    entropy: Tensor | None
    sum_p2: Tensor | None
    is_top1: Tensor
    shift: Tensor


def combined(parts: Parts, ids: Tensor, rows: int, split: Split | None) -> Combined:
    """What all slices say, by a maximum and sums over the slices of this rank and over the ranks.

    Args:
        parts: of the S slices of this rank.
        ids: [T], from the first of the `rows` of this rank on.

    Logits are taken from the largest of all, G, so that nothing large is subtracted from something large:

        sum of exp(logit - G)                  = sum over slices of exp(top - G) * total
        sum of exp(logit - G) * (logit - G)    = sum over slices of exp(top - G) * (weighted + total * (top - G))
        sum of exp(logit - G)^2                = sum over slices of exp(top - G)^2 * squares

    The shift is the log of the probability of a slice: log p = log p within the slice + shift. It replaces `top`, and
    `total` is overwritten.
    """
    token, top, total, weighted, squares = parts
    highest = top.amax(0)
    if split is not None:
        reduced(highest, dist.ReduceOp.MAX, split.group)
    top.sub_(highest)
    sums = [torch.empty_like(highest), (token - highest).where((ids >= 0) & (ids < rows), 0)]
    sums += [torch.empty_like(highest) for x in (weighted, squares) if x is not None]
    for begin in range(0, len(highest), _AT_ONCE):
        here = slice(begin, begin + _AT_ONCE)
        below, totals = top[:, here], total[:, here]
        power = below.exp()
        sums[0][here] = _added(power * totals)
        if weighted is not None:
            sums[2][here] = _added((power * (weighted[:, here] + totals * below)).where(power > 0, 0))
        if squares is not None:
            sums[-1][here] = _added(power.square_() * squares[:, here])
    first = 0
    if split is not None:
        sums, first, rows = reduced(torch.stack(sums), dist.ReduceOp.SUM, split.group), split.first, split.vocabulary
    log_sum = sums[0].log()
    place = ids + first
    known = (place >= 0) & (place < rows)
    shift = top.add_(total.log_()).sub_(log_sum).clamp_(min=-1e30)  # times a slope it is finite, too
    return Combined(
        (sums[1] - log_sum).where(known, torch.nan),
        highest + log_sum,
        None if weighted is None else log_sum - sums[2] / sums[0],
        None if squares is None else sums[-1] / sums[0].square(),
        known & (sums[1] >= 0),
        shift.t(),
    )


def _added(x: Tensor) -> Tensor:
    """The sum over the first dim, which it overwrites, in an order that does not depend on the others."""
    while len(x) > 1:
        half = -(-len(x) // 2)
        x[: len(x) - half] += x[half:]
        x = x[:half]
    return x[0]


def reduced(x: Tensor, op: Any, group: dist.ProcessGroup) -> Tensor:
    """`x`, reduced over the ranks in place."""
    if x.numel():
        dist.all_reduce(x, op=op, group=group)
    return x
