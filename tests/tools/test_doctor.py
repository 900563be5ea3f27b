"""The doctor on batches with known answers: what it prints is executed, and must cover the field. Files of a DataProto
are read without verl, and run no code."""

from __future__ import annotations

import _codecs
import collections
import io
import json
import math
import os
import pickle
import random
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import samples
import torch
from fuzz_wire import Pieces
from tensordict import TensorDict

import maskpack
from maskpack import RL_FIELDS, MaskNestingSpec
from maskpack.packed.sizes import report
from maskpack.tools import cli, inspector
from maskpack.tools import doctor as doctor_module
from maskpack.tools.doctor import diagnose, snippet

B, P, R = len(samples.ROWS), samples.PROMPT, samples.RESPONSE
WIDTHS = {"prompt": P, "response": R, "sequence": P + R}
REAL = {
    "prompt": sum(p for p, _ in samples.ROWS),
    "response": sum(r for _, r in samples.ROWS),
    "sequence": sum(p + r for p, r in samples.ROWS),
}


def rollout(**fields):
    batch = samples.rollout(objects=False)
    for name, value in fields.items():
        batch.set(name, value)
    return batch


def saved(batch, path):
    torch.save({name: batch.get(name) for name in batch.keys()}, path)  # noqa: SIM118  (a TensorDict iterates over rows)
    return path


