"""The doctor on batches with known answers. The registry that it prints is executed: strict mode takes the batch, every
bit comes back, and replay finds the tokens that a naive loop finds."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from functools import partial

import pytest
import samples
import test_presets
import tiny_models
import torch
import yaml
from command_line import output_of, printed, refused
from tensordict import TensorDict

import maskpack
from maskpack import RL_FIELDS, MaskAxis, MaskNestingRegistry, MaskNestingSpec, report
from maskpack.adapters.transformers import replayable
from maskpack.errors import MaskpackWarning, RegistryError
from maskpack.fields.presets import PRESETS
from maskpack.packed.table import forget
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs
from maskpack.tools import cli, doctor, inspector
from maskpack.tools.doctor import diagnose, snippet
from maskpack.tools.files import saved_registry

B, P, R = len(samples.ROWS), samples.PROMPT, samples.RESPONSE
PAD = ["--pad-token-id", str(samples.PAD)]


def saved(batch, path):
    torch.save(dict(batch.items()) if isinstance(batch, TensorDict) else batch, path)
    return str(path)


said = partial(printed, "doctor")


def executed(code):
    """The registry, and the options of replay if there are any, of the code that is printed."""
    names = {"ReplayOptions": ReplayOptions}
    exec(code.replace("# ReplayOptions(", "options = ReplayOptions("), names)
    return names["registry"], names.get("options")


def strict(batch, registry, token=samples.PAD):
    """The batch packed in strict mode; every bit comes back."""
    forget()
    packed = maskpack.compress(batch, registry=registry, pad_token_id=token or 0, strict_mask_nesting=True)
    samples.assert_same(maskpack.decompress(packed), batch)
    return packed


def wire_bytes(batch, registry, token=samples.PAD):
    return report(strict(batch, registry, token)).wire_bytes


def scored_ids(ids, valid, response):
    """The ids of the response tokens that have a token before them in their row, row by row."""
    out = []
    for row in range(len(ids)):
        columns = [at for at in range(ids.shape[1]) if valid[row, at]]
        out += [int(ids[row, at]) for at in columns[1:] if response[row, at]]
    return out


# -------------------------------------------------------------------- names of its own


def own(rows=12, prompt=10, answer=30, seed=3):
    """A trainer of its own: prompts padded on the left, answers on the right, tool tokens are holes."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    on_prompt = torch.arange(prompt) >= prompt - torch.tensor([[rng.randint(2, prompt)] for _ in range(rows)])
    on = torch.arange(answer) < torch.tensor([[rng.randint(4, answer)] for _ in range(rows)])
    on[0] = True
    attn = torch.cat([on_prompt, on], 1)
    loss = on & (torch.arange(answer) // 3 % 3 != 1)
    toks = torch.randint(5, 30_000, attn.shape, generator=generator).masked_fill(~attn, 7)

    def floats(mask):
        return torch.randn(mask.shape, generator=generator).masked_fill(~mask, 0)

    fields = {"toks": toks, "attn": attn.long(), "pos": (attn.cumsum(1) - 1).clamp(min=0), "logp": floats(on)}
    fields |= {"question": toks[:, :prompt].clone(), "answer": toks[:, prompt:].clone(), "learn": loss.long()}
    fields |= {"labels": toks.masked_fill(~attn, -100), "adv": floats(on) * loss, "score": torch.randn(rows)}
    fields["turn"] = (torch.arange(answer) // 3).expand(rows, -1).masked_fill(~on, -1)
    return TensorDict(fields, batch_size=[rows]), attn, torch.cat([torch.zeros_like(on_prompt), on], 1)


def split():
    return own()


def masks():
    """No ids but those of the sequence: the response is what a mask in its last columns says."""
    batch, attn, response = own()
    response = torch.cat([torch.zeros_like(batch["question"]), batch["learn"]], 1).bool()
    return batch.exclude("question", "answer"), attn, response


def whole():
    """The loss mask is as wide as the sequence."""
    batch, attn, response = own()
    fields = batch.select("toks", "attn", "labels").set("learn", response)
    return fields.set("logp", torch.randn(attn.shape).masked_fill(~attn, 0)), attn, response


def nested():
    batch, attn, response = whole()
    return TensorDict({"rollout": batch}, batch_size=batch.batch_size), attn, response


AXES = {
    split: {
        "sequence": (MaskAxis("attn"),),
        "prompt": (MaskAxis("attn", part="head", tail=("answer",)),),
        "response": (MaskAxis("attn", part="tail", tail=("answer",)),),
    },
    masks: {
        "sequence": (MaskAxis("attn"),),
        "response": (MaskAxis("learn"),),
        "columns": (MaskAxis("attn", part="tail", tail=("learn",)),),
    },
    whole: {"sequence": (MaskAxis("attn"),), "response": (MaskAxis("learn"),)},
    nested: {"sequence": (MaskAxis(("rollout", "attn")),), "response": (MaskAxis(("rollout", "learn")),)},
}


@pytest.mark.parametrize("case", AXES)
@pytest.mark.parametrize("parts", [1, 5])
def test_the_registry_as_printed_covers_a_batch_of_own_names(case, parts, monkeypatch):
    batch, attn, response = case()
    before = samples.freeze(batch)
    if parts > 1:
        monkeypatch.setattr(doctor, "_PART", 1)
        monkeypatch.setattr(doctor, "_PARTS", parts)
        monkeypatch.setattr(doctor, "_some_rows", lambda batch: batch)
    found = diagnose(batch)
    assert samples.freeze(batch) == before
    assert dict(found.registry.axes) == AXES[case]
    assert found.pad_token_id == 7
    registry, options = executed(snippet(found))
    assert registry.told == found.registry.told
    packed = strict(batch, registry, 7)
    assert all(spec.mask is not None for spec in registry.values())
    assert found.sizes.padded_bytes == sum(x.numel() * x.element_size() for x in batch.values(True, True))
    assert (found.sizes.wire_bytes == report(packed).wire_bytes) == (parts == 1)
    ids = batch[options.input_ids]
    for rows in (batch, packed):  # a packed batch has its axes, too
        assert PackedInputs.of(rows, options=options).targets.tolist() == scored_ids(ids, attn, response)
    assert found.scored == int(response.sum())


def test_the_registry_of_one_batch_takes_later_ones():
    registry = diagnose(own()[0]).registry
    for seed in range(10):
        strict(own(seed=seed)[0], registry, 7)


@pytest.mark.parametrize("name", ["attn", "learn"])
def test_a_float_field_is_never_a_mask_by_guess(name):
    batch, *_ = whole()
    batch["temperature"] = torch.ones(batch["toks"].shape)
    batch[name] = batch[name].float()
    found = diagnose(batch)
    assert not {"temperature", name} & {way.source for ways in found.registry.axes.values() for way in ways}
    assert not {"temperature", name} & {mask for spec in found.registry.values() for mask in spec.masks}
    assert found.scored is None


def test_prompts_and_completions_that_are_padded_apart_show_no_sequence():
    """A prompt mask may lie within the last columns of a completion mask by chance."""
    prompts, answers = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[8, 9, 1, 2, 0, 0], [3, 4, 5, 6, 7, 8]])
    prompts[0, 1:] = 0
    batch = TensorDict({"q": prompts, "q_mask": prompts != 0, "a": answers, "a_mask": answers != 0}, batch_size=[2])
    found = diagnose(batch)
    assert (found.registry.axes, found.scored) == ({}, None)
    assert {key: spec.mask for key, spec in found.registry.items()} == {
        **dict.fromkeys(("q", "q_mask"), "q_mask"),
        **dict.fromkeys(("a", "a_mask"), "a_mask"),
    }


