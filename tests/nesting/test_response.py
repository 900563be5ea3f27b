"""The response axis, against loops over rows and columns: fields at the response width, and the one-token shift."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch
from samples import (
    PAD,
    PROMPT,
    RESPONSE,
    ROWS,
    assert_same,
    field,
    freeze,
    jagged,
    of,
    positions,
    real_positions,
    rollout,
    row_list,
    rows_of,
)
from tensordict import TensorDict

import maskpack as mp

B, S = len(ROWS), PROMPT + RESPONSE
PROMPTED = ((2, 3), (5, 6), (1, 0), (3, 4), (4, 1), (1, 6))
"""Rows with a prompt each, as extract_response needs where there is a response."""


def nest(batch):
    return mp.nest_batch_by_mask(batch, pad_token_id=PAD)


FORMS = {
    "padded": lambda batch: batch,
    "nested": nest,
    "unpacked": lambda batch: mp.decompress(mp.compress(batch, pad_token_id=PAD), format="nested"),
    "pickled": lambda batch: pickle.loads(pickle.dumps(nest(batch))),
    "mixed": lambda batch: nest(batch).set("old_log_probs", batch["old_log_probs"]),
}
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)

# -------------------------------------------------------------------- select_and_pad_to_response


@all_forms
@pytest.mark.parametrize("rows", [ROWS, PROMPTED, ((3, 0), (2, 1))], ids=["any", "prompts", "without a response"])
def test_fields_come_at_the_response_width(form, rows):
    """Fields of the sequence give their response columns: the right edge of a row without a response lies in its
    prompt. Without names, all fields of the response axis come."""
    batch = rollout(rows, PROMPT, RESPONSE, holes=True, values=True, objects=False)
    at_response = {name for name, value in batch.items() if value.shape[1:] == (RESPONSE,)}
    assert {"responses", "response_mask", "values"} < at_response
    batch["routed_experts"] = of("sequence", torch.int16, -1, (3, 2), rows=rows)
    batch["ref_log_prob"] = of("sequence", torch.float32, rows=rows)
    names = {*at_response, "input_ids", "attention_mask", "position_ids", "routed_experts"}
    source = form(batch)
    before = freeze(source)
    out = mp.select_and_pad_to_response(source, *names)
    assert freeze(source) == before
    assert out.batch_size == (len(rows),)
    assert set(out.keys()) == names
    for name in names:
        assert freeze(out[name]) == freeze(batch[name][:, -RESPONSE:]), name
    assert set(mp.select_and_pad_to_response(source).keys()) == at_response - {"ref_log_prob"}


@all_forms
def test_a_width_that_equals_a_feature_dim_is_not_mistaken(form):
    """(B, 4, S) with a response width of 4: dim 1 holds the sections, not the response."""
    batch = rollout(((2, 3), (1, 4)), 3, 4, objects=False)
    text = positions(batch["attention_mask"])
    batch["position_ids"] = torch.stack([text, text * 2, text * 3, text * 4], 1)
    out = mp.select_and_pad_to_response(form(batch), "position_ids")
    assert freeze(out["position_ids"]) == freeze(batch["position_ids"][:, :, 3:])


def test_a_field_added_to_a_nested_batch():
    batch = rollout(objects=False)
    nested = nest(batch)
    nested["ratio"] = (nested["old_log_probs"] - nested["ref_log_prob"]).exp()
    nested["entropys"] = nested["entropys"] * 2
    out = mp.select_and_pad_to_response(nested, "ratio", "entropys")
    ratio = (batch["old_log_probs"] - batch["ref_log_prob"]).exp()
    for b, (_, r) in enumerate(ROWS):
        ratio[b, r:] = 0
    assert freeze(out["ratio"]) == freeze(ratio)
    assert "ratio" in mp.select_and_pad_to_response(nested).keys()  # noqa: SIM118


def test_the_pad_of_an_added_field_comes_from_the_registry():
    nested = nest(rollout(objects=False))
    nested["labels"] = nested["responses"] * 1
    registry = mp.RL_FIELDS | {"labels": mp.MaskNestingSpec("response", -100)}
    out = mp.select_and_pad_to_response(nested, "labels", registry=registry)["labels"]
    for b, (_, r) in enumerate(ROWS):
        assert out[b, r:].tolist() == [-100] * (RESPONSE - r)
    tokens = mp.RL_FIELDS | {"labels": mp.MaskNestingSpec("response", mp.PAD_TOKEN_ID)}
    with pytest.raises(mp.errors.LayoutError, match=r'"labels" was added after nesting.*PAD_TOKEN_ID'):
        mp.select_and_pad_to_response(nested, "labels", registry=tokens)


@all_forms
def test_fields_come_in_the_order_asked_for(form):
    batch = rollout(objects=False)
    batch["more"] = TensorDict({}, [B])
    source = form(batch)
    for names in (("old_log_probs", "advantages", "responses"), ("responses", "reward_baselines", "old_log_probs")):
        assert tuple(mp.select_and_pad_to_response(source, *names).keys()) == names
        assert tuple(mp.select_and_pad_to_response(source, *names[::-1], names[0]).keys()) == names[::-1]


WIDE = ("responses", "old_log_probs", "advantages", "position_ids", "input_ids", "reward_baselines")


@all_forms
@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_width_is_that_of_the_run(form, more):
    """By an argument, and by the number that the batch has; against the batch whose rollout was padded to it."""
    wide = mp.select_and_pad_to_response(rollout(PROMPTED, PROMPT, RESPONSE + more, objects=False), *WIDE)
    batch = rollout(PROMPTED, PROMPT, RESPONSE, objects=False)
    source, run = form(batch), form(batch.clone().set_non_tensor("max_response_length", RESPONSE + more))
    assert_same(mp.select_and_pad_to_response(source, *WIDE, width=RESPONSE + more), wide)
    assert_same(mp.select_and_pad_to_response(run, *WIDE), wide)
    for rows in (slice(0, 2), slice(1, 2), slice(0, 0)):  # in row 1 all columns are tokens
        part = mp.select_and_pad_to_response(rows_of(run, rows), "old_log_probs", "position_ids")
        assert_same(part, wide[rows].select("old_log_probs", "position_ids"))
    assert mp.select_and_pad_to_response(run)["responses"].shape == (B - 1, RESPONSE + more)
    assert mp.select_and_pad_to_response(run, "responses", width=RESPONSE)["responses"].shape == (B - 1, RESPONSE)


@all_forms
def test_a_width_below_that_of_the_batch(form):
    batch = rollout(((2, 3), (1, 0)), PROMPT, RESPONSE, objects=False).set_non_tensor("max_response_length", 2)
    assert mp.select_and_pad_to_response(form(batch), "responses")["responses"].shape == (2, RESPONSE)
    out = mp.select_and_pad_to_response(form(batch), "responses", "position_ids", width=3)
    assert freeze(out["responses"]) == freeze(batch["responses"][:, :3])
    assert freeze(out["position_ids"]) == freeze(batch["position_ids"][:, PROMPT : PROMPT + 3])
    for width, message in (
        (2, "width is 2; the longest response ends at column 3"),
        (-1, "width is -1"),
        (True, "width"),
    ):
        with pytest.raises(mp.errors.LayoutError, match=f"select_and_pad_to_response: {message}"):
            mp.select_and_pad_to_response(form(batch), "responses", width=width)


def test_a_pad_of_further_columns_has_to_be_known():
    batch = rollout(((2, RESPONSE),), PROMPT, RESPONSE, objects=False)
    with pytest.raises(mp.errors.LayoutError, match='"responses" has pad PAD_TOKEN_ID, whose value is not known'):
        mp.select_and_pad_to_response(batch, "responses", width=RESPONSE + 1)
    out = mp.select_and_pad_to_response(nest(batch), "responses", width=RESPONSE + 2)
    assert out["responses"][0, RESPONSE:].tolist() == [PAD, PAD]


def test_columns_of_an_axis_of_lengths_are_not_those_of_the_sequence():
    """Rows are padded on the right as a whole, so the last columns of the sequence are other tokens."""
    axes = {
        "sequence": mp.MaskAxis("lengths", form="lengths", head=("input_ids",)),
        "response": mp.MaskAxis("response_lengths", form="lengths", head=("scores",)),
    }
    registry = mp.MaskNestingRegistry(
        {"input_ids": mp.MaskNestingSpec("sequence"), "scores": mp.MaskNestingSpec("response")}, axes
    )
    ids = torch.tensor([[1, 2, 3, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    batch = TensorDict({"input_ids": ids, "lengths": torch.tensor([3, 6])}, [2])
    batch["scores"], batch["response_lengths"] = torch.tensor([[1.0, 0, 0], [1, 2, 3]]), torch.tensor([1, 3])
    for form in (batch, mp.nest_batch_by_mask(batch, registry)):
        out = mp.select_and_pad_to_response(form, "scores", registry=registry)
        assert freeze(out["scores"]) == freeze(batch["scores"])
        with pytest.raises(mp.errors.LayoutError, match='"input_ids" is on the sequence axis, whose last 3 columns'):
            mp.select_and_pad_to_response(form, "input_ids", registry=registry)
        assert mp.extract_response(form, ids.float(), registry=registry).tolist() == [[2, 0, 0], [3, 4, 5]]


def test_select_errors():
    nested = nest(rollout(objects=False))
    nested["long"] = jagged([torch.zeros(RESPONSE + 1), *[torch.zeros(r) for _, r in ROWS[1:]]])
    nested["other"] = jagged([torch.zeros(1)] * B)
    nested["dense"] = torch.zeros(B, 3)
    before = freeze(nested)
    for name, message in (
        ("long", r'"long" has 7 tokens in row 0; the padded response width is 6'),
        ("other", r'"other" has 7 tokens in 7 rows under layout "response"; the responses have 20'),
        ("dense", r'"dense" is \(7, 3\); the response axis is \(7, 6\)'),
        ("missing", 'no field "missing"'),
    ):
        with pytest.raises(mp.errors.LayoutError, match=message):
            mp.select_and_pad_to_response(nested, name)
    assert freeze(nested) == before


def test_a_batch_without_a_response_axis():
    batch = rollout(objects=False).select("input_ids", "attention_mask", "old_log_probs")
    with pytest.raises(mp.errors.LayoutError, match="select_and_pad_to_response: the batch gives no response axis"):
        mp.select_and_pad_to_response(batch, "input_ids")
    with pytest.raises(mp.errors.LayoutError, match="extract_response: the batch gives no response axis"):
        mp.extract_response(batch, torch.zeros(B, S))
    responses = rollout(objects=False).select("responses", "response_mask")
    assert mp.select_and_pad_to_response(responses, "responses")["responses"].shape == (B, RESPONSE)
    with pytest.raises(mp.errors.LayoutError, match="extract_response: the batch gives no sequence axis"):
        mp.extract_response(responses, torch.zeros(B, S))


# -------------------------------------------------------------------- extract_response


def naive_places(mask, prompt):
    """For each row, (column of the response, column of the token before it) of every response token."""
    rows = []
    for line in mask:
        before, places = None, []
        for column, on in enumerate(line):
            if not on:
                continue
            if column >= prompt:
                places.append((column - prompt, before))
            before = column
        rows.append(places)
    return rows


def naive_rows(values, mask, prompt):
    """The outputs of each row that score its response tokens."""
    return [[values[b, before] for _, before in places] for b, places in enumerate(naive_places(mask, prompt))]


def naive_packed(values, mask):
    return torch.stack([values[b, s] for b, line in enumerate(mask) for s, on in enumerate(line) if on])


def shaped(kind, values, mask):
    """Padded model outputs in each form that a model may give."""
    packed = naive_packed(values, mask)
    if kind == "jagged":
        ends = torch.tensor([0, *(sum(line) for line in mask)]).cumsum(0)
        return torch.nested.nested_tensor_from_jagged(packed, ends)
    return {"padded": values, "packed": packed, "one row": packed[None]}[kind]


KINDS = ["jagged", "packed", "one row", "padded"]
MASK = real_positions("sequence", PROMPTED, PROMPT, RESPONSE)


@all_forms
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)], ids=str)
def test_extract_response(form, kind, trailing):
    """Of outputs in any form; gradients go to the tokens that score, and to no others."""
    batch = form(rollout(PROMPTED, PROMPT, RESPONSE, holes=True, objects=False))
    before = freeze(batch)
    values = torch.randn(len(PROMPTED), S, *trailing, requires_grad=True)
    out = mp.extract_response(batch, shaped(kind, values, MASK))
    assert freeze(batch) == before
    if kind == "padded":
        assert out.shape == (len(PROMPTED), RESPONSE, *trailing)
        rows = [out[b, :r] for b, (_, r) in enumerate(PROMPTED)]
        for b, (_, r) in enumerate(PROMPTED):
            assert freeze(out[b, r:]) == freeze(torch.zeros(RESPONSE - r, *trailing))
    else:
        assert out._get_max_seqlen() == RESPONSE
        rows = row_list(out)
    expected = naive_rows(values, MASK, PROMPT)
    assert [len(row) for row in rows] == [r for _, r in PROMPTED]
    for row, items in zip(rows, expected, strict=True):
        assert freeze(row) == freeze(torch.stack(items) if items else torch.zeros(0, *trailing))
    packed = torch.cat(rows)
    weights = torch.randn(packed.shape)
    under = out.sum() - packed.sum() if kind == "padded" else 0
    (seen,) = torch.autograd.grad((packed * weights).sum() + under, values)
    truth = torch.stack([value for items in expected for value in items])
    (wanted,) = torch.autograd.grad((truth * weights).sum(), values)
    torch.testing.assert_close(seen, wanted, rtol=1e-6, atol=1e-6)
    scored = {(b, before) for b, places in enumerate(naive_places(MASK, PROMPT)) for _, before in places}
    for b, s in itertools.product(range(len(PROMPTED)), range(S)):
        assert bool((seen[b, s] != 0).any()) == ((b, s) in scored)


@pytest.mark.parametrize("kind", KINDS)
def test_holes_in_the_attention_mask_of_a_response(kind):
    mask = [[False, True, True, True, False, True, False], [True, False, True, False, False, False, True]]
    ids = field(mask, torch.int64, PAD)
    batch = TensorDict({"responses": ids[:, 3:].clone(), "attention_mask": torch.tensor(mask), "input_ids": ids}, [2])
    values = torch.arange(14.0).view(2, 7)
    for source in (batch, nest(batch)):
        out = mp.extract_response(source, shaped(kind, values, mask))
        if kind == "padded":
            assert out.tolist() == [[2.0, 0.0, 3.0, 0.0], [0.0, 0.0, 0.0, 9.0]]
        else:
            assert [row.tolist() for row in row_list(out)] == [[2.0, 3.0], [9.0]]
        for seen in mp.select_and_pad_to_response(source, "responses", "input_ids").values():
            assert freeze(seen) == freeze(batch["responses"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", [[0, 0, 1, 1, 0, 0, 1, 0], [1, 0, 1], [1, 1, 0]], ids=str)
def test_a_response_anywhere_in_its_row(kind, mask):
    """Its columns are columns, of the sequence and of the response; RL_FIELDS, whose responses end rows, refuses it."""
    axes = {"sequence": mp.MaskAxis("attention_mask"), "response": mp.MaskAxis("mask")}
    fields = {name: mp.MaskNestingSpec("sequence") for name in ("input_ids", "attention_mask")}
    registry = mp.MaskNestingRegistry({**fields, "mask": mp.MaskNestingSpec("response")}, axes)
    batch = TensorDict({"attention_mask": torch.ones(1, 8), "mask": torch.tensor([mask])}, [1])
    batch["input_ids"] = torch.arange(11, 19)[None]
    outputs = torch.arange(8.0)[None]
    values = shaped(kind, outputs, [[True] * 8])
    places = [8 - len(mask) + column - 1 for column, on in enumerate(mask) if on]
    line = [float(8 - len(mask) + column - 1) if on else 0.0 for column, on in enumerate(mask)]
    nested = mp.nest_batch_by_mask(batch, registry)
    with pytest.raises(mp.errors.LayoutError, match='extract_response: row 0 of the axis "response" is at columns'):
        mp.extract_response(nested, values)
    for form in (batch, nested):
        seen = mp.extract_response(form, values, registry=registry)
        assert seen.is_nested == (kind not in ("padded", "one row"))  # one row alone is padded
        assert seen.values().tolist() == places if seen.is_nested else seen.tolist() == [line]
        out = mp.select_and_pad_to_response(form, "input_ids", "mask", registry=registry)
        assert out["input_ids"].tolist() == [list(range(19 - len(mask), 19))]
        assert out["mask"].tolist() == [mask]
        wide = mp.select_and_pad_to_response(form, "input_ids", "mask", registry=registry, width=10)
        assert wide["input_ids"][0, len(mask) :].tolist() == [0] * (10 - len(mask))  # 18, its last value, is a token
        assert wide["mask"].tolist() == [mask + [0] * (10 - len(mask))]


@pytest.mark.parametrize("form", ["padded", "nested"])
def test_columns_behind_the_batch_go_on_with_the_pad_that_it_has(form):
    """Also where a spec has several pads, and rows are full."""
    masks = {"attention_mask": torch.tensor([[1] * 4, [1, 1, 1, 0]]), "responses": torch.tensor([[5, 6], [7, 0]])}
    for values, wide in (
        ([[0, 1, 2, 3], [0, 1, 2, 0]], [[2, 3, 0, 0], [2, 0, 0, 0]]),
        ([[0, 1, 2, 3], [0, 1, 2, 2]], [[2, 3, 3, 3], [2, 2, 2, 2]]),
    ):
        batch = TensorDict({**masks, "position_ids": torch.tensor(values)}, [2])
        out = mp.select_and_pad_to_response(FORMS[form](batch), "position_ids", width=4)
        assert out["position_ids"].tolist() == wide


@pytest.mark.parametrize("form", ["padded", "nested"])
@pytest.mark.parametrize("last", [2, 0])
def test_columns_behind_a_response_without_columns(form, last):
    """A row goes on as its field does: with the last token, where that is its pad, or with 0."""
    mask, none = torch.tensor([[1, 1, 1], [1, 1, 0]]), torch.zeros(2, 0, dtype=torch.long)
    batch = TensorDict({"attention_mask": mask, "responses": none}, [2])
    batch["position_ids"] = torch.tensor([[0, 1, 2], [0, 2, last]])
    out = mp.select_and_pad_to_response(FORMS[form](batch), "position_ids", width=2)
    assert out["position_ids"].tolist() == [[last, last], [last, last]]


@pytest.mark.parametrize("pads", [[mp.PAD_TOKEN_ID, -100, mp.EDGE], [-100, mp.PAD_TOKEN_ID, mp.EDGE]], ids=str)
def test_of_several_pads_those_that_are_unknown_or_do_not_fit_the_dtype_are_not_tried(pads):
    mask, responses = torch.tensor([[1] * 4, [1, 1, 1, 0]]), torch.tensor([[5, 6], [7, 0]])
    registry = mp.RL_FIELDS | {"x": mp.MaskNestingSpec("sequence", pads)}
    batch = TensorDict({"attention_mask": mask, "responses": responses}, [2])
    batch["x"] = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 3]], dtype=torch.uint8)
    out = mp.select_and_pad_to_response(batch, "x", width=4, registry=registry)
    assert out["x"].tolist() == [[3, 4, 4, 4], [3, 3, 3, 3]]


def test_the_width_of_a_field_is_the_dim_of_its_spec():
    """In all forms: padded, nested, and added after nesting."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    q = torch.arange(1, 7).view(2, 1, 3).expand(2, 5, 3) * mask[:, None]
    registry = mp.RL_FIELDS | {"q": mp.MaskNestingSpec("response", 0, ragged_dim=-1)}
    batch = TensorDict({"response_mask": mask, "q": q}, [2])
    nested = mp.nest_batch_by_mask(batch, registry)
    later = mp.nest_batch_by_mask(batch.select("response_mask"), registry).set("q", nested["q"])
    for form, names in ((batch, ()), (nested, ()), (later, ("q",))):
        assert_same(mp.select_and_pad_to_response(form, *names, registry=registry)["q"], q)


