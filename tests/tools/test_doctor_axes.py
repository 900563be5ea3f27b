"""The axes and hints that the doctor finds in batches of foreign names, against registries written by hand."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import pytest
import samples
import test_presets
import torch
import yaml
from tensordict import TensorDict

import maskpack
from maskpack import (
    ANY_ZERO,
    EDGE,
    PAD_TOKEN_ID,
    PER_ROW,
    RL_FIELDS,
    SIGNED_ZERO,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
)
from maskpack.errors import RegistryError
from maskpack.packed.sizes import report
from maskpack.packed.table import forget
from maskpack.replay import PackedInputs, ReplayOptions
from maskpack.tools import cli
from maskpack.tools.doctor import diagnose, snippet
from maskpack.tools.files import saved_registry

ZEROS = [0, SIGNED_ZERO, ANY_ZERO]
SPEC = MaskNestingSpec
MASK = {"hints": ("rle", "bitmap")}


def renamed(batch, names):
    """A batch with other names; fields without one are left out."""
    return TensorDict({new: batch[old] for old, new in names.items()}, batch_size=batch.batch_size)


def of_trainer(case, names, **more):
    return renamed(test_presets.made(case, count=40, most=120, empty=False, **more), names)


def skyrl_like():
    names = {"sequences": "block", "attention_mask": "real", "response_mask": "answer", "rewards": "gain"}
    names |= {
        "loss_mask": "train",
        "rollout_logprobs": "engine",
        "action_log_probs": "lp",
        "base_action_log_probs": "ref",
    }
    names |= {"values": "critic", "advantages": "adv", "returns": "ret"}
    axes = {
        "sequence": MaskAxis("real", padded="left"),
        "response": MaskAxis("answer", padded="left"),
        "columns": MaskAxis("real", part="tail", tail=("answer",)),
    }
    specs = {
        "block": SPEC("sequence", PAD_TOKEN_ID),
        "real": SPEC("sequence", **MASK),
        **dict.fromkeys(("answer", "train"), SPEC("response", **MASK)),
        **dict.fromkeys(("gain", "engine"), SPEC("response", ZEROS)),
        "lp": SPEC("columns", ZEROS),
        **dict.fromkeys(("ref", "critic"), SPEC("columns", ZEROS, hints=("near:lp",))),
        **dict.fromkeys(("adv", "ret"), SPEC("columns", [*ZEROS, PER_ROW], hints=("rle",))),
    }
    return of_trainer("skyrl", names), MaskNestingRegistry(specs, axes), "block"


def areal_like():
    names = {"input_ids": "ids", "attention_mask": "there", "loss_mask": "trained", "logprobs": "lp"}
    names |= {"versions": "policy", "prox_logp": "prox"}
    axes = {"sequence": MaskAxis("there"), "response": MaskAxis("trained")}
    specs = {
        "ids": SPEC("sequence", 0),
        "there": SPEC("sequence", **MASK),
        "trained": SPEC("sequence", **MASK),
        "policy": SPEC("sequence", hints=("rle",)),
        "lp": SPEC("sequence", ZEROS),
        "prox": SPEC("sequence", ZEROS, hints=("near:lp",)),
    }
    return of_trainer("areal rollout", names), MaskNestingRegistry(specs, axes), "ids"


def nemo_like():
    names = {"input_ids": "flat", "input_lengths": "sizes", "token_mask": "of_model", "generation_logprobs": "engine"}
    names |= {"prev_logprobs": "prev", "reference_policy_logprobs": "ref", "advantages": "adv"}
    axes = {"sequence": MaskAxis("sizes", "lengths", head=("flat",)), "response": MaskAxis("of_model")}
    specs = {
        "flat": SPEC("sequence", PAD_TOKEN_ID),
        "of_model": SPEC("sequence", **MASK),
        "prev": SPEC("sequence", ZEROS),
        **dict.fromkeys(("engine", "ref"), SPEC("sequence", ZEROS, hints=("near:prev",))),
        "adv": SPEC("sequence", [*ZEROS, PER_ROW], hints=("rle",)),
    }
    return of_trainer("nemo_rl", names), MaskNestingRegistry(specs, axes), "flat"


def ppo(rows=32, prompt=96, answer=416):
    """A PPO trainer of its own: prompts padded on the left, responses on the right, tool tokens are holes."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    asked = torch.tensor([rng.randint(8, prompt) for _ in range(rows // 4)]).repeat_interleave(4)
    said = torch.tensor([rng.randint(4, answer) for _ in range(rows)])
    on_prompt = torch.arange(prompt) >= prompt - asked[:, None]
    on = torch.arange(answer) < said[:, None]
    questions = torch.randint(5, 30_000, (rows // 4, prompt), generator=generator).repeat_interleave(4, 0)
    attn = torch.cat([on_prompt, on], 1)
    loss = on & (torch.arange(answer) // 37 % 3 != 1)

    def floats(scale=1.0, near=None):
        own = torch.randn(rows, answer, generator=generator) * scale
        return (own if near is None else near * (1 + 0.01 * own)).masked_fill(~on, 0)

    batch = TensorDict(
        {
            "prompt_toks": questions.masked_fill(~on_prompt, 0),
            "resp_toks": torch.randint(5, 30_000, (rows, answer), generator=generator).masked_fill(~on, 0),
            "attn": attn.long(),
            "resp_attn": on.long(),
            "pos": (attn.cumsum(1) - 1).clamp(min=0),
            "loss_mask": loss.float(),
            "turn_id": (torch.arange(answer) // 37).expand(rows, -1).masked_fill(~on, -1),
            "engine_logp": -floats().abs(),
            "vals": floats(),
        },
        batch_size=[rows],
    )
    batch["tokens"] = torch.cat([batch["prompt_toks"], batch["resp_toks"]], 1)
    batch["labels"] = batch["tokens"].masked_fill(torch.cat([torch.zeros_like(on_prompt), loss], 1).logical_not(), -100)
    batch["old_logp"] = floats(near=batch["engine_logp"])
    batch["ref_logp"] = floats(near=batch["engine_logp"])
    batch["adv"] = batch["vals"] * loss
    batch["rets"] = floats(near=batch["vals"])
    batch["score"] = torch.randn(rows, generator=generator)
    return batch


def ppo_like():
    sides = {"head": ("prompt_toks",), "tail": ("resp_toks",)}
    axes = {
        "sequence": MaskAxis("attn"),
        "prompt": MaskAxis("attn", part="head", **sides),
        "response": MaskAxis("attn", part="tail", **sides),
    }
    specs = {
        "tokens": SPEC("sequence", PAD_TOKEN_ID, hints=("concat:prompt_toks,resp_toks",)),
        "attn": SPEC("sequence", **MASK),
        "pos": SPEC("sequence", EDGE, hints=("arange",)),
        "prompt_toks": SPEC("prompt", PAD_TOKEN_ID, hints=("dictionary",)),
        "resp_toks": SPEC("response", PAD_TOKEN_ID),
        **dict.fromkeys(("resp_attn", "loss_mask"), SPEC("response", **MASK)),
        "turn_id": SPEC("response", -1, hints=("rle",)),
        "labels": SPEC("sequence", -100, hints=("sparse",)),
        "engine_logp": SPEC("response", ZEROS),
        **dict.fromkeys(("old_logp", "ref_logp"), SPEC("response", ZEROS, hints=("near:engine_logp",))),
        "vals": SPEC("response", ZEROS),
        **dict.fromkeys(("adv", "rets"), SPEC("response", ZEROS, hints=("near:vals",))),
    }
    return ppo(), MaskNestingRegistry(specs, axes), "tokens"


CASES = {
    "ppo": ppo_like,
    "skyrl": skyrl_like,
    "areal": areal_like,
    "nemo_rl": nemo_like,
}


def pad_token_of(case):
    return 0 if case in ("ppo", "areal") else samples.PAD


def strict(batch, registry, pad_token_id):
    forget()
    return maskpack.compress(batch, registry=registry, pad_token_id=pad_token_id, strict_mask_nesting=True)


def bytes_of(packed):
    return report(None, packed)["maskpack/wire_bytes"]


def executed(code):
    """The registry and the options of replay that the doctor prints."""
    names = {"ReplayOptions": ReplayOptions}
    exec(code.replace("# ReplayOptions(", "options = ReplayOptions("), names)
    return names["registry"], names["options"]


def equal(registry, other):
    return registry.told == other.told


# -------------------------------------------------------------------- the registry that is printed


@pytest.mark.parametrize("case", CASES)
def test_the_registry_as_printed_survives_strict_mode_and_replay_and_takes_no_more_bytes_than_one_by_hand(case):
    batch, by_hand, ids = CASES[case]()
    token = pad_token_of(case)
    found = diagnose(batch, pad_token_id=token)
    registry, options = executed(snippet(found, "RL_FIELDS"))
    assert equal(registry, found.cover.registry)
    packed = strict(batch, registry, token)
    samples.assert_same(maskpack.decompress(packed), batch)
    assert bytes_of(packed) == found.covered.wire_bytes
    assert bytes_of(packed) <= 1.02 * bytes_of(strict(batch, by_hand, token))
    assert options.input_ids == ids
    expected = PackedInputs.of(batch, options=ReplayOptions(input_ids=ids, registry=by_hand, no_prompt="skip"))
    for rows in (batch, packed):  # a packed batch has its axes, too
        inputs = PackedInputs.of(rows, options=replace(options, no_prompt="skip"))
        for name in ("input_ids", "cu_seqlens", "predict", "targets"):
            assert torch.equal(getattr(inputs, name), getattr(expected, name)), name
    assert found.cover.scored == inputs.response.num_tokens


def test_a_split_is_shown_by_widths_tails_of_masks_and_ids_side_by_side():
    """The hint is there only because it saves bytes."""
    batch = ppo()
    found = diagnose(batch).cover
    assert found.found.seen == (
        "tokens[:, :96] equals prompt_toks",
        "attn[:, 96:] equals resp_attn",
        "tokens[:, 96:] equals resp_toks",
    )
    sides = {"head": ("prompt_toks",), "tail": ("resp_attn", "resp_toks")}
    assert dict(found.registry.axes) == {
        "sequence": (MaskAxis("attn"),),
        "prompt": (MaskAxis("attn", part="head", **sides),),
        "response": (MaskAxis("attn", part="tail", **sides),),
    }
    assert found.registry["tokens"].hints == ("concat:prompt_toks,resp_toks",)
    assert found.registry["ref_logp"].hints == ("near:engine_logp",)
    batch["ref_logp"] = torch.randn(32, 416).masked_fill(batch["resp_attn"] == 0, 0)
    assert diagnose(batch).cover.registry["ref_logp"].hints == ()


@pytest.mark.parametrize("field", ["resp_attn", "resp_toks", "prompt_toks"])
def test_one_bit_that_differs_shows_no_split(field):
    batch = ppo().select("tokens", "attn", "ref_logp", field)
    assert "prompt" in diagnose(batch).cover.added.axes
    batch[field] = batch[field].clone()
    at = (batch[field] != 0).nonzero()[-1]
    batch[field][at[0], at[1]] = 0 if field == "resp_attn" else 4
    assert "prompt" not in diagnose(batch).cover.added.axes


def test_constant_fields_show_no_split():
    """The last columns of full rows are ones, as a flag of one column may be."""
    batch = ppo().select("tokens", "attn", "labels")
    batch["attn"] = torch.ones_like(batch["attn"])
    batch["flag"] = torch.ones(32, 1, dtype=torch.int64)
    assert diagnose(batch).cover.found.seen == ()


def test_prompts_and_completions_that_are_padded_apart_show_no_sequence():
    """A prompt mask may lie within the last columns of a completion mask by chance."""
    prompts, answers = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[8, 9, 1, 2, 0, 0], [3, 4, 5, 6, 7, 8]])
    prompts[0, 1:] = 0
    batch = TensorDict({"q": prompts, "q_mask": prompts != 0, "a": answers, "a_mask": answers != 0}, batch_size=[2])
    assert diagnose(batch).cover.added.axes == {}
    assert diagnose(batch).cover.found.apart == (("q", "q_mask"), ("a", "a_mask"))


def apart(parent=()):
    """Prompts and answers in fields of their own, the answers first."""
    whole = ppo()
    names = {"resp_toks": "answer_ids", "resp_attn": "answer_mask", "ref_logp": "logp", "prompt_toks": "query_ids"}
    batch = renamed(whole, names)
    batch["query_mask"] = whole["attn"][:, :96].contiguous()
    return TensorDict({parent: batch}, batch_size=batch.batch_size) if parent else batch


@pytest.mark.parametrize("parent", ["", "rollout"])
def test_prompts_and_responses_that_are_padded_apart_are_put_side_by_side(parent, tmp_path, capsys):
    """As the doctor says; then replay has its axes, and the ids take almost no bytes."""
    batch = apart(parent)
    torch.save(batch, tmp_path / "b.pt")
    assert cli.main(["doctor", str(tmp_path / "b.pt")]) == 1
    shown = capsys.readouterr().out
    query, answer = (f"{parent}/{name}" if parent else name for name in ("query_ids", "answer_ids"))
    assert f"If {query} and {answer} are prompts and their responses, put\n" in shown
    assert "Checked: strict mode takes the batch, every bit comes back.\n" in shown
    assert "no response axis" not in shown
    code = re.findall(r"^  (batch\[.*)$", shown, re.MULTILINE)
    assert len(code) == 2
    exec("\n".join(code), {"torch": torch, "batch": batch})
    rows = batch[parent] if parent else batch
    assert torch.equal(rows["input_ids"], ppo()["tokens"])
    assert torch.equal(rows["attention_mask"], ppo()["attn"])
    found = diagnose(batch)
    assert found.cover.found.apart is None
    assert found.cover.scored == int(rows["answer_mask"].sum())
    registry, _ = executed(snippet(found, "RL_FIELDS"))
    assert registry[(parent, "input_ids") if parent else "input_ids"].hints == ("concat:query_ids,answer_ids",)
    fields = {field.path[-1]: field.wire_bytes for field in found.covered.fields}
    assert fields["input_ids"] < 0.02 * (fields["query_ids"] + fields["answer_ids"])


def test_other_pairs_of_masks_are_not_said_to_be_apart():
    whole = apart()
    labels = whole.clone()
    labels["query_ids"] = labels["query_ids"].masked_fill(labels["query_mask"] == 0, -100)
    for batch in (whole.exclude("query_mask"), labels):
        assert diagnose(batch).cover.found.apart is None
    assert diagnose(whole).cover.found.apart == (("query_ids", "query_mask"), ("answer_ids", "answer_mask"))


def test_ids_and_a_loss_mask_alone():
    """Rows end with a token of the loss: the row is all up to it."""
    ids = torch.tensor([[3, 4, 5, 6, 0], [7, 8, 9, 0, 0], [1, 2, 3, 4, 5]])
    loss = torch.tensor([[0, 1, 0, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 0, 1]])
    batch = TensorDict({"toks": ids, "loss": loss}, batch_size=[3])
    found = diagnose(batch).cover
    assert dict(found.registry.axes) == {
        "sequence": (MaskAxis("loss", part="prefix"),),
        "response": (MaskAxis("loss"),),
    }
    packed = strict(batch, found.registry, 0)
    samples.assert_same(maskpack.decompress(packed), batch)
    inputs = PackedInputs.of(packed, options=ReplayOptions(registry=found.registry, input_ids="toks"))
    assert inputs.targets.tolist() == [4, 6, 9, 2, 3, 5]


def test_names_that_the_registry_knows_need_only_the_response():
    """RL_FIELDS knows the sequence; advantages of all tokens are not put under the loss mask."""
    batch = test_presets.made("areal rollout", count=9, most=30, empty=False)
    batch["advantages"] = (torch.rand(batch["input_ids"].shape) + 0.5) * batch["attention_mask"]
    found = diagnose(batch).cover
    assert found.base is RL_FIELDS
    assert dict(found.added.axes) == {"response": (MaskAxis("loss_mask"),)}
    assert found.registry["advantages"].masks == ("sequence", "response")
    packed = strict(batch, found.registry, 0)
    samples.assert_same(maskpack.decompress(packed), batch)
    PackedInputs.of(batch, options=ReplayOptions(registry=found.registry))


def test_a_response_whose_mask_the_registry_has_on_the_sequence_is_no_axis():
    """A packed batch would not have it, because no field is on it."""
    batch = test_presets.made("areal rollout", count=9, most=30, empty=False).exclude("position_ids")
    rows = MaskNestingRegistry(
        {name: ("attention_mask", ZEROS) for name, x in batch.items() if x.dim() > 1}
        | dict.fromkeys(("input_ids", "attention_mask", "loss_mask", "versions"), ("sequence", 0)),
        axes={"sequence": MaskAxis("attention_mask")},
    )
    found = diagnose(batch, rows).cover
    assert (found.added.axes, found.suggestions, found.scored) == ({}, (), None)
    assert found.base is rows


def test_fields_of_a_sub_batch():
    whole = TensorDict({"rollout": ppo().select("tokens", "attn", "prompt_toks", "resp_toks")}, batch_size=[32])
    registry, options = executed(snippet(diagnose(whole), "RL_FIELDS"))
    assert options.input_ids == ("rollout", "tokens")
    assert registry["rollout", "tokens"].hints == ("concat:prompt_toks,resp_toks",)
    assert PackedInputs.of(strict(whole, registry, 0), options=options).num_tokens == int(ppo()["attn"].sum())


# -------------------------------------------------------------------- the command


def saved(batch, path):
    torch.save(dict(batch.items()), path)
    return str(path)


def number(pattern, shown):
    return int(re.search(pattern, shown, re.MULTILINE)[1].replace(",", ""))


def test_the_headline_agrees_with_the_fields_that_stay_padded(tmp_path, capsys):
    assert cli.main(["doctor", saved(ppo(), tmp_path / "b.pt")]) == 1
    shown = capsys.readouterr().out
    whole = number(r"^maskpack:  ([\d,]+) bytes, [\d.]+ times fewer$", shown)
    part = number(r"^15 stay padded; they are compressed all the same, to ([\d,]+) bytes:$", shown)
    fields = shown[shown.index("stay padded;") : shown.index("Replay needs")]
    assert fields.count('\n  "') == 15
    assert 0.9 * whole < part < whole
    better = number(r"^With this registry ([\d,]+) bytes travel", shown)
    assert better < 0.8 * whole
    assert "Checked: strict mode takes the batch, every bit comes back, replay scores 6,749 response tokens." in shown


def loaded(line):
    """The registry of a line that is printed."""
    names = {"json": json, "yaml": yaml, "MaskNestingRegistry": MaskNestingRegistry}
    exec(line, names)
    return names["registry"]


@pytest.mark.parametrize(("name", "case"), [("r.json", "ppo"), ("r.yaml", "nemo_rl"), ("r.yml", "ppo")])
def test_the_registry_that_is_written_is_read_back_and_covers_the_batch(name, case, tmp_path, capsys):
    batch = CASES[case]()[0]
    batch["odd"] = torch.full((batch.batch_size[0], 3), 1.5)
    file, written = saved(batch, tmp_path / "b.pt"), str(tmp_path / name)
    assert cli.main(["doctor", file, "--write", written]) == 0
    *_, told, line = capsys.readouterr().out.splitlines()
    assert told == f"written to {written}, for --registry. In Python:"
    registry = saved_registry(written)
    assert equal(loaded(line), registry)
    with pytest.raises(RegistryError) as refused:
        maskpack.compress(batch, registry=written)
    assert equal(loaded(re.search(r"Read the file: (registry=.*)\.$", str(refused.value))[1]), registry)
    assert equal(registry, diagnose(batch).cover.registry)
    assert registry["odd"].mask is None
    samples.assert_same(maskpack.decompress(strict(batch, registry, pad_token_of(case))), batch)
    assert cli.main(["doctor", file, "--registry", written, "--pad-token-id", str(pad_token_of(case))]) == 0
    assert "Every tensor of two or more dims is covered." in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt", name]


def test_a_file_that_exists_is_not_written_over(tmp_path, capsys):
    file, written = saved(ppo(), tmp_path / "b.pt"), tmp_path / "r.json"
    written.write_text("mine")
    for argv, said in (
        ([file, "--write", str(written)], "r.json: the file exists. Give another name, or remove it"),
        ([file, "--write", str(tmp_path / "r.txt")], "expected a file that ends in .json, .yaml or .yml"),
        ([file, "--write", str(tmp_path / "none" / "r.json")], "No such file or directory"),
        ([file, "--strict", "--write", str(tmp_path / "s.json")], "--write and --strict do not go together"),
    ):
        assert cli.main(["doctor", *argv]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert said in shown.err
    assert written.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.pt", "r.json"]


def several(tmp_path):
    """Files of a trainer: the rollout, the update with fields and pads of its own, and a batch of other fields."""
    whole = ppo()
    update = ppo().exclude("engine_logp", "labels")
    update["turn_id"] = update["turn_id"].masked_fill(update["resp_attn"] == 0, -7)
    update["kl"] = -update["ref_logp"] * update["resp_attn"]
    other = TensorDict({"seen": torch.eye(3) * 2, "seen_on": torch.eye(3).long()}, batch_size=[3])
    batches = {"rollout": whole, "update": update, "other": other}
    return batches, [saved(batch, tmp_path / name) for name, batch in batches.items()]


def test_the_registry_of_several_files_takes_them_all(tmp_path, capsys):
    batches, files = several(tmp_path)
    written = str(tmp_path / "r.yaml")
    assert cli.main(["doctor", *files, "--write", written]) == 0
    shown = capsys.readouterr().out
    lines = [line for line in shown.splitlines() if line[:1] not in ("", " ")]
    assert lines == [
        f"{files[0]}: 15 stay padded",
        f"{files[1]}: 2 stay padded",
        f"{files[2]}: 2 stay padded",
        "Checked: strict mode takes all 3 files, and every bit comes back.",
        f"written to {written}, for --registry. In Python:",
        lines[-1],
    ]
    registry = saved_registry(written)
    assert equal(loaded(lines[-1]), registry)
    assert registry["turn_id"].pads == (-7, -1)
    assert registry.axes == diagnose(ppo()).cover.registry.axes
    for batch in batches.values():
        samples.assert_same(maskpack.decompress(strict(batch, registry, 0)), batch)
    assert cli.main(["doctor", "--strict", *files, "--registry", written]) == 0
    capsys.readouterr()
    again = str(tmp_path / "s.json")
    assert cli.main(["doctor", *files, "--registry", written, "--write", again, "--json"]) == 0
    assert [found["stay_padded"] for found in json.loads(capsys.readouterr().out)] == [[], [], []]
    assert equal(saved_registry(again), registry)


def test_files_that_no_registry_takes_write_none(tmp_path, capsys):
    """The mask of all tokens has the name of the mask of the response."""
    _, files = several(tmp_path)
    odd = ppo()
    odd["attn"], odd["resp_attn"] = odd["resp_attn"], odd["attn"]
    for argv, said in (
        ([*files, saved(odd, tmp_path / "odd")], ""),
        ([*files, str(tmp_path / "none")], "none: No such file"),
    ):
        assert cli.main(["doctor", *argv, "--write", str(tmp_path / "r.yaml")]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert said in shown.err
        assert not (tmp_path / "r.yaml").exists()
    assert cli.main(["doctor", *files]) == 2
    assert "write a registry for all with --write" in capsys.readouterr().err
