"""BatchView against padded batches whose rows are taken one by one, in plain loops."""

from __future__ import annotations

import gc
import itertools
import pickle
import re
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import oracle
import pytest
import samples
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_rows
from samples import assert_same, entry_of, kinds_of
from strategies import Case, RowOp, batches, row_ops, rows_after
from tensordict import NonTensorData, NonTensorStack, TensorDict

from maskpack import MaskNestingSpec, PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest
from maskpack.errors import LayoutError
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import table
from maskpack.views.column_group import BatchMeta
from maskpack.views.view import BatchView

quiet = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


class Ref:
    """Stands for a packed batch that lies elsewhere."""


class Store:
    """Where packed batches lie as bytes; `get` counts what is fetched, and every fetch is another object."""

    def __init__(self) -> None:
        self.held: dict[Ref, bytes] = {}
        self.fetched: list[Ref] = []
        self.calls = 0

    def put(self, packed: PackedBatch) -> BatchView:
        """A view of a reference to it, with a BatchMeta that travelled."""
        ref = Ref()
        self.held[ref] = pickle.dumps(packed, protocol=5)
        return BatchView.at(ref, pickle.loads(pickle.dumps(BatchMeta.of(packed))))

    def get(self, refs: list[Any]) -> list[PackedBatch]:
        assert type(refs) is list
        self.calls += 1
        self.fetched += refs
        return [pickle.loads(self.held[ref]) for ref in refs]

    def take_counts(self) -> list[int]:
        """How often each reference was fetched since the last time, in the order in which they were put."""
        counts = [self.fetched.count(ref) for ref in self.held]
        self.fetched = []
        return counts


def pack(batch: TensorDict, **more: Any) -> PackedBatch:
    return compress(batch, pad_token_id=samples.PAD, **more)


def rollout(*args: Any, **more: Any) -> TensorDict:
    """Without the list that follows the rows, so that TensorDict's own indexing is right."""
    return samples.rollout(*args, **more).exclude("global_token_num")


def taken(batch: TensorDict, *names: Any) -> TensorDict:
    """Some fields, in the order of the batch."""
    found = {name: batch.get(name) for name in batch.keys() if name in names}  # noqa: SIM118
    return TensorDict(found, batch_size=batch.batch_size, device=batch.device)


def segments_of(view: BatchView) -> list[tuple[int, int, int]]:
    """Of a view whose fields come from the same places."""
    (group,) = view.groups
    parts = group.rows
    return list(zip(parts.source.tolist(), parts.start.tolist(), parts.count.tolist(), strict=True))


def after(view: BatchView, ops: Sequence[RowOp]) -> BatchView:
    for op in ops:
        view = op.on_packed(view)
    return view


# -------------------------------------------------------------------- work that grows with the rows, not their square


def test_equal_references_are_one_batch() -> None:
    meta = BatchMeta.of(numbers(2))
    views = [BatchView.at(("place", number % 3), meta) for number in range(6)]
    joined = BatchView.cat(views)
    assert [source.held for source in joined.groups[0].parts] == [("place", number) for number in range(3)]
    assert segments_of(joined) == [(number % 3, 0, 2) for number in range(6)]


# -------------------------------------------------------------------- any operations over any sources


@st.composite
def rollouts(draw: st.DrawFn) -> TensorDict:
    """Of any widths; advantages that were multiplied by the mask are padded with -0.0 in some rows."""
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.tuples(st.integers(0, prompt), st.integers(0, response)), max_size=3))
    batch = samples.rollout(rows, prompt, response, objects=False).exclude("token_level_rewards", "rm_scores")
    batch.set("temperature", NonTensorData(draw(st.sampled_from([0.7, 0.9])), batch_size=[len(rows)]))
    if draw(st.booleans()):
        signs = torch.tensor([1.0, -1.0, -1.0][: len(rows)]).reshape(-1, 1)
        batch["advantages"] = signs * (batch["attention_mask"][:, prompt:] != 0)
    return batch


