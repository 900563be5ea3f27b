"""RowLayout against naive loops over masks and runs."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_tensor
from strategies import MaskCase, masks, patterns

from maskpack import RowLayout
from maskpack.core import native
from maskpack.errors import LayoutError
from maskpack.layout import scan
from maskpack.layout.row_layout import anchored, host_spans, min_length, prefix_of


def width_of(mask: oracle.Mask) -> int:
    return len(mask[0]) if mask else 0


def layout_of(mask: oracle.Mask, width: int, anchor: int = 0) -> RowLayout:
    """By the run table, so that no mask is scanned."""
    table = oracle.mask_to_runs(mask)
    runs = [run for row in table for run in row]
    return RowLayout.from_spans(
        [start for start, _ in runs],
        [count for _, count in runs],
        [len(row) for row in table],
        width,
        anchor=anchor,
    )


def assert_is(layout: RowLayout, mask: oracle.Mask, width: int, anchor: int = 0) -> None:
    """Everything that a layout says, against the mask."""
    table = oracle.mask_to_runs(mask)
    runs = [run for row in table for run in row]
    splits = np.cumsum([0, *[len(row) for row in table]]).tolist()
    lengths, offsets = oracle.lengths(mask), oracle.offsets(mask)
    assert (layout.width, layout.num_rows, layout.num_tokens) == (width, len(mask), offsets[-1])
    assert layout.anchor == anchor
    assert [part.tolist() for part in host_spans(layout)] == [[s for s, _ in runs], [c for _, c in runs], splits]
    assert {part.dtype for part in host_spans(layout)} == {np.dtype(np.int64)}
    assert layout.lengths.tolist() == lengths
    assert layout.lengths.dtype == np.int64
    assert layout.row_offsets.tolist() == offsets
    assert (min_length(layout), layout.max_length) == (min(lengths, default=0), max(lengths, default=0))
    assert_same_tensor(layout.offsets, torch.tensor(offsets))
    assert_same_tensor(layout.cu_seqlens, torch.tensor(offsets, dtype=torch.int32))
    assert_same_tensor(layout.indices, torch.tensor(oracle.indices(mask), dtype=torch.int64))
    assert_same_tensor(layout.to_mask(), oracle.mask_tensor(mask, width))


# -------------------------------------------------------------------- from masks


@given(st.one_of(masks(), masks(wide=True)))
def test_from_mask_of_every_dtype(case: MaskCase) -> None:
    assert oracle.mask_rows(case.tensor) == case.mask
    before = oracle.cells(case.tensor).tobytes()
    assert_is(RowLayout.from_mask(case.tensor), case.mask, case.width)
    assert oracle.cells(case.tensor).tobytes() == before


@pytest.mark.parametrize("threads", [1, 3])
def test_masks_larger_than_one_scan_block(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "threads_for", lambda nbytes: threads)
    rng = np.random.default_rng(0)
    for rows, width in ((700, 1500), (3, 600_000), (90_000, 9)):
        mask = torch.from_numpy(rng.random((rows, width)) < 0.3)
        layout = RowLayout.from_mask(mask)
        assert torch.equal(layout.to_mask(), mask)
        assert layout.lengths.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e-45])
def test_anything_but_zero_is_real(value: float) -> None:
    assert RowLayout.from_mask(torch.tensor([[0.0, value, -0.0]])).to_mask().tolist() == [[False, True, False]]


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
def test_to_mask_in_every_dtype(dtype: torch.dtype) -> None:
    mask = [[True, False, True], [False, False, False]]
    want = oracle.unpack(torch.ones(2).to(dtype), mask, 3)
    assert_same_tensor(layout_of(mask, 3).to_mask(dtype), want)


# -------------------------------------------------------------------- other constructors


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(0, 3))
def test_from_lengths_and_cu_seqlens(lengths: list[int], more: int) -> None:
    longest = max(lengths, default=0)
    for width in (None, longest + more):
        real = longest if width is None else width
        mask = [[place < length for place in range(real)] for length in lengths]
        for form in (
            lengths,
            np.array(lengths, np.int32),
            torch.tensor(lengths, dtype=torch.int64),
            torch.tensor(lengths, dtype=torch.uint8),
        ):
            assert_is(RowLayout.from_lengths(form, width), mask, real)
        for dtype in (torch.int32, torch.int64):
            assert_is(RowLayout.from_cu_seqlens(torch.tensor(oracle.offsets(mask), dtype=dtype), width), mask, real)


# -------------------------------------------------------------------- new layouts from old ones


@given(patterns(), st.data())
def test_select(mask: oracle.Mask, data: st.DataObject) -> None:
    width, rows = width_of(mask), len(mask)
    layout = RowLayout.from_mask(oracle.mask_tensor(mask, width))
    picked = data.draw(st.lists(st.integers(-rows, rows - 1), max_size=8)) if rows else []
    kept = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    bounds = st.one_of(st.none(), st.integers(-rows - 1, rows + 1))
    step = st.sampled_from([None, 1, 2, -1, -2])
    part = slice(data.draw(bounds), data.draw(bounds), data.draw(step))
    cases: list[tuple[Any, list[int]]] = [
        (picked, picked),
        (torch.tensor(picked, dtype=torch.int32), picked),
        (np.array(kept, np.bool_), [row for row, keep in enumerate(kept) if keep]),
        (part, list(range(rows))[part]),
    ]
    for form, want in cases:
        assert_is(layout.take(form), oracle.take(mask, want), width)
    assert_is(layout, mask, width)


@given(patterns(), st.data())
def test_narrow(mask: oracle.Mask, data: st.DataObject) -> None:
    width = width_of(mask)
    start, stop = sorted((data.draw(st.integers(0, width)), data.draw(st.integers(0, width))))
    got = layout_of(mask, width).narrow(start, stop)
    assert_is(got, [row[start:stop] for row in mask], stop - start)


@given(patterns())
def test_prefix(mask: oracle.Mask) -> None:
    assert_is(prefix_of(layout_of(mask, width_of(mask))), oracle.prefix(mask), width_of(mask))


# -------------------------------------------------------------------- anchors


def grown(mask: oracle.Mask, left: int, right: int) -> oracle.Mask:
    """The mask with more columns of padding."""
    return [[False] * left + row + [False] * right for row in mask]


@given(st.data())
def test_cat_lets_the_anchors_meet(data: st.DataObject) -> None:
    """Any widths, any anchors, also parts without rows, whose width counts too."""
    parts: list[tuple[oracle.Mask, int, int]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        width = data.draw(st.integers(0, 6))
        parts.append((data.draw(patterns(width=width)), width, data.draw(st.integers(0, width))))
    got = RowLayout.cat([layout_of(*part) for part in parts])
    most_left = max(anchor for _, _, anchor in parts)
    most_right = max(width - anchor for _, width, anchor in parts)
    want = [
        row for mask, width, anchor in parts for row in grown(mask, most_left - anchor, most_right - (width - anchor))
    ]
    assert_is(got, want, most_left + most_right, most_left)


@given(patterns(), st.data())
def test_anchors_stay_in_place(mask: oracle.Mask, data: st.DataObject) -> None:
    width, rows = width_of(mask), len(mask)
    anchor = data.draw(st.integers(0, width))
    layout = anchored(layout_of(mask, width), anchor)
    for protocol in range(2, 6):
        again = pickle.loads(pickle.dumps(layout, protocol=protocol))
        assert (again, again.device) == (layout, layout.device)
        assert_is(again, mask, width, anchor)
    picked = data.draw(st.lists(st.integers(0, rows - 1), max_size=4)) if rows else []
    same = [
        layout,
        layout_of(mask, width, anchor),
        layout.take(picked),
        layout.take(slice(0, 0)),
        layout.to("cpu"),
        RowLayout.cat([layout]),
        RowLayout.cat([layout, layout.take([])]),
    ]
    assert [one.anchor for one in same] == [anchor] * len(same)
    start, stop = sorted((data.draw(st.integers(0, width)), data.draw(st.integers(0, width))))
    columns = list(range(start, stop))
    assert layout.narrow(start, stop).anchor == sum(column < anchor for column in columns)


def compact(layout: RowLayout) -> tuple[np.ndarray, ...]:
    """The arrays of a pickle."""
    _, (_, _, _, *arrays) = layout.__reduce__()
    return tuple(arrays)


def bytes_as_runs(mask: oracle.Mask) -> int:
    """Of three lists of the narrowest unsigned integers that hold them."""
    table = oracle.mask_to_runs(mask)
    parts = [[start for row in table for start, _ in row], [count for row in table for _, count in row]]
    parts.append([len(row) for row in table])
    return sum(len(part) * (1 if max(part, default=0) < 256 else 2) for part in parts)


@given(patterns(wide=True), st.integers(-(10**6), 300))
def test_the_smaller_form_is_taken(mask: oracle.Mask, few: int) -> None:
    """Whatever the least gain is, the layout comes back."""
    width = width_of(mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maskpack.layout.row_layout._FEW_BYTES", few)
        layout = layout_of(mask, width, anchor=width // 2)
        nbytes = len(mask) * ((width + 7) // 8)
        bits, *more = compact(layout)
        assert len(more) == (0 if bytes_as_runs(mask) > nbytes + few else 2)
        if not more:
            assert np.unpackbits(bits, axis=1, bitorder="little").tolist() == [
                row + [False] * (-width % 8) for row in mask
            ]
        again = pickle.loads(pickle.dumps(layout))
    assert_is(again, mask, width, layout.anchor)


def test_to_the_same_device_is_the_same_layout() -> None:
    layout = RowLayout.from_lengths([2, 1])
    assert layout.to("cpu") is layout
    assert layout.to(torch.device("cpu")) is layout


# -------------------------------------------------------------------- equality, immutability, text


@given(patterns(), patterns())
def test_equality_is_that_of_the_masks(a: oracle.Mask, b: oracle.Mask) -> None:
    left, right = (RowLayout.from_mask(oracle.mask_tensor(mask, width_of(mask))) for mask in (a, b))
    assert (left == right) == (a == b and width_of(a) == width_of(b))
    assert left == layout_of(a, width_of(a)) != layout_of(a, width_of(a) + 1)


def test_layouts_are_not_hashable() -> None:
    assert RowLayout.from_lengths([1]) != [1]
    with pytest.raises(TypeError, match="unhashable"):
        hash(RowLayout.from_lengths([1]))


@pytest.mark.parametrize("name", ["width", "num_tokens", "cu_seqlens", "new"])
def test_attributes_cannot_be_set(name: str) -> None:
    layout = RowLayout.from_lengths([2, 1])
    with pytest.raises(AttributeError):
        setattr(layout, name, 3)
    with pytest.raises(AttributeError):
        del layout.width
    assert_is(layout, [[True, True], [True, False]], 2)


def test_a_layout_keeps_nothing_of_what_it_was_made_from() -> None:
    mask = torch.tensor([[1, 1, 0], [0, 1, 0]])
    lengths, cu = torch.tensor([2, 1]), torch.tensor([0, 2, 3])
    starts, counts, runs = np.array([0, 1]), np.array([2, 1]), np.array([1, 1])
    made = [
        RowLayout.from_mask(mask),
        RowLayout.from_lengths(lengths, 3),
        RowLayout.from_cu_seqlens(cu, 3),
        RowLayout.from_spans(starts, counts, runs, 3),
    ]
    before = [layout.to_mask().tolist() for layout in made]
    for held in (mask, lengths, cu, starts, counts, runs):
        held[...] = 0
    rebuilt = [pickle.loads(pickle.dumps(layout)) for layout in made]
    for layout, again, want in zip(made, rebuilt, before, strict=True):
        layout.offsets.fill_(9)
        assert layout.take([0, 1]).to_mask().tolist() == want
        assert again.to_mask().tolist() == want
        assert (layout.lengths.tolist(), layout.row_offsets.tolist()) == ([2, 1], [0, 2, 3])


# -------------------------------------------------------------------- num_tokens hints


WIDE = torch.zeros(1, 1, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("mask", "total", "message"),
    [
        (WIDE.expand(3, 5), -1, r"num_tokens is -1; a mask \(3, 5\) has 0 to 15 valid tokens"),
        (WIDE.expand(3, 5), 16, r"num_tokens is 16; a mask \(3, 5\) has 0 to 15 valid tokens"),
        (WIDE.expand(2**16, 2**15), 2**31, "the rows have 2147483648 valid tokens; expected at most 2147483647"),
        (WIDE.expand(1, 2**31), 5, "rows are 2147483648 wide; expected at most 2147482624"),
        (WIDE.expand(1, 2**31), None, "rows are 2147483648 wide; expected at most 2147482624"),
    ],
)
def test_a_hint_that_no_mask_has_is_refused_at_once(mask: torch.Tensor, total: int | None, message: str) -> None:
    """Before anything is scanned: the masks are wider than memory."""
    with pytest.raises(LayoutError, match=f"^RowLayout.from_mask: {message}"):
        scan.on_device(mask, total)