def doctor(argv, capsys, status):
    """What the command prints."""
    assert cli.main(["doctor", *map(str, argv)]) == status
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def refused(argv, capsys):
    assert cli.main(["doctor", *map(str, argv)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("maskpack doctor: ")
    assert shown.err.count("\n") == 1
    return shown.err


def executed(shown):
    """The registry of the lines that were printed."""
    code = re.search(r"^from maskpack import .*?^}$", shown, re.DOTALL | re.MULTILINE)
    names = {}
    exec(code[0], names)
    return names["registry"]


def covers(registry, batch, *names, pad_token_id=samples.PAD):
    """Whether strict mode takes the batch, the fields are packed under a mask, and every bit comes back."""
    packed = maskpack.compress(batch, registry=registry, pad_token_id=pad_token_id, strict_mask_nesting=True)
    samples.assert_same(maskpack.decompress(packed), batch)
    forms = {form.path: form for form in packed.schema.forms}
    return [forms[name if isinstance(name, tuple) else (name,)].kind for name in names] == ["padded"] * len(names)


# -------------------------------------------------------------------- a batch that is covered


def test_a_covered_batch_exits_with_0_and_its_figures_are_right(tmp_path, capsys):
    file = saved(rollout(), tmp_path / "b.pt")
    said = json.loads(doctor([file, "--json", "--pad-token-id", samples.PAD], capsys, 0))
    found = report(None, maskpack.compress(rollout(), pad_token_id=samples.PAD))
    assert said["stay_padded"] == []
    assert said["registry"] is said["wire_bytes_with_lines"] is None
    assert said["wire_bytes"] == found["maskpack/wire_bytes"]
    padded = real = 0
    for name in rollout().keys():  # noqa: SIM118
        tensor = rollout()[name]
        padded += tensor.numel() * tensor.element_size()
        axis = next((axis for axis, width in WIDTHS.items() if tensor.dim() > 1 and tensor.shape[1] == width), None)
        real += tensor.numel() * tensor.element_size() if axis is None else REAL[axis] * tensor.element_size()
    assert said["padded_bytes"] == padded
    assert said["padding_bytes"] == padded - real
    assert said["masks"] == {name: {"rows": B, "width": WIDTHS[name], "num_tokens": REAL[name]} for name in WIDTHS}


def test_a_covered_batch_in_words(tmp_path, capsys):
    file = saved(rollout(), tmp_path / "b.pt")
    shown = doctor([file], capsys, 0)
    assert shown.startswith(f"{file}: {B} rows, {len(rollout().keys())} fields\n")
    assert f"  response: 6 wide, {REAL['response'] / (B * R):.1%} valid ({REAL['response']} tokens)" in shown
    assert "Every tensor of two or more dims is covered." in shown
    assert f"pad_token_id was not given; {samples.PAD} is the value under the masks" in shown
    assert "from maskpack import" not in shown


def test_larger_batches_say_how_much_smaller(tmp_path, capsys):
    rng = random.Random(1)
    batch = samples.rollout([(rng.randint(1, 40), rng.randint(1, 200)) for _ in range(40)], 64, 1024, objects=False)
    shown = doctor([saved(batch, tmp_path / "b"), "--gbit", 4], capsys, 0)
    found = report(None, maskpack.compress(batch, pad_token_id=samples.PAD))
    assert f"maskpack:  {found['maskpack/wire_bytes']:,} bytes, {found['maskpack/ratio']:,.1f} times fewer, " in shown
    for name in ("padded", "wire"):
        size = found[f"maskpack/{name}_bytes"]
        assert re.search(rf" {size:,} bytes, .*, {size * 8 / 4e9:.3g} s at 4 Gbit/s\n", shown)
    sizes = {name: found[f"maskpack/field/{name}/wire_bytes"] for name in batch.keys()}  # noqa: SIM118
    largest = sorted(sizes, key=lambda name: -sizes[name])[:5]
    assert f"largest on the wire: {', '.join(f'{name} {sizes[name]:,}' for name in largest)}\n" in shown


def test_prefixes_that_rows_share(tmp_path, capsys):
    alone = saved(rollout(), tmp_path / "alone.pt")
    assert "prefixes:" not in doctor([alone], capsys, 0)
    said = json.loads(doctor([alone, "--json"], capsys, 0))
    assert (said["tokens"], said["shared_tokens"]) == (REAL["sequence"], 0)

    batch = samples.rollout([(30, 20), (30, 10)], 32, 32, objects=False)
    ids = batch["input_ids"]
    ids[:, 2:32] = torch.arange(1, 31)
    batch["prompts"], batch["labels"] = ids[:, :32].clone(), ids.clone()
    batch["labels"][batch["attention_mask"] == 0] = -100
    file = saved(batch, tmp_path / "b.pt")
    line = "prefixes: 33.3% of 90 tokens repeat another row; ReplayOptions(share_prefixes=True) skips them\n"
    assert line in doctor([file], capsys, 1)
    said = json.loads(doctor([file, "--json"], capsys, 1))
    assert (said["tokens"], said["shared_tokens"]) == (90, 30)

    said = json.loads(doctor([saved(rollout().exclude("input_ids"), tmp_path / "c"), "--json"], capsys, 0))
    assert said["tokens"] is said["shared_tokens"] is None


# -------------------------------------------------------------------- lines that cover


def per_row(axis):
    """Floats, each row padded with its own number."""
    out = samples.of(axis, torch.float32, seed=3)
    mask = samples.of(axis, torch.bool)
    return torch.where(mask, out, torch.arange(B, dtype=torch.float32)[:, None] + 0.5)


def signed(axis):
    out = samples.of(axis, torch.float32, seed=4)
    return torch.where(samples.of(axis, torch.bool), out, torch.tensor([0.0, -0.0] * B)[:B, None])


UNCOVERED = [
    (samples.of("response", torch.float32), "MaskNestingSpec('response')", "0.0"),
    (samples.of("sequence", torch.bfloat16), "MaskNestingSpec('sequence')", "0.0"),
    (samples.of("prompt", torch.int32, -100), "MaskNestingSpec('prompt', pad=-100)", "-100"),
    (samples.of("sequence", torch.int64, -100), "MaskNestingSpec('sequence', pad=-100)", "-100"),
    (samples.of("response", torch.float64, -1.5), "MaskNestingSpec('response', pad=-1.5)", "-1.5"),
    (samples.of("response", torch.float32, math.nan), "MaskNestingSpec('response', pad=float(\"nan\"))", "nan"),
    (samples.of("response", torch.float32, -math.inf), "MaskNestingSpec('response', pad=float(\"-inf\"))", "-inf"),
    (
        samples.of("response", torch.int64, samples.PAD),
        "MaskNestingSpec('response', pad=PAD_TOKEN_ID)",
        f"the pad token, {samples.PAD}",
    ),
    (
        samples.of("sequence", torch.int64, samples.EDGE),
        "MaskNestingSpec('sequence', pad=EDGE)",
        "the nearest valid value (EDGE)",
    ),
    (samples.of("response", torch.bool), "MaskNestingSpec('response', pad=False)", "False"),
    (per_row("response"), "MaskNestingSpec('response', pad=PER_ROW)", "one value a row (PER_ROW)"),
    (
        signed("response"),
        "MaskNestingSpec('response', pad=SIGNED_ZERO)",
        "0.0 in some rows and -0.0 in others (SIGNED_ZERO)",
    ),
    (samples.of("sequence", torch.int16, 0, (2, 3)), "MaskNestingSpec('sequence')", "0"),
    (
        samples.of("sequence", torch.int64, samples.EDGE, (4,)).movedim(1, 2).contiguous(),
        "MaskNestingSpec('sequence', pad=EDGE, ragged_dim=-1)",
        "the nearest valid value (EDGE)",
    ),
    (
        samples.of("response", torch.float32, 0, (4, 3)).movedim(1, 2).contiguous(),
        "MaskNestingSpec('response', ragged_dim=2)",
        "0.0",
    ),
]


@pytest.mark.parametrize(("value", "spec", "pad"), UNCOVERED, ids=[line for _, line, _ in UNCOVERED])
def test_the_printed_line_covers_the_field(value, spec, pad, tmp_path, capsys):
    batch = rollout(mine=value)
    file = saved(batch, tmp_path / "b")
    shown = doctor([file], capsys, 1)
    spec = spec.replace(", pad=False", "")  # 0, the default
    assert f"    'mine': {spec},\n" in shown
    assert f" it is padded with {pad}" in shown
    assert '"mine" ' in shown
    assert "the registry does not know it" in shown
    assert covers(executed(shown), batch, "mine")
    said = json.loads(doctor([file, "--json"], capsys, 1))
    assert [(one["path"], one["shape"], one["nbytes"]) for one in said["stay_padded"]] == [
        (["mine"], list(value.shape), value.numel() * value.element_size())
    ]
    assert said["stay_padded"][0]["line"] == f"'mine': {spec},"
    again = maskpack.compress(batch, registry=executed(shown), pad_token_id=samples.PAD)
    assert said["wire_bytes_with_lines"] == report(None, again)["maskpack/wire_bytes"]


def test_several_fields_have_one_snippet(tmp_path, capsys):
    batch = rollout(a=UNCOVERED[2][0], b=UNCOVERED[8][0], sub=rollout(c=UNCOVERED[0][0]))
    torch.save(batch, tmp_path / "b")
    shown = doctor([tmp_path / "b"], capsys, 1)
    assert "3 stay padded:" in shown
    assert "('sub', 'c'): MaskNestingSpec('response')," in shown
    assert "from maskpack import EDGE, RL_FIELDS, MaskNestingSpec\n" in shown
    assert covers(executed(shown), batch, "a", "b", ("sub", "c"))


@pytest.mark.parametrize(
    ("name", "pad", "line"),
    [
        (
            "rm_scores",
            -100,
            "MaskNestingSpec(['response', 'sequence'], pad=[-100.0, 0, SIGNED_ZERO, ANY_ZERO])",
        ),
        ("old_log_probs", 1, "MaskNestingSpec(['response', 'sequence'], pad=[1.0, 0, SIGNED_ZERO, ANY_ZERO], hints="),
    ],
)
def test_a_known_field_with_another_pad_keeps_its_spec(name, pad, line, tmp_path, capsys):
    batch = rollout()
    batch[name] = samples.of("response", torch.float32, pad)
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    assert f"'{name}': {line}" in shown
    registry = executed(shown)
    assert covers(registry, batch, name)
    assert covers(registry, rollout(), name)  # what was right before still is


def test_two_masks_on_two_axes(tmp_path, capsys):
    """TRL's batch: no attention mask over both; the fields that are called masks serve."""
    batch = TensorDict(
        {
            "prompt_ids": samples.of("prompt", torch.int64, 7),
            "prompt_mask": samples.of("prompt", torch.int64).ne(0).long(),
            "completion_ids": samples.of("response", torch.int64, 7),
            "completion_mask": samples.of("response", torch.int64).ne(0).long(),
            "advantages": torch.randn(B),
        },
        batch_size=[B],
    )
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    assert "'prompt_ids': MaskNestingSpec('prompt_mask', pad=7)," in shown
    assert "'completion_mask': MaskNestingSpec('completion_mask')," in shown
    assert covers(executed(shown), batch, "prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def own_names():
    """A trainer's batch without one name that maskpack knows; tool tokens are holes in what is trained on."""
    attn, completion = samples.of("sequence", torch.bool).long(), samples.of("response", torch.bool).long()
    tools = completion * (torch.arange(R) % 3 == 1)
    return TensorDict(
        {
            "tool": tools.bool(),
            "tokens": samples.of("sequence", torch.int64, 7),
            "attn": attn,
            "completion": samples.of("response", torch.int64, 7),
            "trained": completion,
            "behaviour_logp": samples.of("response", torch.float32),
            "turns": completion * (torch.arange(R) // 2 + 1),
            "coin": torch.arange(B * R).view(B, R) % 5 % 2,
            "adv": torch.randn(B),
        },
        batch_size=[B],
    )


def test_masks_are_known_by_what_they_hold(tmp_path, capsys):
    batch = own_names()
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    wanted = [
        "'tool': MaskNestingSpec('trained'),",
        "'tokens': MaskNestingSpec('attn', pad=7),",
        "'attn': MaskNestingSpec('attn'),",
        "'completion': MaskNestingSpec('trained', pad=7),",
        "'trained': MaskNestingSpec('trained'),",
        "'behaviour_logp': MaskNestingSpec('trained'),",
        "'turns': MaskNestingSpec('trained'),",
        "'coin': MaskNestingSpec(None),  # stays padded",
    ]
    assert re.findall(r"^    ('\w+': MaskNestingSpec\(.*\),.*)$", snippet_in(shown), re.MULTILINE) == wanted
    names = [name for name in batch.keys() if name not in ("coin", "adv")]  # noqa: SIM118
    assert covers(executed(shown), batch, *names)


def snippet_in(shown):
    return shown[shown.index("registry = RL_FIELDS") :]


def test_a_mask_can_be_named(tmp_path, capsys):
    batch = own_names()
    file = saved(batch, tmp_path / "b")
    shown = doctor([file, "--mask", "attn", "--mask", "turns"], capsys, 1)
    lines = snippet_in(shown)
    for line in (
        "'tool': MaskNestingSpec('turns'),",
        "'trained': MaskNestingSpec('turns'),",
        "'tokens': MaskNestingSpec('attn'",
    ):
        assert line in lines
    nested = TensorDict({"sub": batch}, batch_size=[B])
    torch.save(nested, tmp_path / "n")
    assert "('sub', 'tokens'): MaskNestingSpec(('sub', 'attn'), pad=7)" in doctor(
        [tmp_path / "n", "--mask", "sub/attn", "--mask", "sub/trained"], capsys, 1
    )
    for name in ("atn", "adv"):
        said = refused([file, "--mask", name], capsys)
        assert f'mask "{name}" is no field (B, width). Name one: tool, tokens, ' in said


def test_a_registry_means_what_it_means_to_compress(tmp_path, capsys):
    """A name that RL_FIELDS knows is not known to a registry that has it not."""
    batch = TensorDict({"m": samples.of("response", torch.bool).long()}, batch_size=[B])
    batch["values"] = samples.of("response", torch.float32)
    file = saved(batch, tmp_path / "b")
    registry = maskpack.MaskNestingRegistry({"m": MaskNestingSpec("m")})
    (tmp_path / "r.json").write_text(json.dumps(registry.to_dict()))
    with pytest.raises(maskpack.errors.CoverageError, match=r'"values".*the registry does not know it'):
        maskpack.compress(batch, registry=registry, strict_mask_nesting=True)
    shown = doctor([file, "--registry", tmp_path / "r.json"], capsys, 1)
    assert '"values" (7, 6) float32, 168 bytes: the registry does not know it' in shown
    assert "'values': MaskNestingSpec('m')," in shown
    whole = registry | {"values": MaskNestingSpec("m")}
    (tmp_path / "r.json").write_text(json.dumps(whole.to_dict()))
    doctor([file, "--registry", tmp_path / "r.json"], capsys, 0)
    maskpack.compress(batch, registry=whole, strict_mask_nesting=True)


def test_a_full_mask_shows_no_pad(tmp_path, capsys):
    batch = TensorDict(
        {"attention_mask": torch.ones(3, 4, dtype=torch.int64), "mine": torch.randn(3, 4)}, batch_size=[3]
    )
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    assert "nothing is padded in this batch, so its pad is not seen; 0 is assumed" in shown
    assert covers(executed(shown), batch, "mine")


# -------------------------------------------------------------------- what no line covers


def stray(axis):
    """A value under the mask, three of another, and zeros."""
    out = samples.of(axis, torch.float32)
    mask = samples.of(axis, torch.bool)
    places = (~mask).nonzero().tolist()
    for place in places[:3]:
        out[tuple(place)] = 2.5
    out[tuple(places[3])] = -7.0
    return out, len(places)


def test_several_values_under_a_mask_are_counted(tmp_path, capsys):
    value, masked = stray("response")
    batch = rollout(mine=value)
    batch["old_log_probs"] = value.clone()
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    held = f"{masked} positions hold 0.0 ({masked - 4} times), 2.5 (3 times), -7.0 (1 times). No pad covers that"
    assert shown.count(f'under mask "response", {held}') == 2
    assert "'mine': MaskNestingSpec(None),  # stays padded\n" in shown
    assert "it has non-pad values under its mask" in shown
    packed = maskpack.compress(batch, registry=executed(shown), pad_token_id=samples.PAD, strict_mask_nesting=True)
    samples.assert_same(maskpack.decompress(packed), batch)


def test_more_values_than_are_shown(tmp_path, capsys):
    shown = doctor([saved(rollout(mine=torch.randn(B, R)), tmp_path / "b")], capsys, 1)
    assert f"and {B * R - REAL['response'] - 3} more values. No pad covers that" in shown


def test_mixed_zeros_have_a_remedy(tmp_path, capsys):
    batch = rollout()
    batch["advantages"] = torch.tensor([1.0, -1.0] * R)[:R] * samples.of("response", torch.bool)
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 0)
    assert "-0.0 under the mask of advantages" in shown
    batch["own"] = batch["advantages"]
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    assert "0.0 and -0.0 in one row, as x * mask leaves them (ANY_ZERO)" in shown
    assert covers(executed(shown), batch, "own")
    batch["own"] = batch["advantages"][:, :, None].expand(B, R, 2).contiguous()
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    assert "0.0 and -0.0 in one row, as x * mask leaves them. No pad covers that: x.masked_fill(mask == 0, 0)" in shown


def test_fields_of_no_masks_size(tmp_path, capsys):
    batch = rollout(odd=torch.randn(B, 3, 2))
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    sizes = 'mask "sequence" is (7, 11); mask "prompt" is (7, 5); mask "response" is (7, 6)'
    assert f"no mask of the batch has its size; {sizes}" in shown
    maskpack.compress(batch, registry=executed(shown), pad_token_id=samples.PAD, strict_mask_nesting=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("advantages", torch.zeros(B, R + 1), 'field "advantages" is (7, 7); mask "response" is (7, 6);'),
        ("teacher_ids", samples.of("sequence", torch.uint8, 9, (2,)), 'field "teacher_ids" is uint8; its pad'),
    ],
)
def test_what_compress_refuses_is_one_line(name, value, message, tmp_path, capsys):
    assert message in refused([saved(rollout(**{name: value}), tmp_path / "b")], capsys)


def test_tensors_inside_python_objects_are_one_finding(tmp_path, capsys):
    batch = rollout()
    batch.set("extra", samples.per_row([{"tokens": torch.zeros(b + 1)} for b in range(B)]))
    torch.save(batch, tmp_path / "b")
    shown = doctor([tmp_path / "b", "--allow-pickle"], capsys, 1)
    assert "1 stay padded:" in shown
    assert f"{4 * sum(range(1, B + 1))} bytes: with {B - 1} more, tensors inside Python objects" in shown
    registry = executed(shown)
    maskpack.compress(batch, registry=registry, pad_token_id=samples.PAD, strict_mask_nesting=True)


# -------------------------------------------------------------------- notes


def notes(batch, **options):
    return "\n".join(diagnose(batch, **options).notes)


def test_notes_name_minus_zero_float64_and_int64():
    said = notes(rollout(), pad_token_id=samples.PAD)
    assert "-0.0" not in said
    assert "float64" not in said
    assert "int64 whose values fit int32: prompts, responses, input_ids" in said
    size = sum(rollout()[name].nbytes for name in rollout().keys() if rollout()[name].dtype == torch.int64)  # noqa: SIM118
    assert f"{size:,} bytes padded. A cast halves that." in said
    batch = rollout(wide=torch.zeros(B, R, dtype=torch.float64), large=torch.full((B, R), 2**40))
    batch["advantages"] = signed("response")
    said = notes(batch, pad_token_id=samples.PAD)
    assert "-0.0 under the mask of advantages, which is not 0.0" in said
    assert f"float64: wide, {B * R * 8} bytes padded" in said
    assert "large" not in said


def test_a_wrong_pad_token_is_put_right(tmp_path, capsys):
    shown = doctor([saved(rollout(), tmp_path / "b"), "--pad-token-id", 3], capsys, 1)
    assert f"'responses': MaskNestingSpec('response', pad=[{samples.PAD}, PAD_TOKEN_ID])," in shown
    assert covers(executed(shown), rollout(), "responses", "prompts", "input_ids", pad_token_id=3)


def test_the_batch_is_not_changed():
    batch = rollout(mine=UNCOVERED[3][0])
    before = samples.freeze(batch)
    diagnose(batch)
    assert samples.freeze(batch) == before


def test_no_rows_and_no_masks():
    assert diagnose(rollout()[:0], pad_token_id=1).suggestions == ()
    found = diagnose(TensorDict({"x": torch.ones(2, 3)}, [2]))
    assert [one.seen for one in found.suggestions] == ["no mask of the batch has its size; there is no mask"]
    assert "'x': MaskNestingSpec(None),  # stays padded" in snippet(found, "RL_FIELDS")


# -------------------------------------------------------------------- files


def test_a_packed_batch_a_nested_one_and_a_memory_map(tmp_path, capsys):
    batch = rollout(mine=UNCOVERED[2][0])
    with pytest.warns(maskpack.errors.MaskpackWarning):
        packed = maskpack.compress(batch, pad_token_id=samples.PAD)
    packed.save(tmp_path / "packed")
    batch.memmap(tmp_path / "map")
    for name in ("packed", "map"):
        shown = doctor([tmp_path / name], capsys, 1)
        assert covers(executed(shown), batch, "mine")
    said = json.loads(doctor([tmp_path / "packed", "--json"], capsys, 1))
    assert said["wire_bytes"] == report(None, packed)["maskpack/wire_bytes"]
    assert said["wire_bytes_with_lines"] is None
    with pytest.warns(maskpack.errors.MaskpackWarning):
        nested = maskpack.nest_batch_by_mask(batch, pad_token_id=samples.PAD)
    assert [one.line for one in diagnose(nested).suggestions] == ["'mine': MaskNestingSpec('prompt', pad=-100),"]


def test_a_registry_of_ones_own(tmp_path, capsys):
    batch = rollout(mine=UNCOVERED[2][0], more=UNCOVERED[3][0])
    file = saved(batch, tmp_path / "b")
    own = {"mine": MaskNestingSpec("prompt", -100)}
    (tmp_path / "r.json").write_text(json.dumps((RL_FIELDS | own).to_dict()))
    shown = doctor([file, "--registry", tmp_path / "r.json"], capsys, 1)
    assert "registry = registry | {\n    'more': MaskNestingSpec('sequence', pad=-100),\n}" in shown
    assert "1 stay padded:" in shown


# -------------------------------------------------------------------- --strict


def test_strict_checks_several_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, batch in (("good", rollout()), ("also", rollout()), ("bad", rollout(mine=UNCOVERED[2][0]))):
        saved(batch, tmp_path / name)
    fields = len(rollout().keys())
    given = ["--strict", "--pad-token-id", samples.PAD]
    assert doctor([*given, "good"], capsys, 0) == f"good: {fields} fields, none stays padded\n"
    shown = doctor([*given, "good", "bad", "also"], capsys, 1)
    lines = shown.splitlines()
    assert lines[:2] == [f"good: {fields} fields, none stays padded", "bad: 1 stay padded"]
    assert lines[2].startswith('  "mine" ')
    assert lines[2].endswith("bytes: the registry does not know it")
    assert lines[3:] == [
        '    under mask "prompt" it is padded with -100',
        "    'mine': MaskNestingSpec('prompt', pad=-100),",
        f"also: {fields} fields, none stays padded",
    ]
    own = {"mine": MaskNestingSpec("prompt", -100)}
    (tmp_path / "r.json").write_text(json.dumps((RL_FIELDS | own).to_dict()))
    doctor(["--strict", "good", "bad", "--registry", "r.json"], capsys, 0)


def test_strict_refuses_values_under_a_mask_and_hidden_tensors(tmp_path, capsys):
    stray = rollout()
    stray["old_log_probs"][0, -1] = 7.0
    assert "1 stay padded" in doctor(["--strict", saved(stray, tmp_path / "stray")], capsys, 1)
    batch = rollout()
    batch.set_non_tensor("held", {"x": torch.ones(3)})
    torch.save(batch, tmp_path / "held")
    assert "'held': MaskNestingSpec(None)" in doctor(["--strict", "--allow-pickle", tmp_path / "held"], capsys, 1)


def test_strict_tells_a_batch_that_cannot_be_packed_from_a_file_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(rollout(), tmp_path / "good")
    saved(rollout(responses=torch.zeros(B, 99)), tmp_path / "odd")
    (tmp_path / "text").write_text("no batch")
    given = ["--strict", "--pad-token-id", samples.PAD]
    shown = doctor([*given, "odd", "good"], capsys, 1)
    assert re.match(r'odd: cannot be packed: .*"responses".*\ngood: \d+ fields, none stays padded\n$', shown)
    shown = doctor([*given, "text", "none", "odd", "good"], capsys, 2)
    starts = ["text: cannot be read: ", "none: cannot be read: ", "odd: cannot be packed: ", "good: "]
    assert [line.startswith(start) for line, start in zip(shown.splitlines(), starts, strict=True)] == [True] * 4


def test_strict_says_the_pad_token_that_it_takes(tmp_path, capsys):
    """`compress` refuses the batch without a pad token."""
    file, fields = saved(rollout(), tmp_path / "b"), len(rollout().keys())
    with pytest.raises(maskpack.errors.RegistryError, match="no pad_token_id was given"):
        maskpack.compress(rollout(), strict_mask_nesting=True)
    note = (
        f"pad_token_id was not given; {samples.PAD} is the value under the masks of the token fields. Pass it to "
        f"compress as pad_token_id={samples.PAD}."
    )
    shown = doctor(["--strict", file], capsys, 0)
    assert shown == f"{file}: {fields} fields, none stays padded\n  note: {note}\n"
    assert f"note: {note}\n" in doctor([file], capsys, 0)
    (found,) = json.loads(doctor(["--strict", "--json", file], capsys, 0))
    assert found["notes"][0] == note


def test_a_pad_token_that_no_padding_shows(tmp_path, capsys):
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64)
    file = saved(TensorDict({"attention_mask": mask, "input_ids": ids}, batch_size=[2]), tmp_path / "b")
    note = "note: pad_token_id was not given, and no padding shows it. Pass that of the tokenizer to compress.\n"
    assert doctor(["--strict", file], capsys, 0) == f"{file}: 2 fields, none stays padded\n  {note}"
    assert note in doctor([file], capsys, 0)
    assert "note" not in doctor(["--strict", file, "--pad-token-id", "0"], capsys, 0)
    alone = saved(TensorDict({"attention_mask": mask}, batch_size=[2]), tmp_path / "alone")
    assert "note" not in doctor(["--strict", alone], capsys, 0)


def test_strict_looks_into_the_objects_of_a_packed_file(tmp_path, capsys):
    batch = rollout()
    batch.set_non_tensor("held", {"x": torch.ones(3)})
    packed = maskpack.compress(batch, pad_token_id=samples.PAD)
    packed.save(tmp_path / "packed", allow_pickle=True)
    for more in (["--strict"], []):
        shown = doctor([*more, "--allow-pickle", tmp_path / "packed"], capsys, 1)
        assert "1 stay padded" in shown
        assert "a tensor inside the Python object" in shown
        assert "'held': MaskNestingSpec(None)" in shown
    registry = RL_FIELDS | {"held": maskpack.MaskNestingSpec(None)}
    (tmp_path / "r.json").write_text(json.dumps(registry.to_dict()))
    doctor(["--strict", "--allow-pickle", tmp_path / "packed", "--registry", tmp_path / "r.json"], capsys, 0)
    with pytest.raises(maskpack.errors.CoverageError, match="held"):
        maskpack.compress(batch, pad_token_id=samples.PAD, strict_mask_nesting=True)
    maskpack.compress(batch, registry=registry, pad_token_id=samples.PAD, strict_mask_nesting=True)


def test_a_mask_that_no_batch_has_is_an_error_of_usage(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(rollout(mine=UNCOVERED[2][0]), tmp_path / "bad")
    saved(rollout(own=samples.of("response", torch.bool)), tmp_path / "good")
    expected = 'cannot be checked: maskpack doctor: mask "respnse_mask" is no field (B, width). Name one: '
    shown = doctor(["--strict", "bad", "good", "--mask", "respnse_mask"], capsys, 2).splitlines()
    assert [line.startswith(f"{file}: {expected}") for file, line in zip(["bad", "good"], shown, strict=True)] == [
        True,
        True,
    ]
    shown = doctor(["--strict", "bad", "good", "--mask", "own"], capsys, 2)
    assert shown.startswith('bad: cannot be checked: maskpack doctor: mask "own" is no field (B, width).')
    assert "\ngood: " in shown
    assert "\ngood: cannot" not in shown
    assert 'mask "respnse_mask" is no field' in refused(["good", "--mask", "respnse_mask"], capsys)


def test_strict_in_json(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(rollout(mine=UNCOVERED[2][0]), tmp_path / "bad")
    found = json.loads(doctor(["--strict", "--json", "bad", "none"], capsys, 2))
    assert [one["file"] for one in found] == ["bad", "none"]
    assert [one["line"] for one in found[0]["stay_padded"]] == ["'mine': MaskNestingSpec('prompt', pad=-100),"]
    assert found[1] == {"file": "none", "error": "none: No such file or directory"}


def test_several_files_need_strict(tmp_path, capsys):
    file = saved(rollout(), tmp_path / "b")
    assert "2 files; expected one. Give one file, or check several with --strict" in refused([file, file], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["none"], "none: No such file or directory"),
        (["b", "--gbit", "0"], "--gbit is 0.0; expected the speed of a link"),
        (["b", "--gbit", "nan"], "--gbit is nan"),
        (["text"], "text is neither a torch.save file, a pickle, a packed batch nor a memory-mapped TensorDict"),
    ],
)
def test_what_cannot_be_read_is_one_line(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(rollout(), tmp_path / "b")
    (tmp_path / "text").write_text("hello, this is text")
    assert message in refused(argv, capsys)


def test_masks_that_are_none_are_one_line(tmp_path, capsys):
    torch.save({"attention_mask": torch.ones(4), "input_ids": torch.ones(4, 2)}, tmp_path / "b")
    assert 'mask field "attention_mask" is (4,); expected (B, width)' in refused([tmp_path / "b"], capsys)


# -------------------------------------------------------------------- a DataProto


class Elsewhere:
    """A class that only the writer of a file knows."""


class Running:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def data_proto(monkeypatch):
    """A class of that name which gives the same state to a pickle; it is gone when the file is read."""

    def written(file, batch, arrays, info, *, form="pickle", plain=False):
        module = types.ModuleType("verl.protocol")

        class DataProto:
            def __getstate__(self):
                if plain:
                    tensors = {
                        name: (
                            str(value.dtype).removeprefix("torch."),
                            value.shape,
                            value.view(torch.uint8).flatten().numpy(),
                        )
                        for name, value in batch.items()
                    }
                    return (tuple(batch.batch_size), None, tensors), arrays, info
                if isinstance(batch, bytes):
                    return batch, arrays, info
                held = io.BytesIO()
                torch.save(batch, held)
                return held.getvalue(), arrays, info

        DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"
        module.DataProto = DataProto
        monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
        monkeypatch.setitem(sys.modules, "verl.protocol", module)
        with open(file, "wb") as opened:
            if form == "torch":
                torch.save(DataProto(), opened)
            else:
                pickle.dump(DataProto(), opened, protocol=int(form))
        monkeypatch.setitem(sys.modules, "verl", None)
        monkeypatch.delitem(sys.modules, "verl.protocol")
        return file

    return written


def arrays(**more):
    names = np.array([f"row-{b}" for b in range(B)], dtype=object)
    return {"uid": names, "index": np.arange(B), "kind": np.array(["x"] * B), **more}


@pytest.mark.parametrize("form", ["2", "4", "5", "torch"])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("flags", [[], ["--allow-pickle"]])
def test_a_data_proto_is_read_without_verl(form, plain, flags, data_proto, tmp_path, capsys):
    batch = rollout(mine=UNCOVERED[3][0])
    file = data_proto(tmp_path / "b", batch, arrays(), {"temperature": 0.7}, form=form, plain=plain)
    shown = doctor([file, *flags], capsys, 1)
    assert f": {B} rows, " in shown
    assert "'mine': MaskNestingSpec('sequence', pad=-100)," in shown
    assert covers(executed(shown), batch, "mine")


def test_its_objects_and_numbers_arrive(data_proto, tmp_path):
    from maskpack.tools.files import saved_batch

    images = np.array([{"pixel_values": torch.full((b + 1, 2), float(b))} for b in range(B)], dtype=object)
    info = {"temperature": 0.7, "global_token_num": list(range(B)), "uid": "not a row"}
    file = data_proto(tmp_path / "b", rollout(), arrays(multi_modal_inputs=images), info, form="4")
    read = saved_batch(file, False)
    samples.assert_same(read.select(*rollout().keys()), rollout())
    assert read["uid"] == [f"row-{b}" for b in range(B)]
    assert [int(number) for number in read["index"]] == list(range(B))
    assert read["temperature"] == 0.7
    assert read["global_token_num"] == list(range(B))
    for b, inputs in enumerate(read.get("multi_modal_inputs").tolist()):
        assert torch.equal(inputs["pixel_values"], torch.full((b + 1, 2), float(b)))


def test_inspect_reads_it_too(data_proto, tmp_path, capsys):
    file = data_proto(tmp_path / "b", rollout(), {}, {}, form="4")
    assert cli.main(["inspect", str(file), "--pad-token-id", str(samples.PAD), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == B


@pytest.mark.parametrize("form", ["2", "4", "torch"])
def test_it_runs_no_code_unless_told(form, data_proto, tmp_path, capsys):
    mark = tmp_path / "mark"
    evil = np.array([Running(mark)] * B, dtype=object)
    file = data_proto(tmp_path / "b", rollout(), {"evil": evil}, {}, form=form)
    said = refused([file], capsys)
    assert "cannot be read: UnpicklingError" in said
    assert "is no plain data" in said
    assert "Give --allow-pickle if you trust the file" in said
    assert not mark.exists()
    doctor([file, "--allow-pickle"], capsys, 0)
    assert mark.exists()


def test_the_tensors_inside_run_no_code_either(data_proto, tmp_path, capsys):
    mark = tmp_path / "mark"
    for name, held in {"a": {"x": Running(mark)}, "b": Running(mark)}.items():
        inner = io.BytesIO()
        torch.save(held, inner)
        file = data_proto(tmp_path / name, inner.getvalue(), {}, {}, form="4")
        assert "cannot be read: UnpicklingError" in refused([file], capsys)
        assert not mark.exists()


def test_it_names_a_class_that_is_not_known(data_proto, tmp_path, capsys):
    file = data_proto(tmp_path / "b", rollout(), arrays(odd=np.array([Elsewhere()] * B, dtype=object)), {}, form="4")
    assert "it names test_doctor.Elsewhere, which is no plain data" in refused([file], capsys)


def test_damaged_files_are_one_line(data_proto, tmp_path, capsys):
    for form in ("4", "torch"):
        whole = data_proto(tmp_path / "whole", rollout(), arrays(), {}, form=form).read_bytes()
        for end in range(0, len(whole), max(1, len(whole) // 40)):
            (tmp_path / "b").write_bytes(whole[:end])
            refused([tmp_path / "b"], capsys)


class Calls:
    """A pickle that makes a call."""

    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


SCALAR = np.float32(0).__reduce__()[0]
MANY = 1 << 16
BOMBS = {
    "bytes by number": (Calls(bytearray, MANY), "it makes a bytearray of ['int']"),
    "bytes of a range": (Calls(bytearray, range(100)), "it makes a bytearray of ['range']"),
    "set": (Calls(set, range(MANY)), "it makes a set of ['range']"),
    "frozenset": (Calls(frozenset, range(MANY)), "it makes a frozenset of ['range']"),
    "size": (Calls(torch.Size, range(MANY)), "it makes a Size of ['range']"),
    "scalar": (Calls(SCALAR, np.dtype(("V", MANY))), "TypeError"),
    "text": (Calls(_codecs.encode, "x", "utf-16"), "it encodes a text as 'utf-16'"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_makes_nothing_larger_than_itself(name, data_proto, tmp_path, capsys):
    bomb, message = BOMBS[name]
    file = data_proto(tmp_path / "b", rollout(), {}, {"bomb": bomb}, form="4")
    assert message in refused([file], capsys)


@pytest.mark.parametrize(("form", "trusted"), [("4", False), ("2", True), ("4", True), ("torch", True)])
def test_plain_values_of_every_kind_are_read(form, trusted, data_proto, tmp_path):
    from maskpack.tools.files import saved_batch

    info = {
        "bytes": [b"abc", bytearray(b"abc"), bytearray(), b""],
        "sets": [{1, 2}, set(), frozenset({3}), frozenset()],
        "others": [1j, torch.Size([2, 3]), np.float32(1.5), np.bool_(True), np.arange(3), (1, None, "x")],
        "more": [range(3), slice(1, 2), collections.OrderedDict(a=1)],
    }
    file = data_proto(tmp_path / "b", rollout(), {}, info, form=form)
    read = saved_batch(file, trusted)
    for name, value in info.items():
        assert list(map(repr, read[name])) == list(map(repr, value))


def test_the_memo_of_a_pickle_is_no_longer_than_the_file(data_proto, tmp_path, capsys):
    data = data_proto(tmp_path / "b", rollout(), {}, {}, form="2").read_bytes()
    for put, number in ((b"r\xff\xff\x0f\x00", 0xFFFFF), (b"p99999999\n", 99999999)):
        (tmp_path / "b").write_bytes(data[:2] + b"N" + put + b"0" + data[2:])
        assert f"it remembers thing number {number}" in refused([tmp_path / "b"], capsys)


def test_tensors_and_arrays_of_no_bytes(data_proto, tmp_path, capsys):
    nothing = np.zeros(1 << 14, "V0")
    file = data_proto(tmp_path / "a", None, {"x": nothing}, {}, form="4")
    assert "'x' has 16384 items" in refused([file], capsys)
    file = data_proto(tmp_path / "b", rollout(), {"x": np.zeros(B + 1)}, {}, form="4")
    assert f"'x' has {B + 1} items for rows [{B}]" in refused([file], capsys)


def test_verls_own_files(tmp_path, capsys):
    protocol = pytest.importorskip("verl.protocol")
    tensors = {name: rollout()[name] for name in rollout().keys()}  # noqa: SIM118
    data = protocol.DataProto.from_dict(tensors=tensors, non_tensors=arrays(), meta_info={"temperature": 1.0})
    data.save_to_disk(tmp_path / "b")
    torch.save(data, tmp_path / "c")
    for name in ("b", "c"):
        assert json.loads(doctor([tmp_path / name, "--json"], capsys, 0))["rows"] == B


# -------------------------------------------------------------------- files that claim more than they hold


def wide(path, width):
    """A packed file of a few bytes, whose response fields are `width` wide."""
    parts = Pieces.of(maskpack.compress(rollout().select("response_mask", "old_log_probs")).to_bytes())
    table = next(entry for entry in parts.arrays if entry[0] == "0.table")
    table[2] = table[2][:24] + width.to_bytes(8, "little") + table[2][32:]  # behind the counts, the first layout
    path.write_bytes(parts.joined())
    return path


@pytest.mark.parametrize("command", ["doctor", "inspect"])
@pytest.mark.parametrize("width", [1 << 26, 2**31 - 1])
def test_a_packed_file_is_not_decoded_before_its_widths_are_looked_at(command, width, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_module, "decompress", lambda *_, **__: pytest.fail("decoded"))
    assert cli.main([command, str(wide(tmp_path / "b.mp", width))]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert re.search(rf"maskpack {command}: .* expected at most {1 << 30}. Give a larger --max-bytes if", shown.err)


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_the_limit_can_be_given(command, tmp_path, capsys):
    file = wide(tmp_path / "b.mp", 1000)
    size = sum(array.nbytes for _, array in maskpack.decompress(maskpack.PackedBatch.load(file)).items())
    for limit, status in ((size // 2, 2), (2 * size, 0)):
        assert cli.main([command, str(file), "--max-bytes", str(limit)]) == status
        shown = capsys.readouterr()
        assert (f"expected at most {limit}" in shown.err) == (status == 2)
    for wrong in ("0", "-5"):
        assert cli.main([command, str(file), "--max-bytes", wrong]) == 2
        assert f"--max-bytes is {wrong}; expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_a_tensor_that_says_one_value_many_times(command, tmp_path, capsys):
    """Its file holds the value once."""
    many = torch.zeros(1, 1).expand(1 << 20, 1 << 10)
    held = {
        "entry": {"x": many},
        "object": {"x": torch.zeros(1), "meta": [{"inside": (many,)}]},
        "batch": TensorDict({"x": many}, [1 << 20]),
    }
    for name, value in held.items():
        torch.save(value, tmp_path / name)
        assert (tmp_path / name).stat().st_size < 10_000
        assert cli.main([command, str(tmp_path / name)]) == 2, name
        shown = capsys.readouterr()
        assert shown.out == ""
        assert re.search(
            rf"holds {1 << 32}\d* bytes padded|holds \d+ bytes padded; expected at most {1 << 30}", shown.err
        )
        assert shown.err.count("\n") == 1


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_too_little_memory_is_one_line(command, tmp_path, capsys, monkeypatch):
    file = saved(rollout(), tmp_path / "b.pt")
    home, name = (doctor_module, "diagnose") if command == "doctor" else (inspector, "figures")
    for error in (
        MemoryError("Unable to allocate 16.0 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(home, name, fails)
        assert cli.main([command, str(file), "--pad-token-id", "7"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"maskpack {command}: it does not fit into the memory of this machine")
        assert shown.err.count("\n") == 1

    def wrong(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(RuntimeError, match="something else"):
        cli.main([command, str(file), "--pad-token-id", "7"])


def test_the_limit_of_diagnose():
    packed = maskpack.compress(rollout(), pad_token_id=samples.PAD)
    assert diagnose(packed, max_bytes=1 << 20).sizes.rows == B
    with pytest.raises(maskpack.errors.LayoutError, match="decompress: these fields take"):
        diagnose(packed, max_bytes=10)


def test_the_command_in_a_process_of_its_own(tmp_path):
    file = saved(rollout(mine=UNCOVERED[3][0]), tmp_path / "b")
    command = [sys.executable, "-m", "maskpack", "doctor", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert covers(executed(done.stdout), rollout(mine=UNCOVERED[3][0]), "mine")


def test_names_without_control_signs(tmp_path, capsys):
    torch.save({"attention_mask": torch.ones(2, 3), "red\x1b[31m": torch.ones(2, 2)}, tmp_path / "b")
    assert "\x1b" not in doctor([tmp_path / "b"], capsys, 1)


def test_a_nan_of_other_bits_is_a_pad_of_rows():
    """0 / 0 is no float("nan") on every processor."""
    batch = rollout()
    pad, mask = samples.PAD, batch["response_mask"].bool()
    for bits in (0x7FC00000, -0x400000):  # that of float("nan"), and its negative
        nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
        batch["odd"] = torch.where(mask, 1.0, nan)
        (line,) = [one.line for one in diagnose(batch, pad_token_id=pad).suggestions if one.key == "odd"]
        scope: dict = {}
        exec("from maskpack import *\nfound = {" + line + "}", scope)
        registry = RL_FIELDS | scope["found"]
        packed = maskpack.compress(batch, registry=registry, pad_token_id=pad, strict_mask_nesting=True)
        back = maskpack.decompress(packed)["odd"]
        assert torch.equal(back.view(torch.int32), batch["odd"].view(torch.int32))


def test_the_pad_token_is_that_of_most_token_fields():
    batch = rollout()
    mask = batch["attention_mask"].bool()
    for name in ("input_ids", "teacher_ids"):
        batch.set(name, torch.where(mask, 1, 50))
    batch.set("prompts", torch.where(mask[:, :P], 1, 60))
    batch.set("responses", torch.where(mask[:, P:], 1, 50))
    assert diagnose(batch).pad_token_id == 50


def _suggested(batch, name):
    return next(line.spec for line in diagnose(batch).suggestions if line.key == name)


def test_a_mask_of_the_registry_comes_before_one_that_is_found():
    batch = rollout()
    response = batch["response_mask"].bool()
    some = response & (torch.rand(response.shape, generator=torch.Generator().manual_seed(0)) < 0.7)
    for name in ("one", "two"):
        batch.set(name, torch.randn(B, R).where(some, 0.0))
    batch.set("some", some)
    assert _suggested(batch, "one").mask == "response"


def test_a_mask_of_more_fields_comes_before_one_of_fewer_tokens():
    wide = torch.arange(12) < torch.tensor([[9], [5], [12]])
    narrow = wide & (torch.arange(12) > 1)
    fields = {"a": torch.randn(3, 12).where(wide, 0.0), "b": torch.randn(3, 12).where(narrow, 0.0)}
    batch = TensorDict({"wide": wide, "narrow": narrow, **fields}, batch_size=[3])
    assert _suggested(batch, "a").mask == "wide"
    assert _suggested(batch, "b").mask == "wide"