def checked(view: BatchView, want: TensorDict, store: Store, data: st.DataObject) -> None:
    """All fields, some of them, padded and nested; each reference is fetched at most once."""
    store.take_counts()
    assert_same_rows(view.materialize(get=store.get), want)
    assert max(store.take_counts(), default=0) <= 1
    assert_same_rows(unnest(view.materialize(get=store.get, format="nested")), want)
    names = data.draw(st.lists(st.sampled_from(list(want.keys())), min_size=1, unique=True)) if len(want.keys()) else []
    some = taken(want, *names) if names else want
    assert_same_rows(view.materialize(*names, get=store.get), some)
    packed = pickle.loads(pickle.dumps(view.to_packed(*names, get=store.get)[::-1]))
    assert_same_rows(decompress(packed), oracle.take_rows(some, range(len(some))[::-1]))


@quiet
@given(batches(dtypes=strategies.PLAIN_DTYPES), st.data())
def test_row_operations_on_any_batch(case: Case, data: st.DataObject) -> None:
    """Every dtype, sub-batches, jagged fields, objects; parts may hold a field dense or with other pads."""
    store = Store()
    choice = st.lists(st.integers(0, case.rows - 1), max_size=3)
    groups = data.draw(st.lists(choice, min_size=1, max_size=3)) if case.rows else [[], []]
    packs = [compress(oracle.take_rows(case.batch, rows), **case.options) for rows in groups]
    away = [data.draw(st.booleans()) for _ in packs]
    views = [store.put(packed) if there else BatchView.of(packed) for packed, there in zip(packs, away, strict=True)]
    line = [(number, row) for number, rows in enumerate(groups) for row in rows]
    ops = data.draw(row_ops(len(line)))
    view = after(BatchView.cat(views), ops)
    index = rows_after(ops, len(line), even_chunks=True)
    joined = PackedBatch.cat(packs).take(index)
    want = oracle.take_rows(case.batch, [line[place][1] for place in index])
    assert_same_rows(decompress(joined), want)
    assert len(view) == view.num_rows == len(joined)
    for name, layout in joined.layouts.items():
        assert view.layouts[name] == layout
        assert view.lengths(name).tolist() == layout.lengths.tolist()
        assert view.head.layouts[name].width == layout.width
    assert store.calls == 0, "no data has moved yet"
    checked(view, want, store, data)
    store.take_counts()
    view.materialize(get=store.get)
    used = {line[place][0] for place in index}
    assert store.take_counts() == [int(number in used) for number, there in enumerate(away) if there]
    assert BatchView.of(packs[0]).head.schema == packs[0].schema


# -------------------------------------------------------------------- rows, by hand


def numbers(rows: int = 10) -> PackedBatch:
    return compress(TensorDict({"x": torch.arange(rows)}, [rows]))


def rows_of(view: BatchView) -> list[int]:
    return view.materialize("x")["x"].tolist()


def test_segments_that_meet_join() -> None:
    a, b = (BatchView.of(numbers()) for _ in range(2))
    assert segments_of(BatchView.cat([a[0:3], a[3:6]])) == [(0, 0, 6)]
    assert segments_of(BatchView.cat([a[0:3], b[0:0], a[3:6]])) == [(0, 0, 6)]
    assert segments_of(BatchView.cat([a[0:3], b[3:6], b[6:7], a[3:4], a[4:5]])) == [(0, 0, 3), (1, 3, 4), (0, 3, 2)]
    assert segments_of(BatchView.cat([a, b])[[8, 9, 10, 11, 9]]) == [(0, 8, 2), (1, 0, 2), (0, 9, 1)]
    assert segments_of(BatchView.cat([b, a])[10:12]) == [(0, 0, 2)], "the source that gives no row is gone"
    packed = numbers()
    again = BatchView.cat([BatchView.of(packed)[:3], BatchView.of(packed)[3:]])
    assert segments_of(again) == [(0, 0, 10)]
    assert len(again.groups[0].parts) == 1
    assert segments_of(a[0:0]) == []
    assert repr(BatchView.cat([a, b])) == "BatchView(rows=20, fields=1, segments=2)"


