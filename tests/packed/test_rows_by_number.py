"""Rows by number: programs of operations against lists, tokens of rows, and what memory they keep."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import fuzz_rows
import numpy as np
import pytest
import torch
from oracle import assert_same_batch
from samples import PAD, workload
from tensordict import TensorDict

import maskpack as mp
from maskpack import PackedBatch, compress, decompress
from maskpack.errors import FieldError, LayoutError
from maskpack.views import BatchView

SPANS = [(0, 0, 5), (3, 2, 9), (3, 4, 12), (3, 2, 9), (7, 4, 4), (1, 3, 10)]
FIELDS = ("input_ids", "attention_mask", "position_ids", "uid")


def packed_rows(rows: int = 8) -> tuple[TensorDict, PackedBatch]:
    batch = workload(rows=rows, prompt=24, response=100, fill=0.5, group=4)
    batch["uid"] = [f"row {row}" for row in range(rows)]
    return batch, compress(batch, pad_token_id=PAD)


@pytest.mark.parametrize("seed", range(0, 120, 40))
def test_programs_of_operations_on_rows(seed: int) -> None:
    for own in range(seed, seed + 40):
        fuzz_rows.play(own)


# -------------------------------------------------------------------- tokens


def assert_spans(out: TensorDict, batch: TensorDict, spans: list[tuple[int, int, int]]) -> None:
    assert len(out) == len(spans)
    for at, (row, start, stop) in enumerate(spans):
        valid = batch["attention_mask"][row].bool()
        for name in FIELDS[:-1]:
            assert torch.equal(out[name].unbind()[at], batch[name][row][valid][start:stop])
    assert list(out["uid"]) == [batch["uid"][row] for row, _, _ in spans]


def test_spans_are_given_in_any_form_and_take_few_bytes() -> None:
    """The programs above move them in all ways."""
    batch, packed = packed_rows()
    some = packed.select(*FIELDS)
    for rows in (some, BatchView.of(some)):
        for given in (SPANS, np.array(SPANS), torch.tensor(SPANS), []):
            cut = rows.take_tokens(given)
            seen = cut if rows is some else cut.to_packed()
            assert_spans(decompress(seen), batch, SPANS if len(given) else [])
        cut = rows.take_tokens(SPANS)
        assert cut.lengths("input_ids (jagged)").tolist() == [stop - start for _, start, stop in SPANS]
        assert cut.nbytes < rows.nbytes
    cut = some.take_tokens(SPANS)
    assert len(cut.to_bytes()) <= 1.05 * len(compress(decompress(cut)).to_bytes()) + 64
    responses = packed.select("old_log_probs", "response_mask").take_tokens([(2, 1, 4)], "response")
    valid = batch["response_mask"][2].bool()
    assert torch.equal(decompress(responses)["old_log_probs"].unbind()[0], batch["old_log_probs"][2][valid][1:4])


def test_fields_of_other_layouts_are_refused() -> None:
    _, packed = packed_rows()
    for rows in (packed, BatchView.of(packed)):
        with pytest.raises(LayoutError, match='field "prompts" has the layout "prompt"; expected fields of "sequence"'):
            rows.take_tokens(SPANS)
    nested = TensorDict({"m": torch.ones(2, 3), "sub": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
    own = compress(nested, registry={"m": mp.MaskNestingSpec("m"), ("sub", "x"): mp.MaskNestingSpec(None)})
    with pytest.raises(LayoutError, match='sub-batch "sub" has batch dims'):
        own.take_tokens([(0, 0, 1)], "m")


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        ([[0, 0, 99]], r"span 0 is tokens 0 to 99 of row 0, which has 4 tokens in layout"),
        ([[1, 0, 1], [0, 3, 2]], r"span 1 is tokens 3 to 2 of row 0"),
        ([[0, -1, 1]], r"tokens -1 to 1 of row 0"),
        ([[2, 0, 0]], r"tokens 0 to 0 of row 2, and the batch has 2 rows"),
        ([[-1, 0, 0]], r"of row -1, and the batch has 2 rows"),
        ([[1 << 31, 0, 0]], r"of row 2147483648, and the batch"),
        ([[0, 1]], r"spans are int64 \(1, 2\); expected whole numbers \(N, 3\)"),
        ([[0.0, 0, 1]], r"spans are float64 \(1, 3\)"),
        ([0, 0, 1], r"spans are int64 \(3,\)"),
    ],
)
def test_spans_that_are_not_there(spans: Any, said: str) -> None:
    batch = TensorDict({"m": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}, [2])
    packed = compress(batch, registry={"m": mp.MaskNestingSpec("m")})
    for rows in (packed, BatchView.of(packed)):
        with pytest.raises(LayoutError, match=said):
            rows.take_tokens(spans)
        with pytest.raises(FieldError, match='no layout ""'):
            rows.take_tokens([], "")


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_a_field_that_stayed_padded_is_that_of_the_row() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    batch = TensorDict({"m": mask, "x": torch.arange(8).reshape(2, 4), "y": mask * 7}, [2])
    packed = compress(batch, registry={name: mp.MaskNestingSpec("m") for name in "mxy"})
    cut = packed.take_tokens([(1, 0, 1), (0, 1, 3)])
    for own in (cut, PackedBatch.from_bytes(cut.to_bytes()), PackedBatch.cat([cut[:1], cut[1:]])):
        out = decompress(own)
        assert out["x"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
        assert [row.tolist() for row in out["y"].unbind()] == [[7], [7, 7]]


def test_spans_know_which_rows_they_are() -> None:
    """Fields are added to the same spans in the same order alone."""
    _, packed = packed_rows()
    view = BatchView.of(packed.select("input_ids", "position_ids"))
    cut = view.take_tokens([(0, 0, 4), (3, 0, 4), (5, 0, 4)])
    assert cut.select("input_ids").with_fields(cut.select("position_ids")).num_rows == 3
    with pytest.raises(LayoutError, match="Expected the same rows in the same order"):
        cut.select("input_ids").with_fields(cut[::-1].select("position_ids"))


# -------------------------------------------------------------------- memory


def test_rows_keep_their_body_alive_until_they_own_their_bytes() -> None:
    _, packed = packed_rows(64)
    some = packed.select("input_ids", "attention_mask")
    body = weakref.ref(packed.table.body)
    kept: dict[str, PackedBatch] = {
        "take": packed.take([3]),
        "slice": packed[5:6],
        "cat": PackedBatch.cat([packed[1:2], packed.take([7, 5])]),
        "select": some[2:3],
        "tokens": some.take_tokens([(3, 0, 4)]),
    }
    del packed, some
    while kept:
        gc.collect()
        assert body() is not None
        name, own = kept.popitem()
        before = decompress(own)
        alone = own.own()
        del own
        assert alone.table.body.nbytes < 8192, name
        assert_same_batch(decompress(alone), before)
    gc.collect()
    assert body() is None


def test_jagged_rows_that_are_joined_are_as_wide_as_the_longest() -> None:
    parts = [
        compress(
            TensorDict({"x": torch.nested.nested_tensor([torch.arange(n) for n in own], layout=torch.jagged)}, [2])
        )
        for own in ((3, 2), (9, 1))
    ]
    joined = PackedBatch.cat(parts)
    assert joined.frames == {name: (own.width, own.anchor) for name, own in joined.layouts.items()}
    assert [len(row) for row in decompress(joined)["x"].unbind()] == [3, 2, 9, 1]
