"""The doctor on batches with known answers: what it prints is executed, and must cover the field. Files of a DataProto
are read without verl, and run no code."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import sys
import types
import zipfile
from fractions import Fraction

import numpy as np
import pytest
import samples
import test_presets
import torch
from fuzz_wire import Pieces
from golden import make_torch
from needs import needs
from tensordict import NonTensorData, TensorDict

import maskpack
import maskpack.store
from maskpack import RL_FIELDS, MaskNestingSpec
from maskpack.fields.presets import PRESETS
from maskpack.packed.sizes import report
from maskpack.packed.table import forget
from maskpack.tools import cli, inspector
from maskpack.tools import doctor as doctor_module
from maskpack.tools.doctor import diagnose, snippet
from maskpack.tools.files import saved_batch

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
    code = re.search(r"^from maskpack import .*?^(}|\)|}\))$", shown, re.DOTALL | re.MULTILINE)
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


ANY = "MaskNestingSpec('response', pad=[0, SIGNED_ZERO, ANY_ZERO])"
"""The line of floats whose pads are zeros."""
UNCOVERED = [
    (samples.of("response", torch.float32), ANY, "0.0"),
    (samples.of("prompt", torch.int32, -100), "MaskNestingSpec('prompt', pad=-100)", "-100"),
    (samples.of("response", torch.float32, math.nan), "MaskNestingSpec('response', pad=float(\"nan\"))", "nan"),
    (samples.of("sequence", torch.int64, -100), "MaskNestingSpec('sequence', pad=-100)", "-100"),
    (
        samples.of("response", torch.int64, samples.PAD),
        "MaskNestingSpec('response', pad=PAD_TOKEN_ID)",
        "the pad token",
    ),
    (
        samples.of("sequence", torch.int64, samples.EDGE),
        "MaskNestingSpec('sequence', pad=EDGE)",
        "the nearest valid value",
    ),
    (samples.of("response", torch.bool), "MaskNestingSpec('response', pad=False)", "False"),
    (per_row("response"), "MaskNestingSpec('response', pad=PER_ROW)", "one value a row (PER_ROW)"),
    (signed("response"), ANY, "0.0 in some rows and -0.0 in others"),
    (
        samples.of("sequence", torch.int64, samples.EDGE, (4,)).movedim(1, 2).contiguous(),
        "MaskNestingSpec('sequence', pad=EDGE, ragged_dim=-1)",
        "the nearest valid value (EDGE)",
    ),
]


@pytest.mark.parametrize(("value", "spec", "pad"), UNCOVERED, ids=[pad for _, _, pad in UNCOVERED])
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
    batch = rollout(a=UNCOVERED[1][0], b=UNCOVERED[5][0], sub=rollout(c=UNCOVERED[0][0]))
    torch.save(batch, tmp_path / "b")
    shown = doctor([tmp_path / "b"], capsys, 1)
    assert "3 stay padded; they are compressed all the same, to " in shown
    assert f"('sub', 'c'): {ANY}," in shown
    assert "from maskpack import ANY_ZERO, EDGE, RL_FIELDS, SIGNED_ZERO, MaskNestingSpec\n" in shown
    assert covers(executed(shown), batch, "a", "b", ("sub", "c"))


def test_a_known_field_with_another_pad_keeps_its_spec(tmp_path, capsys):
    batch = rollout()
    batch["rollout_log_probs"] = samples.of("response", torch.float32, 1)
    shown = doctor([saved(batch, tmp_path / "b")], capsys, 1)
    spec = "MaskNestingSpec(['response', 'sequence'], pad=[1.0, 0, SIGNED_ZERO, ANY_ZERO], hints="
    assert f"'rollout_log_probs': {spec}" in shown
    registry = executed(shown)
    assert covers(registry, batch, "rollout_log_probs")
    assert covers(registry, rollout(), "rollout_log_probs")  # what was right before still is


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
    assert "'prompt_ids': MaskNestingSpec('prompt_mask', pad=PAD_TOKEN_ID)," in shown
    assert "# compress(batch, registry=registry, pad_token_id=7)\n" in shown
    assert "'completion_mask': MaskNestingSpec('completion_mask')," in shown
    registry = executed(shown)
    names = ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask"]
    assert covers(registry, batch, *names, pad_token_id=7)
    assert [*registry] == names  # and none of RL_FIELDS
    assert registry.axes == {}


def test_a_pad_token_that_ends_each_row_is_no_edge():
    """As that of a tokenizer whose pad is the end of the text; rows of a later batch are cut off before it."""
    mask = samples.of("response", torch.bool).long()
    ids = samples.of("response", torch.int64, 7)
    ends = mask.bool() & (mask.cumsum(1) == mask.sum(1, keepdim=True))
    batch = TensorDict({"toks": ids.masked_fill(ends, 7), "on": mask}, batch_size=[B])
    found = diagnose(batch).cover
    assert found.registry["toks"].pads == (maskpack.PAD_TOKEN_ID,)
    assert found.pad_token_id == 7
    assert covers(found.registry, batch.set("toks", ids), "toks", pad_token_id=7)


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
    assert "'values': MaskNestingSpec('m', pad=[0, SIGNED_ZERO, ANY_ZERO])," in shown
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


def gae(seed):
    """A batch of own names whose pads have the sign of what `x * mask` had there, and the mean of what it whitened."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(20) < torch.randint(3, 20, (16, 1), generator=generator)
    own = torch.randn(16, 20, generator=generator).cumsum(1)
    mean, std = own[mask].mean(), own[mask].std()
    own = own.masked_fill(~mask, 0)
    fields = {"on": mask.long(), "adv": (own - mean) / std * mask, "white": (own - mean) / std, "rets": own * mask}
    fields["loss_on"] = mask.float()
    return TensorDict(fields, batch_size=[16])