def test_lengths_are_copies() -> None:
    view = BatchView.of(pack(rollout(((2, 3), (1, 5), (0, 0)))))
    assert view.tokens().tolist() == view.lengths("sequence").tolist() == [5, 6, 0]
    view.lengths("prompt")[:] = 0
    view.tokens()[:] = 0
    assert (view.lengths("prompt").tolist(), view.tokens().tolist()) == ([2, 1, 0], [5, 6, 0])
    assert BatchView.of(numbers(3)).tokens().tolist() == [0, 0, 0]


# -------------------------------------------------------------------- no data moves


def test_rows_that_follow_each_other_are_not_copied() -> None:
    packed = compress(TensorDict({"x": torch.arange(100.0).sqrt(), "y": torch.arange(100.0).exp()}, [100]))
    view = BatchView.of(packed)
    for some in (view, view[10:90], BatchView.cat([view[:50], view[:50]])[50:]):
        assert np.shares_memory(some.to_packed().table.body, packed.table.body)
        assert np.shares_memory(some.to_packed("y").table.body, packed.table.body)


def test_a_source_without_rows_does_not_undo_encodings() -> None:
    """Where the values of one source are others, those of the rest still say that two fields are the same."""
    batch, packed = derived()
    table.forget()  # forms depend on batches before
    view = BatchView.cat([BatchView.of(packed), BatchView.of(derived()[1]), BatchView.of(pack(rollout()))])
    some = view[2:12].to_packed()
    assert kinds_of(some)["input_ids"] == "concat"
    assert entry_of(some, "returns") == entry_of(some, "advantages")
    rows = torch.cat([batch, batch])[2:12]
    assert_same(decompress(some), rows)
    table.forget()
    assert kinds_of(some) == kinds_of(pack(rows))
    alone = view[12:15].to_packed()
    assert entry_of(alone, "returns") != entry_of(alone, "advantages")


def test_batches_without_fields_or_rows() -> None:
    for batch in (TensorDict({}, [3]), TensorDict({}, [0]), rollout((), objects=False)):
        packed = pack(batch)
        assert_same(BatchView.of(packed).materialize(), batch)
        assert_same(
            BatchView.of(packed).materialize(format="nested").exclude(LAYOUTS),
            decompress(packed, format="nested").exclude(LAYOUTS),
        )
        assert_same(BatchView.cat([BatchView.of(packed)] * 2).materialize(), torch.cat([batch, batch]))
    bare = BatchView.of(compress(TensorDict({}, [3])))
    assert len(bare[[0, 0]].materialize()) == 2
    assert rows_of(bare.with_fields(numbers(3))[1:]) == [1, 2]
    assert_same(bare.with_fields(bare).materialize(), TensorDict({}, [3]))


# -------------------------------------------------------------------- fields that follow from others


def derived() -> tuple[TensorDict, PackedBatch]:
    batch = rollout()
    batch["returns"] = batch["advantages"].clone()
    packed = pack(batch)
    assert kinds_of(packed)["input_ids"] == "concat"
    assert entry_of(packed, "returns") == entry_of(packed, "advantages")
    return batch, packed


def test_selected_fields_in_sub_batches() -> None:
    inner = TensorDict({"x": torch.zeros(3), "y": torch.ones(3)}, [3])
    view = BatchView.of(compress(TensorDict({"in": inner, "z": torch.zeros(3)}, [3])))
    assert view.select("in").order == (("in",), ("in", "x"), ("in", "y"))
    assert_same(view.select("z", ("in", "y")).materialize()["in"], inner.select("y"))
    assert list(view.select("z", "in").materialize().keys()) == ["in", "z"]


def test_selected_fields_know_their_rows() -> None:
    """Also those whose rows are known by fields that are left out."""
    old, new = (compress(TensorDict({name: torch.arange(4)}, [4])) for name in ("old", "new"))
    view = BatchView.of(old)
    for names in (["new"], ["old"], ["old", "new"]):
        fields = view.with_fields(new).select(*names)
        assert list(view.with_fields(fields).materialize().keys()) == sorted({"old", *names}, reverse=True)
        with pytest.raises(
            LayoutError, match=r"row 0 of the fields is row 0 of the batch that it comes from; row 0 of"
        ):
            view[::-1].with_fields(fields)
        with pytest.raises(LayoutError, match=r"with_fields: row 0 of the fields is row 0 of the batch"):
            BatchView.of(new)[::-1].with_fields(view.with_fields(new).select("new"))


