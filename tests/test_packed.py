"""compress, decompress and PackedBatch, against naive row loops."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch, assert_same_object, assert_same_tensor
from strategies import Case, batches, row_ops, rows_after
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor
from torch import Tensor

from maskpack import (
    LAYOUTS,
    RL_FIELDS,
    CoverageError,
    LayoutError,
    LossyPadError,
    MaskNestingSpec,
    MaskpackError,
    MaskpackWarning,
    PackedBatch,
    RegistryError,
    compress,
    decompress,
    nest_batch_by_mask,
    unnest,
)

quiet = pytest.mark.filterwarnings("ignore::maskpack.MaskpackWarning")


def rollout(rows: int = 6, prompt: int = 4, response: int = 8, seed: int = 0) -> TensorDict:
    """A batch whose every field nests."""
    rng = np.random.default_rng(seed)
    p, r = rng.integers(1, prompt + 1, rows), rng.integers(1, response + 1, rows)
    places = torch.arange(prompt + response)
    mask = (places >= torch.tensor(prompt - p)[:, None]) & (places < torch.tensor(prompt + r)[:, None])
    ids = torch.from_numpy(rng.integers(1, 100, (rows, prompt + response))) * mask
    scores = torch.from_numpy(rng.normal(size=(rows, response)).astype(np.float32))
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "responses": ids[:, prompt:].clone(),
            "response_mask": mask[:, prompt:].long(),
            "advantages": torch.where(mask[:, prompt:], scores, 0.0),
            "uid": NonTensorStack(*[NonTensorData(f"u{row}") for row in range(rows)]),
            "temperature": NonTensorData(1.0, batch_size=[rows]),
            "reward_baselines": torch.arange(rows, dtype=torch.float32),
        },
        batch_size=[rows],
    )


def with_stray(batch: TensorDict) -> TensorDict:
    """The batch with one value under the mask of its advantages."""
    row = int(batch["response_mask"].sum(1).argmin())
    assert batch["response_mask"][row].sum() <= 5
    batch["advantages"][row, 6] = 7.5
    return batch


def tensors(batch: TensorDictBase) -> list[Tensor]:
    """Every dense tensor and the values of every jagged one, LAYOUTS included."""
    found: list[Tensor] = []
    for value in batch.values():
        if is_non_tensor(value):
            continue
        if isinstance(value, TensorDictBase):
            found.extend(tensors(value))
        else:
            found.append(value.values() if value.is_nested else value)
    return found


def scribble(batch: TensorDictBase) -> None:
    """Changes every bit of every tensor in place."""
    for x in tensors(batch):
        if x.numel():
            raw = x.view(torch.bool) if x.dtype == torch.bool else strategies.oracle_view(x)
            if raw.dtype.is_complex:
                raw.mul_(0).add_(13)
            else:
                raw.copy_(~raw)


def wire(packed: PackedBatch) -> tuple[bytes, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(packed, protocol=5, buffer_callback=buffers.append), buffers


def travelled(packed: PackedBatch) -> tuple[PackedBatch, list[bytes]]:
    """The batch as a reader of read-only shared memory gets it, and that memory."""
    head, buffers = wire(packed)
    held = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(head, buffers=[memoryview(part).toreadonly() for part in held]), held


def size(packed: PackedBatch) -> tuple[int, int]:
    """Bytes in band, bytes out of band."""
    head, buffers = wire(packed)
    return len(head), sum(buffer.raw().nbytes for buffer in buffers)


def assert_same_rows(got: TensorDictBase, want: TensorDictBase) -> None:
    """As assert_same_batch, where per-row objects may have become per-row in one of the two only."""
    assert got.batch_size == want.batch_size
    assert got.device == want.device
    assert list(got.keys()) == list(want.keys())
    for name in want.keys():  # noqa: SIM118
        a, b = got.get(name), want.get(name)
        if is_non_tensor(b):
            assert_same_object(a.tolist(), b.tolist(), name)
        elif isinstance(b, TensorDictBase):
            assert_same_rows(a, b)
        else:
            assert_same_tensor(a, b, name)


# -------------------------------------------------------------------- there and back


@quiet
@given(batches())
def test_round_trip_bit_for_bit(case: Case) -> None:
    packed = compress(case.batch, **case.options)
    assert len(packed) == packed.num_rows == case.rows
    assert_same_batch(decompress(packed), case.batch)


@quiet
@given(batches())
def test_decompress_nested_is_nest_batch_by_mask(case: Case) -> None:
    nested = decompress(compress(case.batch, **case.options), layout="nested")
    want = nest_batch_by_mask(case.batch, **case.options)
    assert_same_batch(nested.exclude(LAYOUTS), want.exclude(LAYOUTS))
    assert_same_batch(unnest(nested), case.batch)


@quiet
@given(batches())
def test_nested_batches_compress_to_the_same(case: Case) -> None:
    nested = nest_batch_by_mask(case.batch, **case.options)
    packed = compress(nested, **case.options)
    assert_same_batch(decompress(packed), case.batch)


@quiet
def test_a_nested_batch_where_a_mask_was_kept_dense() -> None:
    """attention_mask is jagged: the dense response_mask must not become the response axis instead."""
    batch = TensorDict(
        {
            "attention_mask": torch.tensor([[0, 1]]),
            "prompts": torch.zeros(1, 0, dtype=torch.int64),
            "responses": torch.tensor([[0, 9]]),
            "response_mask": torch.tensor([[1, 0]]),
        },
        batch_size=[1],
    )
    nested = nest_batch_by_mask(batch, pad_token_id=0)
    assert_same_batch(decompress(compress(nested, pad_token_id=0)), batch)


@quiet
@given(batches())
def test_decompress_nested_shares_offsets_with_cached_bounds(case: Case) -> None:
    nested = decompress(compress(case.batch, **case.options), layout="nested")
    shared: dict[Any, Tensor] = {}
    for path, field in case.nested.items():
        x: Any = nested
        for name in path:
            x = x.get(name)
        assert x.offsets() is shared.setdefault((path[0] == "own", field.axis), x.offsets())
        lengths = oracle.lengths(field.mask)
        assert {"min_seqlen", "max_seqlen"} <= set(x._metadata_cache)
        assert (x._get_min_seqlen(), x._get_max_seqlen()) == (min(lengths, default=0), max(lengths, default=0))


@quiet
@given(batches())
def test_input_untouched(case: Case) -> None:
    tree = oracle.snapshot(case.batch)
    packed = compress(case.batch, **case.options)
    assert oracle.snapshot(case.batch) == tree
    decompress(packed)
    for options in ({"strict_mask_nesting": True}, {"on_loss": "error"}, {"pad_token_id": None}):
        try:
            compress(case.batch, **{**case.options, **options})
        except MaskpackError:
            assert oracle.snapshot(case.batch) == tree


@quiet
@given(batches(), st.data())
def test_named_fields(case: Case, data: st.DataObject) -> None:
    names = list(case.batch.keys())
    wanted = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) if names else []
    packed = compress(case.batch, **case.options)
    chosen = {name: case.batch.get(name) for name in names if name in wanted or not wanted}
    want = TensorDict(chosen, batch_size=case.batch.batch_size, device=case.batch.device)
    assert_same_batch(decompress(packed, *wanted), want)
    assert_same_batch(unnest(decompress(packed, *wanted, layout="nested")), want)


@quiet
@given(batches())
def test_device_argument(case: Case) -> None:
    want = TensorDict(dict(case.batch.items()), batch_size=case.batch.batch_size, device="cpu")
    packed = compress(case.batch, **case.options)
    for layout in ("padded", "nested"):
        got = decompress(packed, layout=layout, device="cpu")  # type: ignore[arg-type]
        assert_same_batch(unnest(got) if layout == "nested" else got, want)


def test_field_in_a_sub_batch() -> None:
    batch = TensorDict({"a": TensorDict({"b": torch.arange(4), "c": torch.arange(4)}, [4])}, [4])
    got = decompress(compress(batch), ("a", "b"))
    assert_same_batch(got, TensorDict({"a": TensorDict({"b": torch.arange(4)}, [4])}, [4]))


@pytest.mark.parametrize("more", [(), (12,)], ids=["[]", "[B, S]"])
def test_other_batch_sizes(more: tuple[int, ...]) -> None:
    source = rollout(4).select("input_ids", "attention_mask", "position_ids")
    batch = TensorDict(dict(source.items()), batch_size=[4, *more] if more else [])
    packed = compress(batch, pad_token_id=0)
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(unnest(decompress(packed, layout="nested")), batch)
    if more:
        assert_same_batch(decompress(packed[1:3]), batch[1:3])
    else:
        for use in (lambda: packed[1:3], lambda: packed.split(2), lambda: PackedBatch.cat([packed, packed])):
            with pytest.raises(LayoutError, match=r"^PackedBatch\.\w+: .*batch_size \[\].*Give the TensorDict"):
                use()


def test_scalars_and_flat_fields_of_a_batch_without_rows() -> None:
    batch = TensorDict(
        {"x": torch.tensor(1.5), "z": torch.tensor(2 + 3j, dtype=torch.complex128), "b": torch.tensor(True)}, []
    )
    assert_same_batch(decompress(travelled(compress(batch))[0]), batch)


def test_objects_below_two_batch_dims() -> None:
    rows = [NonTensorStack(*[NonTensorData((row, place)) for place in range(3)]) for row in range(2)]
    batch = TensorDict({"uid": NonTensorStack(*rows), "x": torch.zeros(2, 3)}, batch_size=[2, 3])
    packed = compress(batch)
    assert_same_batch(decompress(packed), batch)
    assert decompress(packed[[1, 0]]).get("uid").tolist() == [[(1, 0), (1, 1), (1, 2)], [(0, 0), (0, 1), (0, 2)]]


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
@pytest.mark.parametrize("pad", [0, 1])
def test_every_dtype_padded_and_dense(dtype: torch.dtype, pad: int) -> None:
    rng = np.random.default_rng(5)
    for width in (7, 150):
        mask = [[False] * width, [place > 2 for place in range(width)], [place != 4 for place in range(width)]]
        values = strategies.values(rng, (oracle.offsets(mask)[-1], 2), dtype)
        batch = TensorDict(
            {
                "m": oracle.mask_tensor(mask, width),
                "x": oracle.unpack(values, mask, width, pad),
                "dense": strategies.values(rng, (3, 2), dtype),
                "row": strategies.values(rng, (3,), dtype),
            },
            batch_size=[3],
        )
        registry = {"x": MaskNestingSpec("m", pad, hints=("runs",)), "m": MaskNestingSpec("m")}
        packed, _ = travelled(compress(batch, registry=registry, ignore_dense_fields=["dense"]))
        assert_same_batch(decompress(packed), batch)
        assert_same_batch(unnest(decompress(packed, layout="nested")), batch)
        assert_same_batch(decompress(packed[[2, 0, 2]]), oracle.take_rows(batch, [2, 0, 2]))


@pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3), (0, 0)])
def test_every_dtype_without_elements(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    batch = TensorDict({"dense": torch.zeros(shape, dtype=dtype)}, batch_size=[shape[0]])
    packed = compress(batch, ignore_dense_fields=["dense"])
    for there in (packed, travelled(packed)[0]):
        assert_same_batch(decompress(there), batch)
        assert_same_batch(decompress(there[0:0]), oracle.take_rows(batch, []))
        assert_same_batch(decompress(there[[]]), oracle.take_rows(batch, []))


# -------------------------------------------------------------------- values under the mask


def test_stray_values_travel_dense() -> None:
    batch = with_stray(rollout())
    with pytest.warns(MaskpackWarning, match=r'^compress: travelling dense: "advantages" \(6, 8\) float32'):
        packed = compress(batch, pad_token_id=0)
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(decompress(packed[1:4]), oracle.take_rows(batch, [1, 2, 3]))


@quiet
def test_stray_value_where_tokens_are_as_many_as_rows() -> None:
    """The packed values then have the shape of a field with one value a row."""
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    batch = TensorDict({"attention_mask": mask, "values": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])}, [2])
    assert_same_batch(decompress(compress(batch)), batch)


@quiet
def test_strict_and_on_loss() -> None:
    batch = with_stray(rollout())
    for options in ({"strict_mask_nesting": True}, {"on_loss": "error"}):
        with pytest.raises(LossyPadError, match=r'^compress: field "advantages" holds 7\.5 at'):
            compress(batch, pad_token_id=0, **options)
    want = oracle.map_tensors(batch, oracle.copy)
    want["advantages"][batch["advantages"] == 7.5] = 0.0
    assert_same_batch(decompress(compress(batch, pad_token_id=0, on_loss="drop")), want)


def test_strict_coverage() -> None:
    batch = rollout()
    compress(batch, pad_token_id=0, strict_mask_nesting=True)
    batch["unknown"] = torch.zeros(6, 2)
    with pytest.raises(CoverageError, match=r"^compress: 1 field\(s\) would travel dense(.|\n)*\"unknown\" \(6, 2\)"):
        compress(batch, pad_token_id=0, strict_mask_nesting=True)
    compress(batch, pad_token_id=0, strict_mask_nesting=True, ignore_dense_fields=["unknown"])


# -------------------------------------------------------------------- rows


@quiet
@given(batches(dtypes=strategies.PLAIN_DTYPES), st.data())
def test_row_operations(case: Case, data: st.DataObject) -> None:
    ops = data.draw(row_ops(case.rows))
    packed = compress(case.batch, **case.options)
    for op in ops:
        packed = op.on_packed(packed)
    want = oracle.take_rows(case.batch, rows_after(ops, case.rows, even_chunks=True))
    assert len(packed) == want.batch_size[0]
    assert_same_rows(decompress(packed), want)
    assert_same_rows(unnest(decompress(packed, layout="nested")), want)
    assert_same_rows(decompress(travelled(packed)[0]), want)


@quiet
@given(batches(min_rows=1), st.data())
def test_select_any_rows(case: Case, data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(-case.rows, case.rows - 1), max_size=8))
    packed = compress(case.batch, **case.options)
    want = oracle.take_rows(case.batch, rows)
    for form in (rows, np.array(rows, np.int64), torch.tensor(rows, dtype=torch.int32), tuple(rows)):
        assert_same_batch(decompress(packed.select(form)), want)
    assert_same_batch(decompress(packed[::-1]), oracle.take_rows(case.batch, range(case.rows)[::-1]))


@quiet
@given(batches(), st.integers(1, 6), st.data())
def test_split_and_chunk(case: Case, number: int, data: st.DataObject) -> None:
    packed = compress(case.batch, **case.options)
    rows = list(range(case.rows))
    chunks = packed.chunk(number)
    assert len(chunks) == number
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert [len(part) for part in chunks] == sorted((len(part) for part in chunks), reverse=True)
    parts = packed.split(number)
    assert [len(part) for part in parts] == [len(rows[at : at + number]) for at in range(0, case.rows, number)]
    for some in (chunks, parts):
        begin = 0
        for part in some:
            assert_same_batch(decompress(part), oracle.take_rows(case.batch, rows[begin : begin + len(part)]))
            begin += len(part)
        assert begin == case.rows


@quiet
@given(batches(), st.data())
def test_cat_of_parts(case: Case, data: st.DataObject) -> None:
    """Each part is packed by itself, so that fields may be dense in one and not in another, or pad differently."""
    groups = (
        data.draw(st.lists(st.lists(st.integers(0, case.rows - 1), max_size=3), min_size=1, max_size=3))
        if (case.rows)
        else [[], []]
    )
    parts = [compress(oracle.take_rows(case.batch, rows), **case.options) for rows in groups]
    packed = PackedBatch.cat(parts)
    want = oracle.take_rows(case.batch, [row for rows in groups for row in rows])
    assert_same_rows(decompress(packed), want)
    assert_same_rows(unnest(decompress(packed, layout="nested")), want)


@quiet
def test_cat_where_a_field_is_dense_in_one_part() -> None:
    parts = [rollout(3, seed=1), with_stray(rollout(4, seed=2)), rollout(2, seed=3)]
    for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1]):
        packed = PackedBatch.cat([compress(parts[place], pad_token_id=0) for place in order])
        want = torch.cat([parts[place] for place in order])
        assert_same_rows(decompress(packed), want)
        assert_same_rows(decompress(packed[[8, 0, 4]]), oracle.take_rows(want, [8, 0, 4]))


@quiet
def test_cat_where_pads_differ() -> None:
    registry = {"x": MaskNestingSpec("m", [0, -1]), "m": MaskNestingSpec("m")}
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    parts = [TensorDict({"m": mask, "x": torch.where(mask != 0, 5, pad)}, [2]) for pad in (0, -1)]
    assert_same_batch(decompress(PackedBatch.cat([compress(p, registry=registry) for p in parts])), torch.cat(parts))


@quiet
def test_cat_where_pads_differ_in_their_sign_bit() -> None:
    registry = {"x": MaskNestingSpec("m", [0.0, -0.0]), "m": MaskNestingSpec("m")}
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    parts = [TensorDict({"m": mask, "x": torch.where(mask != 0, 5.0, pad)}, [2]) for pad in (0.0, -0.0)]
    assert_same_batch(decompress(PackedBatch.cat([compress(p, registry=registry) for p in parts])), torch.cat(parts))


@quiet
def test_one_pad_a_row() -> None:
    """`advantages * mask` leaves -0.0 in some rows; parts with one pad for all join them."""
    batch = rollout()
    batch["advantages"] = torch.tensor([1.5, -2.5, 0.5, -1.0, -1.0, 2.0])[:, None] * batch["response_mask"]
    packed, _ = travelled(compress(batch, pad_token_id=0, strict_mask_nesting=True))
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(unnest(decompress(packed, layout="nested")), batch)
    assert_same_batch(decompress(packed[1:4]), oracle.take_rows(batch, [1, 2, 3]))
    assert_same_batch(decompress(packed[[5, 1, 1]]), oracle.take_rows(batch, [5, 1, 1]))
    clean = rollout(seed=3)
    for order in ([0, 1], [1, 0], [0, 0], [1, 1]):
        parts = [(batch, clean)[place] for place in order]
        joined = PackedBatch.cat([compress(part, pad_token_id=0, strict_mask_nesting=True) for part in parts])
        assert_same_rows(decompress(joined), torch.cat(parts))
        assert_same_rows(unnest(decompress(joined, layout="nested")), torch.cat(parts))
        assert_same_rows(decompress(joined[[11, 1, 7]]), oracle.take_rows(torch.cat(parts), [11, 1, 7]))
        assert len(decompress(joined[0:0])) == 0
    like = compress(TensorDict({"values": batch["advantages"]}, [6]), like=packed, strict_mask_nesting=True)
    assert_same_tensor(decompress(like)["values"], batch["advantages"])


def test_cat_of_batch_wide_objects() -> None:
    held = {"a": np.arange(3), "b": [torch.ones(2)], "c": None}
    batch = TensorDict({"meta": NonTensorData(held, batch_size=[2]), "x": torch.zeros(2)}, [2])
    parts = [pickle.loads(pickle.dumps(compress(batch))) for _ in range(2)]
    got = decompress(PackedBatch.cat(parts))
    assert_same_object(got.get("meta").tolist(), [held] * 4)
    other = TensorDict({"meta": NonTensorData(7, batch_size=[2]), "x": torch.ones(2)}, [2])
    mixed = decompress(PackedBatch.cat([parts[0], compress(other)]))
    assert_same_object(mixed.get("meta").tolist(), [held, held, 7, 7])


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (1.0, 1),
        (True, 1),
        ([1], [True]),
        (0.0, -0.0),
        (np.arange(2), np.arange(2.0)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ({"a": 1}, {"a": 2}),
        ((1,), [1]),
    ],
    ids=str,
)
def test_cat_keeps_objects_apart(one: Any, two: Any) -> None:
    parts = [compress(TensorDict({"o": NonTensorData(item, batch_size=[1])}, [1])) for item in (one, two)]
    assert_same_object(decompress(PackedBatch.cat(parts)).get("o").tolist(), [one, two])


def test_empty_selections() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    for none in (packed[0:0], packed[[]], packed[torch.zeros(6, dtype=torch.bool)], packed.select([])):
        assert len(none) == 0
        got = decompress(none)
        assert got.batch_size == (0,)
        assert list(got.keys()) == list(batch.keys())
        assert got["input_ids"].shape == (0, 12)
        assert got["input_ids"].dtype == torch.int64
        nested = decompress(none, layout="nested")
        assert nested["input_ids"].is_nested
        assert_same_rows(unnest(nested), got)
    assert_same_batch(decompress(PackedBatch.cat([packed[0:0], packed, packed[[]]])), batch)


@pytest.mark.parametrize("rows", [[True, False, True, False, False, True], slice(1, None, 2), np.array([0, 5])])
def test_ways_to_name_rows(rows: Any) -> None:
    batch = rollout()
    want = np.arange(6)[rows].tolist()
    assert_same_batch(decompress(compress(batch, pad_token_id=0)[rows]), oracle.take_rows(batch, want))


def test_lengths() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    want = oracle.lengths(oracle.mask_rows(batch["attention_mask"]))
    assert packed.lengths("sequence").tolist() == want
    assert packed[[3, 1]].lengths("sequence").tolist() == [want[3], want[1]]
    with pytest.raises(LayoutError, match=r'^PackedBatch\.lengths: no layout "gone"; the batch has .*"?response'):
        packed.lengths("gone")


def test_what_lengths_gives_is_a_copy() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    with contextlib.suppress(ValueError):  # read-only is as good
        packed.lengths("sequence")[...] = 1
    assert packed.lengths("sequence").tolist() == oracle.lengths(oracle.mask_rows(batch["attention_mask"]))
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(decompress(packed[[1, 0]]), oracle.take_rows(batch, [1, 0]))


# -------------------------------------------------------------------- outputs of a worker


def test_like_gives_the_missing_masks() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    nested = nest_batch_by_mask(batch, pad_token_id=0)
    out = TensorDict({"values": batch["advantages"] * 2 + 0.0, "entropys": batch["advantages"].abs()}, [6])
    jagged = TensorDict({"values": nested["advantages"] * 2}, [6])
    for like in (packed, nested):
        small = compress(out, like=like, strict_mask_nesting=True)
        assert_same_batch(decompress(small), out)
        assert small.lengths("response").tolist() == packed.lengths("response").tolist()
        assert_same_tensor(decompress(compress(jagged, like=like))["values"], out["values"])
    with pytest.raises(CoverageError):
        compress(out, strict_mask_nesting=True)


@quiet
def test_like_of_other_rows() -> None:
    packed = compress(rollout(), pad_token_id=0)
    out = TensorDict({"values": torch.zeros(3, 8)}, [3])
    with pytest.raises(LayoutError, match=r'field "values" is \(3, 8\); mask "response" is \(6, 8\)'):
        compress(out, like=packed)
    assert_same_batch(decompress(compress(out, like=packed[:3])), out)


def test_like_must_be_packed_or_nested() -> None:
    with pytest.raises(LayoutError, match="compress: "):
        compress(TensorDict({"values": torch.zeros(6, 8)}, [6]), like=rollout())


# -------------------------------------------------------------------- the wire


@quiet
@given(batches())
def test_pickle_with_and_without_buffers(case: Case) -> None:
    packed = compress(case.batch, **case.options)
    assert_same_batch(decompress(pickle.loads(pickle.dumps(packed))), case.batch)
    there, _ = travelled(packed)
    assert_same_batch(decompress(there), case.batch)
    assert there.nbytes == packed.nbytes
    back, _ = travelled(there)
    assert_same_batch(decompress(back), case.batch)


@quiet
@given(batches(), st.sampled_from(["padded", "nested"]))
def test_what_decompress_returns_is_writable_and_its_own(case: Case, layout: Any) -> None:
    there, held = travelled(compress(case.batch, **case.options))
    before = [bytes(part) for part in held]
    out = decompress(there, layout=layout)
    scribble(out)
    assert held == before
    assert_same_batch(decompress(there), case.batch)
    local = compress(case.batch, **case.options)
    scribble(decompress(local, layout=layout))
    assert_same_batch(decompress(local), case.batch)


def test_a_nested_batch_owns_its_offsets() -> None:
    batch = rollout()
    packed = compress(batch, pad_token_id=0)
    out = decompress(packed, layout="nested")
    out["input_ids"].offsets().zero_()
    assert_same_batch(decompress(packed), batch)
    assert_same_batch(unnest(decompress(packed, layout="nested")), batch)


@quiet
@given(batches(dtypes=strategies.PLAIN_DTYPES))
def test_a_packed_batch_owns_its_bytes(case: Case) -> None:
    for nest in (False, True):
        batch = oracle.map_tensors(case.batch, oracle.copy)
        if nest:
            batch = nest_batch_by_mask(batch, **case.options)
        packed = compress(batch, **case.options)
        scribble(batch.exclude(LAYOUTS))
        assert_same_batch(decompress(packed), case.batch)


@pytest.mark.filterwarnings("error")
def test_read_only_buffers_give_no_warning() -> None:
    there, _ = travelled(compress(rollout(), pad_token_id=0))
    decompress(there)
    decompress(there, layout="nested")


def test_bytes_travel_out_of_band() -> None:
    batch = rollout(64, 100, 400)
    packed = compress(batch.exclude("uid"), pad_token_id=0)
    in_band, out_of_band = size(packed)
    assert packed.nbytes <= out_of_band < packed.nbytes + 2048
    assert in_band < 8192
    assert in_band < size(compress(rollout(512, 100, 400).exclude("uid"), pad_token_id=0))[0] + 512


def test_a_slice_carries_its_own_bytes_only() -> None:
    packed = compress(rollout(64, 100, 400).exclude("uid"), pad_token_id=0)
    whole_in, whole = size(packed)
    tokens = packed.lengths("sequence")
    for part in (packed[8:16], packed.chunk(8)[1], packed.split(8)[1], packed.select(list(range(8, 16)))):
        share = tokens[8:16].sum() / tokens.sum()
        part_in, part_out = size(part)
        assert part_in <= whole_in + 256
        assert part_out < whole * share * 1.3 + 1024
        assert part.nbytes < packed.nbytes * share * 1.3 + 1024
    sizes = [size(part)[1] for part in packed.chunk(8)]
    assert sum(sizes) < whole * 1.05 + 8 * 512
    assert size(packed[0:0])[1] < 512
    assert len(pickle.dumps(packed[0:1])) < whole_in + 2 * whole * tokens[0] / tokens.sum() + 2048


def test_a_slice_of_neighbouring_rows_is_a_view() -> None:
    packed = compress(rollout(16, 20, 80), pad_token_id=0)
    part = packed[4:8]
    for path, field in packed.fields.items():
        whole, some = getattr(field, "words", None), getattr(part.fields[path], "words", None)
        if whole is not None:
            assert np.shares_memory(whole, some), path


def test_nbytes_is_below_the_fill_ratio() -> None:
    batch = rollout(32, 64, 512)
    packed = compress(batch, pad_token_id=0)
    padded = sum(x.numel() * x.element_size() for x in tensors(batch))
    fill = oracle.mask_rows(batch["attention_mask"])
    ratio = sum(oracle.lengths(fill)) / (len(fill) * len(fill[0]))
    assert 0 < packed.nbytes < padded * ratio
    assert packed[:8].nbytes < packed.nbytes
    assert compress(TensorDict({}, [3])).nbytes == 0


def test_masks_of_many_runs_stay_small() -> None:
    mask = (torch.arange(4096) % 2)[None].repeat(8, 1)
    batch = TensorDict({"attention_mask": mask, "responses": torch.zeros(8, 4096, dtype=torch.int64)}, [8])
    batch["response_mask"] = mask
    packed = compress(batch.exclude("responses"))
    assert_same_batch(decompress(packed), batch.exclude("responses"))
    assert packed.nbytes < mask.numel() * 8


# -------------------------------------------------------------------- the errors


def test_an_integer_is_no_row_selection() -> None:
    packed = compress(rollout(), pad_token_id=0)
    for row in (2, np.int64(2)):
        with pytest.raises(LayoutError) as caught:
            packed[row]  # type: ignore[index]
        assert str(caught.value) == (
            "PackedBatch: the index is the whole number 2; expected rows. Take one row as a slice: packed[2 : 2 + 1]."
        )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([6], "rows run from 6 to 6; the batch has 6 rows. Choose rows inside the batch"),
        ([-7, 0], "rows run from -7 to 0; the batch has 6 rows"),
        ([0.5], r"rows are float64 \(1,\); expected whole numbers"),
        ([[0, 1]], r"rows are int64 \(1, 2\); expected whole numbers"),
        ([True, False], r"row mask is \(2,\); expected \(6,\). Give one true or false for each row"),
        (torch.ones(6, 1, dtype=torch.bool), r"row mask is \(6, 1\); expected \(6,\)"),
        (["u1"], "expected whole numbers"),
    ],
)
def test_wrong_rows(rows: Any, message: str) -> None:
    packed = compress(rollout(), pad_token_id=0)
    with pytest.raises(LayoutError, match=rf"^PackedBatch\.select: .*{message}"):
        packed[rows]


def test_wrong_parts() -> None:
    packed = compress(rollout(), pad_token_id=0)
    for wrong, message in (
        (0, "size is 0; expected at least 1"),
        ([3, 2], r"sizes \[3, 2\] sum to 5; the batch has 6 rows. Give sizes that sum"),
        ([7, -1], r"sizes \[7, -1\] sum to 6"),
    ):
        with pytest.raises(LayoutError, match=rf"^PackedBatch\.split: {message}"):
            packed.split(wrong)
    with pytest.raises(LayoutError, match=r"^PackedBatch\.chunk: parts is 0; expected at least 1. Give a positive"):
        packed.chunk(0)


@quiet
def test_what_cannot_be_joined() -> None:
    packed = compress(rollout(), pad_token_id=0)
    with pytest.raises(LayoutError, match=r"^PackedBatch\.cat: no batches; expected at least one"):
        PackedBatch.cat([])
    with pytest.raises(LayoutError, match=r"^PackedBatch\.cat: fields \['advantages'\] are not in every batch"):
        PackedBatch.cat([packed, compress(rollout().exclude("advantages"), pad_token_id=0)])
    with pytest.raises(LayoutError, match=r'layout "sequence" is \[12, 13\] wide; expected one width. Pad the'):
        PackedBatch.cat([packed, compress(rollout(response=9), pad_token_id=0)])
    half = rollout()
    half["advantages"] = half["advantages"].half()
    with pytest.raises(LayoutError, match=r"\"advantages\" has dtypes \['float32', 'float16'\]; expected one. Cast"):
        PackedBatch.cat([packed, compress(half, pad_token_id=0)])


@quiet
def test_fields_of_different_shape_are_not_joined() -> None:
    cases = [
        [TensorDict({"unknown": torch.zeros(2, width)}, [2]) for width in (3, 4)],
        [TensorDict({"unknown": torch.zeros(2, *more)}, [2]) for more in ((3,), (3, 1))],
        [TensorDict({"m": torch.ones(2, 2), "x": torch.zeros(2, 2, *more)}, [2]) for more in ((3,), (4,))],
        [
            TensorDict({"unknown": torch.zeros(2, 3)}, [2]),
            TensorDict({"unknown": TensorDict({"a": torch.zeros(2)}, [2])}, [2]),
        ],
        [
            TensorDict({"unknown": torch.zeros(2, 3)}, [2]),
            TensorDict({"unknown": NonTensorData(1, batch_size=[2])}, [2]),
        ],
    ]
    registry = {"x": MaskNestingSpec("m"), "m": MaskNestingSpec("m")}
    for parts in cases:
        with pytest.raises(LayoutError, match=r"^PackedBatch\.cat: "):
            PackedBatch.cat([compress(part, registry=registry) for part in parts])


def test_wrong_arguments() -> None:
    packed = compress(rollout(), pad_token_id=0)
    with pytest.raises(LayoutError, match=r"^decompress: layout is 'jagged'; expected \"padded\" or \"nested\""):
        decompress(packed, layout="jagged")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r'^decompress: no field "gone" in the batch; it has .*advantages'):
        decompress(packed, "gone")
    with pytest.raises(LayoutError, match=r"^compress: the batch is a dict; expected a TensorDict"):
        compress({})  # type: ignore[arg-type]
    with pytest.raises(RegistryError, match=r"^compress: .*Pass pad_token_id=tokenizer"):
        compress(rollout())
    with pytest.raises(RegistryError, match=r"^compress: verify is 'often'; expected one of always, first, never"):
        compress(rollout(), pad_token_id=0, verify="often")  # type: ignore[arg-type]


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    packed = compress(rollout(), pad_token_id=0)
    with pytest.raises(LayoutError, match=r"decompress: .*cuda"):
        decompress(packed, device="cuda")


def test_immutable() -> None:
    packed = compress(rollout(), pad_token_id=0)
    with pytest.raises(AttributeError):
        packed.num_rows = 3  # type: ignore[misc]
    assert "rows=6" in repr(packed)
    assert f"{packed.nbytes:,}" in repr(packed)


def test_registry_of_the_caller() -> None:
    batch = rollout()
    batch["extra"] = batch["advantages"] * 3 + 0.0
    registry = RL_FIELDS | {"extra": MaskNestingSpec("response")}
    assert_same_batch(decompress(compress(batch, registry=registry, pad_token_id=0, strict_mask_nesting=True)), batch)
