"""PackedInputs against loops over rows and columns, and response_log_probs over a model of two lines, whose hidden
states are summed row by row. Models of transformers are in test_replay_models.py."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from samples import PAD, freeze, in_chunks, positions, row_list
from tensordict import TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.errors import LayoutError, ReplayError
from maskpack.replay import PackedInputs, ReplayOptions, prefix_tree, response_log_probs, response_values
from maskpack.replay import inputs as module

VOCABULARY = 23
Lines = Sequence[Sequence[bool]]


def lines_of(rows: Sequence[tuple[int, int]], prompt: int, response: int, side: str = "both") -> list[list[bool]]:
    """The mask of rows with so many prompt and response tokens: both padded on the left, both on the right, or a row on
    both sides."""
    lines = []
    for p, r in rows:
        head, tail = [True] * p, [True] * r
        left = [False] * (prompt - p) + head if side != "right" else head + [False] * (prompt - p)
        lines.append(left + ([False] * (response - r) + tail if side == "left" else tail + [False] * (response - r)))
    return lines


def batch_of(
    lines: Lines,
    response: int,
    *,
    ids: str = "edge",
    mask: torch.dtype = torch.int64,
    seed: int = 0,
    holes: bool = False,
) -> TensorDict:
    """A batch with that mask. `ids`: position ids, "edge", "mrope3", "mrope4", or none."""
    source = torch.Generator().manual_seed(seed)
    on = torch.tensor(lines, dtype=torch.bool).reshape(len(lines), -1)
    rows, width = on.shape
    tokens = torch.randint(1, VOCABULARY, (rows, width), generator=source)
    tokens = torch.where(on, tokens, torch.tensor(PAD))
    data = {"input_ids": tokens, "attention_mask": on.to(mask)}
    if width > response:
        data["prompts"] = tokens[:, : width - response].clone()
    data["responses"] = tokens[:, width - response :].clone()
    if holes:  # tool tokens, the last token among them
        kept = torch.rand(rows, response, generator=source) < 0.5
        data["response_mask"] = (kept & on[:, width - response :]).long()
    text = positions(on)
    if ids == "edge":
        data["position_ids"] = text
    elif ids.startswith("mrope"):
        sections = [text * 3 + 1, text // 2, text + 5] if ids == "mrope3" else [text, text * 3, text // 2, text + 5]
        data["position_ids"] = torch.stack(sections, 1) * on.any(1)[:, None, None]
    return TensorDict(data, batch_size=[rows])


FORMS = {
    "padded": lambda batch: batch,
    "nested": lambda batch: mp.nest_batch_by_mask(batch, pad_token_id=PAD),
    "packed": lambda batch: mp.compress(batch, pad_token_id=PAD),
    "sent": lambda batch: mp.PackedBatch.from_bytes(mp.compress(batch, pad_token_id=PAD).to_bytes()),
}
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def naive(batch: TensorDict, multiple_of: int = 1) -> SimpleNamespace:
    """What PackedInputs should hold, row by row and column by column, as lists."""
    mask, tokens = batch["attention_mask"].tolist(), batch["input_ids"].tolist()
    width = batch["attention_mask"].shape[1]
    prompt = width - batch["responses"].shape[1]
    given_ids = batch.get("position_ids", None)
    sections = 1 if given_ids is None or given_ids.dim() == 2 else given_ids.shape[1]
    out = SimpleNamespace(ids=[], places=[[] for _ in range(sections)], ends=[0], predict=[], targets=[], scored=[])
    out.lengths, responses = [], 0
    for b, line in enumerate(mask):
        real = [s for s in range(width) if line[s]]
        for nth, s in enumerate(real):
            here = len(out.ids)
            if s >= prompt:
                if nth > 0:
                    out.predict.append(here - 1)
                    out.targets.append(tokens[b][s])
                    out.scored.append(responses)
                responses += 1
            out.ids.append(tokens[b][s])
            for section, column in enumerate(out.places):
                if given_ids is None:
                    column.append(nth)
                else:
                    value = given_ids[b, s] if given_ids.dim() == 2 else given_ids[b, section, s]
                    column.append(int(value))
        if real:
            out.ends.append(len(out.ids))
        out.lengths.append(sum(1 for s in real if s >= prompt))
    out.tokens, out.bounds = len(out.ids), list(out.ends)
    tail = 0
    while (out.tokens + tail) % multiple_of or not out.tokens + tail:
        tail += 1
    for column in out.places:
        column.extend(range(tail))
    out.ids.extend([0] * tail)
    if tail:
        out.ends.append(len(out.ids))
    out.all_scored = len(out.scored) == responses
    return out


def check(inputs: PackedInputs, truth: SimpleNamespace) -> None:
    total = len(truth.ids)
    assert inputs.input_ids.tolist() == [truth.ids]
    assert tuple(inputs.input_ids.shape) == (1, total)
    places = [truth.places[0]] if len(truth.places) == 1 else [[column] for column in truth.places]
    assert inputs.position_ids.tolist() == places
    assert inputs.cu_seqlens.tolist() == truth.ends
    assert inputs.max_seqlen == max((b - a for a, b in itertools.pairwise(truth.ends)), default=0)
    assert isinstance(inputs.max_seqlen, int)
    assert inputs.predict.tolist() == truth.predict
    assert inputs.targets.tolist() == truth.targets
    assert (None if truth.all_scored else truth.scored) == (None if inputs.scored is None else inputs.scored.tolist())
    assert inputs.response.lengths.tolist() == truth.lengths
    assert inputs.bounds.tolist() == truth.bounds
    assert inputs.num_tokens == truth.tokens
    int64 = (inputs.input_ids, inputs.position_ids, inputs.predict, inputs.targets)
    assert {x.dtype for x in int64} == {torch.int64}
    assert inputs.cu_seqlens.dtype == torch.int32
    assert all(place < truth.tokens for place in inputs.predict.tolist())


# -------------------------------------------------------------------- PackedInputs

BOTH = ((2, 3), (5, 6), (1, 0), (3, 4), (0, 0), (5, 1), (4, 6))
CASES: dict[str, tuple[list[list[bool]], int]] = {
    "both": (lines_of(BOTH, 5, 6), 6),
    "left": (lines_of(BOTH, 5, 6, "left"), 6),
    "right": (lines_of(BOTH, 5, 6, "right"), 6),
    "holes": ([[0, 1, 1, 0, 1, 1, 0, 1], [1, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]], 4),
    "one row": (lines_of([(3, 4)], 5, 6), 6),
    "full rows": (lines_of([(5, 6)] * 3, 5, 6), 6),
    "no responses": (lines_of([(2, 0), (5, 0)], 5, 6), 6),
    "one token each": (lines_of([(1, 0), (1, 1), (1, 0)], 5, 6), 6),
    "empty rows": (lines_of([(0, 0), (2, 1), (0, 0), (0, 0), (1, 2), (0, 0)], 5, 6), 6),
    "no tokens": (lines_of([(0, 0), (0, 0)], 5, 6), 6),
    "many rows": (lines_of([(1 + b % 5, b % 7) for b in range(512)], 5, 6), 6),
}


def test_a_batch_without_tokens_is_a_tail_alone() -> None:
    """Models do not run without a token, and ranks that run one wait for each other."""
    for batch in (batch_of(*CASES["no tokens"]), batch_of(*CASES["both"])[:0]):
        inputs = PackedInputs.of(batch)
        assert inputs.cu_seqlens.tolist() == [0, 1]
        assert (inputs.num_tokens, inputs.bounds.tolist(), inputs.predict.numel()) == (0, [0], 0)
        assert PackedInputs.of(batch, options=ReplayOptions(multiple_of=8)).cu_seqlens.tolist() == [0, 8]


@pytest.mark.parametrize("mask", [torch.bool, torch.int32, torch.float32])
def test_dtypes_of_mask_and_ids(mask: torch.dtype) -> None:
    batch = batch_of(*CASES["holes"], mask=mask)
    truth = naive(batch)
    batch["input_ids"], batch["position_ids"] = batch["input_ids"].int(), batch["position_ids"].int()
    for multiple_of in (1, 32):
        inputs = PackedInputs.of(batch, options=ReplayOptions(multiple_of=multiple_of))
        assert (inputs.input_ids.dtype, inputs.position_ids.dtype, inputs.targets.dtype) == (torch.int64,) * 3
        assert inputs.targets.tolist() == truth.targets


@all_forms
def test_responses_without_prompt(form: Any) -> None:
    rows = ((2, 3), (0, 4), (0, 0), (0, 1), (1, 1))
    batch = batch_of(lines_of(rows, 3, 4), 4)
    with pytest.raises(ReplayError, match=r"rows \[1, 3\] have a response but no prompt token"):
        PackedInputs.of(form(batch))
    inputs = PackedInputs.of(form(batch), options=ReplayOptions(no_prompt="skip"))
    check(inputs, naive(batch))
    assert inputs.scored is not None
    assert inputs.scored.tolist() == [0, 1, 2, 4, 5, 6, 8]


@st.composite
def batches(draw: st.DrawFn) -> TensorDict:
    rows, prompt, response = draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(1, 6))
    if draw(st.booleans()):
        lengths = st.tuples(st.integers(0, prompt), st.integers(0, response))
        drawn = draw(st.lists(lengths, min_size=rows, max_size=rows))
        lines = lines_of(drawn, prompt, response, draw(st.sampled_from(["both", "left", "right"])))
    else:
        width = prompt + response
        lines = draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    ids = draw(st.sampled_from(["edge", "none", "mrope3", "mrope4"]))
    batch = batch_of(lines or [[False] * (prompt + response)], response, ids=ids, holes=draw(st.booleans()))
    return batch if lines else batch[:0]


@example(batch_of(*CASES["many rows"], holes=True), 8, "nested")
@example(batch_of(*CASES["many rows"], holes=True), 1, "packed")
@given(batches(), st.sampled_from([1, 2, 5, 16]), st.sampled_from(list(FORMS)))
def test_any_batch(batch: TensorDict, multiple_of: int, form: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)  # of fields that stay dense
        source = FORMS[form](batch)
    before = freeze(source) if isinstance(source, TensorDict) else freeze(mp.decompress(source))
    truth = naive(batch, multiple_of)
    check(PackedInputs.of(source, options=ReplayOptions(multiple_of=multiple_of, no_prompt="skip")), truth)
    assert before == (freeze(source) if isinstance(source, TensorDict) else freeze(mp.decompress(source)))
    if truth.all_scored:
        check(PackedInputs.of(source, options=ReplayOptions(multiple_of=multiple_of)), truth)
    else:
        with pytest.raises(ReplayError, match="no prompt token"):
            PackedInputs.of(source, options=ReplayOptions(multiple_of=multiple_of))


@all_forms
def test_rows_selected_from_a_batch(form: Any) -> None:
    """Micro-batches of nested and packed batches keep no trace of the other rows."""
    batch = batch_of(*CASES["both"], ids="mrope3")
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 14)
    assert len(plan.micro_batches) > 2
    for rows, part in zip(plan.micro_batches, plan.apply(form(batch)), strict=True):
        check(PackedInputs.of(part), naive(batch[rows]))


def without(batch: TensorDict, *names: str) -> TensorDict:
    return batch.exclude(*names)


def put(batch: TensorDict, name: str, value: Tensor) -> TensorDict:
    return batch.clone().set(name, value)


def other_rows(batch: TensorDict) -> TensorDict:
    """A nested batch whose input_ids have as many tokens, in rows of other lengths."""
    nested = mp.nest_batch_by_mask(batch, pad_token_id=PAD)
    rows = row_list(nested["input_ids"])
    rows[0], rows[1] = torch.cat([rows[0], rows[1][:1]]), rows[1][1:]
    return nested.set("input_ids", torch.nested.nested_tensor(rows, layout=torch.jagged))


OWN_NAMES = mp.MaskNestingRegistry(
    {
        "tokens": mp.MaskNestingSpec("sequence", PAD),
        "attn": mp.MaskNestingSpec("sequence"),
        "completion": mp.MaskNestingSpec("response", PAD),
        "position_ids": mp.MaskNestingSpec("sequence", mp.EDGE),
    },
    axes={
        "sequence": mp.MaskAxis("attn"),
        "response": mp.MaskAxis("attn", part="tail", tail=("completion",)),
    },
)
OWN_FORMS = {
    "padded": lambda batch: batch,
    "nested": lambda batch: mp.nest_batch_by_mask(batch, OWN_NAMES, strict_mask_nesting=True),
    "packed": lambda batch: mp.compress(batch, registry=OWN_NAMES, strict_mask_nesting=True),
}


@pytest.mark.parametrize("tokens", ["tokens", ("state", "tokens")])
@pytest.mark.parametrize("form", OWN_FORMS.values(), ids=OWN_FORMS)
def test_names_of_ones_own(form: Any, tokens: Any) -> None:
    batch = batch_of(*CASES["both"]).exclude("prompts")
    own = TensorDict({"attn": batch["attention_mask"], "position_ids": batch["position_ids"]}, batch_size=[7])
    own.set("completion", batch["responses"])
    own[tokens] = batch["input_ids"]
    options: dict[str, Any] = {"options": ReplayOptions(input_ids=tokens, registry=OWN_NAMES)}
    check(PackedInputs.of(form(own), **options), naive(batch))
    model, plan = Sums(), mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 20)
    for seen in (
        response_log_probs(model, form(own), **options),
        response_log_probs(model, form(own), plan=plan, **options),
        response_log_probs(model, form(own), plan=plan, entropy=True, **options)[0],
    ):
        same_rows(seen, truth_of(model, batch)[0])
    for seen in (
        response_values(model, form(own), VALUE_HEADS["[N]"], **options),
        response_values(model, form(own), VALUE_HEADS["[N]"], plan=plan, **options),
    ):
        same_rows(seen, values_of(model, batch, WEIGHT, 3))
    with pytest.raises(
        ReplayError,
        match=r'no field "input_ids".*If they have another name, pass it: ReplayOptions\(input_ids="tokens"\)',
    ):
        PackedInputs.of(form(own), options=ReplayOptions(registry=OWN_NAMES))
    with pytest.raises(ReplayError, match=r'PackedInputs.of: field "attn" is torch\.float32'):
        PackedInputs.of(
            own.clone().set("attn", own["attn"].float()), options=ReplayOptions(registry=OWN_NAMES, input_ids="attn")
        )


GOOD = batch_of(*CASES["both"])
BAD: dict[str, tuple[type, Any, str]] = {
    "no input_ids in a packed batch": (
        ReplayError,
        mp.compress(without(GOOD, "input_ids"), pad_token_id=PAD),
        'the batch has no field "input_ids"; expected token ids. Keep it in the batch.',
    ),
    "positions of four dims": (
        ReplayError,
        put(GOOD, "position_ids", GOOD["position_ids"][:, :, None, None].expand(7, 11, 2, 2)),
        'field "position_ids" is (40, 2, 2) packed',
    ),
    "ids in other rows": (
        ReplayError,
        other_rows(GOOD),
        'field "input_ids" has 40 tokens in rows of other lengths than the sequence axis',
    ),
    "no sequence axis": (
        LayoutError,
        put(GOOD, "response_mask", torch.ones(7, 6)).select("input_ids", "response_mask"),
        "the batch gives no sequence axis; expected",
    ),
}
"""What test_misuse.py does not have."""


@pytest.mark.parametrize(("kind", "batch", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(kind: type, batch: Any, message: str) -> None:
    with pytest.raises(mp.MaskpackError, match=re.escape(message)) as caught:
        PackedInputs.of(batch)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("PackedInputs.of: ")


# -------------------------------------------------------------------- responses that are not the end of their rows


def masked(rows: Lines, mask: Lines) -> TensorDict:
    """Rows of token ids 1, 2, ... under `rows`, and a mask of their trained tokens."""
    on = torch.tensor(rows, dtype=torch.int64)
    ids = torch.arange(1, 1 + on.numel()).view_as(on) * on
    data = {"input_ids": ids, "attention_mask": on, "input_lengths": on.sum(1), "mask": torch.tensor(mask)}
    return TensorDict(data | {"response_lengths": data["mask"].sum(1)}, batch_size=[len(rows)])


def axes_of(
    response: mp.MaskAxis | tuple[mp.MaskAxis, ...], sequence: mp.MaskAxis | None = None
) -> mp.MaskNestingRegistry:
    fields = {name: mp.MaskNestingSpec("sequence") for name in ("input_ids", "attention_mask")}
    fields |= {"mask": mp.MaskNestingSpec(["response", "sequence"]), "scores": mp.MaskNestingSpec("response")}
    return mp.MaskNestingRegistry(
        fields, axes={"sequence": sequence or mp.MaskAxis("attention_mask"), "response": response}
    )


FULL = [[1] * 8, [1] * 8]
LEFT = [[0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
SHORT = [[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1]]
LENGTHS = mp.MaskAxis("input_lengths", form="lengths", head=("input_ids",))
MASK = mp.MaskAxis("mask")
APART: dict[str, tuple[Lines, Lines, mp.MaskNestingRegistry, int, str]] = {
    "more spans": (SHORT, [[1, 0, 1, 0, 1, 0, 0, 1], [0] * 8], axes_of(MASK), 0, "0:1 and 2:3 and 4:5 and 7:8"),
    "no sequence": ([[0] * 8, [0] * 8], [[0] * 8, [0, 1] * 4], axes_of(MASK), 1, "1:2 and 3:4 and 5:6 and 7:8"),
    "under padding": (SHORT, [[0, 0, 0, 0, 0, 1, 0, 0], [0] * 8], axes_of(MASK), 0, "5:6"),
    "half under padding": (SHORT, [[0, 0, 0, 1, 1, 1, 0, 0], [0] * 8], axes_of(MASK), 0, "3:6"),
    "before the padding": (LEFT, [[1, 1, 0, 0, 0, 0, 0, 0], [0] * 8], axes_of(MASK), 0, "0:2"),
}  # fmt: skip
HOLES: dict[str, tuple[Lines, Lines, mp.MaskNestingRegistry, list[int]]] = {
    "a hole": (FULL, [[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 0]], axes_of(MASK), [6, 7, 8, 11, 12, 15]),
    "token_mask": (SHORT, [[0, 1, 1, 0, 1, 0, 0, 0], [0] * 8], axes_of(MASK, LENGTHS), [2, 3, 5]),
    "[B, R] before the end": (LEFT, [[1, 1, 1, 0], [1, 1, 0, 0]], axes_of(MASK), [5, 6, 7, 13, 14]),
    "a tail of another mask": (FULL, [[0, 0, 0, 1, 1, 0, 0, 1], [0] * 8],
        axes_of(mp.MaskAxis("mask", part="tail", tail=("scores",))), [4, 5, 8]),
}  # fmt: skip
READERS: dict[str, Any] = {
    "PackedInputs.of": PackedInputs.of,
    "shared": lambda batch, options: PackedInputs.of(batch, options=replace(options, share_prefixes=True)),
    "prefix_tree": prefix_tree,
    "response_log_probs": lambda batch, options: response_log_probs(Sums(), batch, options=options),
    "planned": lambda batch, options: response_log_probs(Sums(), batch, plan=TWO, options=options),
    "response_values": lambda batch, options: response_values(Sums(), batch, VALUE_HEADS["[N]"], options=options),
}
TWO = mp.planning.plan_micro_batches([8, 8], 8)


def forms_under(registry: mp.MaskNestingRegistry, batch: TensorDict) -> Iterator[tuple[Any, mp.MaskNestingRegistry]]:
    """A batch in all forms, with the registries by which it may be read."""
    yield batch, registry
    for form in (
        mp.nest_batch_by_mask(batch, registry, strict_mask_nesting=True),
        mp.compress(batch, registry=registry),
    ):
        yield form, registry
        yield form, mp.RL_FIELDS


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("rows", "mask", "registry", "row", "columns"), APART.values(), ids=APART)
def test_a_response_outside_its_row_is_refused(
    rows: Lines, mask: Lines, registry: mp.MaskNestingRegistry, row: int, columns: str, reader: str
) -> None:
    number = 0 if reader == "planned" else row
    for form, own in forms_under(registry, masked(rows, mask)):
        with pytest.raises(mp.MaskpackError, match=f'row {number} of the axis "response" is at columns {columns}, '):
            READERS[reader](form, options=ReplayOptions(registry=own))


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("rows", "mask", "registry", "targets"), HOLES.values(), ids=HOLES)
def test_a_response_with_holes_is_scored_where_it_is(
    rows: Lines, mask: Lines, registry: mp.MaskNestingRegistry, targets: list[int], reader: str
) -> None:
    """By the registry that says so; RL_FIELDS, whose responses end their rows, refuses it."""
    batch = masked(rows, mask)
    if "scores" in registry.axes["response"][0].tail:
        batch["scores"] = torch.zeros(2, 5)
    for form, own in forms_under(registry, batch):
        if own is registry:
            assert PackedInputs.of(form, options=ReplayOptions(registry=own)).targets.tolist() == targets
        else:
            with pytest.raises(mp.MaskpackError, match=r'of the axis "response" is at .* Expected the last valid'):
                READERS[reader](form, options=ReplayOptions(registry=own))


ENDS: dict[str, tuple[Lines, Lines, mp.MaskNestingRegistry, list[int]]] = {
    "a mask [B, S]": (LEFT, [[0, 0, 0, 0, 1, 1, 1, 0], [0] * 7 + [1]], axes_of(MASK), [5, 6, 7, 16]),
    "padding within": ([[1, 1, 0, 1, 0, 1]], [[0, 1, 0, 1, 0, 1]], axes_of(MASK), [2, 4, 6]),
    "a mask [B, R]": (LEFT, [[1, 1, 1, 0], [1, 1, 1, 1]], axes_of(MASK), [5, 6, 7, 13, 14, 15, 16]),
    "token_mask": (SHORT, [[0, 0, 0, 1, 1, 0, 0, 0], [0] * 6 + [1, 1]], axes_of(MASK, LENGTHS), [4, 5, 15, 16]),
    "lengths": (SHORT, [[1, 0, 0], [1, 1, 1]],
        axes_of(mp.MaskAxis("response_lengths", form="lengths", head=("mask",)), LENGTHS), [5, 14, 15, 16]),
    "prefix": (SHORT, [[0, 1, 0], [1, 0, 1]], axes_of(mp.MaskAxis("mask", part="prefix")), [4, 5, 14, 15, 16]),
    "no responses": (LEFT, [[0] * 8, [0] * 8], axes_of(MASK), []),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "mask", "registry", "targets"), ENDS.values(), ids=ENDS)
def test_responses_that_are_the_end_of_their_rows(
    rows: Lines, mask: Lines, registry: mp.MaskNestingRegistry, targets: list[int]
) -> None:
    for form, own in forms_under(registry, masked(rows, mask)):
        if own is registry:
            assert PackedInputs.of(form, options=ReplayOptions(registry=own)).targets.tolist() == targets
            assert (
                PackedInputs.of(form, options=ReplayOptions(registry=own, share_prefixes=True)).targets.tolist()
                == targets
            )


# -------------------------------------------------------------------- response_log_probs


class Sums:
    """A model: the hidden state of a token is the mean of the embeddings of its row up to it, each turned by its
    position. `seen` are the calls."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        source = torch.Generator().manual_seed(5)
        self.table = torch.randn(PAD + 1, 4, generator=source, dtype=torch.float64)[:VOCABULARY].clone()
        self.head = torch.randn(VOCABULARY, 4, generator=source, dtype=torch.float64)
        for weight in (self.table, self.head):
            weight.requires_grad_()
        self.seen: list[str] = []

    def row(self, ids: Tensor, places: Tensor) -> Tensor:
        turned = self.table[ids] * (places.reshape(-1, len(ids)).sum(0) + 1.0).cos()[:, None]
        return turned.cumsum(0) / torch.arange(1, len(ids) + 1)[:, None]

    def hidden(self, inputs: PackedInputs) -> Tensor:
        self.seen.append("hidden")
        ends = inputs.cu_seqlens.tolist()
        parts = [slice(begin, end) for begin, end in itertools.pairwise(ends)]
        return torch.cat([self.row(inputs.input_ids[0, part], inputs.position_ids[..., part]) for part in parts])

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        self.seen.append("dense")
        assert attention_mask.shape == input_ids.shape
        lengths = attention_mask.sum(1).tolist()
        assert attention_mask.tolist() == [[int(s < n) for s in range(input_ids.shape[1])] for n in lengths]
        assert max(lengths) == input_ids.shape[1]
        rows = [self.row(ids, position_ids[..., b, :]) for b, ids in enumerate(input_ids)]
        return torch.stack(rows)

    def self_check(self, inputs: PackedInputs, hidden: Tensor, again: bool) -> None:
        tokens = (
            inputs.input_ids.shape[1] if self.seen[-1] == "hidden" else inputs.num_tokens or inputs.input_ids.shape[1]
        )
        assert hidden.shape[0] == tokens
        self.seen.append(f"self_check {again}")


