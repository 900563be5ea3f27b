"""decompress(widths="trim"): the columns that are real in any row, of each axis, against slices of the whole batch."""

from __future__ import annotations

import pytest
import torch
from samples import assert_same

import maskpack as mp
from bench.workloads import PAD_ID, VARIANTS, make_batch

P, R = 20, 50


def sliced(x, first, last):
    """The columns of the prompt, the response or the sequence axis between the first and the last real one."""
    if x.dim() < 2:
        return x
    dim = 2 if x.dim() == 3 and x.shape[2] == P + R else 1
    begin, end = {P + R: (first, last), P: (first, P), R: (0, last - P)}.get(x.shape[dim], (0, x.shape[dim]))
    return x.narrow(dim, begin, end - begin)


@pytest.mark.filterwarnings("ignore::maskpack.MaskpackWarning")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [list(range(12)), [3, 1], [5]])
def test_columns_that_are_real_in_any_row(variant, rows):
    batch = make_batch(variant, 12, prompt_width=P, response_width=R)
    packed = mp.compress(batch, pad_token_id=PAD_ID).select(rows)
    whole = mp.decompress(packed)
    real = [column for column in range(P + R) if any(row[column] for row in whole["attention_mask"].tolist())]
    trimmed = mp.decompress(packed, widths="trim")
    assert list(trimmed.keys()) == list(whole.keys())
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and not value.is_nested:
            assert_same(trimmed[name], sliced(value, real[0], real[-1] + 1).contiguous())
    assert_same(mp.decompress(packed), whole)


def test_nested_rows_know_the_narrower_widths():
    batch = make_batch("reference", 12, prompt_width=P, response_width=R)
    packed = mp.compress(batch, pad_token_id=PAD_ID)[2:5]
    assert_same(mp.unnest(mp.decompress(packed, layout="nested", widths="trim")), mp.decompress(packed, widths="trim"))


def test_no_rows_and_no_tokens():
    batch = make_batch("reference", 3, prompt_width=P, response_width=R)
    packed = mp.compress(batch, pad_token_id=PAD_ID)
    assert mp.decompress(packed[:0], widths="trim")["input_ids"].shape == (0, 0)
    empty = batch.apply(lambda x: torch.full_like(x, PAD_ID) if x.dtype == torch.int64 else torch.zeros_like(x))
    for name in ("attention_mask", "response_mask", "position_ids"):
        empty[name] = torch.zeros_like(empty[name])
    assert mp.decompress(mp.compress(empty, pad_token_id=PAD_ID), widths="trim")["responses"].shape == (3, 0)


def test_widths_that_are_none():
    packed = mp.compress(make_batch("reference", 2, prompt_width=P, response_width=R), pad_token_id=PAD_ID)
    with pytest.raises(mp.LayoutError, match=r"widths is 'trimmed'; expected \"canonical\" or \"trim\""):
        mp.decompress(packed, widths="trimmed")
