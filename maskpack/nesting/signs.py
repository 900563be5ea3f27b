"""ANY_ZERO: the signs of the zeros under a mask, as bits.

uint8 [B, ceil(width / 8)] on the host: a bit for each position of a row, set where -0.0 is masked out. The first
position is the highest bit of the first byte. The core reads and writes them; here is what else is done with them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from maskpack.core.bits import Words
from maskpack.core.pads import pad_tensor
from maskpack.layout.row_layout import RowLayout


def signs_of(x: Tensor, layout: RowLayout) -> Tensor:
    """The signs of a field [B, width] on any device, whose masked-out elements are zeros. One synchronisation."""
    negative = torch.signbit(x.detach()) & ~layout.to(x.device).to_mask(torch.bool)
    return torch.from_numpy(np.packbits(negative.cpu().numpy(), axis=1))


def signs_of_rows(pads: Tensor, layout: RowLayout) -> Tensor | None:
    """The signs of a field whose pads [B] are one zero a row; None if a row with padding has another pad."""
    pads, padded = pads.cpu(), torch.from_numpy(layout.lengths < layout.width)
    if bool((pads[padded] != 0).any()):
        return None
    return signs_of(pads[:, None].expand(layout.num_rows, layout.width), layout.to("cpu"))


def with_signs(x: Tensor, signs: Tensor, layout: RowLayout) -> Tensor:
    """A padded field [B, width] with -0.0 where a bit is set and the layout has no token, in any dtype that it was cast
    to. What the bits of tokens are depends on who wrote them."""
    minus = pad_tensor(-0.0, x.dtype)
    assert minus is not None
    lanes = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    bits = (signs.to(x.device, non_blocking=True)[:, :, None] >> lanes) & 1
    masked = bits.flatten(1)[:, : x.shape[1]].bool() & ~layout.to(x.device).to_mask(torch.bool)
    return torch.where(masked, minus.to(x.device, non_blocking=True), x)


def moved_signs(signs: Words, width: int, left: int, to_width: int) -> Words:
    """The signs of rows `width` wide in rows `to_width` wide, which have `left` more columns on the left, or fewer. New
    columns hold 0.0."""
    seen = np.unpackbits(signs, axis=1, count=width)[:, max(-left, 0) :]
    begin = max(left, 0)
    out = np.zeros((len(signs), to_width), np.uint8)
    seen = seen[:, : to_width - begin]
    out[:, begin : begin + seen.shape[1]] = seen
    return np.packbits(out, axis=1)
