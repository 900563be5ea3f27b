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


def signs_of(x: Tensor, layout: RowLayout) -> Words:
    """The signs of a field [B, width] on any device, whose masked-out elements are zeros. One synchronisation."""
    negative = torch.signbit(x.detach()) & ~layout.to(x.device).to_mask(torch.bool)
    return np.packbits(negative.cpu().numpy(), axis=1)


def with_signs(x: Tensor, signs: Tensor, layout: RowLayout) -> Tensor:
    """A padded field [B, width] with -0.0 where a bit is set and the layout has no token, in any dtype that it was cast
    to. What the bits of tokens are depends on who wrote them."""
    minus = pad_tensor(-0.0, x.dtype)
    assert minus is not None
    lanes = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    bits = (signs.to(x.device, non_blocking=True)[:, :, None] >> lanes) & 1
    masked = bits.flatten(1)[:, : x.shape[1]].bool() & ~layout.to(x.device).to_mask(torch.bool)
    return torch.where(masked, minus.to(x.device, non_blocking=True), x)