def test_the_registry_of_one_batch_takes_later_ones():
    """For no byte more than the pad of the batch."""
    found = diagnose(gae(0)).cover
    for seed in range(10):
        assert covers(found.registry, gae(seed), *gae(seed).keys(), pad_token_id=None)
    assert found.registry["adv"].pads == (0, maskpack.SIGNED_ZERO, maskpack.ANY_ZERO)
    assert found.registry["loss_on"].pads == (0,)
    plain = found.registry | {
        name: MaskNestingSpec("on", found.registry[name].pads[0 if name == "white" else 1], hints=spec.hints)
        for name, spec in found.registry.items()
        if name in ("adv", "white", "rets")
    }
    assert wire_bytes(gae(0), found.registry) <= wire_bytes(gae(0), plain)


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


def test_mixed_zeros_have_a_remedy(tmp_path, capsys):
    batch = rollout()
    batch["advantages"] = torch.tensor([1.0, -1.0] * R)[:R] * samples.of("response", torch.bool)
    doctor([saved(batch, tmp_path / "b")], capsys, 0)
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


def test_tensors_inside_python_objects_are_one_finding(tmp_path, capsys):
    batch = rollout()
    batch.set("extra", samples.per_row([{"tokens": torch.zeros(b + 1)} for b in range(B)]))
    torch.save(batch, tmp_path / "b")
    shown = doctor([tmp_path / "b", "--allow-pickle"], capsys, 1)
    assert "1 stays padded; it is compressed all the same, to " in shown
    assert f"{4 * sum(range(1, B + 1))} bytes: with {B - 1} more, tensors inside Python objects" in shown
    registry = executed(shown)
    maskpack.compress(batch, registry=registry, pad_token_id=samples.PAD, strict_mask_nesting=True)


# -------------------------------------------------------------------- what is given


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


def test_a_packed_batch_and_a_nested_one(tmp_path, capsys):
    batch = rollout(mine=UNCOVERED[1][0])
    with pytest.warns(maskpack.errors.MaskpackWarning):
        packed = maskpack.compress(batch, pad_token_id=samples.PAD)
    packed.save(tmp_path / "packed")
    assert covers(executed(doctor([tmp_path / "packed"], capsys, 1)), batch, "mine")
    said = json.loads(doctor([tmp_path / "packed", "--json"], capsys, 1))
    assert said["wire_bytes"] == report(None, packed)["maskpack/wire_bytes"]
    assert said["wire_bytes_with_lines"] is None
    with pytest.warns(maskpack.errors.MaskpackWarning):
        nested = maskpack.nest_batch_by_mask(batch, pad_token_id=samples.PAD)
    assert [one.line for one in diagnose(nested).suggestions] == ["'mine': MaskNestingSpec('prompt', pad=-100),"]


