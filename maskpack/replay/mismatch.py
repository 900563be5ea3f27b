"""compare: how far log-probs of the trainer are from those that the rollout recorded for the same tokens.

    d = log_probs - rollout_log_probs      r = exp(d)

    k1 = mean(-d)      k2 = mean(d^2 / 2)      k3 = mean(r - 1 - d)

The three estimate KL(rollout || trainer) from tokens of the rollout. Source: John Schulman, "Approximating KL
Divergence", http://joschu.net/blog/kl-approx.html.

    rows       0 0 0 | 1 | 2 2 2 2 2        tokens of all rows, one after the other
    positions  0 1 2 | 0 | 0 1 2 3 4        in the response
    from       0 1 2 | 0 | 0 1 2 2 4        buckets: 0, 1, 2 to 3, 4 to 7, 8 to 15, ...
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.tensors import need_tensor
from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.layout.jagged import Jagged, offsets_of

_CALL = "compare"
_SUMS = ("tokens", "non_finite", "k1", "k2", "k3", "abs_mean", "ratio_mean", "outside", "abs_max")
_PLACE = ("row", "position", "rollout's", "trainer's")


@dataclass(frozen=True)
class MismatchLimit:
    """How far trainer and rollout may be apart, for `compare`. A difference that is not finite exceeds any limit.

    Attributes:
        k3: of the mean estimate of KL(rollout || trainer), in nats for each token.
        abs_max: of the largest absolute difference of two log-probs.
        outside: of the share of tokens whose ratio is outside the clip, 0 to 1.
        action: "raise" for ReplayError, "warn" for MaskpackWarning.

    Raises:
        ReplayError: no limit, a negative one, or another action.
    """

    k3: float | None = None
    abs_max: float | None = None
    outside: float | None = None
    action: Literal["raise", "warn"] = "raise"

    def __post_init__(self) -> None:
        for name, most in self.limits.items():
            _need_number(most, name, "MismatchLimit", 1 if name == "outside" else math.inf)
        if not self.limits or self.action not in ("raise", "warn"):
            raise ReplayError(
                f"MismatchLimit: k3, abs_max and outside are {self.k3}, {self.abs_max} and {self.outside}, action is "
                f'{said(self.action)}; expected at least one limit, and "raise" or "warn". Set them.'
            )

    @property
    def limits(self) -> dict[str, float]:
        """Those that are set, by name."""
        every = {"k3": self.k3, "abs_max": self.abs_max, "outside": self.outside}
        return {name: most for name, most in every.items() if most is not None}


@dataclass(frozen=True, eq=False)
class Mismatch:
    """What `compare` returns. Tensors are on the device of `log_probs`.

    Attributes:
        row_k3: float64 [B], the mean of r - 1 - d over the tokens of each row: 0 for a row without tokens, infinite for
            one with a difference that is not finite. Rows may be dropped by it.
        row_abs_max: float64 [B], the largest absolute d of each row; in the same cases 0 and infinite.
    """

    row_k3: Tensor
    row_abs_max: Tensor
    _numbers: Tensor

    @cached_property
    def _read(self) -> list[float]:
        return cast("list[float]", self._numbers.tolist())

    def metrics(self, prefix: str = "rollout_mismatch/") -> dict[str, float]:
        """Returns a flat dict for a logger. The first call synchronises once on CUDA.

        `tokens`, `non_finite` (differences that are infinite or NaN, which all others leave out), `k1`, `k2`, `k3`,
        `abs_mean` and `abs_max` of the absolute d, `ratio_mean` of r, `outside` (the share of tokens whose r is outside
        the clip) and, for positions from 0, 1, 2 to 3, 4 to 7 and so on, `abs_mean_from_<n>` of those with tokens.
        Without tokens, everything is 0 but `ratio_mean`, which is 1.
        """
        out: dict[str, float] = dict(zip(_SUMS, self._read, strict=False))
        finite = max(out["tokens"] - out["non_finite"], 1)
        out |= {name: out[name] / finite for name in ("k1", "k2", "k3", "abs_mean", "outside")}
        out["ratio_mean"] = 1 + out["ratio_mean"] / finite
        buckets = self._read[len(_SUMS) + len(_PLACE) :]
        for nth, (count, total) in enumerate(zip(buckets[::2], buckets[1::2], strict=True)):
            if count:
                out[f"abs_mean_from_{(1 << nth) >> 1}"] = total / count
        return {prefix + name: value for name, value in out.items()}

    @property
    def worst(self) -> tuple[int, int] | None:
        """Row and position of the first difference that is not finite, or else of the largest absolute one; None
        without tokens. Synchronises as `metrics` does."""
        place = self._read[len(_SUMS) :]
        return (int(place[0]), int(place[1])) if self._read[0] else None

    def _check(self, limit: MismatchLimit) -> None:
        seen = self.metrics("")
        over = {name: most for name, most in limit.limits.items() if not seen[name] <= most}
        if not over and not seen["non_finite"]:
            return
        apart = [f"{name} is {seen[name]:.6g}; expected at most {most:g}" for name, most in over.items()]
        if seen["non_finite"]:
            apart.append(f"{seen['non_finite']:.0f} of {seen['tokens']:.0f} differences are not finite")
        row, position, rollout, own = self._read[len(_SUMS) :][: len(_PLACE)]
        message = (
            f"{_CALL}: the log-probs of the trainer are not those of the rollout: {'; '.join(apart)}. Row {row:.0f}, "
            f"position {position:.0f} is furthest apart: {rollout:.6g} by the rollout, {own:.6g} by the trainer. "
            "Compare weights, temperature and precision of both, or set another limit."
        )
        if limit.action == "raise":
            raise ReplayError(message)
        warnings.warn(message, MaskpackWarning, stacklevel=3)


def compare(
    rollout_log_probs: Tensor,
    log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    clip: float = 0.2,
    limit: MismatchLimit | None = None,
) -> Mismatch:
    """Measures how far log-probs of the trainer are from those of the rollout: d = log_probs - rollout_log_probs.

    Args:
        rollout_log_probs: floats, padded [B, R], or jagged [B, j] on the offsets of `log_probs`, on any device.
        log_probs: floats of the same shape, such as the result of `response_log_probs`.
        mask: of the tokens to compare, 0 elsewhere: [B, R], or jagged [B, j]. Padded log-probs need one.
        clip: `outside` counts tokens whose ratio exp(d) is outside [1 - clip, 1 + clip]; from 0 to 1.
        limit: what to do if they are too far apart. It reads the metrics at once.

    Returns:
        Metrics, which are summed in float64 on the device and read later; and tensors of each row. The position of a
        token is its column if it is padded, its place in the row if it is jagged.

    Waits for no device, but for jagged tensors with other offsets tensors than those of `log_probs`, to compare them.

    Raises:
        ReplayError: shapes, offsets, dtypes or a clip that do not fit; a limit was exceeded.
    """
    _need_number(clip, "clip", _CALL, 1)
    if limit is not None and not isinstance(cast("Any", limit), MismatchLimit):
        raise ReplayError(f"{_CALL}: limit is {said(limit)}; expected a MismatchLimit. Pass MismatchLimit(k3=0.01).")
    tokens = _Tokens.of(rollout_log_probs, log_probs, mask)
    far = tokens.own - tokens.rollout
    finite = far.isfinite()
    bad, used = tokens.on & ~finite, tokens.on & finite
    d = far.where(used, 0)
    gap, ratio = d.abs(), d.expm1()
    k3 = ratio - d
    unbounded, by_row = torch.full_like(d, math.inf), d.new_zeros(tokens.num_rows)
    row_tokens = by_row.index_add(0, tokens.rows, tokens.on.double()).clamp_(min=1)
    row_k3 = by_row.index_add(0, tokens.rows, unbounded.where(bad, k3)) / row_tokens
    row_abs_max = by_row.scatter_reduce(0, tokens.rows, unbounded.where(bad, gap), "amax")
    starts = 1 << torch.arange(max(d.numel(), 1).bit_length(), device=d.device)
    bucket = torch.bucketize(tokens.positions, starts, right=True)
    by_bucket = torch.stack([used.double(), gap], 1)
    by_bucket = d.new_zeros(starts.numel() + 1, 2).index_add(0, bucket, by_bucket)
    most, k1 = gap.new_zeros(()), 0 - d.sum()  # not -0.0
    place = d.new_zeros(len(_PLACE))
    if d.numel():
        most = gap.amax()
        at = unbounded.where(bad, gap.where(used, -1)).argmax()
        found = (tokens.rows, tokens.positions, tokens.rollout, tokens.own)
        place = torch.cat([x.index_select(0, at[None]).double() for x in found])
    sums = [tokens.on.sum(), bad.sum(), k1, d.square().sum() / 2, k3.sum(), gap.sum(), ratio.sum()]
    sums += [((ratio < -clip) | (ratio > clip)).sum(), most]
    numbers = torch.cat([torch.stack([one.double() for one in sums]), place, by_bucket.flatten()])
    out = Mismatch(row_k3, row_abs_max, numbers)
    if limit is not None:
        out._check(limit)  # pyright: ignore[reportPrivateUsage]
    return out


class _Tokens(NamedTuple):
    """Tokens of `num_rows` rows, float64, bool and int64 [N] each: `on` where they are compared."""

    rollout: Tensor
    own: Tensor
    on: Tensor
    rows: Tensor
    positions: Tensor
    num_rows: int

    @classmethod
    def of(cls, rollout: Tensor, own: Tensor, mask: Tensor | None) -> _Tokens:
        given = {"rollout_log_probs": rollout, "log_probs": own} | ({} if mask is None else {"mask": mask})
        for name, x in given.items():
            need_tensor(x, name, _CALL, ReplayError)
            if name != "mask" and not x.is_floating_point():
                raise ReplayError(f"{_CALL}: {name} is {x.dtype}; expected floats. Pass log-probs.")
            fits = Jagged.of(x) is not None and x.dim() == 2 if own.is_nested else x.shape == own.shape
            if not fits or own.dim() != 2:
                raise ReplayError(
                    f"{_CALL}: {name} is {_shown(x)}, log_probs is {_shown(own)}; expected all padded [B, R] or all "
                    "jagged [B, j]. Nest or pad them alike."
                )
        device = own.device
        if own.is_nested:
            offsets = offsets_of(own)
            for name, x in given.items():
                if offsets_of(x) is not offsets and not torch.equal(offsets_of(x).to(device), offsets):
                    raise ReplayError(
                        f"{_CALL}: {name} has rows of other lengths than log_probs; expected the same. Nest both under "
                        "the response."
                    )
            # values may go on beyond the last row
            places = torch.arange(min(x.values().shape[0] for x in given.values()), device=device)
            inside = places < offsets[-1]
            rows = torch.bucketize(places, offsets[1:], right=True).clamp_(max=max(own.shape[0] - 1, 0))
            positions = places - offsets[rows]
        elif mask is None:
            raise ReplayError(
                f"{_CALL}: log_probs is padded {_shown(own)}, without a mask; expected one, because pads are no "
                "tokens. Pass mask=response_mask."
            )
        else:
            rows, positions = (x.flatten().contiguous() for x in _grid(own))
            inside = torch.ones_like(rows, dtype=torch.bool)
        flat = {name: (x.values() if x.is_nested else x.flatten()).detach().to(device) for name, x in given.items()}
        flat = {name: x[: rows.shape[0]] for name, x in flat.items()}
        on = inside if mask is None else inside & (flat["mask"] != 0)
        numbers = flat["rollout_log_probs"].double(), flat["log_probs"].double()
        return cls(*numbers, on, rows, positions, own.shape[0])


def _grid(x: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [B, R] each: rows and columns."""
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return rows[:, None].expand(x.shape), columns.expand(x.shape)


def _shown(x: Tensor) -> str:
    return f"jagged of {x.size(0)} rows" if x.is_nested else str(tuple(x.shape))


def _need_number(value: Any, name: str, call: str, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not 0 <= value <= most:
        limits = "from 0" if most == math.inf else f"from 0 to {most}"
        raise ReplayError(f"{call}: {name} is {said(value)}; expected a number {limits}. Give one.")