@pytest.mark.parametrize("base", ["advantages", "returns"])
def test_a_field_whose_base_was_replaced_keeps_its_values(base: str) -> None:
    batch, packed = derived()
    fresh = {
        "prompts": samples.of("prompt", torch.int64, samples.PAD, seed=91),
        base: samples.of("response", torch.float32, seed=92),
    }
    new = pack(TensorDict(fresh, [7]), like=packed)
    view = BatchView.of(packed).with_fields(new)
    want = oracle.take_rows(batch, range(7))
    for name, value in fresh.items():
        want[name] = value
    rows = [3, 1, 6, 0]
    assert_same(view.materialize(), want)
    assert_same(view[rows].materialize(), oracle.take_rows(want, rows))
    assert_same(view[rows].materialize("input_ids"), taken(oracle.take_rows(want, rows), "input_ids"))
    both = BatchView.cat([view, view[::-1]])
    assert_same(both.materialize(), oracle.take_rows(want, [*range(7), *range(7)[::-1]]))
    assert view.head.schema.forms[0].path == packed.schema.forms[0].path


# -------------------------------------------------------------------- with_fields


FRESH = {
    "prompts": ("prompt", torch.int64, samples.PAD),
    "input_ids": ("sequence", torch.int64, samples.PAD),
    "position_ids": ("sequence", torch.int64, samples.EDGE),
    "advantages": ("response", torch.float32, 0),
    "returns": ("response", torch.float32, 0),
    "entropys": ("sequence", torch.float32, 0),
}