@pytest.mark.parametrize("field", ["answer", "toks"])
def test_one_bit_that_differs_shows_no_split(field):
    batch, *_ = own()
    batch = batch.select("toks", "attn", "answer", "logp")
    batch[field][0, -1] += 1
    assert "prompt" not in diagnose(batch).registry.axes


# -------------------------------------------------------------------- lines


def per_row(axis):
    mask = samples.of(axis, torch.bool)
    return torch.where(mask, samples.of(axis, torch.float32, seed=3), torch.arange(B)[:, None] + 0.5)


ZEROS = "MaskNestingSpec('response', pad=ZERO)"
LINES = [
    (samples.of("response", torch.float32), ZEROS, "0.0"),
    (samples.of("prompt", torch.int32, -100), "MaskNestingSpec('prompt', pad=-100)", "-100"),
    (samples.of("response", torch.float32, math.nan), "MaskNestingSpec('response', pad=float(\"nan\"))", "nan"),
    (samples.of("response", torch.int64, samples.PAD), "MaskNestingSpec('response', pad=PAD_TOKEN_ID)", "the pad to"),
    (samples.of("sequence", torch.int64, samples.EDGE), "MaskNestingSpec('sequence', pad=EDGE)", "EDGE"),
    (samples.of("response", torch.bool), "MaskNestingSpec('response')", "False"),
    (per_row("response"), "MaskNestingSpec('response', pad=PER_ROW)", "PER_ROW"),
    (torch.tensor([1.0, -1.0] * R)[:R] * samples.of("response", torch.bool), ZEROS, "ZERO"),
    (
        samples.of("sequence", torch.int64, samples.EDGE, (4,)).movedim(1, 2).contiguous(),
        "MaskNestingSpec('sequence', pad=EDGE, ragged_dim=-1)",
        "EDGE",
    ),
]