def each_row(model: Sums, batch: TensorDict) -> Iterator[tuple[Any, Tensor, list[int]]]:
    """Hidden states of each row from its own tokens, its tokens, and which of them are responses."""
    prompt = batch["attention_mask"].shape[1] - batch["responses"].shape[1]
    for b in range(batch.batch_size[0]):
        real = [s for s, on in enumerate(batch["attention_mask"][b].tolist()) if on]
        ids = batch["input_ids"][b, real]
        places = batch["position_ids"][b, ..., real] if "position_ids" in batch else torch.arange(len(real))
        yield model.row(ids, places) if real else None, ids, [nth for nth, s in enumerate(real) if s >= prompt]


def row_of(responses: Sequence[int], value: Any) -> Tensor:
    """The values of response tokens; 0 where nothing is before one."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([value(nth) if nth else zero for nth in responses]) if responses else zero[None][:0]


def truth_of(model: Sums, batch: TensorDict, temperature: float = 1.0) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probs and entropies of the response tokens of each row."""
    log_probs, entropies = [], []
    for states, ids, responses in each_row(model, batch):
        p = None if states is None else (states @ model.head.T / temperature).log_softmax(-1)
        log_probs.append(row_of(responses, lambda nth, p=p, ids=ids: p[nth - 1, ids[nth]]))
        entropies.append(row_of(responses, lambda nth, p=p: -(p[nth - 1].exp() * p[nth - 1]).sum()))
    return log_probs, entropies