def with_values(batch: TensorDict, names: list[str], seed: int) -> TensorDict:
    """The batch with other values of some fields: known names keep their places, new ones come last."""
    fresh: dict[str, Any] = {"reward_baselines": torch.arange(len(batch)) + seed * 0.5}
    fresh["temperature"] = NonTensorData(seed // 10, batch_size=[len(batch)])
    prompt = batch["prompts"].shape[1]
    columns = {"prompt": slice(None, prompt), "response": slice(prompt, None), "sequence": slice(None)}
    for name, (axis, dtype, pad) in FRESH.items():
        mask = batch["attention_mask"][:, columns[axis]]
        fresh[name] = samples.field(mask.bool().tolist(), dtype, pad, seed=seed, width=mask.shape[1])
    data = {name: batch.get(name) for name in batch.keys()} | {name: fresh[name] for name in names}  # noqa: SIM118
    return TensorDict(data, batch.batch_size)


@quiet
@given(st.lists(rollouts(), min_size=1, max_size=2), st.data())
def test_fields_are_added_and_rows_moved_in_any_order(parts: list[TensorDict], data: st.DataObject) -> None:
    store = Store()
    names = st.lists(st.sampled_from([*FRESH, "reward_baselines", "temperature"]), min_size=1, max_size=3, unique=True)
    plan = data.draw(st.lists(names, max_size=2))
    views = []
    for number, part in enumerate(parts):
        part = part.exclude("returns", "entropys")
        view = BatchView.of(pack(part))
        for step, some in enumerate(plan):
            ops = data.draw(row_ops(len(part), max_size=2))
            view = after(view, ops)
            part = with_values(
                oracle.take_rows(part, rows_after(ops, len(part), even_chunks=True)), some, 10 * step + 1
            )
            like = view.to_packed("attention_mask", "prompts", "responses", get=store.get)
            new = pack(taken(part, *some), like=like)
            fields = store.put(new) if data.draw(st.booleans()) else new
            view = view.with_fields(fields)
        views.append(view)
        parts[number] = part
    view = BatchView.cat(views)
    want = decompress(PackedBatch.cat([pack(part) for part in parts]))
    assert list(want.keys()) == ["/".join(path) for path in view.order]
    ops = data.draw(row_ops(len(want), max_size=2))
    checked(after(view, ops), oracle.take_rows(want, rows_after(ops, len(want), even_chunks=True)), store, data)


def test_sub_batches_meet() -> None:
    inner = TensorDict({"x": torch.zeros(3), "y": torch.zeros(3)}, [3])
    base = BatchView.of(compress(TensorDict({"in": inner, "z": torch.zeros(3), "t": torch.zeros(3)}, [3])))
    more = TensorDict({"in": TensorDict({"y": torch.ones(3), "new": torch.ones(3)}, [3])}, [3])
    view = base.with_fields(compress(more))[1:]
    want = TensorDict({"in": {"x": torch.zeros(2), "y": torch.ones(2), "new": torch.ones(2)}}, [2])
    want["in"].batch_size = [2]
    assert_same(view.materialize("in"), want)
    assert list(view.materialize().keys()) == ["in", "z", "t"]
    assert_same(view.materialize(("in", "y"))["in"], want["in"].select("y"))
    assert_same(view.materialize(("in", "x"))["in"], want["in"].select("x"))
    leaf = view.with_fields(compress(TensorDict({"in": torch.full((2,), 5.0)}, [2])))
    assert leaf.materialize()["in"].tolist() == [5, 5]
    assert leaf.order == (("in",), ("z",), ("t",))
    again = leaf.with_fields(compress(more[1:]))
    assert_same(again.materialize("in"), more[1:])
    both = BatchView.cat([view, view])
    assert both[[3, 0]].materialize("in")["in", "new"].tolist() == [1, 1]


def test_objects_in_a_sub_batch_whose_other_fields_came_later() -> None:
    def view(value: str) -> BatchView:
        held = TensorDict({"x": torch.zeros(2), "o": NonTensorData(value, batch_size=[2])}, [2])
        more = TensorDict({"in": TensorDict({"x": torch.ones(2)}, [2])}, [2])
        return BatchView.of(compress(TensorDict({"in": held}, [2]))).with_fields(compress(more))

    seen = BatchView.cat([view("a"), view("b")])[[3, 1]].materialize()
    assert seen.get(("in", "o")).tolist() == ["b", "a"]
    assert seen["in", "x"].tolist() == [1, 1]


@pytest.mark.parametrize("devices", [("cpu", None), (None, "cpu")])
def test_the_device_of_the_view_is_that_of_all_its_fields(devices: tuple[Any, Any]) -> None:
    one, two = (
        TensorDict({name: torch.zeros(2)}, [2], device=device) for name, device in zip("ab", devices, strict=True)
    )
    view = BatchView.of(compress(one)).with_fields(compress(two))
    assert [view.materialize(*names).device for names in ([], ["a"], ["b"])] == [one.device] * 3
    assert view.materialize("b", format="nested").device == one.device


def test_layouts_that_would_widen_apart() -> None:
    """Fields packed with their mask alone do not know where the prompts end."""
    one, two = rollout(((2, 3), (1, 6))), rollout(((3, 8),), 3, 8)

    def view(batch: TensorDict, like: bool) -> BatchView:
        packed = pack(batch)
        fields = {"values": (batch["attention_mask"] != 0) * 2.0, "attention_mask": batch["attention_mask"]}
        kept = ["values"] if like else list(fields)
        more = TensorDict({name: fields[name] for name in kept}, batch.batch_size)
        return BatchView.of(packed).with_fields(pack(more, like=packed if like else None))

    apart = [view(one, False), view(two, False)]
    assert_same(apart[0].materialize("input_ids"), taken(one, "input_ids"))
    assert BatchView.cat([apart[0], apart[0]]).materialize()["values"].shape == (4, 11)
    with pytest.raises(LayoutError) as caught:
        BatchView.cat(apart)
    assert str(caught.value).startswith(
        'BatchView.cat: layout "sequence" becomes 13 wide for some fields and 11 for others, or begins at another '
        "column; expected the same columns for all fields. Compress all its fields with like="
    )
    together = BatchView.cat([view(one, True), view(two, True)]).materialize("values", "attention_mask")
    assert together["values"].shape == (3, 13)
    assert together["values"].tolist() == (together["attention_mask"] * 2.0).tolist()


# -------------------------------------------------------------------- what is kept alive


def test_references_are_released_with_the_view() -> None:
    packed, ref = pack(rollout()), Ref()
    alive = [weakref.ref(packed), weakref.ref(ref)]
    here, there = BatchView.of(packed), BatchView.at(ref, BatchMeta.of(packed))
    views = [BatchView.cat([here, there])[3:11][::-1]]
    views.append(views[0].with_fields(compress(TensorDict({"x": torch.zeros(8)}, [8]))))
    for view in views:
        view.materialize(get=lambda refs, found=packed: [found for _ in refs])
        view.lengths("sequence")
    del here, there, packed
    gc.collect()
    assert alive[0]() is not None
    del ref, view
    assert alive[1]() is not None
    rest = views[0][:0]
    views.clear()
    gc.collect()
    assert [some() for some in alive] == [None, None]
    assert len(rest.materialize()) == 0


def test_an_outline_keeps_no_memory_of_the_batch() -> None:
    batch = samples.rollout().set("image", samples.per_row([torch.zeros(1000) for _ in range(7)]))
    packed = pickle.loads(pickle.dumps(pack(batch)))
    arrays = [packed.table.body, packed.objects["image",].data[0].words]
    while isinstance(arrays[0].base, np.ndarray):
        arrays[0] = arrays[0].base
    alive = [weakref.ref(packed), *map(weakref.ref, arrays)]
    meta = BatchMeta.of(packed)
    nbytes = packed.nbytes
    del packed, arrays
    gc.collect()
    assert [some() for some in alive] == [None, None, None]
    assert (meta.num_rows, meta.nbytes) == (7, nbytes)
    assert len(pickle.dumps(meta)) < 20_000
    assert len(meta.head) == 0


def test_bytes_of_a_view_are_shares() -> None:
    packed = packed_of(8), packed_of(4)
    view = BatchView.cat([BatchView.of(part) for part in packed])
    sizes = [part.nbytes for part in packed]
    assert view.nbytes == sum(sizes)
    assert view[:2].nbytes == round(sizes[0] / 4)
    assert view[[0, 0, 11]].nbytes == round(sizes[0] / 4) + round(sizes[1] / 4)
    assert view[0:0].nbytes == 0
    meta = BatchMeta.of(packed[0]).take(np.array([1, 5]))
    assert (meta.num_rows, meta.nbytes) == (2, round(sizes[0] / 4))
    assert meta.layouts["sequence"] == packed[0].layouts["sequence"].take([1, 5])
    assert BatchMeta.of(packed[0][0:0]).nbytes_of(3) == 0


def packed_of(rows: int) -> PackedBatch:
    return pack(rollout([(2, 3 + row % 3) for row in range(rows)]))


# -------------------------------------------------------------------- references that lead elsewhere


@pytest.mark.parametrize(
    "found",
    [
        lambda batch: pack(batch[:6]),
        lambda batch: pack(batch.exclude("returns")),
        lambda batch: pack(batch.clone().set("returns", batch["returns"].double())),
        lambda batch: pack(batch)[::-1],
        lambda batch: pack(rollout(response=9)),
        lambda batch: batch,
    ],
    ids=["rows", "fields", "dtype", "lengths", "width", "no packed batch"],
)
def test_a_reference_to_something_else(found: Any) -> None:
    batch = rollout()
    view = BatchView.at(Ref(), BatchMeta.of(pack(batch)))
    with pytest.raises(LayoutError, match=r"^BatchView\.materialize: a reference resolved to "):
        view[2:4].materialize("prompts", get=lambda refs: [found(batch)])


def test_rows_that_are_here_need_no_get() -> None:
    view = BatchView.cat([Store().put(pack(rollout())), BatchView.of(pack(rollout()))])
    assert len(view[7:].materialize()) == 7
    assert rows_of(view.with_fields(numbers(14))) == [*range(14)], "nor do fields"


# -------------------------------------------------------------------- errors


def unlike() -> dict[str, list[TensorDict]]:
    """Pairs of batches that do not go together."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    inner = TensorDict({"a": torch.zeros(2)}, [2])
    floats, ints = torch.float32, torch.int64
    pairs = {
        "fields": [TensorDict({name: torch.zeros(2)}, [2]) for name in "xy"],
        "dtype": [TensorDict({"x": torch.zeros(2, dtype=dtype)}, [2]) for dtype in (floats, torch.float16)],
        "padded dtype": [TensorDict({"p": mask.to(dtype), "m": mask}, [2]) for dtype in (floats, ints)],
        "elements": [TensorDict({"p": torch.zeros(2, 3, n), "m": torch.ones(2, 3)}, [2]) for n in (3, 4)],
        "widths": [TensorDict({"m": torch.ones(2, width)}, [2, width]) for width in (5, 7)],
        "dims": [TensorDict({"d": torch.zeros(2, 3)}, dims) for dims in ([2], [2, 3])],
        "dims below": [TensorDict({"d": TensorDict({}, dims)}, [2]) for dims in ([2], [2, 3])],
    }
    kinds = [torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, 1), NonTensorData(1, batch_size=[2])]
    for one, two in itertools.combinations([*kinds, TensorDict({}, [2]), inner], 2):
        pairs[f"{type(one).__name__}, {type(two).__name__} {len(pairs)}"] = [
            TensorDict({"d": x}, [2]) for x in (one, two)
        ]
    return pairs


@pytest.mark.parametrize("pair", unlike().values(), ids=unlike())
def test_what_cannot_be_joined_is_known_at_once(pair: list[TensorDict]) -> None:
    """Where both lie elsewhere, nothing is fetched; nor where one of them gives no rows."""
    registry, store = {name: MaskNestingSpec("m") for name in "mp"}, Store()
    packed = [compress(batch, registry=registry) for batch in pair]
    a, b = map(store.put, packed)
    for views in ([a, b], [b, a], [a[:0], b], [a, b[0:0]]):
        with pytest.raises(LayoutError, match=r"^BatchView\.cat: "):
            BatchView.cat(views)
    for parts in (packed, packed[::-1]):
        with pytest.raises(LayoutError, match=r"^PackedBatch\.cat: "):
            PackedBatch.cat(parts)


@quiet
def test_a_dense_field_of_another_width_is_known_at_once() -> None:
    stray, store = rollout(), Store()
    stray["advantages"][4, 5] = 7.5
    narrow, wide = store.put(pack(rollout())), store.put(pack(rollout(response=9)))
    message = r'^BatchView\.cat: field "advantages" stays padded, .* axis "response" grows from width 6, .* to 9'
    with pytest.raises(LayoutError, match=message):
        BatchView.cat([wide, store.put(pack(stray))])
    with pytest.raises(LayoutError, match=message):
        BatchView.cat([BatchView.cat([narrow, wide]), store.put(pack(stray))])
    same = rollout()
    same["advantages"][4, 5] = 7.5
    view = BatchView.cat([store.put(pack(rollout())), store.put(pack(same))])
    for rows in (range(14), [3], [11, 2]):
        want = oracle.take_rows(torch.cat([rollout(), same]), list(rows))
        assert_same(view[list(rows)].materialize(get=store.get), want)
        assert_same(unnest(view[list(rows)].materialize(get=store.get, format="nested")), want)


def test_fields_that_do_not_fit_the_view() -> None:
    view = BatchView.of(pack(rollout()))
    for other in (BatchView.of(pack(rollout().exclude("uid"))[::-1]), BatchView.of(pack(rollout(response=7)))):
        with pytest.raises(LayoutError, match=r'^BatchView\.with_fields: layout "'):
            view.with_fields(other)
    deep = compress(TensorDict({"d": torch.zeros(7, 3)}, [7, 3]))
    below = [compress(TensorDict({"in": TensorDict({}, dims)}, [7])) for dims in ([7], [7, 3])]
    for base, fields in ((view, deep), (BatchView.of(below[0]), below[1])):
        with pytest.raises(LayoutError, match=r"^BatchView\.with_fields: the fields .*have batch dims \(3,\) behind"):
            base.with_fields(fields)
    with pytest.raises(LayoutError, match=r"batch_size \[\], so its rows are not a batch dim"):
        BatchView.of(compress(TensorDict({"x": torch.zeros(3)}, [])))


UIDS: dict[str, Any] = {
    "text": ["a", "b", "a", "c"],
    "bytes": [b"a", b"b", b"a", b"c"],
    "mixed": ["a", 7, "a", b"c"],
    "integers": torch.tensor([5, 6, 5, 1 << 60]),
    "words": torch.tensor([[5, 1], [6, 1], [5, 1], [5, 2]], dtype=torch.int16),
}


def named(uids: Any, rows: Sequence[int], **fields: torch.Tensor) -> TensorDict:
    own = uids[list(rows)] if isinstance(uids, torch.Tensor) else NonTensorStack(*[uids[row] for row in rows])
    return TensorDict({"uid": own, **fields}, [len(rows)])


@pytest.mark.parametrize("kind", UIDS)
def test_rows_of_equal_lengths_in_another_order_are_known_by_their_uids(kind: str) -> None:
    uids, scores, store = UIDS[kind], torch.arange(4.0), Store()
    view = BatchView.of(compress(named(uids, range(4), x=torch.zeros(4))))[::-1][::-1]
    for rows in ([0, 1, 2, 3], [2, 1, 0, 3]):  # rows with one uid are not told apart
        assert view.with_fields(compress(named(uids, rows, score=scores))).materialize()["score"].tolist() == [
            0,
            1,
            2,
            3,
        ]
    order = [3, 1, 0, 2]
    fields = compress(named(uids, order, score=scores[order]))
    own, other = (uids[row].tolist() if isinstance(uids, torch.Tensor) else uids[row] for row in (0, 3))
    text = re.escape(f'with_fields: field "uid" of row 0 is {own!r}, and {other!r} in the batch that is joined with it')
    with pytest.raises(LayoutError, match=text):
        view.with_fields(fields)
    back = fields.take(np.argsort(order))
    assert view.with_fields(back).materialize()["score"].tolist() == [0, 1, 2, 3]
    assert view.with_fields(fields.select("score")).num_rows == 4, "one of them has none"
    assert store.put(fields).with_fields(view.to_packed()).num_rows == 4, "one of them is elsewhere"


def test_uids_that_are_not_compared() -> None:
    """One for all rows, objects of other types, numbers with NaN, tokens."""
    view = BatchView.of(compress(named(["a", "b"], [0, 1])))
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    for uid in (NonTensorData("b", batch_size=[2]), torch.tensor([torch.nan, 1.0]), jagged, TensorDict({}, [2])):
        one, other = (compress(TensorDict({"uid": uid, name: torch.zeros(2)}, [2])) for name in "xy")
        assert view.with_fields(one).num_rows == BatchView.of(one).with_fields(other).num_rows == 2
    arrays: list[Any] = [np.arange(3), (1, np.arange(2)), None, 1.5]
    one = BatchView.of(compress(named(arrays, range(4))))
    assert one.with_fields(compress(named(arrays, [1, 2, 3, 0]))).num_rows == 4
    assert one.with_fields(compress(named(["a", "b", "c", 1], range(4)))).num_rows == 4


def test_the_limit_of_what_is_materialized() -> None:
    batch = TensorDict({"x": torch.arange(600).view(6, 100)}, [6])
    view = BatchView.of(compress(batch))[1:3]
    assert_same(view.materialize(max_bytes=2 * 100 * 8), batch[1:3])
    with pytest.raises(LayoutError, match=r"decompress: these fields take 1600 bytes padded; expected at most 1599"):
        view.materialize(max_bytes=1599)


def test_batches_of_one_schema_share_a_head():
    """Which is then not sent with the rows of each; batches of other widths keep theirs."""

    def packed(rows: int, width: int) -> PackedBatch:
        mask = (torch.arange(width) < torch.arange(rows)[:, None]).long()
        return pickle.loads(
            pickle.dumps(compress(TensorDict({"m": mask}, [rows]), registry={"m": MaskNestingSpec("m")}))
        )

    views = [BatchView.of(packed(rows, 6)) for rows in (3, 5, 4)]
    (group,) = BatchView.cat(views).groups
    assert [part.meta.head is group.head for part in group.parts] == [True] * 3
    (group,) = BatchView.cat([*views, BatchView.of(packed(2, 7))]).groups
    assert [part.meta.head is group.head for part in group.parts] == [False] * 4