@pytest.mark.parametrize(("value", "spec", "pad"), LINES, ids=[pad for _, _, pad in LINES])
def test_the_printed_line_covers_the_field(value, spec, pad, tmp_path, capsys):
    batch = samples.rollout_with(mine=value, sub=TensorDict({"mine": value}, [B]))
    torch.save(batch, tmp_path / "b")
    shown = said([tmp_path / "b"], capsys, 1)
    assert f"    'mine': {spec},\n" in shown
    assert f"    ('sub', 'mine'): {spec},\n" in shown
    assert f" it is padded with {pad}" in shown
    registry, _ = executed(re.search(r"^from maskpack import .*?^}\)$", shown, re.DOTALL | re.MULTILINE)[0])
    kinds = {form.path: form.kind for form in strict(batch, registry).schema.forms}
    assert kinds["mine",] == kinds["sub", "mine"] == "padded"


def under(**values):
    """A field of the response with these values under the mask, in turn."""
    out = samples.of("response", torch.float32)
    places = (~samples.of("response", torch.bool)).nonzero()
    out[tuple(places.T)] = torch.tensor([*values.values()]).repeat(len(places))[: len(places)]
    return out


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (
            under(a=0.0, b=2.5, c=-7.0),
            r'under mask "response" it holds (0.0|2.5|-7.0), .*\. No pad covers that: x\.mas',
        ),
        (torch.randn(B, 3, 2), r'has its size; mask "sequence" is \(7, 11\); mask "prompt" is \(7, 5\); mask "resp'),
        (samples.per_row([{"x": torch.zeros(b + 1)} for b in range(B)]), r"no mask reaches into a Python object"),
    ],
)
def test_what_no_mask_covers_is_declared_to_stay_padded(value, seen):
    batch = samples.rollout_with(mine=value)
    (line,) = diagnose(batch, pad_token_id=samples.PAD).suggestions
    assert (line.key, line.spec.mask) == ("mine", None)
    assert re.search(seen, line.seen)
    strict(batch, executed(snippet(diagnose(batch)))[0])


def test_the_remedy_for_several_values():
    batch = samples.rollout_with(mine=under(a=0.0, b=2.5))
    batch["mine"] = batch["mine"].masked_fill(batch["response_mask"] == 0, 0)
    assert diagnose(batch).registry["mine"].mask == "response"


