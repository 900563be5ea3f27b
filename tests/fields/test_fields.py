"""Every row of the table of RL fields, its variants and the other layouts that a registry can say, there and back."""

from __future__ import annotations

import warnings

import pytest
import torch
from samples import (
    PAD,
    PROMPT,
    RESPONSE,
    RESPONSE_FIELDS,
    ROWS,
    assert_same,
    field,
    freeze,
    of,
    positions,
    real_positions,
    row_list,
    tokens,
)
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack.nesting.check import COVERAGE

B = len(ROWS)
INT, FLOAT, BF16 = torch.int64, torch.float32, torch.bfloat16


def round_trips(batch, registry=mp.RL_FIELDS, *, pad_token_id=PAD, strict=True, **options):
    """All ways there and back; returns the nested form. Anything that would travel dense is an error."""
    before = freeze(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mp.errors.MaskpackWarning)
        nested = mp.nest_batch_by_mask(
            batch, registry, pad_token_id=pad_token_id, strict_mask_nesting=strict, **options
        )
        packed = mp.compress(batch, registry=registry, pad_token_id=pad_token_id, strict_mask_nesting=strict, **options)
        repacked = mp.compress(nested, registry=registry, pad_token_id=pad_token_id, **options)
        again = mp.nest_batch_by_mask(nested, registry, pad_token_id=pad_token_id, **options)
    unpacked = mp.decompress(packed, format="nested")
    assert_same(mp.unnest_batch_by_mask(nested), batch)
    assert_same(mp.unnest_batch_by_mask(again), batch)
    assert_same(mp.decompress(packed), batch)
    assert_same(mp.unnest_batch_by_mask(unpacked), batch)
    assert_same(mp.decompress(repacked), batch)
    assert_same(mp.unnest_batch_by_mask(mp.decompress(repacked, format="nested")), batch)
    assert freeze(unpacked.exclude("_maskpack")) == freeze(nested.exclude("_maskpack"))
    assert freeze(batch) == before
    return nested


def check_rows(nested, padded, mask, dim=1):
    """The jagged rows are the real elements of the padded field."""
    assert nested.is_nested
    for b, row in enumerate(row_list(nested)):
        real = [s for s, on in enumerate(mask[b]) if on]
        columns = padded[b].movedim(dim - 1, 0)
        assert freeze(row) == freeze(columns[real])


# -------------------------------------------------------------------- the table

MASKS = (INT, torch.bool, FLOAT, BF16)
EXPERTS = ((torch.int16, 0), (INT, -1), (torch.uint8, 0), (torch.int16, -1))


@pytest.mark.parametrize("turn", range(4))
def test_every_field(turn):
    """In one batch; with dtypes, and axes, pads and sections where a field may have others, in turn."""
    dtype = (INT, torch.int32, torch.bool, FLOAT)[turn]
    floats = ("response", FLOAT, 0) if turn % 2 else ("sequence", BF16, 0)
    table = dict.fromkeys(RESPONSE_FIELDS, (*floats, ())) | {
        "prompts": ("prompt", INT, PAD, ()),
        "responses": ("response", INT, PAD, ()),
        "input_ids": ("sequence", INT, PAD, ()),
        "response_mask": ("response", dtype, 0, ()),
        "loss_mask": ("sequence" if turn == 3 else "response", dtype, 0, ()),
        "routed_experts": ("sequence", *EXPERTS[turn], (3, 2)),
        "teacher_ids": ("sequence", torch.int32, PAD, (4,)),
        "teacher_logprobs": ("sequence", FLOAT, 0, (4,)),
    }
    data = {name: of(*case, seed=5) for name, case in table.items()}
    data["attention_mask"] = tokens(mask=MASKS[turn])["attention_mask"]
    text = positions(data["attention_mask"])
    data["position_ids"] = torch.stack([text, *(text * part for part in range(2, 4 + turn % 2))], 1) if turn else text
    dense = {"reward_baselines": torch.rand(B), "dummy_tensor": torch.zeros(B, 1, dtype=torch.uint8)}
    assert {*data, *dense} == set(mp.RL_FIELDS) - {"multi_modal_inputs", "global_token_num"}
    batch = TensorDict({**data, **dense}, batch_size=[B])
    assert not {one.kind for one in mp.check(batch, pad_token_id=PAD)} & {*COVERAGE}
    nested = round_trips(batch)
    for name, value in data.items():
        mask = real_positions(table.get(name, ("sequence",))[0], ROWS, PROMPT, RESPONSE)
        check_rows(nested[name], value, mask, dim=2 if turn and name == "position_ids" else 1)
    assert mp.compress(batch, pad_token_id=PAD).nbytes < sum(x.numel() * x.element_size() for x in data.values())


# -------------------------------------------------------------------- where the columns split


def numbered(rows=((2, 1), (0, 3), (3, 2), (1, 0)), prompt=3, response=4, **numbers):
    """attention_mask (B, 7) and old_log_probs (B, 4), with numbers that tell where the columns split."""
    data = tokens(rows, prompt, response)
    on = real_positions("response", rows, prompt, response)
    batch = TensorDict({"attention_mask": data["attention_mask"], "old_log_probs": field(on, FLOAT)}, [len(rows)])
    for name, number in numbers.items():
        batch[name] = NonTensorData(number, batch_size=batch.batch_size)
    return batch, on


