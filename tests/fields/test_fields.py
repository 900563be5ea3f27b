"""Every row of the table of RL fields, its variants and the other layouts that a registry can say, there and back."""

from __future__ import annotations

import warnings

import pytest
import torch
from samples import (
    EDGE,
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
    rollout,
    row_list,
    tokens,
)
from tensordict import NonTensorData, TensorDict

import maskpack as mp

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

TABLE = [
    ("prompts", INT, "prompt", PAD, ()),
    ("responses", INT, "response", PAD, ()),
    ("input_ids", INT, "sequence", PAD, ()),
    *[("attention_mask", dtype, "sequence", 0, ()) for dtype in (INT, torch.bool, FLOAT, BF16)],
    ("position_ids", INT, "sequence", EDGE, ()),
    *[(name, FLOAT, "response", 0, ()) for name in RESPONSE_FIELDS],
    *[(name, BF16, "sequence", 0, ()) for name in RESPONSE_FIELDS],
    *[("response_mask", dtype, "response", 0, ()) for dtype in (INT, torch.int32, torch.bool, FLOAT)],
    *[("loss_mask", dtype, "response", 0, ()) for dtype in (INT, torch.int32, torch.bool, FLOAT)],
    ("loss_mask", FLOAT, "sequence", 0, ()),
    *[("routed_experts", dtype, "sequence", 0, (3, 2)) for dtype in (torch.int16, INT, torch.uint8)],
    *[("routed_experts", dtype, "sequence", -1, (3, 2)) for dtype in (torch.int16, INT)],
    ("teacher_ids", torch.int32, "sequence", PAD, (4,)),
    ("teacher_logprobs", FLOAT, "sequence", 0, (4,)),
]


def named(case):
    name, dtype, axis, pad, trailing = case
    return f"{name}-{str(dtype).removeprefix('torch.')}-{axis}-{pad}{'x'.join(map(str, ('', *trailing)))}"


@pytest.mark.parametrize("case", TABLE, ids=named)
def test_every_field(case):
    name, dtype, axis, pad, trailing = case
    data = tokens(mask=dtype) if name == "attention_mask" else tokens()
    if name != "attention_mask":
        data[name] = of(axis, dtype, pad, trailing, seed=5)
    nested = round_trips(TensorDict(data, batch_size=[B]))
    check_rows(nested[name], data[name], real_positions(axis, ROWS, PROMPT, RESPONSE))


@pytest.mark.parametrize("sections", [3, 4])
@pytest.mark.parametrize("rows", [ROWS, ((2, 2),) * 4, ((1, 3),) * 3], ids=["ragged", "equal", "square"])
def test_mrope_position_ids(sections, rows):
    prompt, response = (PROMPT, RESPONSE) if rows is ROWS else rows[0]
    data = tokens(rows, prompt, response)
    text = positions(data["attention_mask"])
    mask = data["attention_mask"]
    vision = [(text * (row + 2)) for row in range(sections - 1)]
    data["position_ids"] = torch.stack([text, *vision], 1)
    assert data["position_ids"].shape == (len(rows), sections, prompt + response)
    nested = round_trips(TensorDict(data, batch_size=[len(rows)]))
    check_rows(nested["position_ids"], data["position_ids"], mask.bool().tolist(), dim=2)


# -------------------------------------------------------------------- whole batches


@pytest.mark.parametrize("values", [False, True], ids=["grpo", "ppo"])
@pytest.mark.parametrize("holes", [False, True], ids=["single-turn", "multi-turn"])
def test_whole_batch(values, holes):
    batch = rollout(values=values, holes=holes)
    nested = round_trips(batch)
    mask = real_positions("response", ROWS, PROMPT, RESPONSE)
    for name in ("response_mask", "token_level_scores", *(["values"] if values else [])):
        check_rows(nested[name], batch[name], mask)
    dense = sum(t.numel() * t.element_size() for t in batch.values() if isinstance(t, torch.Tensor))
    assert mp.compress(batch, pad_token_id=PAD).nbytes < dense


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