def test_a_known_field_with_another_pad_keeps_its_spec():
    batch = samples.rollout_with(rollout_log_probs=samples.of("response", torch.float32, 1))
    found = diagnose(batch)
    spec = found.registry["rollout_log_probs"]
    assert (spec.masks, spec.pads[0], spec.hints) == (
        ("response", "sequence"),
        1.0,
        RL_FIELDS["rollout_log_probs"].hints,
    )
    for one in (batch, samples.rollout_with()):  # what was right before still is
        strict(one, found.registry)


def test_a_wrong_pad_token_is_put_right():
    found = diagnose(samples.rollout_with(), pad_token_id=3)
    assert found.registry["responses"].pads == (samples.PAD, maskpack.PAD_TOKEN_ID)
    strict(samples.rollout_with(), found.registry, 3)


def test_a_full_mask_shows_no_pad():
    mask = torch.ones(3, 4, dtype=torch.int64)
    batch = TensorDict({"attention_mask": mask, "mine": torch.randn(3, 4)}, batch_size=[3])
    (line,) = diagnose(batch).suggestions
    assert "nothing is padded in this batch, so its pad is not seen; 0 is assumed" in line.seen
    strict(batch, diagnose(batch).registry)


def test_a_nan_of_other_bits_is_a_pad_of_rows():
    """0 / 0 is no float("nan") on every processor."""
    nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    batch = samples.rollout_with(odd=torch.where(samples.of("response", torch.bool), 1.0, nan))
    strict(batch, executed(snippet(diagnose(batch)))[0])


def test_the_pad_token_is_that_of_most_token_fields():
    batch, mask = samples.rollout_with(), samples.of("sequence", torch.bool)
    for name, pad in (("input_ids", 50), ("teacher_ids", 50), ("prompts", 60), ("responses", 50)):
        columns = {"prompts": slice(P), "responses": slice(P, None)}.get(name, slice(None))
        batch[name] = torch.where(mask[:, columns], 1, pad)
    assert diagnose(batch).pad_token_id == 50


def test_a_mask_of_the_registry_or_of_more_tokens_comes_first():
    some = samples.of("response", torch.bool) & (torch.arange(R) % 2 == 0)
    batch = samples.rollout_with(
        one=torch.randn(B, R).where(some, 0.0), two=torch.randn(B, R).where(some, 0.0), some=some
    )
    assert diagnose(batch).registry["one"].mask == "response"
    wide = torch.arange(12) < torch.tensor([[9], [5], [12]])
    narrow = wide & (torch.arange(12) > 1)
    fields = {"a": torch.randn(3, 12).where(wide, 0.0), "b": torch.randn(3, 12).where(narrow, 0.0)}
    found = diagnose(TensorDict({"wide": wide, "narrow": narrow, **fields}, batch_size=[3]))
    assert (found.registry["a"].mask, found.registry["b"].mask) == ("wide", "wide")


def test_no_rows_and_no_masks():
    assert diagnose(samples.rollout_with()[:0], pad_token_id=1).suggestions == ()
    (line,) = diagnose(TensorDict({"x": torch.ones(2, 3)}, [2])).suggestions
    assert line.seen == "no mask of the batch has its size; there is no mask"


def test_packed_and_nested_batches_are_those_that_were_packed():
    batch = samples.rollout_with(mine=LINES[1][0])
    with pytest.warns(MaskpackWarning):
        forms = maskpack.compress(batch, pad_token_id=7), maskpack.nest_batch_by_mask(batch, pad_token_id=7)
    for form in (batch, *forms):
        assert [one.line for one in diagnose(form).suggestions] == ["'mine': MaskNestingSpec('prompt', pad=-100),"]


