"""Figures: against naive sums over elements and over the arrays of the byte form, which is parsed here by itself."""

from __future__ import annotations

import dataclasses
import json
import warnings

import numpy as np
import pytest
import samples
import torch
from fuzz_wire import Pieces
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack import report
from maskpack.packed.file.codec import as_sent
from maskpack.packed.rows import Rows

LONG = ((40, 300), (60, 700), (3, 10), (0, 0), (60, 512))
WIDE = {"prompt": 64, "response": 768}


def pack(batch, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
        return mp.compress(batch, pad_token_id=samples.PAD, **more)


def naive_wire(packed):
    """Bytes of the arrays of the layouts and of each tensor in the byte form, and all of its bytes. An array of several
    tensors counts for the first."""
    data = packed.to_bytes()
    pieces = Pieces.of(data)
    sent = Rows.of(as_sent(packed.table, packed.codec), packed.schema)
    plain = dataclasses.replace(packed, rows=sent, codec=None).to_bytes()
    (layouts, entries, fields), line = (table := Pieces.of(plain).table)[:3], table[3:]
    stored = [line[14 * at : 14 * at + 14] for at in range(layouts)]
    entries = [line[14 * layouts + 16 * at :][:16] for at in range(entries)]
    line = line[14 * layouts + 16 * len(entries) :]
    places = {at: size * count for row in [*stored, *entries] for at, size, count in arrays_in(row[-9:])}
    records = [size * count for size, count in zip(line[fields + 1 :: 3], line[fields + 2 :: 3], strict=True)]
    sent = sum(records)
    if packed.codec is not None:
        body = [len(pieces.array(number)[2]) for number in pieces.manifest["body"]]
        sent = min(sent, body.pop()) if sent else 0  # the pads of all tensors are one array
        places = dict(zip(sorted(places), body, strict=True))

    def taken(rows):
        return sum(places.pop(at, 0) for row in rows for at, _, _ in arrays_in(row))

    def own(at):
        kind, first, second = entries[at][0], *entries[at][5:7]
        parts = [first] if kind in (4, 5, 8) else range(first, first + second) if kind == 6 else []
        return [entries[at][-9:], *(row for part in parts for row in own(part))]

    paths = [entry["path"][0] for entry in pieces.manifest["fields"] if "dtype" in entry]
    found = {"layouts": taken(row[-9:] for row in stored)}
    for number, path in enumerate(paths):
        begin, end = (sum(records[:at]) * sent // max(1, sum(records)) for at in (number, number + 1))
        found[path] = taken(own(line[number])) + end - begin
    return found, len(data)


def arrays_in(numbers):
    """The places of arrays that hold numbers: their begin, bytes of a number, numbers."""
    triples = [tuple(numbers[at : at + 3]) for at in range(0, len(numbers), 3)]
    return [place for place in triples if place[2]]


def sum_of_parts(metrics):
    parts = sum(size for name, size in metrics.items() if name.startswith("maskpack/field/") and "wire" in name)
    return parts + sum(metrics[f"maskpack/{part}_bytes"] for part in ("layouts", "objects", "header"))


def carried(packed):
    """Bytes of a pickle."""
    stream, buffers = samples.sent(packed)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def pickled_arrays(packed):
    """Bytes of the buffer of a pickle, in which the arrays of fields and layouts lie from multiples of 8 bytes on."""
    return packed.__reduce_ex__(5)[1][3].raw().nbytes


# -------------------------------------------------------------------- figures against naive sums


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("rows", [samples.ROWS, LONG, ()])
@pytest.mark.parametrize("some", [slice(None), slice(1, 4), [2, 0, 0]], ids=str)
def test_wire_bytes_are_those_of_the_byte_form(rows, some, codec):
    where = WIDE if rows is LONG else {}
    batch = samples.rollout(rows, objects=False, **where)
    batch["advantages"][:1, -1:] = -0.0
    packed = pack(batch, codec=codec)
    packed = packed[some] if rows else packed
    assert bool((packed.table.pads["count"] > 1).any()) == bool(rows)
    found = report(packed).metrics()
    arrays, total = naive_wire(packed)
    assert found["maskpack/header_bytes"] == total - sum(arrays.values())
    assert found["maskpack/layouts_bytes"] == arrays.pop("layouts")
    assert {name: found[f"maskpack/field/{name}/wire_bytes"] for name in arrays} == arrays
    assert [path[0] for path in packed.numbers] == list(arrays)
    assert found["maskpack/objects_bytes"] == 0
    assert found["maskpack/wire_bytes"] == sum_of_parts(found) == total
    assert found["maskpack/ratio"] == found["maskpack/padded_bytes"] / found["maskpack/wire_bytes"]


def test_objects_count_in_every_total():
    batch = samples.rollout()
    batch.set("images", samples.per_row([{"pixels": torch.zeros(b, 3, 50)} for b in range(len(samples.ROWS))]))
    packed = pack(batch)
    found, without = report(packed).metrics(), report(pack(batch.exclude("images"))).metrics()
    assert found["maskpack/objects_bytes"] == carried(packed.objects) > 21 * 150 * 4
    assert found["maskpack/wire_bytes"] == sum_of_parts(found)
    more = found["maskpack/objects_bytes"] - without["maskpack/objects_bytes"]
    for name in ("padded_bytes", "real_bytes"):
        assert found[f"maskpack/{name}"] == without[f"maskpack/{name}"] + more
    arrays = found["maskpack/wire_bytes"] - found["maskpack/objects_bytes"] - found["maskpack/header_bytes"]
    assert arrays == packed.nbytes - sum(array.nbytes for held in packed.objects.values() for array in held.arrays())
    assert arrays <= pickled_arrays(packed) < arrays + 8 * 60
    assert arrays + found["maskpack/objects_bytes"] < carried(packed) < found["maskpack/wire_bytes"], (
        "a pickle has no header"
    )
    batch.set("call", NonTensorData(lambda: 1, batch_size=[7]))  # only cloudpickle takes it
    assert report(pack(batch)).metrics()["maskpack/objects_bytes"] > found["maskpack/objects_bytes"]


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@given(batches())
def test_any_batch_adds_up(case: Case):
    packed = mp.compress(case.batch, **case.options)
    found = report(packed)
    arrays = sum(field.wire_bytes for field in found.fields) + found.layouts
    assert arrays == packed.table.nbytes <= pickled_arrays(packed) <= 1.1 * arrays + 8 * 500
    assert found.wire_bytes == arrays + found.objects + found.header
    tensors = {}
    for name, value in case.batch.items(True, True):
        if isinstance(value, torch.Tensor):
            tensors[name if isinstance(name, tuple) else (name,)] = value.values() if value.is_nested else value
    assert [field.path for field in found.fields] == list(tensors)
    masked = [field for field in found.fields if field.kind == "padded" and field.padded_bytes]
    real, whole = sum(field.real_bytes for field in masked), sum(field.padded_bytes for field in masked)
    assert found.fill == (real / whole if whole else 1.0)
    for field in found.fields:
        value = tensors[field.path]
        assert (field.dtype, field.shape) == (value.dtype, tuple(value.shape))
        assert field.padded_bytes == value.numel() * value.element_size()
        if field.path in case.nested and field.kind == "padded":
            known = case.nested[field.path]
            one = np.prod([size for dim, size in enumerate(value.shape) if dim not in (0, known.ragged_dim)], dtype=int)
            assert field.real_bytes == sum(map(sum, known.mask)) * one * value.element_size()
        else:
            assert field.real_bytes == field.padded_bytes


def test_kinds_shapes_and_encodings():
    batch = samples.rollout(objects=False)
    batch["position_ids"] = batch["position_ids"][:, None].repeat(1, 4, 1)
    batch["unknown"] = torch.randn(7, 3, 2, dtype=torch.complex128)
    batch["own"] = samples.jagged([torch.randn(b, 2) for b in range(7)])
    packed = pack(batch)
    found = {field.path[0]: field for field in report(packed).fields}
    assert list(found) == list(batch.keys())
    assert found["position_ids"].shape == (7, 4, 11)
    assert found["position_ids"].encoding == "rle"
    assert found["input_ids"].encoding == "concat"
    assert found["input_ids"].wire_bytes == 1 + 8  # the record of its pad
    assert (found["own"].kind, found["own"].shape, found["own"].padded_bytes) == ("jagged", (21, 2), 21 * 2 * 4)
    assert (found["unknown"].kind, found["unknown"].padded_bytes) == ("dense", 7 * 3 * 2 * 16)
    assert found["unknown"].real_bytes == found["unknown"].wire_bytes == 7 * 3 * 2 * 16
    assert found["unknown"].reason == "the registry does not know it"
    assert found["dummy_tensor"].kind == "dense"
    assert found["dummy_tensor"].reason is found["prompts"].reason is None


def test_rows_that_are_no_batch_dim():
    batch = TensorDict({"ids": torch.arange(7), "cu": torch.tensor([0, 3, 3, 7]), "x": torch.randn(7, 2)}, [])
    axes = {"packed": mp.MaskAxis("cu", form="cu_seqlens")}
    registry = mp.MaskNestingRegistry({name: mp.MaskNestingSpec("packed") for name in ("ids", "x")}, axes)
    packed = mp.compress(batch, registry=registry)
    found = {field.path[0]: field for field in report(packed).fields}
    sizes = [(field.kind, field.shape, field.padded_bytes, field.real_bytes) for field in found.values()]
    assert sizes == [("flat", (7,), 56, 56), ("dense", (4,), 32, 32), ("flat", (7, 2), 56, 56)]
    assert report(packed).metrics()["maskpack/fill"] == 1.0


def test_fields_whose_names_look_alike_are_kept_apart():
    batch = TensorDict({"a": {"b": torch.zeros(2, dtype=torch.int16)}, "a/b": torch.ones(2)}, [2])
    found = report(pack(batch)).metrics()
    assert found["maskpack/field/a/b/padded_bytes"] == 2 * 2
    assert found["maskpack/field/a\\/b/padded_bytes"] == 2 * 4
    assert found["maskpack/wire_bytes"] == sum_of_parts(found)


def test_an_array_of_two_fields_counts_once():
    batch = TensorDict({"a": torch.randn(50), "b": torch.randn(50)}, [50])
    packed = pack(batch)
    packed = dataclasses.replace(packed, rows=Rows.of(packed.table.select([0, 0]), packed.schema))
    found = report(packed).metrics()
    assert found["maskpack/wire_bytes"] == sum_of_parts(found) == len(packed.to_bytes())
    assert [found[f"maskpack/field/{name}/wire_bytes"] for name in "ab"] == [200, 0]


# -------------------------------------------------------------------- prefixes

PIECES = [[1000 + 100 * piece + token for token in range(16 + piece)] for piece in range(3)]
TREE = [(0, 1), (0, 1, 2), (0, 2), (), (1,), (0,), (0, 1, 2)]


def tree_rows(tree):
    return [[token for piece in row for token in PIECES[piece]] for row in tree]


def naive_counts(rows):
    """Tokens of rows, and those that are not the end of a new prefix."""
    total = sum(map(len, rows))
    return total, total - len({tuple(row[: k + 1]) for row in rows for k in range(len(row))})


def counts_of(packed):
    found = report(packed).metrics()
    return found.get("maskpack/tokens"), found.get("maskpack/shared_tokens")


def padded(rows, pad, side):
    """Lists of tokens as [B, 60], and their mask."""
    ids, mask = torch.full((len(rows), 60), pad), torch.zeros(len(rows), 60, dtype=torch.long)
    for b, row in enumerate(rows):
        begin = {"left": 60 - len(row), "right": 0, "both": (60 - len(row)) // 2}[side]
        ids[b, begin : begin + len(row)] = torch.tensor(row, dtype=torch.long)
        mask[b, begin : begin + len(row)] = 1
    return ids, mask


def tokens(rows, side="right", **more):
    ids, mask = padded(rows, samples.PAD, side)
    return TensorDict({"attention_mask": mask, "input_ids": ids, **more}, [len(rows)])


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=3), max_size=8), st.sampled_from(["left", "right", "both"]), st.data()
)
def test_shared_tokens_of_any_tree(tree, side, data):
    rows = [[token % 250 for token in row] for row in tree_rows(tree)]
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.uint32, torch.int64, torch.uint64]))
    batch = tokens(rows, side)
    batch["input_ids"] = torch.where(batch["attention_mask"] != 0, batch["input_ids"], 251).to(dtype)
    known = rows
    if data.draw(st.booleans()):  # which part rows of equal ids
        mask = batch["attention_mask"]
        late = torch.tensor([data.draw(st.integers(0, 1)) for _ in rows])[:, None] * (mask.cumsum(1) > 20)
        positions = (mask.cumsum(1) + late) * mask
        known = [[*zip(row, own[own > 0].tolist(), strict=True)] for row, own in zip(rows, positions, strict=True)]
        ways = [mask, mask, positions]
        batch["position_ids"] = torch.stack(ways, 1) if data.draw(st.booleans()) else positions
    nested = mp.nest_batch_by_mask(batch, pad_token_id=251)
    for form, codec in ((batch, None), (nested, None), (batch, "zstd")):
        packed = mp.compress(form, pad_token_id=251, codec=codec)
        assert counts_of(packed) == naive_counts(known)
    if rows:
        picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
        assert counts_of(packed[picked]) == naive_counts([known[row] for row in picked])


