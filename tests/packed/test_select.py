"""PackedBatch.select: some fields of a packed batch, against the fields of the padded batch taken by a plain loop."""

from __future__ import annotations

import pickle
from typing import Any

import oracle
import pytest
import samples
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import assert_same_batch
from strategies import Case, batches
from tensordict import NonTensorData, TensorDict

from maskpack import PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")


def some(batch: Any, *keys: Any) -> Any:
    """The entries that are named or lie in one that is, in the order of the batch."""
    paths = [(key,) if isinstance(key, str) else key for key in keys]
    left = []
    for name, value in batch.items():
        below = [path[1:] for path in paths if path[0] == name]
        if not below:
            left.append(name)
        elif () not in below:
            batch = batch.clone(recurse=False).set(name, some(value, *below))
    return batch.exclude(*left)


def rollout() -> TensorDict:
    """`input_ids` is the concat of `prompts` and `responses`; `returns` equals `advantages`."""
    batch = samples.rollout().exclude("global_token_num")
    batch["returns"] = batch["advantages"].clone()
    rows = len(batch)
    batch["uid"] = NonTensorData("one", batch_size=[rows])
    batch["sub"] = TensorDict({"a": torch.arange(rows), "b": TensorDict({"c": torch.ones(rows, 2)}, [rows])}, [rows])
    return batch


def pack(batch: TensorDict) -> PackedBatch:
    return compress(batch, pad_token_id=samples.PAD)


@pytest.mark.parametrize("rows", [None, 0, 1, 3, 50])
def test_fields_of_a_batch_whose_rows_are_no_batch_dim(rows: Any) -> None:
    """They have one element, whatever the rows of a sub-batch are."""
    batch = TensorDict({"x": torch.arange(8.0).view(4, 2), "y": torch.ones(2)}, [])
    if rows is not None:
        batch["s"] = TensorDict({"z": torch.rand(rows, 2)}, [rows])
    packed = compress(batch)
    parts = packed.narrow("x", 1, 1, dim=1), packed.narrow("x", 1, 2, dim=0).select("x")
    wanted = batch.clone().set("x", batch["x"][:, 1:]), TensorDict({"x": batch["x"][1:3]}, [])
    for seen, want in zip((packed.select("x"), *parts), (batch.select("x"), *wanted), strict=True):
        assert seen.nbytes > 0
        for sent in (seen, seen.own(), pickle.loads(pickle.dumps(seen)), PackedBatch.from_bytes(seen.to_bytes())):
            assert_same_batch(decompress(sent), want)


@given(batches(), st.data())
def test_selected_fields_are_those_of_the_batch(case: Case, data: st.DataObject) -> None:
    """Of any depth, in any order, before rows are moved and after. fuzz_rows.py moves them in other ways."""
    packed = compress(case.batch, **case.options)
    paths = [form.path for form in packed.schema.forms]
    assume(paths)
    names = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4))
    seen = packed.select(*names)
    want = some(case.batch, *names)
    assert_same_batch(decompress(seen), want)
    assert_same_batch(decompress(packed), case.batch)
    assert_same_batch(unnest(decompress(seen, format="nested")), want)
    assert_same_batch(decompress(PackedBatch.from_bytes(seen.to_bytes(allow_pickle=True), allow_pickle=True)), want)
    rows = data.draw(st.lists(st.integers(0, case.rows - 1), max_size=4)) if case.rows else []
    for own in (seen[rows], packed[rows].select(*names)):
        assert_same_batch(decompress(own), oracle.take_rows(want, rows))
    joined = [
        PackedBatch.cat([seen, packed[rows].select(*names)]),
        PackedBatch.cat([packed, packed[rows]]).select(*names),
    ]
    for own in joined:
        assert_same_batch(decompress(own), oracle.take_rows(want, [*range(case.rows), *rows]))


def test_what_follows_from_fields_that_are_left_out_is_stored() -> None:
    batch = rollout()
    packed = pack(batch)
    ids, returns = ("input_ids",), ("returns",)
    assert packed.table.kind(packed.numbers[ids]) == "concat"
    entries = packed.table.fields[[packed.numbers[path] for path in (returns, ("advantages",))]]
    assert entries[0] == entries[1], "which are stored once"
    record = 9  # of a pad
    parts = packed.select("prompts", "responses").nbytes - 2 * record
    for names in (["input_ids"], ["input_ids", "prompts"], ["input_ids", "prompts", "responses"]):
        assert packed.select(*names).nbytes == parts + len(names) * record
    alone = packed.select("returns").nbytes
    assert alone == packed.select("advantages").nbytes == packed.select("advantages", "returns").nbytes - 5
    assert alone + parts < packed.nbytes
    whole = len(packed.to_bytes(allow_pickle=True))
    for name in ("input_ids", "returns"):
        assert len(packed.select(name).to_bytes()) < whole - packed.nbytes / 2, "and nothing else travels"


def test_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(rollout())
    monkeypatch.setattr("maskpack.core.native.decode", None)
    monkeypatch.setattr("maskpack.core.native.encode", None)
    for names in (["responses", "returns", "sub", "uid"], ["input_ids"]):
        assert packed.select(*names).table.body is packed.table.body


def test_layouts_stay_for_lengths_and_like() -> None:
    batch = rollout()
    packed = pack(batch)
    seen = packed.select("uid")
    assert seen.lengths("response").tolist() == packed.lengths("response").tolist()
    again = compress(TensorDict({"values": batch["advantages"]}, [len(batch)]), like=seen)
    assert again.forms["values",].layout == packed.forms["advantages",].layout
    assert (seen.num_rows, seen.codec) == (packed.num_rows, packed.codec)
