"""Tokens to score anywhere in a row: log-probs, values and gradients of rows whose loss masks have holes, against each
row alone, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from needs import needs
from samples import row_list
from tensordict import TensorDict
from test_replay import Sums
from torch import Tensor

import maskpack as mp
from maskpack.errors import LayoutError, ReplayError
from maskpack.planning import plan_micro_batches
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs, response_values

SPLIT = mp.RL_FIELDS | {"step_mask": mp.MaskNestingSpec("sequence")}
FIELDS = {name: mp.MaskNestingSpec("sequence") for name in ("input_ids", "attention_mask")}
FIELDS["position_ids"] = mp.MaskNestingSpec("sequence", mp.EDGE)
MASK = mp.MaskNestingSpec(["response", "sequence"])
FLAT = mp.MaskNestingRegistry(
    FIELDS | {"loss_mask": MASK},
    axes={"sequence": mp.MaskAxis("attention_mask"), "response": mp.MaskAxis("loss_mask")},
)
"""Rows [S] without a prompt, whose loss mask is the response."""
WHOLE = mp.MaskNestingRegistry(
    FIELDS | {"loss_mask": mp.MaskNestingSpec("sequence")}, axes={"sequence": mp.MaskAxis("attention_mask")}
)
"""The same, without a response axis."""


def rows_of(source: torch.Generator, count: int = 5, width: int = 11) -> TensorDict:
    """Rows with padding anywhere, whose first token is never scored. Some share prefixes, some have no token."""
    on = torch.rand(count, width, generator=source) < 0.8
    on[1:3] = on[0]
    on[-1] = False
    ids = torch.randint(3, 8, (count, width), generator=source)
    ids[1:3] = torch.where(torch.arange(width) < width // 2, ids[0], ids[1:3])
    loss = on & (torch.rand(count, width, generator=source) < 0.5) & (on.cumsum(1) > 1)
    data = {"input_ids": torch.where(on, ids, 0), "attention_mask": on.long(), "loss_mask": loss.long()}
    return TensorDict(data | {"position_ids": (on.cumsum(1) - 1).clamp(min=0)}, [count])


def split(batch: TensorDict, response: int) -> TensorDict:
    """The same rows as prompts and responses, with the loss mask on the response axis, and a second mask over the whole
    sequence. Rows keep a prompt token."""
    out = batch.exclude("loss_mask")
    out["attention_mask"][:, 0] = 1
    out["position_ids"] = (out["attention_mask"].cumsum(1) - 1).clamp(min=0)
    out["prompts"], out["responses"] = (x.contiguous() for x in batch["input_ids"].tensor_split([-response], 1))
    out["response_mask"] = batch["loss_mask"][:, -response:].contiguous()
    out["step_mask"] = torch.where(torch.arange(batch["input_ids"].shape[1]) % 3 > 0, out["attention_mask"], 0)
    return out


def forms(batch: TensorDict, registry: mp.MaskNestingRegistry) -> Iterator[Any]:
    yield batch
    yield mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True, pad_token_id=0)
    yield mp.compress(batch, registry=registry, strict_mask_nesting=True, pad_token_id=0)


def columns(batch: TensorDict, scored: Tensor) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """The ids of each row, and the columns and places of its tokens to score."""
    for b, line in enumerate(batch["attention_mask"].tolist()):
        real = [s for s, on in enumerate(line) if on]
        picked = [s for s in real if scored[b, s]]
        yield batch["input_ids"][b, real], picked, [real.index(s) for s in picked]


def log_probs_of(model: Sums, batch: TensorDict, scored: Tensor) -> list[Tensor]:
    out: list[Tensor] = []
    for ids, _, places in columns(batch, scored):
        states = model.row(ids, torch.arange(len(ids))) if len(ids) else model.table[:0]
        line = [(model.head @ states[at - 1]).log_softmax(0)[ids[at]] for at in places]
        out.append(torch.stack(line) if line else states.new_zeros(0))
    return out


def same(seen: Tensor, truth: Sequence[Tensor], weights: tuple[Tensor, ...] = ()) -> None:
    """Within 1e-10, their gradients too; the seen ones are computed first."""
    assert seen.offsets().diff().tolist() == [len(row) for row in truth]
    whole = torch.cat(list(truth))
    if not whole.numel():
        return
    assert float((seen.values() - whole).detach().abs().max()) <= 1e-10
    scale = torch.linspace(0.5, 1.5, whole.numel(), dtype=torch.float64)
    if weights:
        pair = [
            torch.autograd.grad((x.double() * scale).sum(), weights, retain_graph=True) for x in (seen.values(), whole)
        ]
        for got, want in zip(*pair, strict=True):
            assert float((got - want).norm()) <= 1e-10 * float(want.norm()) + 1e-14


@pytest.mark.parametrize("share", [False, True], ids=["each row", "shared"])
def test_a_thousand_masks_over_whole_rows(share: bool) -> None:
    source, model = torch.Generator().manual_seed(3), Sums()
    for number in range(1000):
        batch = rows_of(source)
        inputs = PackedInputs.of(batch, options=ReplayOptions(registry=FLAT, share_prefixes=share, min_shared=1))
        truth = [(at, ids[at]) for ids, _, places in columns(batch, batch["loss_mask"]) for at in places]
        if share:
            assert inputs.copies is None or inputs.copies.numel() == len(truth)
            found = inputs.targets if inputs.copies is None else inputs.targets[inputs.copies]
        else:
            starts = [0, *batch["attention_mask"].sum(1).cumsum(0).tolist()]
            places = [
                starts[b] + at - 1 for b, (_, _, own) in enumerate(columns(batch, batch["loss_mask"])) for at in own
            ]
            assert inputs.predict.tolist() == places
            found = inputs.targets
        assert found.tolist() == [int(target) for _, target in truth]
        if not share and number % 20 == 0:
            for form in forms(batch, FLAT):
                seen = response_log_probs(model, form, options=ReplayOptions(registry=FLAT))
                same(seen, log_probs_of(model, batch, batch["loss_mask"]), (model.table, model.head))


def test_a_thousand_masks_over_responses() -> None:
    """Two masks at once, of the response and of the sequence; other response tokens have the log-prob 0."""
    source, model = torch.Generator().manual_seed(4), Sums()
    both = ReplayOptions(scored=("response_mask", "step_mask"), no_prompt="skip", registry=SPLIT)
    for number in range(1000):
        batch = split(rows_of(source), 7)
        mask = batch["step_mask"].clone()
        mask[:, -7:] *= batch["response_mask"]
        mask[:, :-7] = 0
        heads = PackedInputs.of(batch, options=both)
        assert heads.targets.tolist() == [int(ids[at]) for ids, _, at in columns(batch, mask) for at in at]
        if number % 20:
            continue
        for form in forms(batch, SPLIT):
            seen = response_log_probs(model, form, options=both)
            rows = []
            for b, own in enumerate(log_probs_of(model, batch, mask)):
                line, scored = batch["attention_mask"][b, -7:].bool(), mask[b, -7:].bool()
                rows.append(torch.zeros(7, dtype=own.dtype).masked_scatter(scored, own)[line])
            same(seen, rows, (model.table, model.head))


def test_values_and_plans_of_rows_with_holes() -> None:
    source, model = torch.Generator().manual_seed(5), Sums()
    batch = rows_of(source, 9)
    truth = log_probs_of(model, batch, batch["loss_mask"])
    values = [model.table[:0].sum(-1)] * 9
    for b, (ids, _, places) in enumerate(columns(batch, batch["loss_mask"])):
        if places:
            values[b] = model.row(ids, torch.arange(len(ids)))[[at - 1 for at in places]].sum(-1)
    plan = plan_micro_batches(batch["attention_mask"].sum(1), 20)
    assert len(plan.micro_batches) > 2
    options = ReplayOptions(registry=FLAT)
    for form in forms(batch, FLAT):
        same(response_log_probs(model, form, plan=plan, options=options), truth)
        same(response_values(model, form, lambda hidden: hidden.sum(-1), plan=plan, options=options), values)
        same(response_values(model, form, lambda hidden: hidden.sum(-1), options=options), values, (model.table,))


def test_rows_without_a_response_axis_are_scored_where_a_mask_says() -> None:
    source, model = torch.Generator().manual_seed(6), Sums()
    batch = rows_of(source)
    options = ReplayOptions(registry=WHOLE, scored=("loss_mask",))
    rows = []
    for b, own in enumerate(log_probs_of(model, batch, batch["loss_mask"])):
        on, scored = batch["attention_mask"][b].bool(), batch["loss_mask"][b].bool()
        rows.append(torch.zeros(11, dtype=own.dtype).masked_scatter(scored, own)[on])
    for form in forms(batch, WHOLE):
        same(response_log_probs(model, form, options=ReplayOptions(registry=WHOLE)), rows, (model.table, model.head))
        same(response_log_probs(model, form, options=options), rows, (model.table, model.head))
    with pytest.raises(LayoutError, match="the batch gives no response axis"):
        response_log_probs(model, batch.exclude("loss_mask"), options=ReplayOptions(registry=WHOLE))


def test_what_errors_of_the_response_axis_say_to_do() -> None:
    axes = {"sequence": mp.MaskAxis("attention_mask"), "response": mp.MaskAxis("train")}
    registry = mp.MaskNestingRegistry(FIELDS | {"train": mp.MaskNestingSpec("response")}, axes=axes)
    batch, options = rows_of(torch.Generator().manual_seed(6)), ReplayOptions(registry=registry)
    batch = batch.select("input_ids", "attention_mask").set("train", batch["loss_mask"])
    wanted = PackedInputs.of(batch, options=options).targets
    packed = mp.compress(batch, registry=registry | {"train": mp.MaskNestingSpec("sequence")}, pad_token_id=0)
    with pytest.raises(LayoutError, match="a registry in which the mask has a MaskNestingSpec of its own axis"):
        PackedInputs.of(packed, options=options)
    packed = mp.compress(batch, registry=registry, pad_token_id=0)
    assert torch.equal(PackedInputs.of(packed, options=options).targets, wanted)
    pads = batch["attention_mask"] == 0
    odd = batch.clone().set("train", batch["train"].masked_fill(pads, 1))
    with pytest.raises(LayoutError, match="Multiply a mask by that of valid tokens"):
        PackedInputs.of(odd, options=options)
    odd["train"] *= odd["attention_mask"]
    assert torch.equal(PackedInputs.of(odd, options=options).targets, wanted)


def test_the_output_layer_runs_on_scored_tokens_alone() -> None:
    """Of a value head: the number of hidden states that it is given."""
    source, model, sizes = torch.Generator().manual_seed(7), Sums(), []
    batch = split(rows_of(source, 9), 7)

    def head(hidden: Tensor) -> Tensor:
        sizes.append(hidden.shape[0])
        return hidden.sum(-1)

    for masks in ((), ("response_mask",)):
        options = ReplayOptions(scored=masks, no_prompt="skip", registry=SPLIT)
        response_values(model, batch, head, options=options)
    assert sizes == [int(batch["attention_mask"][:, -7:].sum()), int(batch["response_mask"].sum())]
    assert 0 < sizes[1] < sizes[0]


def test_fields_on_a_response_with_holes_are_padded_where_they_were() -> None:
    source, model = torch.Generator().manual_seed(8), Sums()
    batch = rows_of(source)
    nested = mp.nest_batch_by_mask(batch, FLAT)
    nested["log_probs"] = response_log_probs(model, nested, options=ReplayOptions(registry=FLAT))
    out = mp.select_and_pad_to_response(nested, "log_probs", registry=FLAT)["log_probs"]
    for b, own in enumerate(log_probs_of(model, batch, batch["loss_mask"])):
        line = torch.zeros(11, dtype=own.dtype).masked_scatter(batch["loss_mask"][b].bool(), own)
        assert float((out[b] - line).detach().abs().max()) <= 1e-12


BAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no such field": ({"scored": ("kept",)}, 'the batch has no field "kept"; expected a mask of the tokens to score'),
    "another shape": ({"scored": ("prompts",)}, 'field "prompts" is (5, 4); the sequence axis is (5, 11)'),
}


@pytest.mark.parametrize(("more", "message"), BAD.values(), ids=BAD)
def test_masks_that_do_not_fit_are_refused(more: Mapping[str, Any], message: str) -> None:
    batch = split(rows_of(torch.Generator().manual_seed(9)), 7)
    with pytest.raises(ReplayError) as caught:
        PackedInputs.of(batch, options=replace(ReplayOptions(no_prompt="skip", registry=SPLIT), **more))
    assert message in str(caught.value)


def test_a_first_token_that_is_scored_is_named_or_skipped() -> None:
    model, batch = Sums(), rows_of(torch.Generator().manual_seed(10))
    first = int(batch["attention_mask"][3].argmax())
    batch["loss_mask"][3, first] = 1
    with pytest.raises(ReplayError, match=r"rows \[3\] have a response but no prompt token"):
        response_log_probs(model, batch, options=ReplayOptions(registry=FLAT))
    seen = row_list(response_log_probs(model, batch, options=ReplayOptions(registry=FLAT, no_prompt="skip")))
    assert seen[3][0].item() == 0.0
    batch["loss_mask"][3, first] = 0
    rest = log_probs_of(model, batch, batch["loss_mask"])[3]
    assert float((seen[3][1:] - rest).detach().abs().max()) <= 1e-12


@pytest.mark.parametrize("share", [False, True], ids=["each row", "shared"])
@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma3", "qwen25_vl", "gpt2"])
def test_models_of_transformers_score_tokens_anywhere(name: str, share: bool) -> None:
    """In float64: log-probs and the gradients of all weights, those of each row alone."""
    needs("transformers")
    import rows_alone
    from tree_rows import batch_of, close, groups, pair

    if name == "gpt2" and share:
        pytest.skip("its attention does not share")
    make = rows_alone.MODELS[name]
    model, plain = pair(make, torch.float64)
    batch = batch_of(groups([3, 2, 1]), mrope=name == "qwen25_vl")
    source = torch.Generator().manual_seed(11)
    on = batch["attention_mask"].bool()
    loss = on & (torch.rand(on.shape, generator=source) < 0.6) & (on.cumsum(1) > 1)
    batch = batch.exclude("prompts", "responses").set("loss_mask", loss.long())
    replay = rows_alone.replayable(model)
    options = ReplayOptions(registry=FLAT, share_prefixes=share, min_shared=1)
    out = response_log_probs(replay, batch, self_check=True, options=options)
    truth, _ = rows_alone.truth_of(plain, batch, scored=loss)
    assert out.offsets().diff().tolist() == loss.sum(1).tolist()
    assert rows_alone.off(out, truth) <= 1e-10
    close(rows_alone.gradients(model, out.values()), rows_alone.gradients(plain, truth), 1e-10)


@pytest.mark.parametrize("shift", [-2, -1, 1])
def test_a_mask_that_was_moved_scores_the_same_tokens(shift: int) -> None:
    """As torch.roll moves it; its entries that leave their row are of no token."""
    moved = FLAT | mp.MaskNestingRegistry(
        {"loss_mask": mp.MaskNestingSpec("response")}, {"response": mp.MaskAxis("loss_mask", shift=shift)}
    )
    source = torch.Generator().manual_seed(5)
    for _ in range(8):
        batch = rows_of(source)
        batch["loss_mask"][:, :2] = batch["loss_mask"][:, -2:] = 0
        model, rolled = Sums(), batch.clone()
        rolled["loss_mask"] = batch["loss_mask"].roll(shift, 1)
        want = response_log_probs(model, batch, options=ReplayOptions(registry=FLAT))
        for form in forms(rolled, moved):
            got = response_log_probs(model, form, options=ReplayOptions(registry=moved))
            assert torch.equal(got.values(), want.values())
            assert torch.equal(got.offsets(), want.offsets())
        states = torch.rand(*batch["input_ids"].shape, 3)
        padded = mp.extract_response(rolled, states, registry=moved)
        assert torch.equal(padded, mp.extract_response(batch, states, registry=FLAT).roll(shift, 1))
        rolled["loss_mask"][0, -1 if shift < 0 else 0] = 1
        with pytest.raises(
            LayoutError, match=rf'row 0 of the axis "response" .*, whose entries speak of the column \{-shift:+}'
        ):
            PackedInputs.of(rolled, options=ReplayOptions(registry=moved))


def test_a_mask_as_wide_as_a_response_of_lengths_is_read_by_its_spec() -> None:
    """The response axis tells only lengths, and both axes have five columns: the spec says which tokens are meant."""
    axes = {name: mp.MaskAxis(f"{name}_lengths", form="lengths", head=("ids",)) for name in ("sequence", "response")}
    mask = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 1, 0, 0]])
    data = {"ids": torch.arange(10).view(2, 5), "mask": mask, "sequence_lengths": torch.tensor([5, 4])}
    batch = TensorDict(data | {"response_lengths": torch.tensor([2, 2])}, [2])
    ids = {"ids": mp.MaskNestingSpec("sequence")}
    for spec, targets in (("sequence", [3, 7]), ("response", [])):
        own = mp.MaskNestingRegistry(ids | {"mask": mp.MaskNestingSpec(spec)}, axes)
        inputs = PackedInputs.of(batch, options=ReplayOptions(input_ids="ids", registry=own, scored=("mask",)))
        assert inputs.targets.tolist() == targets
        with pytest.raises(LayoutError, match='field "ids" is on the sequence axis, whose last 5 columns are not'):
            mp.select_and_pad_to_response(batch, "ids", registry=own)
    own = mp.MaskNestingRegistry(ids, axes)
    with pytest.raises(ReplayError, match='field "mask" may be on the axis "response" or "sequence"'):
        PackedInputs.of(batch, options=ReplayOptions(input_ids="ids", registry=own, scored=("mask",)))