def test_lists_that_are_not_of_these_rows(tmp_path, capsys):
    rows = {"tokens": [torch.arange(1, 4), torch.arange(1, 3)], "loss_masks": [torch.ones(2), torch.ones(1)]}
    torch.save({**rows, "raw_reward": [0.5] * 4}, tmp_path / "a.pt")
    assert f"{tmp_path / 'a.pt'}: 2 rows, 2 fields\n" in said([tmp_path / "a.pt"], capsys, 0)
    torch.save({**rows, "advantages": [torch.ones(2)] * 4}, tmp_path / "b.pt")
    shown = said([tmp_path / "b.pt"], capsys, 2)
    assert "lists of different lengths: tokens 2, loss_masks 2, advantages 4; expected one entry" in shown
    assert "Leave the others out" in shown
    torch.save(rows, tmp_path / "c.pt")
    assert f"{tmp_path / 'c.pt'}: 2 rows, 2 fields\n" in said([tmp_path / "c.pt"], capsys, 0)


# -------------------------------------------------------------------- presets


def of_trainer(case):
    return test_presets.made(case, count=40, most=120, empty=False)


@pytest.mark.parametrize("case", ["skyrl", "nemo_rl", "openrlhf", "slime", "slime jagged", "areal rollout", "prime_rl"])
def test_the_preset_that_fits_is_named_alone(case, tmp_path, capsys):
    """After strict mode and replay took it. Its bytes are those that are printed."""
    batch, name = of_trainer(case), case.partition(" ")[0]
    torch.save(batch, tmp_path / "b")
    covered = case == "slime jagged"
    shown = said([tmp_path / "b"], capsys, int(not covered))
    assert shown.count("registry = ") == 1
    code = shown[shown.index("from maskpack.fields import") : shown.index("Checked")]
    registry, options = executed(code)
    assert registry.told == PRESETS[name].told
    token = diagnose(batch).pad_token_id
    assert f"packed:  {wire_bytes(batch, registry, token):,} bytes, " in shown
    needs = "Strict mode and replay need" if "stay padded with RL_FIELDS" in shown else "Replay needs"
    assert f"{needs} a registry; for bytes alone nothing is needed." in shown
    tokens = PackedInputs.of(
        batch, options=ReplayOptions(registry=registry, input_ids=options.input_ids, no_prompt="skip")
    )
    assert f"Replay finds {tokens.response.num_tokens:,} response tokens." in shown
    said([tmp_path / "b", "--registry", name, *(["--pad-token-id", token] if token else [])], capsys, 0)


def test_a_preset_has_lines_for_what_it_does_not_know():
    batch = of_trainer("skyrl").set("images", samples.per_row([{"pixels": torch.ones(2)}] * 40))
    found = diagnose(batch)
    assert found.name == "skyrl"
    assert [one.line for one in found.suggestions] == ["'images': MaskNestingSpec(None),  # stays padded"]
    strict(batch, executed(snippet(found))[0])


def test_a_batch_that_rl_fields_refuses(tmp_path, capsys):
    file = saved(of_trainer("openrlhf"), tmp_path / "b.pt")
    shown = said([file], capsys, 1)
    assert 'RL_FIELDS refuses the batch: compress: field "rollout_log_probs" is ' in shown
    assert 'b.pt: compress: field "rollout_log_probs" is ' in said(["--strict", file], capsys, 2)
    only = saved(of_trainer("openrlhf").select("rollout_log_probs", "attention_mask"), tmp_path / "c")
    assert '"rollout_log_probs" is' in said([only, "--registry", "verl"], capsys, 2)


def test_a_covered_batch(tmp_path, capsys):
    shown = said([saved(samples.rollout_with(), tmp_path / "b.pt")], capsys, 0)
    assert shown.startswith(f"{tmp_path / 'b.pt'}: {B} rows, {len(samples.rollout_with().keys())} fields\n")
    assert "Every tensor of two or more dims is covered by RL_FIELDS." in shown
    assert f"note: the pad token is {samples.PAD}. Pass that of the tokenizer to compress as pad_token_id" in shown
    assert "registry = " not in shown
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64)
    file = saved(TensorDict({"attention_mask": mask, "input_ids": ids}, batch_size=[2]), tmp_path / "full")
    assert "note: no padding shows the pad token" in said([file], capsys, 0)


