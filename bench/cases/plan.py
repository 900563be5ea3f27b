"""Time and quality of plans: micro-batches by token budget, rows to ranks, and both for all ranks.

Lengths are those of the reference workload (log-normal), uniform, and bimodal: half of the rows fill three quarters of
the budget, so that a bound on bins must know more than the total; of the other workloads all rows that there are, over
as many ranks as have 25 rows or more. Two numbers of synthetic lengths: Karmarkar-Karp and first-fit decreasing as
trainers write it are measured at the smaller one only, because their time grows with its square.

Ours gets an array and checks it; rivals get a list of Python integers for nothing. Times are processor time. The floor
is a sort of the lengths with the result as a list. The collector of cycles is off while anything is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import workloads
from bench.harness.measure import NotExact, interleaved, progress
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.rivals import plans as rivals
from maskpack.planning import PlanOptions, balance_rows, plan_micro_batches, plan_ranks
from maskpack.planning.ranks import RankPlans

Array = npt.NDArray[np.int64]
Amounts = npt.NDArray[np.float64]

BUDGET, RANK_BUDGET, UPDATES = 16_384, 32_768, 4
_ROWS_OF_RANK, _RANKS_AT_MOST = 25, 64
_UPDATED = PlanOptions(num_updates=UPDATES)

_OURS = "plan_micro_batches"
_FFD, _TREE = "first-fit decreasing, as trainers write it", "first-fit decreasing, tournament tree"
_KK = "Karmarkar-Karp, as many parts"
_ARGSORT = "np.argsort and tolist"
_EQUAL, _LPT = "balance_rows", "largest processing time, heap"
_RANKS, _DUMMIES = "plan_ranks", "consecutive rows, FFD, dummies"


@case(
    "plan",
    help="micro-batches and ranks of 8,192 and 65,536 lengths, and those of a workload",
    on="cpu",
    workloads=True,
    rows=None,
    tiny={"sizes": (40, 90)},
)
def run(rounds: int, *, sizes: tuple[int, int] = (8_192, 65_536), workload: str = "reference") -> RowGroups:
    """Raises NotExact if a plan loses a row or breaks the budget, or if the two ways of first-fit decreasing give
    different bins."""
    if workload == "reference":
        return _synthetic(rounds, sizes)
    of = workloads.lengths(workload, workloads.MOST_ROWS[workload])
    return _real(workload, of.prompt + of.response, rounds)


def _synthetic(rounds: int, sizes: tuple[int, int]) -> RowGroups:
    ranks = _ranks_of(sizes[0])
    small, large = ({kind: drawn(count) for kind, drawn in LENGTHS.items()} for count in sizes)
    for kind, lengths in small.items():
        yield _micro_batches(kind, lengths, BUDGET, rounds, "<= 25", slow=True)
    for kind, lengths in large.items():
        yield _micro_batches(kind, lengths, BUDGET, rounds, "<= 250", slow=False)
    for kind, lengths in small.items():
        yield _balance(kind, lengths, ranks, rounds)
    yield _all_ranks("log-normal", small["log-normal"], ranks, RANK_BUDGET, rounds)


def _real(workload: str, lengths: Array, rounds: int) -> RowGroups:
    """Budgets are the usual ones, or the next power of two from the longest row on."""
    longest = 1 << int(lengths.max() - 1).bit_length()
    ranks = _ranks_of(lengths.size)
    yield _micro_batches(workload, lengths, max(BUDGET, longest), rounds, None, slow=True)
    yield _balance(workload, lengths, ranks, rounds)
    yield _all_ranks(workload, lengths, ranks, max(RANK_BUDGET, longest), rounds)


def _ranks_of(rows: int) -> int:
    return min(_RANKS_AT_MOST, max(1, rows // _ROWS_OF_RANK))


# -------------------------------------------------------------------- lengths


def log_normal(count: int) -> Array:
    """Of the reference workload."""
    of = workloads.lengths("reference", count)
    return of.prompt + of.response


def uniform(count: int) -> Array:
    """1 to 16 384."""
    return np.random.default_rng(0).integers(1, BUDGET + 1, count)


def bimodal(count: int) -> Array:
    """Short answers of about 2 000 tokens, long ones of about 12 000."""
    rng = np.random.default_rng(0)
    long = rng.random(count) < 0.5
    lengths = np.where(long, rng.normal(12_000, 1_500, count), rng.normal(2_000, 500, count))
    return np.clip(np.rint(lengths), 1, BUDGET).astype(np.int64)


LENGTHS: Mapping[str, Callable[[int], Array]] = {"log-normal": log_normal, "uniform": uniform, "bimodal": bimodal}


# -------------------------------------------------------------------- micro-batches


def _micro_batches(kind: str, lengths: Array, budget: int, rounds: int, target: str | None, *, slow: bool) -> list[Row]:
    case = f"plan {lengths.size:,} {kind} lengths, budget {budget:,}"
    progress(case)
    listed = lengths.tolist()
    plan = plan_micro_batches(lengths, budget).micro_batches
    count = len(plan)
    theirs: dict[str, Callable[[], rivals.Bins]] = {_TREE: lambda: rivals.first_fit_on_a_tree(listed, budget)}
    if slow:
        theirs[_FFD] = lambda: rivals.first_fit_decreasing(listed, budget)
        theirs[_KK] = lambda: rivals.karmarkar_karp(listed, count)
    bins = {_OURS: plan, **{name: work() for name, work in theirs.items()}}
    _check(case, bins, lengths, budget)
    works: dict[str, Callable[[], object]] = {_OURS: lambda: plan_micro_batches(lengths, budget), **theirs}
    works[_ARGSORT] = lambda: np.argsort(lengths).tolist()
    ms = interleaved(works, rounds, time.process_time)
    pairs = [(rival, _OURS, None) for rival in theirs] + [(_OURS, _ARGSORT, None)]
    return [*_bins(case, lengths, budget, bins), *times(case, ms, pairs, {_OURS: target})]


def _check(case: str, bins: Mapping[str, rivals.Bins], lengths: Array, budget: int) -> None:
    for name, found in bins.items():
        require_rows_once(f"{case}: {name}", found, lengths.size)
        if name != _KK:
            require_within(f"{case}: {name}", found, lengths, budget)
    if _FFD in bins and bins[_FFD] != bins[_TREE]:
        raise NotExact(f"{case}: {_TREE}: other bins than {_FFD}.")
    ours, bound = len(bins[_OURS]), rivals.martello_toth(lengths, budget)
    if ours < bound:
        raise NotExact(f"{case}: {ours} bins within the budget; the Martello-Toth bound says at least {bound}.")


def _bins(case: str, lengths: Array, budget: int, bins: Mapping[str, rivals.Bins]) -> list[Row]:
    """How many bins there are, and how well they are filled."""
    ours, bound = len(bins[_OURS]), rivals.martello_toth(lengths, budget)
    report = [
        Row(case, "bins above the Martello-Toth bound", ours - bound, "bins"),
        Row(case, "bins above first-fit decreasing", ours - len(bins[_TREE]), "bins", "<= 0"),
    ]
    if _KK in bins:
        parts = _sums(lengths, bins[_KK])
        report.append(Row(case, f"{_KK}: parts", parts.size, "parts"))
        report.append(Row(case, f"{_KK}: parts over the budget", int((parts > budget).sum()), "parts"))
    return report


# -------------------------------------------------------------------- ranks


def _balance(kind: str, lengths: Array, ranks: int, rounds: int) -> list[Row]:
    case = f"plan, {lengths.size:,} {kind} lengths over {ranks} ranks"
    progress(case)
    listed = lengths.tolist()
    works: dict[str, Callable[[], rivals.Bins]] = {
        _EQUAL: lambda: balance_rows(lengths, ranks),
        _LPT: lambda: rivals.largest_processing_time(listed, ranks),
    }
    parts = {name: work() for name, work in works.items()}
    for name, found in parts.items():
        require_rows_once(f"{case}: {name}", found, lengths.size)
    counts = [len(part) for part in parts[_EQUAL]]
    if max(counts) - min(counts) > 1:
        raise NotExact(f"{case}: {_EQUAL}: {min(counts)} to {max(counts)} rows; expected at most one apart.")
    ms = interleaved(works, rounds, time.process_time)
    above = {name: _above_mean(lengths, found) for name, found in parts.items()}
    report = [
        Row(case, f"{name}: most tokens of a rank above the mean", more, "tokens") for name, more in above.items()
    ]
    more = above[_EQUAL] - above[_LPT]
    report.append(Row(case, f"{_EQUAL}: most tokens of a rank above those of the heap", more, "tokens", "<= 0"))
    return report + times(case, ms, targets={_EQUAL: "<= 10"})


def _above_mean(lengths: Array, parts: rivals.Bins) -> float:
    loads = _sums(lengths, parts)
    return float(loads.max() - loads.mean())


# -------------------------------------------------------------------- plans of all ranks


def _all_ranks(kind: str, lengths: Array, ranks: int, budget: int, rounds: int) -> list[Row]:
    case = f"plan, {lengths.size:,} {kind} lengths, {ranks} ranks, {UPDATES} updates, budget {budget:,}"
    progress(case)
    listed = lengths.tolist()

    ours, theirs = (
        lambda: plan_ranks(lengths, ranks, budget, options=_UPDATED),
        lambda: rivals.usual_rank_plans(listed, ranks, UPDATES, budget),
    )
    plans = {_RANKS: _rows_of(ours()), _DUMMIES: theirs()}
    for name, found in plans.items():
        require_rows_once(f"{case}: {name}", [rows for rank in found for rows in rank], lengths.size)
        for rank in found:
            require_within(f"{case}: {name}", rank, lengths, budget)
    ms = interleaved({_RANKS: lambda: ours().plans, _DUMMIES: theirs}, rounds, time.process_time)
    return [*(row for name, found in plans.items() for row in _of_ranks(case, name, found, lengths)), *times(case, ms)]


def _rows_of(found: RankPlans) -> list[rivals.Bins]:
    """Rows of the whole batch by rank and micro-batch; dummies are left empty."""
    return [
        [
            [] if dummy else [own[row] for row in rows]
            for rows, dummy in zip(plan.micro_batches, plan.is_dummy, strict=True)
        ]
        for own, plan in zip(found.rows, found.plans, strict=True)
    ]


def _of_ranks(case: str, name: str, plans: Sequence[rivals.Bins], lengths: Array) -> list[Row]:
    """Ranks wait for each other in every micro-batch: the one with most to do is the time of all."""
    loads = np.array([_sums(lengths, rank) for rank in plans])
    return [
        Row(case, f"{name}: micro-batches of a rank", loads.shape[1], "bins"),
        Row(case, f"{name}: dummies on all ranks", int((loads == 0).sum()), "bins"),
        Row(case, f"{name}: most tokens of a rank / mean, by micro-batch", rank_imbalance(loads), "x"),
    ]


def rank_imbalance(loads: Amounts) -> float:
    """Of [ranks, micro-batches]: the sum of the largest of each micro-batch over the sum of the means."""
    return float(loads.max(0).sum() / loads.mean(0).sum())


# -------------------------------------------------------------------- checks and sums


def require_rows_once(name: str, bins: rivals.Bins, rows: int) -> None:
    """Raises NotExact unless every row is in the bins once."""
    if sorted(row for items in bins for row in items) != list(range(rows)):
        raise NotExact(f"{name}: the rows are not 0 to {rows - 1}, each once.")


def require_within(name: str, bins: rivals.Bins, lengths: Array, budget: int) -> None:
    """Raises NotExact for a bin over the budget."""
    for tokens in _sums(lengths, bins):
        if tokens > budget:
            raise NotExact(f"{name}: a micro-batch of {tokens:g} tokens; expected at most {budget}.")


def _sums(of_rows: npt.NDArray[Any], bins: rivals.Bins) -> Amounts:
    return np.array([of_rows[items].sum() for items in bins], np.float64)