@pytest.mark.parametrize("version", ["0.10.0", "0.14.3"])
def test_files_of_torch_save_with_other_versions_of_tensordict(version, capsys):
    """The maker is tests/golden/make_torch.py."""
    file = make_torch.HERE / f"tensordict-{version}.pt"
    samples.assert_same(saved_batch(file, False), make_torch.batch())
    assert "'sub', 'x'" in doctor([file, "--pad-token-id", 0], capsys, 1)


def test_a_class_that_is_refused_is_named_and_damage_is_told(tmp_path, capsys):
    torch.save({"x": torch.ones(2, 3), "y": Fraction(1, 2)}, tmp_path / "class.pt")
    said = refused([tmp_path / "class.pt"], capsys)
    assert "cannot be read: UnpicklingError: it names fractions.Fraction, which is no plain data. Give --allow" in said
    torch.save({"x": torch.ones(2, 3)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for name in whole.namelist():
            data = whole.read(name)
            cut.writestr(name, data.replace(b"ctorch._utils", b"\xff torch._utils") if name.endswith(".pkl") else data)
    assert "UnpicklingError: it is damaged: Unsupported operand 255" in refused([tmp_path / "cut.pt"], capsys)


def test_a_folder_of_a_memory_mapped_tensordict(tmp_path, capsys):
    batch = rollout(mine=UNCOVERED[1][0], sub=TensorDict({"half": torch.ones(B, 2, dtype=torch.bfloat16)}, [B]))
    batch["none"] = torch.zeros(B, 0)
    batch["names"] = samples.per_row([f"row {b}" for b in range(B)])
    batch.set("info", NonTensorData({"step": 1}, batch_size=[B]))
    batch.clone().memmap(str(tmp_path / "m"))
    read = saved_batch(tmp_path / "m", False)
    assert set(read.keys()) == set(batch.keys())
    samples.assert_same(read.select(*batch.keys()), batch)
    shown = doctor([tmp_path / "m"], capsys, 1)
    assert "'mine': MaskNestingSpec('prompt', pad=-100)," in shown
    (tmp_path / "m" / "mine.memmap").write_bytes(b"")
    assert "m cannot be read: RuntimeError: " in refused([tmp_path / "m"], capsys)
    about = json.loads((tmp_path / "m" / "meta.json").read_text())
    (tmp_path / "m" / "meta.json").write_text(json.dumps({"../m/mine": about["mine"], "shape": [B]}))
    assert "which is no name of a file" in refused([tmp_path / "m"], capsys)
    (tmp_path / "m" / "meta.json").write_text(json.dumps({"thing": {"type": "Thing"}, "shape": [B]}))
    (tmp_path / "m" / "thing").mkdir()
    (tmp_path / "m" / "thing" / "meta.json").write_text("{}")
    assert "field 'thing' is a Thing that is no plain data" in refused([tmp_path / "m"], capsys)


# -------------------------------------------------------------------- --strict


@pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")
def test_a_log(tmp_path, capsys):
    """A sample of its rows is what the doctor says of these rows, packed."""
    with maskpack.store.RolloutLog(tmp_path / "log", pad_token_id=samples.PAD) as log:
        assert log.append(rollout(), {"step": 0}) == range(B)
        log.append(rollout(own=torch.zeros(B, R)), {"step": 1})
        shown = doctor([tmp_path / "log"], capsys, 1)
        assert shown.startswith(f"{tmp_path / 'log'}: {B} rows (a sample), ")
        assert "'own': MaskNestingSpec(" in shown
        maskpack.compress(rollout(own=torch.zeros(B, R)), pad_token_id=samples.PAD).save(tmp_path / "b")
        assert doctor([tmp_path / "b"], capsys, 1).splitlines()[1:] == shown.splitlines()[1:]
        strict = doctor(["--strict", tmp_path / "log", tmp_path / "b"], capsys, 1)
        assert strict.count("1 stays padded\n") == 2


def test_a_log_whose_appends_have_other_fields(tmp_path, capsys):
    with maskpack.store.RolloutLog(tmp_path / "log", pad_token_id=samples.PAD) as log:
        with pytest.warns(maskpack.errors.MaskpackWarning):
            log.append(rollout(own=torch.zeros(B, R)))
        log.append(rollout())
    with pytest.warns(maskpack.errors.MaskpackWarning, match="1 of 2 appends .* left out: own"):
        doctor([tmp_path / "log"], capsys, 0)


def test_a_dict_with_a_tensor_without_dims(tmp_path, capsys):
    """As num_items_in_batch in the inputs of TRL's loss."""
    batch = {**rollout().exclude("global_token_num").to_dict(), "num_items": torch.tensor(7)}
    batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    shown = doctor([saved(batch, tmp_path / "b.pt"), "--pad-token-id", samples.PAD], capsys, 0)
    assert f": {B} rows, " in shown


def test_strict_checks_several_files(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, batch in (("good", rollout()), ("also", rollout()), ("bad", rollout(mine=UNCOVERED[1][0]))):
        saved(batch, tmp_path / name)
    fields = len(rollout().keys())
    given = ["--strict", "--pad-token-id", samples.PAD]
    assert doctor([*given, "good"], capsys, 0) == f"good: {fields} fields, none stays padded\n"
    shown = doctor([*given, "good", "bad", "also"], capsys, 1)
    lines = shown.splitlines()
    assert lines[:2] == [f"good: {fields} fields, none stays padded", "bad: 1 stays padded"]
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
    saved(rollout(responses=torch.zeros(B, 99)), tmp_path / "odd")
    (tmp_path / "text").write_text("no batch")
    shown = doctor([*given, "text", "none", "odd", "bad", "good"], capsys, 2)
    starts = ["text: text is neither", "none: none: No such", "odd: compress: ", "bad: 1 stays", "good: "]
    lines = [line for line in shown.splitlines() if line[0] != " "]
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 5


def test_a_pad_token_that_no_padding_shows(tmp_path, capsys):
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64)
    file = saved(TensorDict({"attention_mask": mask, "input_ids": ids}, batch_size=[2]), tmp_path / "b")
    note = "note: pad_token_id was not given, and no padding shows it. Pass that of the tokenizer to compress.\n"
    assert doctor(["--strict", file], capsys, 0) == f"{file}: 2 fields, none stays padded\n  {note}"
    assert note in doctor([file], capsys, 0)
    assert "note" not in doctor(["--strict", file, "--pad-token-id", "0"], capsys, 0)
    alone = saved(TensorDict({"attention_mask": mask}, batch_size=[2]), tmp_path / "alone")
    assert "note" not in doctor(["--strict", alone], capsys, 0)


# -------------------------------------------------------------------- a DataProto


class Running:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def data_proto(monkeypatch):
    """A class of that name which gives the same state to a file; it is gone when the file is read."""

    def written(file, batch, arrays, info, *, form):
        module = types.ModuleType("verl.protocol")

        class DataProto:
            def __getstate__(self):
                held = io.BytesIO()
                torch.save(batch, held)
                return held.getvalue(), arrays, info

        DataProto.__module__, DataProto.__qualname__ = "verl.protocol", "DataProto"
        module.DataProto = DataProto
        monkeypatch.setitem(sys.modules, "verl", types.ModuleType("verl"))
        monkeypatch.setitem(sys.modules, "verl.protocol", module)
        with open(file, "wb") as opened:
            (torch.save if form == "torch" else pickle.dump)(DataProto(), opened)
        monkeypatch.setitem(sys.modules, "verl", None)
        monkeypatch.delitem(sys.modules, "verl.protocol")
        return file

    return written


FORMS = [("torch", []), ("torch", ["--allow-pickle"]), ("pickle", ["--allow-pickle"])]


def arrays(**more):
    names = np.array([f"row-{b}" for b in range(B)], dtype=object)
    return {"uid": names, "index": np.arange(B), "kind": np.array(["x"] * B), **more}


@pytest.mark.parametrize(("form", "flags"), FORMS)
def test_a_data_proto_is_read_without_verl(form, flags, data_proto, tmp_path, capsys):
    """With its objects and numbers."""
    images = np.array([{"pixel_values": torch.full((b + 1, 2), float(b))} for b in range(B)], dtype=object)
    info = {"temperature": 0.7, "global_token_num": list(range(B)), "uid": "not a row"}
    batch = rollout(mine=UNCOVERED[3][0])
    file = data_proto(tmp_path / "b", batch, arrays(multi_modal_inputs=images), info, form=form)
    read = saved_batch(file, bool(flags))
    samples.assert_same(read.select(*batch.keys()), batch)
    assert f": {B} rows, " in doctor([file, *flags], capsys, 1)
    assert read["uid"] == [f"row-{b}" for b in range(B)]
    assert [int(number) for number in read["index"]] == list(range(B))
    assert read["temperature"] == 0.7
    assert read["global_token_num"] == list(range(B))
    for b, inputs in enumerate(read.get("multi_modal_inputs").tolist()):
        assert torch.equal(inputs["pixel_values"], torch.full((b + 1, 2), float(b)))


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("pickle", "it is a pickle"),
        ("torch", "is no plain data"),
        ("inside", "is no plain data"),
    ],
)
def test_it_runs_no_code_unless_told(form, reason, data_proto, tmp_path, capsys):
    mark = tmp_path / "mark"
    batch = {"x": Running(mark)} if form == "inside" else rollout()
    evil = {} if form == "inside" else {"evil": np.array([Running(mark)] * B, dtype=object)}
    file = data_proto(tmp_path / "b", batch, evil, {}, form="pickle" if form == "pickle" else "torch")
    said = refused([file], capsys)
    assert re.search(f"cannot be read: UnpicklingError: .*{reason}", said)
    assert "Give --allow-pickle if you trust the file" in said
    assert not mark.exists()
    if form != "inside":
        doctor([file, "--allow-pickle"], capsys, 0)
        assert mark.exists()


