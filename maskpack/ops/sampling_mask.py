"""Sampling masks: the ids that a sampler with top-p or top-k could have drawn for each token.

    token      0          1    2                   3
    ids        7 3 4           9 1 2 0             5
    offsets  0          3    3             7            8       token 1 has no ids: all are allowed

Logits of other ids are taken as -inf, so their probability is 0 and they have no gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.errors import LayoutError
from maskpack.layout.jagged import Jagged

_CALL = "packed_log_probs"
_INTEGERS = (torch.int64, torch.int32)


class SamplingMask(NamedTuple):
    """ids int64 [K] and offsets int64 [T + 1]. Kernels mark allowed ids of a piece in `scratch`, an int8 buffer."""

    ids: Tensor
    offsets: Tensor
    scratch: Tensor

    def of(self, rows: slice) -> SamplingMask:
        return self._replace(offsets=self.offsets[rows.start : rows.stop + 1])

    def forbidden(self, columns: slice) -> Tensor:
        """bool [T, N]: which ids of these columns are not allowed."""
        counts = self.offsets.diff()
        rows = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        ids = self.ids[self.offsets[0] : self.offsets[-1]]
        here = (ids >= columns.start) & (ids < columns.stop)
        forbidden = (counts > 0).unsqueeze(1).repeat(1, columns.stop - columns.start)
        forbidden[rows[here], ids[here] - columns.start] = False
        return forbidden


def check_sampling_mask(mask: Any, tokens: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Contiguous int64 ids and offsets. Raises LayoutError for anything else; values are checked on the CPU alone."""
    if mask is None:
        return None
    pair: Any = mask
    if isinstance(mask, Tensor):
        own = Jagged.of(mask)
        pair = None if own is None or own.dim != 1 else own[:2]
    if not (isinstance(pair, tuple) and [type(x) for x in cast("tuple[Any, ...]", pair)] == [Tensor, Tensor]):
        raise LayoutError(
            f"{_CALL}: sampling_mask is {said(mask)}; expected a jagged tensor [T, j] of ids, or a pair of ids [K] and "
            "offsets [T + 1]. Pass one of them."
        )
    ids, offsets = cast("tuple[Tensor, Tensor]", pair)
    fits = ids.dim() == 1 and offsets.shape == (tokens + 1,) and ids.device == offsets.device == device
    if not fits or ids.dtype not in _INTEGERS or offsets.dtype not in _INTEGERS:
        seen = " and ".join(f"{tuple(x.shape)} {str(x.dtype)[6:]} on {x.device}" for x in (ids, offsets))
        raise LayoutError(
            f"{_CALL}: sampling_mask has ids and offsets {seen}; expected [K] and [{tokens + 1}] of int64 or int32 on "
            f"{device}. Pass the allowed ids of each of the {tokens} tokens."
        )
    if device.type == "cpu":
        last, shrinks = int(offsets[-1]), bool((offsets.diff() < 0).any())
        if int(offsets[0]) != 0 or last != len(ids) or shrinks:
            raise LayoutError(
                f"{_CALL}: sampling_mask has offsets from {int(offsets[0])} to {last}{', not in order' * shrinks}; "
                f"expected 0 to {len(ids)}, the number of its ids, in order. Pass cumulative lengths."
            )
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
            raise LayoutError(
                f"{_CALL}: ids of sampling_mask lie in [{int(ids.min())}, {int(ids.max())}]; expected "
                f"[0, {vocabulary}), the rows of lm_head_weight. Leave padding out."
            )
    # not checked on a GPU: at least nothing else is read
    return ids.long().contiguous(), offsets.long().clamp(0, len(ids)).contiguous()
