"""compare: against loops over rows and tokens in float64, of padded and of jagged log-probs."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from maskpack.errors import MaskpackWarning, ReplayError
from maskpack.replay import MismatchLimit, compare
from maskpack.replay.mismatch import Mismatch

PREFIX = "rollout_mismatch/"
ODD = [math.nan, math.inf, -math.inf]
Token = tuple[int, int, float, float]
"""Row, position, the rollout's log-prob and the trainer's."""


def truth_of(tokens: list[Token], rows: int, clip: float) -> tuple[dict[str, float], list[float], list[float], Any]:
    """Metrics, k3 and the largest difference of each row, and where the worst token is."""
    every: list[tuple[int, int, np.float64]] = []
    with np.errstate(all="ignore"):
        for row, position, rollout, own in tokens:
            every.append((row, position, np.float64(own) - np.float64(rollout)))
        finite = [(row, position, d) for row, position, d in every if np.isfinite(d)]
        count, of_finite = max(len(finite), 1), [d for _, _, d in finite]
        k3 = [np.exp(d) - 1 - d for d in of_finite]
    out = {
        "tokens": len(every),
        "non_finite": len(every) - len(finite),
        "k1": math.fsum(-d for d in of_finite) / count,
        "k2": math.fsum(d * d / 2 for d in of_finite) / count,
        "k3": math.fsum(k3) / count,
        "abs_mean": math.fsum(abs(d) for d in of_finite) / count,
        "abs_max": max((abs(d) for d in of_finite), default=0.0),
        "ratio_mean": math.fsum(np.exp(d) for d in of_finite) / count if finite else 1.0,
        "outside": sum(not 1 - clip <= np.exp(d) <= 1 + clip for d in of_finite) / count,
    }
    begin, end = 0, 1
    while begin <= max((position for _, position, _ in finite), default=-1):
        own = [abs(d) for _, position, d in finite if begin <= position < end]
        if own:
            out[f"abs_mean_from_{begin}"] = math.fsum(own) / len(own)
        begin, end = end, 2 * end
    row_k3, row_max = [], []
    for nth in range(rows):
        own = [d for row, _, d in every if row == nth]
        bad = not all(np.isfinite(d) for d in own)
        row_k3.append(math.inf if bad else math.fsum(np.exp(d) - 1 - d for d in own) / max(len(own), 1))
        row_max.append(math.inf if bad else max((abs(d) for d in own), default=0.0))
    odd = [(row, position) for row, position, d in every if not np.isfinite(d)]
    best = max(finite, key=lambda one: abs(one[2]), default=None)
    return out, row_k3, row_max, odd[0] if odd else None if best is None else (best[0], best[1])


def check(seen: Mismatch, tokens: list[Token], rows: int, clip: float) -> None:
    wanted, row_k3, row_max, worst = truth_of(tokens, rows, clip)
    metrics = seen.metrics()
    assert {name.removeprefix(PREFIX) for name in metrics} == set(wanted)
    for name, value in wanted.items():
        got = metrics[PREFIX + name]
        assert isinstance(got, float)
        assert got == pytest.approx(value, rel=1e-12, abs=1e-15), name
    for got, want in ((seen.row_k3, row_k3), (seen.row_abs_max, row_max)):
        assert got.dtype == torch.float64
        assert got.tolist() == pytest.approx(want, rel=1e-12, abs=1e-15)
    assert seen.worst == worst


def drawn(source: np.random.Generator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs [B, R] of a rollout and of a trainer, and a mask with holes; some rows have no token, and some tokens
    odd log-probs. What the mask leaves out is anything."""
    shape = int(source.integers(0, 6)), int(source.integers(0, 40))
    rollout, far = -source.exponential(1, shape), source.normal(0, source.choice([1e-4, 0.1, 1]), shape)
    on = source.random(shape) < source.choice([0.3, 0.9, 1])
    on[source.random(shape[0]) < 0.2] = False
    pair = [torch.from_numpy(x).to(dtype) for x in (rollout, rollout + far)]
    for x in pair:
        odd = torch.from_numpy(~on if source.random() < 0.7 else source.random(shape) < 0.1)
        x[odd] = torch.tensor(source.choice(ODD, int(odd.sum())), dtype=dtype)
    return pair[0], pair[1], torch.from_numpy(on)