@pytest.mark.parametrize(
    "numbers",
    [
        {"max_prompt_length": 3},
        {"max_response_length": 4},
        {"max_prompt_length": 3, "max_response_length": 4},
        {"max_prompt_length": 3, "max_response_length": 9},
    ],
    ids=str,
)
def test_numbers_tell_where_the_columns_split(numbers):
    """That of the prompts decides if both are there: responses may be shorter than the longest that is allowed."""
    batch, on = numbered(**numbers)
    check_rows(round_trips(batch)["old_log_probs"], batch["old_log_probs"], on)


@pytest.mark.parametrize("splitter", ["prompts", "responses", "response_mask"])
@pytest.mark.parametrize("numbers", [{"max_prompt_length": 6}, {"max_prompt_length": 6, "max_response_length": 9}])
def test_a_field_tells_better_than_a_number_where_the_columns_split(splitter, numbers):
    batch, on = numbered(**numbers)
    axis = "prompt" if splitter == "prompts" else "response"
    batch[splitter] = field(
        real_positions(axis, ((2, 1), (0, 3), (3, 2), (1, 0)), 3, 4), INT, PAD if splitter != "response_mask" else 0
    )
    check_rows(round_trips(batch)["old_log_probs"], batch["old_log_probs"], on)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (
            {"max_prompt_length": 2, "max_response_length": 4},
            '"max_prompt_length" is 2 wide and "max_response_length" 4',
        ),
        ({"max_prompt_length": 8}, "at 8; expected a split inside the mask"),
        ({"max_response_length": 8}, "at -1; expected a split inside the mask"),
        ({"max_prompt_length": 2}, r'"old_log_probs" is \(4, 4\)'),
    ],
    ids=str,
)
def test_numbers_that_cannot_split_the_columns_are_refused(numbers, message):
    with pytest.raises(mp.errors.LayoutError, match=message):
        mp.compress(numbered(**numbers)[0])


# -------------------------------------------------------------------- other layouts that the registry can say


def test_lengths_instead_of_a_mask():
    lengths, width = [3, 0, 7, 5], 9
    mask = [[s < n for s in range(width)] for n in lengths]
    batch = TensorDict(
        {
            "input_ids": field(mask, INT, PAD),
            "input_lengths": torch.tensor(lengths),
            "token_mask": field(mask, torch.int32),
            "generation_logprobs": field(mask, FLOAT),
            "sample_mask": torch.ones(4),
        },
        batch_size=[4],
    )
    axes = {"sequence": mp.MaskAxis("input_lengths", form="lengths", head=("input_ids", "token_mask"))}
    fields = {
        "input_ids": mp.MaskNestingSpec("sequence", mp.PAD_TOKEN_ID),
        "token_mask": mp.MaskNestingSpec("sequence", hints=("rle",)),
        "generation_logprobs": mp.MaskNestingSpec("sequence"),
    }
    registry = mp.MaskNestingRegistry(fields, axes)
    nested = round_trips(batch, registry)
    for name in fields:
        check_rows(nested[name], batch[name], mask)

    # A field that is added to the nested batch leaves the width as it was.
    nested["extra"] = nested["generation_logprobs"] * 2
    wider = registry | {"extra": mp.MaskNestingSpec("sequence")}
    restored = mp.unnest_batch_by_mask(mp.nest_batch_by_mask(nested, wider, pad_token_id=PAD))
    assert restored["extra"].shape == (4, width)
    assert_same(restored.select(*batch.keys()), batch)


def test_one_packed_tensor_with_cu_seqlens():
    batch = TensorDict(
        {
            "input_ids": torch.arange(7),
            "cu_seqlens": torch.tensor([0, 3, 3, 7], dtype=torch.int32),
            "routed_experts": torch.arange(42, dtype=torch.int16).view(7, 3, 2),
        },
        batch_size=[],
    )
    axes = {"packed": mp.MaskAxis("cu_seqlens", form="cu_seqlens")}
    fields = {"input_ids": mp.MaskNestingSpec("packed"), "routed_experts": mp.MaskNestingSpec("packed")}
    nested = round_trips(batch, mp.MaskNestingRegistry(fields, axes))
    assert [row.tolist() for row in row_list(nested["input_ids"])] == [[0, 1, 2], [], [3, 4, 5, 6]]


@pytest.mark.parametrize("key", ["collector.mask", ("collector", "mask")], ids=["dotted", "tuple"])
def test_time_axis(key):
    mask = [[s < n for s in range(5)] for n in (5, 1, 0, 3)]
    batch = TensorDict({}, batch_size=[4, 5])
    batch["observation"] = field(mask, FLOAT, 0, (3,))
    batch["next", "reward"] = field(mask, FLOAT, 0, (1,))
    batch["next", "done"] = field(mask, torch.bool, 0, (1,))
    batch[key] = torch.tensor(mask)
    names = ["observation", ("next", "reward"), ("next", "done"), key]
    registry = {name: mp.MaskNestingSpec(key) for name in names}
    nested = round_trips(batch, registry)
    for name in names:
        check_rows(nested[name], batch[name], mask)
    assert mp.decompress(mp.compress(batch, registry=registry)).batch_size == (4, 5)
