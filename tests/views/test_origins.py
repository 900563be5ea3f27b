"""Views know which rows they have: against plain lists of (origin, number)."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from maskpack import PackedBatch, compress
from maskpack.dispatch.messages import own_rows
from maskpack.errors import LayoutError
from maskpack.packed.rows import Segments
from maskpack.views.column_group import BatchMeta
from maskpack.views.origins import UNKNOWN, Origins
from maskpack.views.view import BatchView

Claim = tuple[int, int, int]
CLAIMS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 4)), max_size=12)
pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def of(claims: list[Claim]) -> Origins:
    """Claims (row, origin, number)."""
    return Origins.of(*np.array(claims, np.int64).reshape(-1, 3).T)


def claims_of(origins: Origins) -> list[Claim]:
    """Read from the entries themselves."""
    columns = origins.row, origins.count, origins.origin, origins.number
    entries = zip(*(column.tolist() for column in columns), strict=True)
    return [(row + k, origin, number + k) for row, count, origin, number in entries for k in range(count)]


def once(claims: list[Claim]) -> list[Claim]:
    """Without those that say of one row that it is two of one origin."""
    said: dict[tuple[int, int], set[int]] = {}
    for row, origin, number in claims:
        said.setdefault((row, origin), set()).add(number)
    return [(row, origin, *numbers) for (row, origin), numbers in said.items() if len(numbers) == 1]


@given(CLAIMS, st.lists(st.integers(0, 5), max_size=8))
def test_entries(claims: list[Claim], index: list[int]) -> None:
    origins, kept = of(claims), once(claims)
    assert claims_of(origins) == sorted(kept, key=lambda claim: (claim[1], claim[0]))
    want = [(place, origin, n) for place, row in enumerate(index) for r, origin, n in kept if r == row]
    assert sorted(claims_of(origins.take(np.array(index, np.int64)))) == sorted(want)
    again = pickle.loads(pickle.dumps(origins))
    assert claims_of(again) == claims_of(origins)
    assert {part.dtype for part in (again.row, again.count, again.origin, again.number)} == {np.dtype(np.int64)}


@given(CLAIMS, CLAIMS)
def test_differences(ours: list[Claim], theirs: list[Claim]) -> None:
    mine, yours = once(ours), once(theirs)
    known = {(row, origin): number for row, origin, number in mine}
    origins = {origin for _, origin, _ in mine}
    odd = [
        (row, number, known.get((row, origin)))
        for row, origin, number in yours
        if origin in origins and known.get((row, origin)) != number
    ]
    seen = of(ours).difference(of(theirs))
    assert (seen is None) == (not odd)
    if seen is not None:
        assert seen in odd
        assert seen.row == min(row for row, _, _ in odd)


def test_rows_that_follow_each_other_are_one_entry() -> None:
    assert Origins.whole(1000).row.size == 1
    assert Origins.whole(0).row.size == 0
    assert UNKNOWN.difference(Origins.whole(3)) is None
    packed = numbers(100_000)
    view = BatchView.of(packed)
    assert BatchView.cat([view[1000:], view[:1000]]).origins().row.size == 2
    assert len(pickle.dumps(view[5:].origins())) < 1000


# -------------------------------------------------------------------- views


def numbers(rows: int, name: str = "x") -> PackedBatch:
    return compress(TensorDict({name: torch.arange(rows)}, [rows]), registry={})


def result_of(view: BatchView, name: str) -> BatchView:
    """As a call gives it: its rows lie elsewhere, in two parts."""
    half = len(view) // 2
    parts = [BatchView.at(object(), BatchMeta.of(numbers(n, name))) for n in (half, len(view) - half)]
    return BatchView.cat(parts).known_as(view.origins())


def moved(data: st.DataObject, view: BatchView, ids: list[Any]) -> tuple[BatchView, list[Any]]:
    for _ in range(data.draw(st.integers(0, 3))):
        kind = data.draw(st.integers(0, 4))
        if kind == 0 and len(ids) < 8:
            view, ids = view[[*range(len(ids))] * 2], ids * 2
        elif kind == 1:
            cut = data.draw(st.integers(0, len(ids)))
            parts = view.split([cut, len(ids) - cut])
            view, ids = BatchView.cat(parts[::-1]), ids[cut:] + ids[:cut]
        elif kind == 2:
            view = pickle.loads(pickle.dumps(view))
        elif kind == 3:
            mask = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            view, ids = view[np.array(mask, np.bool_)], [one for one, keep in zip(ids, mask, strict=True) if keep]
        else:
            perm = data.draw(st.permutations(range(len(ids))))
            view, ids = view[list(perm)], [ids[row] for row in perm]
    return view, ids


@given(st.data())
def test_fields_lie_beside_their_own_rows_only(data: st.DataObject) -> None:
    """Two batches, joined and moved about; fields computed from some of their rows, moved about too."""
    packs = [numbers(3), numbers(2)]
    ids = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1)]
    base = BatchView.cat([BatchView.of(packed) for packed in packs])
    view, ours = moved(data, base, ids)
    other, theirs = moved(data, view, ours)
    fields, theirs = moved(data, result_of(other, "y"), theirs)
    if len(ours) != len(theirs):
        return
    fits = all(one == two for one, two in zip(ours, theirs, strict=True) if two[0] in {name for name, _ in ours})
    if fits:
        joined = view.with_fields(fields)
        assert joined.with_fields(result_of(joined, "z").with_fields(fields)).order == (("x",), ("y",), ("z",))
    else:
        with pytest.raises(LayoutError, match=r"^BatchView\.with_fields: row \d of the fields is row \d of the batch"):
            view.with_fields(fields)


def test_other_rows_that_are_asked_for() -> None:
    view = BatchView.of(numbers(5))
    with pytest.raises(LayoutError, match=r"row 2 of the fields is row 3 .* row 2 of the view is row 2"):
        view.with_fields(result_of(view[[0, 1, 3, 2, 4]], "y"))
    with pytest.raises(LayoutError, match="row 1 of the view is another"):
        BatchView.cat([view[:1], BatchView.of(numbers(1)), view[2:]]).with_fields(result_of(view, "y"))
    assert view.with_fields(view[::-1].to_packed()).materialize("x")["x"].tolist() == [4, 3, 2, 1, 0]


def test_rows_that_were_packed_apart_are_told_by_their_lengths() -> None:
    view = BatchView.of(numbers(4))
    assert view[::-1].with_fields(numbers(4, "y")).order == (("x",), ("y",))
    mixed = BatchView.cat([result_of(view[:2], "y"), BatchView.of(numbers(2, "y"))])
    assert view.with_fields(mixed).order == (("x",), ("y",))
    with pytest.raises(LayoutError, match="row 2 of the fields is row 0 of the batch"):
        view.with_fields(mixed[[2, 3, 0, 1]])


def test_rows_are_known_when_all_their_first_fields_are_others() -> None:
    view = BatchView.of(numbers(4))
    replaced = view.with_fields(numbers(4))
    assert replaced.groups[0].parts[0].held is not view.groups[0].parts[0].held
    replaced.with_fields(result_of(view, "y"))
    with pytest.raises(LayoutError, match="row 0 of the fields is row 3"):
        replaced.with_fields(result_of(view[::-1], "y"))
    twice = BatchView.of(numbers(4)).with_fields(numbers(4, "z"))
    with pytest.raises(LayoutError, match="row 0 of the fields is row 1"):
        twice.with_fields(numbers(4)).with_fields(result_of(twice[[1, 0, 2, 3]], "y"))


def test_origins_do_not_grow_from_call_to_call() -> None:
    view = BatchView.of(numbers(64))
    rng = np.random.default_rng(0)
    for _ in range(20):
        order = rng.permutation(64)
        view = view.take(order).with_fields(numbers(64, "y"))
        view = view.with_fields(result_of(view, "x"))
    assert sum(source.origins.row.size for group in view.groups for source in group.parts) <= 128


def test_ranks_are_not_told() -> None:
    """A parcel has the same bytes, whatever is known of its rows."""
    view = BatchView.of(numbers(50))[np.random.default_rng(0).permutation(50)]
    (group,) = view.groups
    sizes = [
        len(pickle.dumps([own_rows(part, None, lambda _: 0) for part in some.groups]))
        for some in (view, view.known_as(UNKNOWN), view.known_as(Origins.whole(50)))
    ]
    assert len(set(sizes)) == 1
    assert isinstance(group.rows, Segments)