def test_shared_tokens_of_a_batch_from_a_device_that_is_not_here():
    packed = pack(tokens(tree_rows(TREE)))
    forms = tuple(dataclasses.replace(form, device="cuda:7") for form in packed.schema.forms)
    packed = dataclasses.replace(packed, schema=dataclasses.replace(packed.schema, forms=forms))
    assert counts_of(packed) == naive_counts(tree_rows(TREE))


def test_a_branch_of_few_tokens_is_not_shared():
    ids = list(range(1, 31))
    assert counts_of(pack(tokens([ids, [*ids[:15], 99], [*ids[:16], 99]]))) == (63, 16)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("input_ids", lambda batch: batch["input_ids"].float()),
        ("input_ids", lambda batch: samples.jagged([torch.ones(n) > 0 for n in batch["attention_mask"].sum(1)])),
        ("input_ids", lambda batch: batch["input_ids"][..., None].repeat(1, 1, 2)),
        ("input_ids", lambda batch: batch["input_ids"] + torch.arange(60)),  # several values under the mask
        ("input_ids", lambda batch: samples.jagged([torch.arange(3) for _ in batch])),  # rows of other lengths
        ("position_ids", lambda batch: batch["attention_mask"].float()),
        ("position_ids", lambda batch: torch.zeros(len(batch), 2, 2, 60, dtype=torch.long)),
        ("position_ids", lambda batch: torch.zeros(len(batch), dtype=torch.long)),
        ("input_ids", None),
    ],
)
def test_no_counts_without_token_ids(name, change):
    batch = tokens(tree_rows(TREE))
    assert counts_of(pack(batch)) != (None, None)
    batch = batch.exclude(name) if change is None else batch.set(name, change(batch))
    assert counts_of(pack(batch)) == (None, None)
    inside = TensorDict({"attention_mask": batch["attention_mask"], "sub": tokens(tree_rows(TREE))}, batch.batch_size)
    assert counts_of(pack(inside)) == (None, None)


