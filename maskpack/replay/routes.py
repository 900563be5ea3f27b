"""RoutedExperts: the experts that routers of a mixture of experts have to choose, as the rollout engine recorded them.

    field        routed_experts [B, S, layers, k]      of the sequence axis
    packed       ids int16 [T, layers, k]              -1 at the last token of each row: its router chooses
    router of a layer      probabilities [T, E] -> those at ids[:, layer] -> weights of the experts

No log-prob depends on the experts of a row's last token, which engines do not run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import IntArray
from maskpack.errors import ReplayError

_FIELD = "routed_experts"


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts of packed tokens.

    Attributes:
        ids: int16 [T, layers, k], k different experts of each token in each layer; or all k are -1, where the router
            chooses.
        highest: the largest of the ids, -1 without one.
    """

    ids: Tensor
    highest: int

    @classmethod
    def of(cls, packed: Tensor, ends: IntArray, call: str) -> RoutedExperts:
        """From the field as packed tokens [T, layers, k], of any integer dtype, in which rows end before `ends`. One
        synchronisation on CUDA. Raises ReplayError for ids that are no k different experts."""
        if packed.is_floating_point() or packed.is_complex() or packed.dtype == torch.bool:
            raise ReplayError(f'{call}: field "{_FIELD}" is {packed.dtype}; expected integers. Fix the producer.')
        if packed.dim() != 3 or 0 in packed.shape[1:]:
            raise ReplayError(
                f'{call}: field "{_FIELD}" is {tuple(packed.shape)} packed; expected [T, layers, k]: k experts of each '
                "token in each layer. Fix the producer."
            )
        wide = packed.to(torch.int64) if packed.dtype in (torch.uint32, torch.uint64) else packed
        low, high = cast("list[int]", torch.stack(wide.aminmax()).tolist()) if wide.numel() else (-1, -1)
        if low < -1 or high > torch.iinfo(torch.int16).max:
            raise ReplayError(
                f'{call}: field "{_FIELD}" has ids from {low} to {high}; expected experts from 0 to 32767, or -1 where '
                "the router chooses. Fix the producer."
            )
        ids = wide.to(torch.int16)
        ids = ids.clone() if ids.data_ptr() == packed.data_ptr() else ids
        ids[torch.from_numpy(ends - 1).to(ids.device)] = -1
        _check_different(ids, call)
        return cls(ids, high)

    def to(self, device: torch.device) -> RoutedExperts:
        return replace(self, ids=self.ids.to(device, non_blocking=self.ids.device.type == "cpu"))

    def codes(self) -> IntArray:
        """int64 [T, n] on the host, equal for tokens with the same experts: four ids in each number."""
        flat = self.ids.flatten(1).numpy()
        wide = np.zeros((flat.shape[0], -(-flat.shape[1] // 4) * 4), np.int16)
        wide[:, : flat.shape[1]] = flat
        return wide.view(np.int64)

    def with_tail(self, tokens: int) -> RoutedExperts:
        """With `tokens` more, for which the routers choose."""
        return replace(self, ids=torch.cat([self.ids, self.ids.new_full((tokens, *self.ids.shape[1:]), -1)]))


def _check_different(ids: Tensor, call: str) -> None:
    """Raises ReplayError unless the experts of each token are different, or all -1."""
    chosen = ids >= 0
    wrong = chosen.any(-1) != chosen.all(-1)
    for one, other in combinations(range(ids.shape[2]), 2):
        wrong |= (ids[..., one] == ids[..., other]) & chosen[..., one]
    if bool(wrong.any()):
        token, layer = cast("list[int]", torch.nonzero(wrong)[0].tolist())
        raise ReplayError(
            f'{call}: field "{_FIELD}" has experts {ids[token, layer].tolist()} for a token in layer {layer}, and '
            f"{int(wrong.sum())} more such; expected different experts, or -1 alone where the router chooses. Engines "
            "leave zeros for tokens that they did not record: drop such rows, or set these tokens to -1."
        )
