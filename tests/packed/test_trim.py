"""decompress(widths="trim"): the columns that are real in any row, of each axis, against slices of the whole batch."""

from __future__ import annotations

import pytest
import torch
from samples import PAD, VARIANTS, assert_same, per_row, workload
from tensordict import NonTensorData, NonTensorStack, TensorDict

import maskpack as mp
from maskpack import unnest_batch_by_mask as unnest

P, R = 20, 50


def sliced(x, first, last):
    """The columns of the prompt, the response or the sequence axis between the first and the last real one."""
    if x.dim() < 2:
        return x
    dim = 2 if x.dim() == 3 and x.shape[2] == P + R else 1
    begin, end = {P + R: (first, last), P: (first, P), R: (0, last - P)}.get(x.shape[dim], (0, x.shape[dim]))
    return x.narrow(dim, begin, end - begin)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [list(range(12)), [3, 1], [5]])
def test_columns_that_are_real_in_any_row(variant, rows):
    batch = workload(variant, 12, P, R)
    packed = mp.compress(batch, pad_token_id=PAD).take(rows)
    whole = mp.decompress(packed)
    real = [column for column in range(P + R) if any(row[column] for row in whole["attention_mask"].tolist())]
    trimmed = mp.decompress(packed, widths="trim")
    assert list(trimmed.keys()) == list(whole.keys())
    for name, value in whole.items():
        if isinstance(value, torch.Tensor) and not value.is_nested:
            assert_same(trimmed[name], sliced(value, real[0], real[-1] + 1).contiguous())
    assert_same(mp.decompress(packed), whole)


def test_nested_rows_know_the_narrower_widths():
    batch = workload("reference", 12, P, R)
    packed = mp.compress(batch, pad_token_id=PAD)[2:5]
    assert_same(
        unnest(mp.decompress(packed, format="nested", widths="trim")),
        mp.decompress(packed, widths="trim"),
    )


def test_no_rows_and_no_tokens():
    batch = workload("reference", 3, P, R)
    packed = mp.compress(batch, pad_token_id=PAD)
    assert mp.decompress(packed[:0], widths="trim")["input_ids"].shape == (0, 0)
    empty = batch.apply(lambda x: torch.full_like(x, PAD) if x.dtype == torch.int64 else torch.zeros_like(x))
    for name in ("attention_mask", "response_mask", "position_ids"):
        empty[name] = torch.zeros_like(empty[name])
    assert mp.decompress(mp.compress(empty, pad_token_id=PAD), widths="trim")["responses"].shape == (3, 0)


def test_widths_that_are_none():
    packed = mp.compress(workload("reference", 2, P, R), pad_token_id=PAD)
    with pytest.raises(mp.errors.LayoutError, match=r"widths is 'trimmed'; expected \"padded\" or \"trim\""):
        mp.decompress(packed, widths="trimmed")


# -------------------------------------------------------------------- batch dims behind the rows

MASK = torch.tensor([[0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0]])
WIDTH, FIRST, LAST = 7, 1, 5
AXES = mp.MaskNestingRegistry(
    {
        "attention_mask": mp.MaskNestingSpec("attention_mask"),
        "ids": mp.MaskNestingSpec("attention_mask"),
        "states": mp.MaskNestingSpec("attention_mask", ragged_dim=2),
    }
)


def of_tokens(*more):
    """A field that is 0 where the mask is."""
    numbers = torch.arange(1, 1 + MASK.numel()).view(MASK.shape) * MASK
    return numbers if not more else numbers[..., None] * torch.arange(1, 1 + more[0])


def packed_of(entries, *dims):
    rows = next(iter(entries.values())).shape[0]
    return mp.compress(TensorDict(entries, batch_size=[rows, *dims]), registry=AXES)


def test_a_second_batch_dim_of_the_width_becomes_narrower():
    for rows in ([0, 1, 2], [0], [2], []):
        packed = packed_of({"attention_mask": MASK, "ids": of_tokens()}, WIDTH).take(rows)
        whole = mp.decompress(packed)
        real = [column for column in range(WIDTH) if any(MASK[row, column] for row in rows)] or [0, -1]
        trimmed = mp.decompress(packed, widths="trim")
        assert_same(trimmed, whole[:, real[0] : real[-1] + 1].contiguous())
        nested = mp.decompress(packed, format="nested", widths="trim")
        assert nested.batch_size == (len(rows),)
        assert_same(unnest(nested), trimmed)
        assert_same(mp.decompress(packed), whole)


