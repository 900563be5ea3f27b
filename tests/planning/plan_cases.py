"""What is planned, as naive sets and sums: rows of tokens, costs of any numbers, tries as sets of prefixes.

Case    lengths, a budget, options, labels; with `rows` of tokens, planned with their tree
cases   draws them, one kind of cost at a time
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maskpack.planning import MicroBatchPlan, PlanOptions, PrefixTree, plan_micro_batches, plan_ranks
from maskpack.planning.ranks import RankPlans

many = settings(max_examples=max(60, settings.default.max_examples))
"""Plans take a millisecond: more examples than the profile has."""
KINDS = ("tokens", "padded", "own", "prefix")
"""What a budget is of: tokens, padded tokens, a function of your own, tokens of a trie."""
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
Row = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """A cost of rows by length, any numbers at all."""

    values: tuple[float, ...]

    def __call__(self, lengths: Any) -> list[float]:
        return [self.values[int(length) % len(self.values)] for length in lengths]


@dataclasses.dataclass(frozen=True)
class Flops:
    """A cost of rows that grows with the square of their lengths."""

    linear: float
    quadratic: float

    def __call__(self, lengths: Any) -> Any:
        n = lengths.astype(np.float64)
        return self.linear * n + self.quadratic * n * n


def trie(rows: Sequence[Row]) -> set[Row]:
    """The prefixes of the rows: one for each token that is computed once."""
    return {row[: n + 1] for row in rows for n in range(len(row))}


def tree_of(rows: Sequence[Row], min_shared: int = 1) -> PrefixTree:
    ids = np.array([token for row in rows for token in row], np.int64)
    return PrefixTree.from_ids(ids, np.cumsum([0, *map(len, rows)]), min_shared=min_shared)


def in_units(labels: Sequence[Any] | None, rows: int) -> list[list[int]]:
    """Rows that stay together, in the order of their first rows."""
    found: dict[Any, list[int]] = {}
    for row, label in enumerate(range(rows) if labels is None else labels):
        found.setdefault(label, []).append(row)
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Case:
    lengths: list[int]
    token_budget: Any
    options: PlanOptions = dataclasses.field(default_factory=PlanOptions)
    labels: Sequence[Any] | None = None
    rows: list[Row] | None = None

    def but(self, **options: Any) -> Case:
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **options))

    @property
    def given(self) -> dict[str, Any]:
        tree = None if self.rows is None else tree_of(self.rows)
        return {"options": self.options, "groups": self.labels, "tree": tree}

    @property
    def plan(self) -> MicroBatchPlan:
        return plan_micro_batches(self.lengths, self.token_budget, **self.given)

    def ranks(self, ranks: int, **more: Any) -> RankPlans:
        return plan_ranks(self.lengths, ranks, self.token_budget, **self.given, **more)

    def take(self, rows: Sequence[int]) -> Case:
        return dataclasses.replace(
            self,
            lengths=[self.lengths[row] for row in rows],
            labels=None if self.labels is None else [self.labels[row] for row in rows],
            rows=None if self.rows is None else [self.rows[row] for row in rows],
        )

    @property
    def units(self) -> list[list[int]]:
        return in_units(self.labels, len(self.lengths))

    def roots(self, rows: Sequence[int]) -> list[list[int]]:
        """The rows with a tree that have the first token in common."""
        tokens = [] if self.rows is None or self.labels is not None else [self.rows[row][:1] for row in rows]
        return [[row for row, its in zip(rows, tokens, strict=True) if its == first] for first in {*tokens} if first]

    def is_whole(self, rows: list[int]) -> bool:
        """Whether a micro-batch cannot be split."""
        return rows in self.units or rows in self.roots(rows)

    def cost(self, rows: Sequence[int]) -> Fraction:
        if self.rows is not None:
            return Fraction(len(trie([self.rows[row] for row in rows])))
        if self.options.cost == "padded":
            return Fraction(len(rows) * max(self.lengths[row] for row in rows))
        return self._sum(self.options.cost, rows)

    def work(self, rows: Sequence[int]) -> Fraction:
        return self.cost(rows) if self.options.work is None else self._sum(self.options.work, rows)

    def _sum(self, cost: Any, rows: Sequence[int]) -> Fraction:
        of_rows = np.array([self.lengths[row] for row in rows], np.int64)
        return sum((Fraction(float(item)) for item in (of_rows if cost == "tokens" else cost(of_rows))), Fraction(0))

    def too_large(self, rows: Sequence[int]) -> bool:
        return self.cost(rows) > Fraction(self.token_budget)


def real(plan: MicroBatchPlan) -> list[list[list[int]]]:
    """The micro-batches of each update, without dummies."""
    return [update[: len(update) - dummies] for update, dummies in zip(plan.updates, plan.dummies, strict=True)]


FINE = (0.0, 5e-324, 2.0**-53, 0.1, 1 / 3, 1.0, 1 - 2.0**-53, 1e16, 7.0)
"""Numbers whose float sums are not their sums."""


@st.composite
def costs(draw: st.DrawFn) -> Callable[[Any], Any]:
    way = draw(st.integers(0, 3))
    if way == 0:
        return Flops(draw(st.sampled_from((0.0, 1.0, 0.1))), draw(st.sampled_from((0.125, 1 / 3, 7.0))))
    some = st.sampled_from(FINE) if way == 1 else st.floats(0, 100) if way == 2 else st.integers(0, 20).map(float)
    return Table(tuple(draw(st.lists(some, min_size=1, max_size=6))))


@st.composite
def tries(draw: st.DrawFn, least: int = 0, most: int = 20) -> list[Row]:
    """Rows of which many go on from a prefix of another; some are equal, some empty."""
    system = tuple(draw(st.lists(st.just(7), max_size=4)))
    rows: list[Row] = []
    for _ in range(draw(st.integers(least, most))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else system
        kept = before[: draw(st.integers(0, len(before)))]
        rows.append(kept + tuple(draw(st.lists(st.integers(0, 3), max_size=8))))
    return rows


@st.composite
def cases(draw: st.DrawFn, kind: str, *, work: bool = True, groups: bool = True) -> Case:
    tokens = draw(tries()) if kind == "prefix" else None
    rows = draw(st.integers(0, 24)) if tokens is None else len(tokens)
    most = draw(st.sampled_from((1, 4, 30, 200)))
    lengths = draw(st.lists(st.integers(0, most), min_size=rows, max_size=rows))
    options: dict[str, Any] = {"num_updates": draw(st.integers(1, 4)), "multiple_of": draw(st.integers(1, 3))}
    labels = None
    if groups and draw(st.booleans()):
        labels = draw(st.lists(st.sampled_from(("a", "b", 2, 3, None, (4, 4))), min_size=rows, max_size=rows))
        labels = sorted(labels, key=str) if draw(st.booleans()) else labels
    if tokens is not None:
        return Case([*map(len, tokens)], draw(st.integers(1, 40)), PlanOptions(**options), labels, tokens)
    if work and draw(st.booleans()):
        options["work"] = draw(costs())
    options["cost"] = draw(costs()) if kind == "own" else kind
    if kind != "own":
        budget = draw(st.integers(1, max(2 * most, 8)) | st.just(10**30))
    else:
        found = [float(item) for item in options["cost"](np.array(lengths, np.int64))]
        sums = list(itertools.accumulate(found))[:4]
        positive = [item for item in (*found, *sums, 0.1, 1.0, 50.0) if item > 0]
        budget = draw(st.sampled_from(positive) | st.integers(1, 100))
    return Case(lengths, budget, PlanOptions(**options), labels)


def for_cases(*more: Any, kinds: Sequence[str] = KINDS, **options: Any) -> Callable[[Any], Any]:
    """The test once for each kind, over many cases of it."""

    def decorated(test: Any) -> Any:
        def run(kind: str) -> None:
            many(given(cases(kind, **options), *more)(test))()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("kind", kinds)(run)

    return decorated