# -------------------------------------------------------------------- packed rows


def documents():
    """A micro-batch [1, T] of rows one after another, as prime-rl makes it, and its rows."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, tiny_models.VOCABULARY, (n,), generator=generator) for n in (5, 9, 4)]
    learn = [torch.arange(len(row)) > 1 for row in rows]
    batch = {"input_ids": torch.cat(rows)[None], "loss_mask": torch.cat(learn)[None]}
    batch["position_ids"] = torch.cat([torch.arange(len(row)) for row in rows])[None]
    batch["logp"] = torch.where(batch["loss_mask"], -0.5, 0)
    batch["temperatures"] = torch.ones(batch["logp"].shape)
    return batch, rows, learn


LENGTHS = torch.tensor([5, 9, 4])
AGAIN, TOLD = "counts and starts again inside a row", "Replay keeps documents apart by position_ids, cu_seqlens or seq"
PACKED = {
    "position_ids": ({}, AGAIN),
    "seq_lens": ({"seq_lens": LENGTHS, "position_ids": None}, '"seq_lens" says that one row holds 3 documents'),
    "cu_seqlens": (
        {"cu_seqlens": torch.tensor([0, 5, 14, 18], dtype=torch.int32), "position_ids": None},
        '"cu_seqlens" says that one row holds 3 documents',
    ),
    "flat": ({"seq_lens": LENGTHS}, '"seq_lens" says that one row holds 3 documents'),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_rows_are_named_and_replayed_as_they_are(case, tmp_path, capsys):
    """The log-probs are those of each document alone."""
    batch, rows, learn = documents()
    more, seen = PACKED[case]
    batch = {name: x for name, x in {**batch, **more}.items() if x is not None}
    if case == "flat":
        batch = {name: x if name == "seq_lens" else x[0] for name, x in batch.items()}
    found = diagnose(TensorDict(batch, batch_size=[]))
    assert found.scored == sum(int(mask.sum()) for mask in learn)
    assert [one.kind for one in found.findings] == ["documents"]
    shown = said([saved(batch, tmp_path / "b")], capsys, int(case != "flat"))
    assert "documents: " in shown
    assert seen in shown
    assert TOLD in shown
    assert "Not checked: replay" not in shown
    _, options = executed(snippet(found))
    model, plain = tiny_models.pair(tiny_models.qwen3)
    with torch.no_grad():
        ours = response_log_probs(replayable(model), TensorDict(batch, batch_size=[]), options=options)
        alone = [plain(row[None]).logits[0, :-1].log_softmax(-1) for row in rows]
    truth = [scores[at - 1, row[at]] for scores, row in zip(alone, rows, strict=True) for at in range(2, len(row))]
    ours = ours.values()
    assert torch.allclose(ours[ours != 0], torch.stack(truth), atol=1e-5)


def test_positions_that_replay_does_not_read_are_named():
    """Of another name: replay would score the rows as one. After the remedy it keeps them apart."""
    batch, _, learn = documents()
    batch["attn"] = torch.ones_like(batch["input_ids"])
    batch["pos"] = batch.pop("position_ids")
    found = diagnose(TensorDict(batch, batch_size=[1]))
    (one,) = found.findings
    assert (one.path, one.kind) == (("pos",), "documents")
    assert one.remedy == "Replay reads position_ids alone: give the field that name."
    assert (found.scored, found.found.axes) == (None, {})
    batch["position_ids"] = batch.pop("pos")
    found = diagnose(TensorDict(batch, batch_size=[1]))
    assert found.scored == sum(int(mask.sum()) for mask in learn)
    _, options = executed(snippet(found))
    assert PackedInputs.of(TensorDict(batch, [1]), options=options).cu_seqlens.tolist() == [0, 5, 14, 18]


@pytest.mark.parametrize("positions", ["left", "zeros", "edge"])
def test_padding_starts_no_document(positions):
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]]) != 0
    mask = mask if positions == "left" else mask.flip(1)
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    counted = counted.masked_fill(~mask, 0) if positions == "zeros" else counted
    assert diagnose(TensorDict({"attn": mask, "pos": counted}, [2])).findings == ()


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize(("name", "as_dict"), [("r.json", True), ("r.yaml", False)])
def test_the_registry_that_is_written_is_read_back_and_covers_the_batch(name, as_dict, tmp_path, capsys):
    batch = own()[0].set("odd", torch.full((12, 3), 1.5))
    torch.save(batch.to_dict() if as_dict else batch, tmp_path / "b.pt")
    file, written = str(tmp_path / "b.pt"), str(tmp_path / name)
    *_, told, line = said([file, "--write", written], capsys, 0).splitlines()
    assert told == f"written to {written}, for --registry. In Python:"
    names = {"json": json, "yaml": yaml, "MaskNestingRegistry": MaskNestingRegistry}
    exec(line, names)
    registry = saved_registry(written)
    assert names["registry"].told == registry.told == diagnose(batch).registry.told
    with pytest.raises(RegistryError, match=re.escape(line.partition(" = ")[2])):
        maskpack.compress(batch, registry=written)
    strict(batch, registry, 7)
    shown = said([file, "--registry", written, "--pad-token-id", 7], capsys, 0)
    assert "Every tensor of two or more dims is covered by the registry." in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt", name]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--write", "r.json"], "r.json: the file exists. Give another name, or remove it"),
        (["--write", "r.txt"], "expected a file that ends in .json, .yaml or .yml\n"),
        (["--write", "none/r.json"], "there is no such folder. Make it, or give another name"),
        (["--write", "s.json", "--strict"], "--write and --strict do not go together"),
    ],
)
def test_what_cannot_be_written_fails_before_a_file_is_read(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.json").write_text("mine")
    assert message in said(["no batch", *argv], capsys, 2)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("r.json", "mine")]


def shards(tmp_path):
    """Files of a trainer: the rollout, the update with fields and pads of its own, and a batch of other fields."""
    update = own(seed=4)[0].exclude("logp", "labels")
    update["turn"] = update["turn"].masked_fill(update["answer"] == 7, -7)
    update["kl"] = -torch.rand(12, 30) * (update["answer"] != 7)
    other = TensorDict({"seen": torch.eye(3) * 2, "seen_on": torch.eye(3).long()}, batch_size=[3])
    batches = {"rollout": own()[0], "update": update, "other": other}
    return [*batches.values()], [saved(batch, tmp_path / name) for name, batch in batches.items()]


def test_the_registry_of_several_files_takes_them_all(tmp_path, capsys):
    batches, files = shards(tmp_path)
    written = str(tmp_path / "r.yaml")
    shown = said([*files, "--write", written], capsys, 0)
    registry = saved_registry(written)
    assert registry["turn"].pads == (-7, -1)
    assert registry.axes == diagnose(own()[0]).registry.axes
    for batch in batches:
        strict(batch, registry, 7)
    sizes = [[line["padded_bytes"], line["wire_bytes"]] for line in json.loads(said([*files, "--json"], capsys, 1))]
    padded, wire = map(sum, zip(*sizes, strict=True))
    assert padded == sum(x.numel() * x.element_size() for batch in batches for x in batch.values())
    assert f"All files: {padded:,} bytes padded, {wire:,} packed, {padded / wire:,.1f} times fewer." in shown
    said(["--strict", *files, "--registry", written], capsys, 0)


def test_files_that_no_registry_takes_write_none(tmp_path, capsys):
    """The mask of all tokens has the name of that of the loss. Without the file that is named, there is one."""
    _, files = shards(tmp_path)
    odd = own()[0]
    odd["turn"] = odd["toks"]
    odd = saved(odd, tmp_path / "odd")
    shown = said([files[0], odd, "--write", tmp_path / "r.yaml"], capsys, 2)
    assert re.search(rf"no registry takes all files. Leave ({odd}|{files[0]}) out: ", shown)
    assert not (tmp_path / "r.yaml").exists()
    said([files[0], "--write", tmp_path / "r.yaml"], capsys, 0)


def test_strict_checks_several_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (
        saved(samples.rollout_with(), "good"),
        saved(samples.rollout_with(mine=LINES[1][0]), "bad"),
        saved(samples.rollout_with(responses=torch.zeros(B, 99)), "odd"),
    )
    (tmp_path / "text").write_text("no batch")
    fields = len(samples.rollout_with().keys())
    shown = said(["--strict", *PAD, "text", "none", "odd", "bad", "good"], capsys, 2)
    assert [
        line.partition(" (")[0][:40] for line in shown.splitlines() if not line.startswith(("  note", "  nonfi"))
    ] == [
        "text: text is none of the files that are",
        "none: none: No such file or directory",
        shown.splitlines()[2][:40],
        f"bad: {fields + 1} fields, 1 of them padded",
        '  "mine"',
        '    under mask "prompt" it is padded wit',
        "    'mine': MaskNestingSpec('prompt', pa",
        f"good: {fields} fields, none of them padded",
    ]
    assert shown.splitlines()[2].startswith("odd: compress: ")
    (tmp_path / "r.json").write_text(json.dumps((RL_FIELDS | {"mine": MaskNestingSpec("prompt", -100)}).to_dict()))
    said(["--strict", "good", "bad", "--registry", "r.json"], capsys, 0)


def test_json_has_the_figures(tmp_path, capsys):
    batch = samples.rollout_with(mine=LINES[1][0])
    found = json.loads(said([saved(batch, tmp_path / "b"), "--json", *PAD], capsys, 1))
    registry, _ = executed(found["registry"])
    assert found["wire_bytes"] == wire_bytes(batch, registry)
    assert (found["stay_padded"], found["lines"]) == ([["mine"]], ["'mine': MaskNestingSpec('prompt', pad=-100),"])
    assert found["response_tokens"] == sum(r for _, r in samples.ROWS)
    assert (found["base"], found["why"], found["refusal"]) == ("RL_FIELDS", None, None)
    assert {line.partition(":")[0] for line in found["findings"]} == {"nonfinite"}


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_too_little_memory_is_one_line(command, tmp_path, capsys, monkeypatch):
    file = saved(samples.rollout_with(), tmp_path / "b.pt")
    home, name = (doctor, "diagnose") if command == "doctor" else (inspector, "report")
    for error in (MemoryError("16.0 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(home, name, fails)
        assert refused(command, [file], capsys).startswith(
            f"maskpack {command}: it does not fit into the memory of this machine"
        )

    def wrong(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(RuntimeError, match="something else"):
        cli.main([command, file])


PEAK = """
import resource, sys
from maskpack.tools import cli

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

assert cli.main(["doctor", sys.argv[1]]) == 0
before = peak()
assert cli.main(["doctor", sys.argv[2]]) == 0
print("peak", peak() - before)
"""


def test_it_takes_twice_the_memory_of_the_batch(tmp_path):
    """Of full rows, which no mask makes smaller."""
    files, size = [], 0
    for rows, name in ((2, "small"), (64, "large")):
        ids = torch.randint(1, 150_000, (rows, 400_000))
        mask = torch.ones(ids.shape, dtype=torch.bool)
        loss = mask.clone()
        loss[:, :500] = False
        size = ids.numel() * 10
        files.append(saved({"input_ids": ids, "attention_mask": mask, "loss_mask": loss}, tmp_path / name))
        del ids, mask, loss
    assert int(output_of(sys.executable, "-c", PEAK, *files).rpartition("peak ")[2]) < 2 * size
