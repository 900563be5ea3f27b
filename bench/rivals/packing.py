"""What plain torch does on a GPU in place of RowLayout, pack and unpack: the rivals of maskpack.ops.

    given the index or the cu_seqlens   the fastest that torch can do once something has computed these
    given the mask                      usual code: unpad as flash-attention users write it
Fields are lists of [B, S] (or [B, S, F]), values lists of [T] (or [T, F]), masks bool [B, S], indices int64 [T].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Pads = Sequence[float]


# -------------------------------------------------------------------- mask -> layout


def cu_seqlens(mask: Tensor) -> Tensor:
    """int32 [B + 1]; no synchronisation. Knows nothing of where the runs are."""
    return F.pad(mask.sum(1, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))


class Unpadding(NamedTuple):
    """What varlen attention is given: int64 [T], int32 [B + 1], and the longest row."""

    indices: Tensor
    cu_seqlens: Tensor
    longest: int


def unpadding(mask: Tensor) -> Unpadding:
    """The metadata of unpad_input."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    longest = int(lengths.max().item())
    return Unpadding(indices, F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0)), longest)


# -------------------------------------------------------------------- pack


def mask_index(mask: Tensor) -> Tensor:
    """The index, by nonzero."""
    return mask.flatten().nonzero().view(-1)


def pack_by_index(fields: Sequence[Tensor], index: Tensor) -> list[Tensor]:
    """`index_select`, the index given."""
    return [x.flatten(0, 1).index_select(0, index) for x in fields]


def compiled_pack_by_index(device: torch.device) -> Callable[[Sequence[Tensor], Tensor], list[Tensor]]:
    """`pack_by_index` of all fields in one compiled function, made for each shape on its own, as suits it best."""
    torch.compiler.reset()  # it counts how often one function is compiled for other shapes, and stops
    # Without a GPU there is no kernel to make, and to compile C++ takes longer than all else.
    return torch.compile(pack_by_index, dynamic=False, backend="inductor" if device.type == "cuda" else "eager")


# -------------------------------------------------------------------- unpack


def _full(value: Tensor, shape: Sequence[int], pad: float) -> Tensor:
    return torch.full((*shape, *value.shape[1:]), pad, dtype=value.dtype, device=value.device)


def unpack_by_index(values: Sequence[Tensor], index: Tensor, shape: Sequence[int], pads: Pads) -> list[Tensor]:
    """full, then index_copy_, the index given."""
    padded = [_full(value, shape, pad) for value, pad in zip(values, pads, strict=True)]
    for out, value in zip(padded, values, strict=True):
        out.flatten(0, 1).index_copy_(0, index, value)
    return padded


def write_outputs(values: Sequence[Tensor], shape: Sequence[int], pads: Pads) -> list[Tensor]:
    """One write of everything that unpack returns: full, and nothing after it."""
    return [_full(value, shape, pad) for value, pad in zip(values, pads, strict=True)]