def listed(rollout: Tensor, own: Tensor, on: Tensor, places: Tensor | None = None) -> list[Token]:
    out: list[Token] = []
    for row in range(on.shape[0]):
        for column in range(on.shape[1]):
            if on[row, column]:
                place = column if places is None else int(places[row, column])
                out.append((row, place, float(rollout[row, column].double()), float(own[row, column].double())))
    return out


def jagged(x: Tensor, lengths: Tensor) -> Tensor:
    """The first tokens of each row."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    values = torch.cat([row[:count] for row, count in zip(x, lengths.tolist(), strict=True)] or [x.flatten()])
    return torch.nested.nested_tensor_from_jagged(values, offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_three_hundred_padded_batches(dtype: torch.dtype) -> None:
    source = np.random.default_rng(1)
    for _ in range(300):
        rollout, own, on = drawn(source, dtype)
        clip = float(source.choice([0.1, 0.2, 0.5]))
        before = rollout.clone(), own.clone(), on.clone()
        mask = on.to(source.choice(np.array([torch.bool, torch.int64, torch.float32], dtype=object)))
        check(compare(rollout, own, mask, clip=clip), listed(rollout, own, on), on.shape[0], clip)
        for x, as_it_was in zip((rollout, own, on), before, strict=True):
            assert torch.equal(x.nan_to_num(7), as_it_was.nan_to_num(7))


def test_three_hundred_jagged_batches() -> None:
    """With holes by a mask, or without; offsets are shared, or equal."""
    source = np.random.default_rng(2)
    for number in range(300):
        rollout, own, on = drawn(source, torch.float32)
        if not on.shape[0]:
            continue
        lengths = torch.from_numpy(source.integers(0, on.shape[1] + 1, on.shape[0]))
        inside = torch.arange(on.shape[1]) < lengths[:, None]
        pair = [jagged(x, lengths) for x in (rollout, own)]
        if number % 2:
            pair[0] = torch.nested.nested_tensor_from_jagged(pair[0].values(), pair[1].offsets())
        check(compare(*pair), listed(rollout, own, inside), on.shape[0], 0.2)
        check(compare(*pair, jagged(on, lengths)), listed(rollout, own, inside & on), on.shape[0], 0.2)


def test_values_after_the_last_row_are_no_tokens() -> None:
    values, offsets = -torch.rand(8), torch.tensor([0, 2, 2, 6])
    longer, other = (torch.nested.nested_tensor_from_jagged(x, offsets) for x in (values, values[:7] + 1))
    values[6:] = 900.0
    for pair in ((longer, other), (other, longer)):
        seen = compare(*pair)
        assert seen.metrics("")["tokens"] == 6
        assert seen.metrics("")["abs_max"] == pytest.approx(1)
        assert seen.row_abs_max.tolist() == pytest.approx([1, 0, 1])


def test_the_same_log_probs_are_exactly_0_apart() -> None:
    log_probs = -torch.rand(3, 9)
    out = compare(log_probs, log_probs.clone(), torch.ones(3, 9)).metrics("")
    assert out.pop("tokens") == 27
    assert out.pop("ratio_mean") == 1.0
    assert [str(value) for value in out.values()] == ["0.0"] * len(out)  # not -0.0
    assert len(out) > 8


def test_small_differences_keep_their_digits() -> None:
    """In float32, exp(d) - 1 - d would be 0 or noise."""
    rollout = torch.full((1, 1000), -1.0, dtype=torch.float64)
    seen = compare(rollout, rollout + 1e-6, torch.ones(1, 1000)).metrics("")
    assert seen["k3"] == pytest.approx(5e-13, rel=1e-4)
    assert seen["k2"] == pytest.approx(5e-13, rel=1e-4)


def test_gradients_do_not_pass() -> None:
    own = torch.zeros(2, 3, requires_grad=True)
    seen = compare(torch.zeros(2, 3), own, torch.ones(2, 3))
    assert not seen.row_k3.requires_grad
    assert not compare(torch.zeros(2, 3), own, torch.ones(2, 3), limit=MismatchLimit(k3=0)).row_k3.requires_grad


def far_apart() -> tuple[Tensor, Tensor, Tensor]:
    rollout = torch.full((3, 5), -1.25)
    own = rollout.clone()
    own[2, 3] = -9.5
    return rollout, own, torch.ones(3, 5)


@pytest.mark.parametrize("limit", [{"k3": 0.4}, {"abs_max": 8}, {"outside": 0.05}], ids=lambda limit: next(iter(limit)))
def test_a_limit_raises_or_warns(limit: dict[str, float]) -> None:
    given = far_apart()
    (name, most) = next(iter(limit.items()))
    seen = compare(*given).metrics("")[name]
    assert seen > most
    said = (
        f"compare: the log-probs of the trainer are not those of the rollout: {name} is {seen:.6g}; expected at most "
        f"{most:g}. Row 2, position 3 is furthest apart: -1.25 by the rollout, -9.5 by the trainer."
    )
    with pytest.raises(ReplayError, match=re.escape(said)):
        compare(*given, limit=MismatchLimit(**limit))
    with pytest.warns(MaskpackWarning, match=re.escape(said)) as caught:
        out = compare(*given, limit=MismatchLimit(**limit, action="warn"))
    assert caught[0].filename == __file__
    assert out.worst == (2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(*given, limit=MismatchLimit(k3=1, abs_max=8.25, outside=0.07))
        compare(*given)


@pytest.mark.parametrize("odd", ODD)
def test_differences_that_are_not_finite_exceed_any_limit(odd: float) -> None:
    rollout, own, mask = far_apart()
    own[1, 4] = odd
    wide = MismatchLimit(k3=math.inf, abs_max=math.inf, outside=1)
    said = f"1 of 15 differences are not finite. Row 1, position 4 is furthest apart: -1.25 by the rollout, {odd:g} by"
    with pytest.raises(ReplayError, match=re.escape(said)):
        compare(rollout, own, mask, limit=wide)
    mask[1, 4] = 0
    assert compare(rollout, own, mask, limit=wide).metrics("")["non_finite"] == 0


ZEROS = torch.zeros(2, 3)
NESTED = torch.nested.nested_tensor_from_jagged(torch.zeros(6), torch.tensor([0, 2, 6]))
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "no mask": ((ZEROS, ZEROS), {}, "log_probs is padded (2, 3), without a mask; expected one"),
    "other shapes": (
        (ZEROS[:, :2], ZEROS, ZEROS),
        {},
        "rollout_log_probs is (2, 2), log_probs is (2, 3); expected all",
    ),
    "mask of another shape": ((ZEROS, ZEROS, ZEROS[0]), {}, "mask is (3,), log_probs is (2, 3); expected all padded"),
    "three dims": ((ZEROS[None],) * 3, {}, "rollout_log_probs is (1, 2, 3), log_probs is (1, 2, 3); expected all"),
    "jagged and padded": ((ZEROS, NESTED), {}, "rollout_log_probs is (2, 3), log_probs is jagged of 2 rows; expected"),
    "padded and jagged": ((NESTED, ZEROS, ZEROS), {}, "rollout_log_probs is jagged of 2 rows, log_probs is (2, 3)"),
    "other rows": (
        (torch.nested.nested_tensor_from_jagged(torch.zeros(6), torch.tensor([0, 3, 6])), NESTED),
        {},
        "rollout_log_probs has rows of other lengths than log_probs; expected the same",
    ),
    "strided": ((NESTED, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)])), {}, "log_probs is jagged of 2"),
    "ids": ((ZEROS.long(), ZEROS, ZEROS), {}, "rollout_log_probs is torch.int64; expected floats"),
    "a list": (([0.5], ZEROS, ZEROS), {}, "rollout_log_probs is a list"),
    "clip": ((ZEROS, ZEROS, ZEROS), {"clip": -1}, "clip is -1; expected a number from 0"),
    "clip is NaN": ((ZEROS, ZEROS, ZEROS), {"clip": math.nan}, "clip is nan; expected a number from 0"),
    "limit": ((ZEROS, ZEROS, ZEROS), {"limit": 0.1}, "limit is 0.1; expected a MismatchLimit"),
}


@pytest.mark.parametrize(("given", "more", "message"), BAD.values(), ids=BAD)
def test_calls_that_do_not_fit_are_refused(given: tuple[Any, ...], more: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError) as caught:
        compare(*given, **more)
    assert str(caught.value).startswith("compare: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"k3": -1.0}, {"k3": math.nan}, {"k3": 1.0, "action": "stop"}, {"outside": "x"}])
def test_limits_that_mean_nothing_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ReplayError, match=r"^MismatchLimit: "):
        MismatchLimit(**given)