@pytest.mark.parametrize("kind", ["jagged", "packed", "one row"])
@pytest.mark.parametrize("rows", [slice(None), slice(1, 4)], ids=["batch", "micro-batch"])
@pytest.mark.parametrize("form", ["nested", "unpacked"])
def test_jagged_arithmetic_with_fields_of_the_batch(kind, rows, form):
    batch = rollout(PROMPTED, PROMPT, RESPONSE, objects=False)
    source = rows_of(FORMS[form](batch), rows)
    values = torch.randn(len(PROMPTED), S)[rows]
    outputs = shaped(kind, values, MASK[rows])
    log_probs = mp.extract_response(source, outputs)
    again = mp.extract_response(source, outputs)
    loss = (log_probs - source["old_log_probs"]).exp() * source["advantages"] + (again - log_probs)
    old, advantages = batch["old_log_probs"][rows], batch["advantages"][rows]
    for b, (row, items) in enumerate(zip(row_list(loss), naive_rows(values, MASK[rows], PROMPT), strict=True)):
        expected = [(items[k] - old[b, k]).exp() * advantages[b, k] for k in range(len(items))]
        torch.testing.assert_close(row, torch.stack(expected) if expected else torch.zeros(0), equal_nan=True)


@all_forms
def test_a_response_without_a_prompt_is_an_error(form):
    batch = form(rollout(objects=False))  # row 3 has four response tokens and no prompt; row 4 has neither
    before = freeze(batch)
    with pytest.raises(
        mp.errors.LayoutError, match=r"extract_response: rows \[3\] have a response but no prompt token"
    ):
        mp.extract_response(batch, torch.randn(B, S))
    assert freeze(batch) == before
    keep = [0, 1, 2, 4, 5, 6]
    some = form(rollout([ROWS[b] for b in keep], PROMPT, RESPONSE, objects=False))
    assert mp.extract_response(some, torch.randn(len(keep), S)).shape == (len(keep), RESPONSE)


def test_prompts_as_wide_as_responses_are_not_responses():
    ids = torch.tensor([[0, 4, 5, 6], [3, 4, 5, 0]])
    batch = TensorDict({"attention_mask": (ids != 0).long(), "prompts": ids[:, :2], "responses": ids[:, 2:]}, [2])
    batch["unknown"] = torch.zeros(2, 2)
    for form in (batch, mp.nest_batch_by_mask(batch, pad_token_id=0)):
        assert list(mp.select_and_pad_to_response(form).keys()) == ["responses"]
        with pytest.raises(mp.errors.LayoutError, match='"prompts"'):
            mp.select_and_pad_to_response(form, "prompts")