def same_rows(seen: Tensor, truth: list[Tensor]) -> None:
    assert seen.is_nested
    rows = row_list(seen)
    assert [len(row) for row in rows] == [len(row) for row in truth]
    for row, other in zip(rows, truth, strict=True):
        assert row.detach().tolist() == pytest.approx(other.detach().tolist(), abs=1e-12)


@pytest.fixture(params=["packed", "padded"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", "1" if request.param == "packed" else "0")
    return request.param


@pytest.mark.parametrize("ids", ["edge", "mrope4"])
@pytest.mark.parametrize("case", [case for case in CASES if case != "many rows"])
def test_log_probs_are_those_of_each_row_alone(case: str, ids: str, packing: str) -> None:
    form = FORMS["packed" if ids == "edge" else "nested"]
    batch = batch_of(*CASES[case], ids=ids)
    model = Sums()
    log_probs, entropies = response_log_probs(
        model, form(batch), temperature=0.7, entropy=True, options=ReplayOptions(multiple_of=16)
    )
    for seen, truth in zip((log_probs, entropies), truth_of(model, batch, 0.7), strict=True):
        same_rows(seen, truth)
    assert model.seen == (["hidden" if packing == "packed" else "dense", "self_check False"])
    with in_chunks(2):
        same_rows(response_log_probs(model, form(batch)), truth_of(model, batch)[0])


@all_forms
def test_a_response_without_prompt_keeps_a_zero_for_its_first_token(form: Any, packing: str) -> None:
    batch = batch_of(lines_of(((2, 3), (0, 4), (0, 0), (0, 1), (1, 1)), 3, 4), 4)
    model = Sums()
    with pytest.raises(ReplayError, match=r"PackedInputs.of: rows \[1, 3\] have a response"):
        response_log_probs(model, form(batch))
    assert model.seen == []
    with pytest.raises(
        ReplayError, match=r"in the micro-batch of rows \[1, 2\] of the batch: PackedInputs.of: rows \[0"
    ):
        response_log_probs(model, form(batch), plan=mp.planning.plan_micro_batches([5, 4, 0, 1, 2], 4))
    model.seen.clear()
    log_probs, entropies = response_log_probs(model, form(batch), entropy=True, options=ReplayOptions(no_prompt="skip"))
    truth = truth_of(model, batch)
    same_rows(log_probs, truth[0])
    same_rows(entropies, truth[1])
    assert [row[0].item() for row in row_list(log_probs) if len(row)][1:3] == [0.0, 0.0]


@given(batches())
def test_any_batch_through_the_model(batch: TensorDict) -> None:
    model = Sums()
    same_rows(response_log_probs(model, batch, options=ReplayOptions(no_prompt="skip")), truth_of(model, batch)[0])


@all_forms
def test_a_plan_puts_rows_back(form: Any, packing: str) -> None:
    batch = batch_of(*CASES["both"], ids="mrope3")
    plan = mp.planning.plan_micro_batches(
        batch["attention_mask"].sum(1).numpy(), 14, options=mp.planning.PlanOptions(multiple_of=4)
    ).with_count(8)
    assert sum(plan.is_dummy) == 1
    model = Sums()
    options = {"entropy": True, "temperature": 0.5, "self_check": True}
    packed = ReplayOptions(multiple_of=8, no_prompt="skip")
    seen = response_log_probs(model, form(batch), plan=plan, options=packed, **options)
    assert model.seen == (["hidden" if packing == "packed" else "dense", "self_check True"] * 8)
    for got, truth in zip(seen, truth_of(model, batch, 0.5), strict=True):
        same_rows(got, truth)
        assert not got.requires_grad
    assert seen[0].offsets() is seen[1].offsets()
    nested = mp.nest_batch_by_mask(batch.set("old_log_probs", torch.zeros(7, 6)), pad_token_id=PAD)
    out = response_log_probs(model, nested, plan=plan)
    same_rows(out - nested["old_log_probs"], truth_of(model, batch)[0])  # on the offsets of the batch


@all_forms
def test_a_plan_of_empty_rows_has_empty_dummies_that_run(form: Any, packing: str) -> None:
    """Other ranks wait for them."""
    batch = batch_of(*CASES["no tokens"])
    plan = mp.planning.plan_micro_batches([0, 0], 8).with_count(3)
    assert (plan.micro_batches, plan.is_dummy) == ([[0], [1], [0]], [False, False, True])
    model = Sums()
    seen = response_log_probs(model, form(batch), plan=plan)
    assert model.seen == ["hidden" if packing == "packed" else "dense", "self_check False"] * 3
    same_rows(seen, truth_of(model, batch)[0])


def test_a_plan_takes_the_registry_and_the_kept_bytes() -> None:
    batch = batch_of(*CASES["both"])
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 20)
    model = Sums()
    with pytest.raises(LayoutError, match="no response axis"):
        response_log_probs(model, batch, plan=plan, options=ReplayOptions(registry=mp.MaskNestingRegistry({})))


@pytest.mark.parametrize(
    ("self_check", "calls"), [(None, ["self_check False"]), (True, ["self_check True"]), (False, [])]
)
def test_the_self_check_is_asked_for(self_check: bool | None, calls: list[str]) -> None:
    model = Sums()
    response_log_probs(model, batch_of(*CASES["both"]), self_check=self_check)
    assert model.seen == ["hidden", *calls]


@pytest.mark.parametrize("value", ["", "off", "true", "2"])
def test_the_switch_is_0_or_1(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKPACK_PACKED_REPLAY", value)
    model = Sums()
    with pytest.raises(ReplayError, match=f"MASKPACK_PACKED_REPLAY is '{value}'; expected 0 or 1. Unset it."):
        response_log_probs(model, batch_of(*CASES["both"]))
    assert model.seen == []


@pytest.mark.parametrize(("asked", "part"), [("share_prefixes", "tree"), ("routed_experts", "routed_experts")])
def test_a_model_that_does_not_declare_what_is_asked_for_is_refused(asked: str, part: str) -> None:
    message = f"{asked} with a Sums, which does not declare support for PackedInputs.{part}; expected a model that "
    with pytest.raises(ReplayError, match=message):
        response_log_probs(Sums(), batch_of(*CASES["both"]), options=ReplayOptions(**{asked: True}))


# -------------------------------------------------------------------- devices


class Elsewhere(Sums):
    """A model on the meta device, which knows shapes and no numbers; `given` are the tokens of each call."""

    device = torch.device("meta")

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = (weight.detach().to("meta").requires_grad_() for weight in (self.table, self.head))
        self.given: list[int] = []

    def hidden(self, inputs: PackedInputs) -> Tensor:
        self.given.append(inputs.input_ids.shape[1])
        self.check(inputs)
        return self.table.index_select(0, inputs.input_ids[0])

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        self.given.append(input_ids.numel())
        assert {x.device.type for x in (input_ids, attention_mask, position_ids)} == {"meta"}
        return torch.empty(*input_ids.shape, 4, dtype=torch.float64, device="meta")

    def self_check(self, inputs: PackedInputs, hidden: Tensor, again: bool) -> None:
        assert hidden.device.type == "meta"

    @staticmethod
    def check(inputs: PackedInputs) -> None:
        tensors = (inputs.input_ids, inputs.position_ids, inputs.cu_seqlens, inputs.predict, inputs.targets)
        assert {x.device.type for x in tensors} == {"meta"}
        assert inputs.response.device.type == "meta"
        assert inputs.scored is None or inputs.scored.device.type == "meta"


@pytest.fixture
def onto_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of packed batches are decoded there, which `decompress` refuses, because no value can be read again;
    positions and masks, which are looked at, on the host."""

    def decoded(packed: mp.PackedBatch, *fields: Any, format: Any, device: Any) -> Any:
        assert device == torch.device("meta" if ("input_ids",) in fields else "cpu")
        assert ("input_ids",) not in fields or len(fields) == 1
        nested = mp.decompress(packed, *fields, format=format)
        return TensorDict({name: nested[name].to(device) for name in fields}, batch_size=nested.batch_size)

    monkeypatch.setattr(module, "decompress", decoded)


def sent_to_meta(seen: Tensor, lengths: list[int]) -> None:
    assert {seen.device.type, seen.values().device.type, seen.offsets().device.type} == {"meta"}
    assert (seen.size(0), seen.values().shape) == (len(lengths), (sum(lengths),))


@all_forms
@pytest.mark.parametrize("ids", ["edge", "none", "mrope4"])
def test_rows_go_to_the_device_of_the_model(form: Any, ids: str, packing: str, onto_meta: None) -> None:
    batch = form(batch_of(*CASES["both"], ids=ids))
    before = freeze(batch) if isinstance(batch, TensorDict) else freeze(mp.decompress(batch))
    model = Elsewhere()
    log_probs, entropies = response_log_probs(model, batch, entropy=True, options=ReplayOptions(multiple_of=16))
    values = response_values(model, batch, lambda hidden: hidden[:, :1])
    for seen in (log_probs, entropies, values):
        sent_to_meta(seen, [r for _, r in BOTH])
        assert seen.requires_grad or packing == "padded"
    assert before == (freeze(batch) if isinstance(batch, TensorDict) else freeze(mp.decompress(batch)))


def test_only_what_the_model_needs_goes_to_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the other fields, and nothing padded."""
    sent: list[tuple[int, ...]] = []
    to = Tensor.to

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = to(self, *args, **kwargs)
        if out.device.type == "meta" != self.device.type:
            sent.append(tuple(self.shape))
        return out

    batch = batch_of(*CASES["both"])
    batch["advantages"] = torch.randn(7, 6)
    batch["pixels"] = torch.randn(7, 3, 8, 8)
    for source in (batch, mp.nest_batch_by_mask(batch.exclude("advantages", "pixels"), pad_token_id=PAD)):
        model = Elsewhere()
        sent.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "to", noted)
            response_log_probs(model, source)
        assert sent
        assert {len(shape) for shape in sent} == {1}  # 40 tokens, the 20 of responses, bounds of rows
        assert max(shape[0] for shape in sent) == 40


def test_a_model_that_does_not_say_its_device_is_named() -> None:
    class Silent(Sums):
        device = None  # type: ignore[assignment]

    for call in (response_log_probs, lambda *given: response_values(*given, VALUE_HEADS["[N]"])):
        with pytest.raises(ReplayError, match=r"model is a Silent; expected a ReplayModel"):
            call(Silent(), batch_of(*CASES["both"]))


# -------------------------------------------------------------------- response_values


def values_of(model: Sums, batch: TensorDict, weight: Tensor, bias: float) -> list[Tensor]:
    """Of each row: for a response token, the value of what was seen before it."""
    return [
        row_of(responses, lambda nth, states=states: sum(states[nth - 1] * weight) + bias)
        for states, _, responses in each_row(model, batch)
    ]


WEIGHT = torch.tensor([0.5, -1.0, 2.0, 0.25], dtype=torch.float64)
VALUE_HEADS = {"[N]": lambda hidden: hidden @ WEIGHT + 3, "[N, 1]": lambda hidden: hidden @ WEIGHT[:, None] + 3}


@all_forms
@pytest.mark.parametrize("head", VALUE_HEADS.values(), ids=VALUE_HEADS)
def test_values_are_those_of_each_row_alone(form: Any, head: Any, packing: str) -> None:
    batch = batch_of(*CASES["both"], ids="mrope3")
    model = Sums()
    truth = values_of(model, batch, WEIGHT, 3)
    same_rows(response_values(model, form(batch), head, options=ReplayOptions(multiple_of=16)), truth)
    assert model.seen == (["hidden" if packing == "packed" else "dense", "self_check False"])
    plan = mp.planning.plan_micro_batches(batch["attention_mask"].sum(1).numpy(), 14)
    seen = response_values(
        model, form(batch), head, plan=plan, self_check=True, options=ReplayOptions(no_prompt="skip")
    )
    assert not seen.requires_grad
    same_rows(seen, truth)


def test_values_of_responses_without_prompt_begin_with_zero(packing: str) -> None:
    batch = batch_of(lines_of(((2, 3), (0, 4), (0, 0), (0, 1), (1, 1)), 3, 4), 4)
    model = Sums()
    with pytest.raises(ReplayError, match=r"rows \[1, 3\] have a response"):
        response_values(model, batch, VALUE_HEADS["[N]"])
    seen = response_values(model, batch, VALUE_HEADS["[N]"], options=ReplayOptions(no_prompt="skip"))
    same_rows(seen, values_of(model, batch, WEIGHT, 3))
    (truth,) = torch.autograd.grad(torch.cat(values_of(model, batch, WEIGHT, 3)).sum(), model.table)
    assert torch.allclose(torch.autograd.grad(seen.values().sum(), model.table)[0], truth, rtol=0, atol=1e-12)


def test_values_are_float32_at_least() -> None:
    batch = batch_of(*CASES["both"])
    for given_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        seen = response_values(Sums(), batch, lambda hidden, to=given_dtype: hidden[:, 0].to(to))
        assert seen.dtype is dtype


def test_a_value_head_has_one_output() -> None:
    batch = batch_of(*CASES["both"])
    with pytest.raises(ReplayError, match=r"value_head made \(20, 2\) of hidden states \(20, 4\); expected \(20,\) or"):
        response_values(Sums(), batch, lambda hidden: hidden[:, :2])