def test_damaged_files_are_one_line(data_proto, tmp_path, capsys):
    for form, flags in FORMS:
        whole = data_proto(tmp_path / "whole", rollout(), arrays(), {}, form=form).read_bytes()
        for end in range(0, len(whole), len(whole) // 20):
            (tmp_path / "b").write_bytes(whole[:end])
            refused([tmp_path / "b", *flags], capsys)


def test_arrays_of_no_bytes_and_of_other_rows(data_proto, tmp_path, capsys):
    file = data_proto(tmp_path / "a", None, {"x": np.zeros(1 << 14, "V0")}, {}, form="pickle")
    assert "'x' has 16384 items" in refused([file, "--allow-pickle"], capsys)
    file = data_proto(tmp_path / "b", rollout(), {"x": np.zeros(B + 1)}, {}, form="torch")
    assert f"'x' has {B + 1} items for rows [{B}]" in refused([file], capsys)


def test_verls_own_files(tmp_path, capsys):
    protocol = needs("verl.protocol")
    tensors = {name: rollout()[name] for name in rollout().keys()}  # noqa: SIM118
    data = protocol.DataProto.from_dict(tensors=tensors, non_tensors=arrays(), meta_info={"temperature": 1.0})
    data.save_to_disk(tmp_path / "b")
    torch.save(data, tmp_path / "c")
    for name in ("b", "c"):
        assert json.loads(doctor([tmp_path / name, "--json", "--allow-pickle"], capsys, 0))["rows"] == B


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
    for error in (MemoryError("16.0 GiB"), RuntimeError("DefaultCPUAllocator: can't allocate memory")):

        def fails(*_, error=error, **__):
            raise error

        monkeypatch.setattr(home, name, fails)
        assert cli.main([command, str(file), "--pad-token-id", "7"]) == 2
        shown = capsys.readouterr()
        assert shown.err.startswith(f"maskpack {command}: it does not fit into the memory of this machine")
        assert (shown.out, shown.err.count("\n")) == ("", 1)

    def wrong(*_, **__):
        raise RuntimeError("something else")

    monkeypatch.setattr(home, name, wrong)
    with pytest.raises(RuntimeError, match="something else"):
        cli.main([command, str(file), "--pad-token-id", "7"])


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
    assert diagnose(batch).cover.pad_token_id == 50


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


# -------------------------------------------------------------------- registries of other trainers


def of_trainer(case, **more):
    return test_presets.made(case, count=40, most=120, empty=False, **more)


def wire_bytes(batch, registry):
    forget()
    packed = maskpack.compress(batch, registry=registry, pad_token_id=samples.PAD)
    return report(None, packed)["maskpack/wire_bytes"]


@pytest.mark.parametrize("case", ["skyrl", "nemo_rl", "trl", "slime"])
@pytest.mark.parametrize("options", [[], ["--pad-token-id", str(samples.PAD)]], ids=["seen", "given"])
def test_the_preset_that_fits_is_named_with_its_bytes(case, options, tmp_path, capsys):
    batch = of_trainer(case)
    file = saved(batch, tmp_path / "b.pt")
    said = json.loads(doctor([file, "--json", *options], capsys, 1))
    nbytes = wire_bytes(batch, PRESETS[case])
    assert said["preset"] == {"name": case, "wire_bytes": nbytes, "pad_token_id": samples.PAD}
    with pytest.warns(maskpack.errors.MaskpackWarning):
        assert said["wire_bytes"] == wire_bytes(batch, RL_FIELDS)
    shown = doctor([file, *options], capsys, 1)
    fewer = 1 - nbytes / said["wire_bytes"]
    assert f"\npreset:    {nbytes:,} bytes, {fewer:.1%} fewer, with maskpack.fields.{case}\n" in shown
    line = re.search(r"compress\(batch, registry=\w+, pad_token_id=\d+\)", shown)[0]
    names = {"compress": maskpack.compress, "batch": batch, case: PRESETS[case]}
    samples.assert_same(maskpack.decompress(eval(line, names)), batch)


def test_a_preset_that_covers_a_batch_is_named_though_it_saves_nothing(tmp_path, capsys):
    """And what the printed registry costs is told as that."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    ids = torch.where(mask != 0, 7, samples.PAD)
    batch = TensorDict({"prompt_ids": ids.flip(1), "prompt_mask": mask.flip(1)}, [2])
    batch.update({"completion_ids": ids, "completion_mask": mask, "advantages": torch.ones(2)})
    batch["old_per_token_logps"] = -0.5 * mask
    said = json.loads(
        doctor([file := saved(batch, tmp_path / "b.pt"), "--json", "--pad-token-id", samples.PAD], capsys, 1)
    )
    assert said["preset"]["name"] == "trl"
    assert said["preset"]["wire_bytes"] == wire_bytes(batch, PRESETS["trl"]) >= said["wire_bytes"]
    shown = doctor([file, "--pad-token-id", samples.PAD], capsys, 1)
    assert f"\npreset:    {said['preset']['wire_bytes']:,} bytes, with maskpack.fields.trl\n" in shown
    with_lines, before = said["wire_bytes_with_lines"], said["wire_bytes"]
    assert f"With this registry {with_lines:,} bytes travel, {with_lines - before:,} more than now." in shown


def test_a_batch_that_the_registry_refuses_is_given_its_preset(tmp_path, capsys):
    """And a registry of its own; a CI run fails on it."""
    batch = of_trainer("openrlhf")
    file = saved(batch, tmp_path / "b.pt")
    nbytes = wire_bytes(batch, PRESETS["openrlhf"])
    fits = f" maskpack.fields.openrlhf takes this batch, in {nbytes:,} bytes."
    shown = doctor([file, "--pad-token-id", samples.PAD], capsys, 1)
    assert re.search(rf'refused with RL_FIELDS: compress: field "rollout_log_probs" is .*{re.escape(fits)}\n', shown)
    assert f"preset:    {nbytes:,} bytes" in shown
    assert covers(executed(shown), batch, "rollout_log_probs", "advantages")
    shown = doctor(["--strict", file, "--pad-token-id", samples.PAD], capsys, 2)
    assert shown.endswith(f"{fits}\n")
    only = batch.select("rollout_log_probs", "attention_mask")
    assert '"rollout_log_probs" is' in refused([saved(only, tmp_path / "c"), "--pad-token-id", 7], capsys)


def test_a_preset_is_not_named_where_it_brings_little(tmp_path, capsys):
    registry = tmp_path / "r.json"
    registry.write_text(json.dumps(PRESETS["skyrl"].to_dict()))
    own = [saved(of_trainer("skyrl"), tmp_path / "own.pt"), "--registry", registry]
    unknown = of_trainer("skyrl")
    unknown["other"] = torch.ones(40, 3)
    known = [saved(rollout(), tmp_path / "known.pt")]
    for argv, status in ((own, 0), (known, 0), ([saved(unknown, tmp_path / "unknown.pt")], 1)):
        assert json.loads(doctor([*argv, "--json"], capsys, status))["preset"] is None
        assert "preset:" not in doctor(argv, capsys, status)
