"""What tests of attention share: calls, loops over the tokens that each token sees, and tensors as a GPU has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from maskpack.ops.attention import packed_attention


def naive(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Sequence[Sequence[int]],
    scale: float,
    window: int | None,
    cap: float | None,
) -> Tensor:
    """The definition, in float64: each token of a path with those before it. Paths may share tokens."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    out: list[Any] = [None] * len(query)
    for path in paths:
        for nth, token in enumerate(path):
            seen = list(path[0 if window is None else max(0, nth - window + 1) : nth + 1])
            keys, values = (x[seen].repeat_interleave(group, 1) for x in (key, value))
            scores = (keys * query[token]).sum(-1) * scale
            scores = scores if cap is None else cap * (scores / cap).tanh()
            out[token] = (scores.softmax(0)[..., None] * values).sum(0)
    return torch.stack(out)


def in_turn(lengths: Sequence[int]) -> list[range]:
    """The tokens of rows that follow each other."""
    return [range(begin, end) for begin, end in itertools.pairwise([0, *itertools.accumulate(lengths)])]


def tensors(
    lengths: Sequence[int], heads: tuple[int, int] = (4, 2), dim: int = 8, dtype: Any = torch.float32, seed: int = 0
) -> list[Tensor]:
    """Queries, keys and values of the tokens of rows."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), count, dim) for count in (heads[0], heads[1], heads[1])]
    return [(2 * torch.randn(*shape, generator=source)).to(dtype) for shape in shapes]


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def attend(qkv: list[Tensor], lengths: Sequence[int], *, scale: float = 0.4, **more: Any) -> Tensor:
    return packed_attention(*qkv, bounds(lengths), max(lengths), scale=scale, **more)


def head_major(x: Tensor) -> Tensor:
    """Equal values, head after head in memory, as rotary embeddings that end in torch.cat leave them."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class OnGpu(Tensor):
    """A tensor on the host that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]
