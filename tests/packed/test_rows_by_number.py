"""Rows by number: programs of operations against lists, tokens of rows, and what memory they keep."""

from __future__ import annotations

import gc
import pickle
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
from maskpack.errors import LayoutError
from maskpack.views import BatchMeta, BatchView

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


@pytest.mark.parametrize("format", ["padded", "nested"])
@pytest.mark.parametrize("where", ["here", "view", "reference"])
def test_spans_of_tokens_are_rows(where: str, format: Any) -> None:
    batch, packed = packed_rows()
    some = packed.select(*FIELDS)
    view = BatchView.at("away", BatchMeta.of(some)) if where == "reference" else BatchView.of(some)
    rows: Any = some if where == "here" else view

    def opened(own: Any) -> TensorDict:
        own = own if where == "here" else own.to_packed(get=lambda refs: [some for _ in refs])
        out = decompress(own, format=format)
        return out if format == "padded" else mp.unnest_batch_by_mask(out)

    for given in (SPANS, np.array(SPANS), torch.tensor(SPANS), []):
        assert_spans(opened(rows.take_tokens(given)), batch, SPANS if len(given) else [])
    cut = rows.take_tokens(SPANS)
    assert cut.lengths("input_ids (jagged)").tolist() == [stop - start for _, start, stop in SPANS]
    assert_spans(opened(cut[[5, 2, 2]]), batch, [SPANS[5], SPANS[2], SPANS[2]])
    assert_spans(opened(type(rows).cat([cut[:2], rows.take_tokens([(6, 0, 8)]), cut[3:]])), batch, [
        *SPANS[:2], (6, 0, 8), *SPANS[3:]
    ])  # fmt: skip
    assert_spans(opened(cut.take_tokens([(2, 1, 3), (0, 0, 5)])), batch, [(3, 5, 7), (0, 0, 5)])
    assert cut.nbytes < rows.nbytes


def test_spans_travel_as_rows_of_their_own() -> None:
    batch, packed = packed_rows()
    cut = packed.select(*FIELDS).take_tokens(SPANS)
    for own in (pickle.loads(pickle.dumps(cut)), PackedBatch.from_bytes(cut.to_bytes()), cut.own()):
        assert_spans(decompress(own), batch, SPANS)
    anew = compress(decompress(cut))
    assert len(cut.to_bytes()) <= 1.05 * len(anew.to_bytes()) + 64
    responses = packed.select("old_log_probs", "response_mask").take_tokens([(2, 1, 4)], "response")
    assert torch.equal(
        decompress(responses)["old_log_probs"].unbind()[0],
        batch["old_log_probs"][2][batch["response_mask"][2].bool()][1:4],
    )


def test_fields_of_other_layouts_are_refused() -> None:
    _, packed = packed_rows()
    for rows in (packed, BatchView.of(packed)):
        with pytest.raises(LayoutError, match='field "prompts" has the layout "prompt"; expected fields of "sequence"'):
            rows.take_tokens(SPANS)
    nested = TensorDict({"m": torch.ones(2, 3), "sub": TensorDict({"x": torch.ones(2, 3)}, [2, 3])}, [2])
    own = compress(nested, registry={"m": mp.MaskNestingSpec("m"), ("sub", "x"): mp.MaskNestingSpec(None)})
    with pytest.raises(LayoutError, match='sub-batch "sub" has batch dims'):
        own.take_tokens([(0, 0, 1)], "m")


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