# -------------------------------------------------------------------- the batch


def test_padded_bytes_are_those_of_the_batch_where_rows_were_widened():
    narrow, wide = samples.rollout(response=6, objects=False), samples.rollout(response=9, objects=False)
    joined = mp.PackedBatch.cat([pack(narrow), pack(wide)])
    assert report(joined).metrics()["maskpack/field/returns/padded_bytes"] == 14 * 9 * 4
    assert report(joined[:7]).metrics()["maskpack/field/returns/padded_bytes"] == 7 * 9 * 4


# -------------------------------------------------------------------- JSON


def test_json_says_what_report_says():
    batch = samples.rollout()
    batch["sub"] = batch.select("attention_mask", "responses")
    packed = pack(batch)
    said = json.loads(json.dumps(report(packed).to_dict(), allow_nan=False))
    found = report(packed).metrics()
    assert {type(value) for value in found.values()} == {int, float}
    for name in ("rows", "padded_bytes", "real_bytes", "wire_bytes", "ratio", "fill", "layouts_bytes"):
        assert said[name] == found.pop(f"maskpack/{name}"), name
    for name in ("objects_bytes", "header_bytes"):
        assert said[name] == found.pop(f"maskpack/{name}"), name
    for field in said["fields"]:
        for name in ("padded_bytes", "real_bytes", "wire_bytes"):
            assert field[name] == found.pop(f"maskpack/field/{'/'.join(field['path'])}/{name}")
        assert (
            torch.empty(0, dtype=getattr(torch, field["dtype"])).element_size() * np.prod(field["shape"])
            == (field["padded_bytes"])
        )
    assert found == {"maskpack/tokens": said["tokens"], "maskpack/shared_tokens": said["shared_tokens"]}
    assert (said["tokens"], said["shared_tokens"]) == (36, 0)


def test_rows_that_take_no_bytes_are_paid_for() -> None:
    packed = mp.compress(TensorDict({"s": torch.zeros(10_000)}, batch_size=[10_000]))
    assert report(packed).metrics()["maskpack/wire_bytes"] == len(packed.to_bytes())