def test_dims_between_the_rows_and_the_width_stay():
    states = of_tokens(2).movedim(2, 1).contiguous()
    for dims in ([3], [3, 2], [3, 2, WIDTH]):
        batch = TensorDict({"states": states}, batch_size=dims)
        packed = mp.compress(
            batch, registry=AXES, like=mp.compress(TensorDict({"attention_mask": MASK}, [3]), registry=AXES)
        )
        seen = mp.decompress(packed, widths="trim")
        wanted = TensorDict(
            {"states": states[..., FIRST:LAST].contiguous()}, [*dims[:2], *[LAST - FIRST] * (len(dims) == 3)]
        )
        assert_same(seen, wanted)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_sub_batches_follow_their_own_fields():
    inner = TensorDict({"ids": of_tokens()}, batch_size=[3, WIDTH])
    deep = TensorDict({"more": TensorDict({}, batch_size=[3, WIDTH, 2])}, batch_size=[3, WIDTH])
    outer = TensorDict({"attention_mask": MASK, "inner": inner, "kept": torch.ones(3, 2)}, batch_size=[3])
    seen = mp.decompress(mp.compress(outer, registry=AXES), widths="trim")
    assert (seen.batch_size, seen["inner"].batch_size) == ((3,), (3, LAST - FIRST))
    assert_same(seen["inner"]["ids"], of_tokens()[:, FIRST:LAST].contiguous())
    assert seen["kept"].shape == (3, 2)
    whole = TensorDict({"attention_mask": MASK, "deep": deep}, batch_size=[3, WIDTH])
    seen = mp.decompress(mp.compress(whole, registry=AXES), widths="trim")
    assert seen["deep"].batch_size == (3, LAST - FIRST)
    assert seen["deep"]["more"].batch_size == (3, LAST - FIRST, 2)


def test_objects_follow_too():
    batch = TensorDict({"attention_mask": MASK}, batch_size=[3, WIDTH])
    batch.set("one", NonTensorData({"x": 1}, batch_size=[3, WIDTH]))
    seen = mp.decompress(mp.compress(batch, registry=AXES), widths="trim")
    assert seen["one"] == {"x": 1}
    assert seen.get("one").batch_size == seen.batch_size == (3, LAST - FIRST)


def test_batch_dims_that_nothing_narrows_stay():
    batch = TensorDict({"attention_mask": torch.ones(3, WIDTH)}, batch_size=[3, WIDTH])
    batch.set("items", NonTensorStack(*[per_row(range(WIDTH)) for _ in range(3)]))
    packed = mp.compress(batch, registry=AXES)
    assert_same(mp.decompress(packed, widths="trim"), mp.decompress(packed))
    alone = mp.decompress(packed, "items", widths="trim")
    assert alone.batch_size == (3, WIDTH)


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_fields_that_would_differ_in_a_batch_dim_are_named():
    entries = {"attention_mask": MASK, "stray": torch.ones(3, WIDTH)}
    packed = packed_of(entries, WIDTH)
    for format in ("padded", "nested"):
        with pytest.raises(mp.errors.LayoutError) as caught:
            mp.decompress(packed, format=format, widths="trim")
        assert str(caught.value) == (
            'decompress: widths="trim" in a batch with batch dims (7,) behind its rows, of which its fields would keep '
            '"attention_mask" (4,), "stray" (7,); expected the same of each. Name fields of one axis, leave the widths '
            "padded, or give the TensorDict batch_size=[rows] before packing."
        )
    for name, columns in (("attention_mask", slice(FIRST, LAST)), ("stray", slice(None))):
        assert_same(mp.decompress(packed, name, widths="trim")[name], entries[name][:, columns].contiguous())
    assert_same(mp.decompress(packed), TensorDict(entries, batch_size=[3, WIDTH]))


def test_lists_of_an_item_for_each_column_are_named():
    batch = TensorDict({"attention_mask": MASK}, batch_size=[3, WIDTH])
    batch.set("items", NonTensorStack(*[per_row(range(WIDTH)) for _ in range(3)]))
    with pytest.raises(
        mp.errors.LayoutError, match=r'keep "attention_mask" \(4,\), the items of "items" \(7,\); expected'
    ):
        mp.decompress(mp.compress(batch, registry=AXES), widths="trim")
