"""The command line: inspect shows the figures of every kind of file, and what it cannot read is one line."""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path

import command_line
import pytest
import samples
import torch
from needs import needs, without
from tensordict import NonTensorData, NonTensorStack, TensorDict

import maskpack
from maskpack import report
from maskpack.store import RolloutLog
from maskpack.tools import cli, files
from maskpack.tools.files import saved_batch

# -------------------------------------------------------------------- the command


@pytest.mark.parametrize("name", ["ray", "transformers"])
def test_missing_extra_is_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr(cli, "is_installed", lambda package: package != name)
    said = command_line.refused("demo", [], capsys)
    assert said == f"maskpack demo: {name} is not installed; run: pip install 'maskpack[demo]'\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: command"),
        (["doctor", "b", "--colour"], "unrecognized arguments: --colour"),
        (["inspect"], "required: FILE"),
        (["inspect", "b", "--pad-token-id", "x"], "invalid int value"),
    ],
)
def test_wrong_arguments_exit_with_2(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------- inspect

PAD = ["--pad-token-id", str(samples.PAD)]
inspected, refused = partial(command_line.printed, "inspect"), partial(command_line.refused, "inspect")


class Own:
    """What only a pickle can say."""

    def __eq__(self, other):
        return isinstance(other, Own)

    __hash__ = None


def rollout():
    return samples.rollout(objects=False).set("odd", torch.randn(7, 3, 2))


def packed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", maskpack.errors.MaskpackWarning)
        return maskpack.compress(rollout(), pad_token_id=samples.PAD)


def as_packed(path):
    packed().save(path)


def as_torch(path):
    torch.save(rollout(), path)


def as_dict(path):
    torch.save(dict(rollout().items()), path)


def as_pickled_batch(path):
    torch.save(packed(), path)


def matches(said, found):
    """Whether JSON of the command has the figures of a report."""
    assert [said[name] for name in ("rows", "padded_bytes", "real_bytes", "ratio", "fill", "layouts_bytes")] == [
        found[f"maskpack/{name}"] for name in ("rows", "padded_bytes", "real_bytes", "ratio", "fill", "layouts_bytes")
    ]
    assert said["wire_bytes"] == found["maskpack/wire_bytes"]
    for field in said["fields"]:
        for name in ("padded_bytes", "real_bytes", "wire_bytes"):
            assert field[name] == found[f"maskpack/field/{'/'.join(field['path'])}/{name}"]
    assert 3 * len(said["fields"]) == sum(name.startswith("maskpack/field/") for name in found)


@pytest.mark.parametrize("save", [as_packed, as_torch, as_dict, as_pickled_batch])
def test_inspect_reads_every_kind_of_file(save, tmp_path, capsys):
    file = tmp_path / "batch"
    save(file)
    flags = {as_packed: [], as_pickled_batch: ["--allow-pickle"]}.get(save, PAD)
    said = json.loads(inspected([file, "--json", *flags], capsys))
    assert said["file"] == str(file)
    matches(said, report(packed()).metrics())


def test_inspect_shows_a_table(tmp_path, capsys):
    packed().save(tmp_path / "b")
    out = inspected([tmp_path / "b"], capsys)
    found = report(packed()).metrics()
    lines = out.splitlines()
    assert lines[0] == f"{tmp_path / 'b'}: 7 rows, {len(rollout().keys())} fields, codec none"
    rows = {line.split()[0]: line for line in lines[2:] if line.strip("- ") and line[0] != " "}
    for name in rollout().keys():  # noqa: SIM118  (TensorDict iterates over rows)
        cells = [f"{found[f'maskpack/field/{name}/{kind}_bytes']:,}" for kind in ("padded", "real", "wire")]
        assert " ".join(cells) in " ".join(rows[name].split())
        assert len(rows[name]) <= len(rows["field"])
    for kind in ("padded", "real", "wire"):
        assert f"{found[f'maskpack/{kind}_bytes']:,}" in rows["total"].split()
    assert rows["input_ids"].split()[-2:] == ["9", "68.4"]  # a concat: the record of its pad alone
    below = out.partition("Fields that stay padded:\n")[2].splitlines()
    assert below == [
        "  reward_baselines (7,) float32, 28 bytes: by design",
        "  dummy_tensor (7, 1) uint8, 7 bytes: by design",
        "  odd (7, 3, 2) float32, 168 bytes: the registry does not know it",
    ]


def test_inspect_a_slice_a_codec_objects_sub_batches_and_no_rows(tmp_path, capsys):
    batch = samples.rollout()
    batch["sub"] = batch.select("attention_mask", "responses", "returns")
    for name, shown in {
        "slice": maskpack.compress(batch, pad_token_id=samples.PAD)[2:5],
        "codec": maskpack.compress(batch, pad_token_id=samples.PAD, codec="zstd"),
        "none": maskpack.compress(batch[:0], pad_token_id=samples.PAD),
    }.items():
        shown.save(tmp_path / name)
        said = json.loads(inspected([tmp_path / name, "--json"], capsys))
        loaded = maskpack.PackedBatch.load(tmp_path / name)
        matches(said, report(loaded).metrics())
        assert said["rows"] == len(shown)
        assert said["codec"] == shown.codec
        assert ["sub", "returns"] in [field["path"] for field in said["fields"]]
        assert "total" in inspected([tmp_path / name], capsys)


def test_inspect_a_tree_of_plain_dicts(tmp_path, capsys):
    fields = dict(rollout().select("attention_mask", "responses").items())
    torch.save({**fields, "ref": dict(fields), "step": 3, "lines": ["a", "b"]}, tmp_path / "b")
    said = json.loads(inspected([tmp_path / "b", "--json", *PAD], capsys))
    assert [field["path"] for field in said["fields"]] == [
        ["attention_mask"],
        ["responses"],
        ["ref", "attention_mask"],
        ["ref", "responses"],
    ]
    assert said["rows"] == 7
    assert said["objects_bytes"] > 0


@pytest.mark.parametrize("kind", ["json", "yaml", "yml"])
def test_inspect_takes_a_registry(kind, tmp_path, capsys):
    mask = torch.tensor([[1, 0, 0], [1, 1, 0]])
    torch.save({"m": mask, "x": torch.tensor([[5, 7, 7], [6, 4, 7]]), "attention_mask": mask}, tmp_path / "b")
    spec = {"fields": {"m": {"mask": "m"}, "x": {"mask": "m", "pad": 7}}}
    text = json.dumps(spec) if kind == "json" else needs("yaml").safe_dump(spec)
    (tmp_path / f"r.{kind}").write_text(text)
    said = json.loads(inspected([tmp_path / "b", "--json", "--registry", tmp_path / f"r.{kind}"], capsys))
    assert [field["kind"] for field in said["fields"]] == ["padded", "padded", "dense"]  # RL_FIELDS are not added
    assert [field["real_bytes"] for field in said["fields"]] == [24, 24, 48]
    without = json.loads(inspected([tmp_path / "b", "--json"], capsys))
    assert [field["kind"] for field in without["fields"]] == ["dense", "dense", "padded"]


# -------------------------------------------------------------------- what inspect refuses


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "b is empty: torch.save, pickle, "),
        *((data, "b is none of the files that are read: ") for data in (b"hello, this is text", b"\x07" * 5000)),
        (b'{"rows":{"a": 1}}', "b holds a dict without tensors"),
        (b'{"a": 1', "b cannot be read: JSONDecodeError"),
        (b"PK\x03\x04 no zip", "b begins as a file of torch.save or NumPy, and ends early. Save or copy it again"),
        (b"\x80\x02 no pickle", "cannot be read: UnpicklingError: it is a pickle. Give --allow-pickle"),
        (b"\x18" + bytes(7) + b'{"__metadata__": {}}    ', "is a safetensors file, as of the weights of a model"),
    ],
)
def test_inspect_refuses_other_files(data, message, tmp_path, capsys):
    (tmp_path / "b").write_bytes(data)
    assert message in refused([tmp_path / "b"], capsys)


@pytest.mark.parametrize("save", [as_packed, as_dict])
def test_inspect_refuses_files_cut_anywhere(save, tmp_path, capsys):
    save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    for end in range(0, len(data), len(data) // 40):
        (tmp_path / "b").write_bytes(data[:end])
        refused([tmp_path / "b", *PAD], capsys)
        refused([tmp_path / "b", "--allow-pickle", *PAD], capsys)


@pytest.mark.parametrize(
    "change", [TensorDict.clone, TensorDict.lock_, TensorDict.consolidate], ids=["plain", "locked", "consolidated"]
)
def test_what_any_tensordict_saved_is_read(change, tmp_path):
    """Those before 0.15 do not tell torch that their classes are safe."""
    batch = TensorDict({"rows": NonTensorStack("a", "b"), "all": NonTensorData({"k": 1}, batch_size=[2])}, [2])
    batch["m"], batch["sub"] = torch.randn(2, 3), TensorDict({"x": torch.zeros(2)}, [2])
    torch.save(change(batch), tmp_path / "b")
    safe = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()
        samples.assert_same(saved_batch(tmp_path / "b")[0].select(*batch.keys()), batch)
    finally:
        torch.serialization.add_safe_globals(safe)


def test_inspect_reads_jagged_tensors(tmp_path, capsys):
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save(TensorDict({"x": rows}, [2]), tmp_path / "b")
    assert "2 rows, 1 fields" in inspected([tmp_path / "b"], capsys)


def test_inspect_reads_pickles_of_a_packed_batch_only_when_told(tmp_path, capsys):
    batch = TensorDict({"x": torch.zeros(2), "o": NonTensorData(Own(), batch_size=[2])}, [2])
    maskpack.compress(batch).save(tmp_path / "b", allow_pickle=True)
    assert "Pass --allow-pickle if you trust who wrote it" in refused([tmp_path / "b"], capsys)
    inspected([tmp_path / "b", "--allow-pickle"], capsys)


def test_inspect_guesses_the_pad_of_the_doctor(tmp_path, capsys):
    as_torch(tmp_path / "b")
    said = [json.loads(inspected([tmp_path / "b", "--json", *pad], capsys))["fields"] for pad in ([], PAD)]
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(2)], "holds a list; expected a TensorDict or a dict of tensors"),
        (torch.zeros(2), "holds a Tensor; expected"),
        ({}, "holds a dict without tensors"),
        ({"a": 1}, "holds a dict without tensors"),
        ({3: torch.zeros(2)}, "holds a dict with the key 3; expected names"),
        ({"a": {(1, 2): torch.zeros(2)}}, "holds a dict with the key (1, 2)"),
        ({"x": torch.zeros(2, 2).to_sparse()}, 'field "x" has the memory layout torch.sparse_coo'),
        ({"x": {"y": torch.zeros(2, 2, device="meta")}}, "tensors on the meta device"),
        ({"attention_mask": torch.ones(2, 3), "input_ids": torch.ones(2, 4)}, 'field "input_ids" is (2, 4)'),
    ],
)
def test_inspect_refuses_what_is_no_batch(value, message, tmp_path, capsys):
    torch.save(value, tmp_path / "b")
    assert message in refused([tmp_path / "b", *PAD], capsys)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.toml", "", "expected a file that ends in .json, .yaml or .yml"),
        ("r.json", "{", "Expecting property name"),
        ("r.json", "[]", "expected a dict"),
        ("r.json", "[" * 100_000, "recursion"),
        ("r.json", '{"colours": {}}', "unknown entries ['colours']"),
        ("r.json", b"\xff\xfe\x00", "--registry"),
        ("r.yaml", "a: [", "expected what MaskNestingRegistry.to_dict gives"),
        ("r.yaml", "", "expected a dict"),
        ("r.yaml", "!!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_inspect_refuses_bad_registries(name, text, message, tmp_path, capsys):
    as_dict(tmp_path / "b")
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refused([tmp_path / "b", "--registry", tmp_path / name, *PAD], capsys)


@without("yaml")
def test_inspect_without_a_registry_file_or_yaml(found, tmp_path, capsys, monkeypatch):
    as_dict(tmp_path / "b")
    assert "r.json: No such file" in refused([tmp_path / "b", "--registry", tmp_path / "r.json"], capsys)
    assert "is no log" in refused([tmp_path], capsys)
    (tmp_path / "r.yaml").write_text("fields: {}")
    monkeypatch.setitem(sys.modules, "yaml", found)
    assert "PyYAML is not installed" in refused([tmp_path / "b", "--registry", tmp_path / "r.yaml"], capsys)


def test_inspect_shows_names_without_control_signs(tmp_path, capsys):
    torch.save({"red\x1b[31m\n": torch.zeros(2, 2)}, tmp_path / "b")
    assert "red\\x1b[31m\\n" in inspected([tmp_path / "b"], capsys)
    torch.save({"a": torch.zeros(2, 2), 1.5: "\x1b"}, tmp_path / "b")
    assert "\x1b" not in refused([tmp_path / "b"], capsys)


def test_inspect_cuts_long_names(tmp_path, capsys):
    """Every line is as wide as the longest name."""
    fields = {"x" * 50_000: torch.zeros(2), **{f"y{n}": torch.zeros(2) for n in range(40)}}
    maskpack.compress(TensorDict(fields, [2])).save(tmp_path / "b")
    shown = inspected([tmp_path / "b"], capsys)
    assert "\n" + "x" * 80 + "...  float32" in shown
    assert len(shown) < 80_000


# -------------------------------------------------------------------- logs


@pytest.fixture
def rollouts(tmp_path):
    """A log of four appends in two segments or more, of which rows are deleted."""
    with RolloutLog(tmp_path / "log", segment_bytes=1 << 14, pad_token_id=samples.PAD) as log:
        for step in range(4):
            batch = samples.rollout()
            more = {"worker": [f"w{row % 2}" for row in range(len(batch))]} if step else {}
            log.append(batch, {"step": step, **more})
        log.delete([8, 9, 27])
        yield log


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_inspect_of_a_log(scheme, rollouts, capsys):
    path = scheme + rollouts.path
    shown = inspected([path], capsys).splitlines()
    assert shown[0] == f"{path}: 25 rows in 4 chunks; 3 rows were deleted"
    files = sorted(Path(rollouts.path).glob("*.seg"))
    assert shown[1] == f"{sum(map(os.path.getsize, files)):,} bytes in {len(files)} segments"
    assert shown[2:4] == ["tag step: 4 values in 25 rows", "tag worker: 2 values in 18 rows"]
    assert shown[5] == "The last chunk, 6 rows from 21 to 26:"
    table = [line.split() for line in shown[7:]]
    expected = report(maskpack.compress(samples.rollout()[:6], pad_token_id=samples.PAD)).metrics()
    padded = {line[0]: int(line[3].replace(",", "")) for line in table if len(line) == 7 and line[3][0].isdigit()}
    assert len(padded) > 15
    assert padded == {name: expected[f"maskpack/field/{name}/padded_bytes"] for name in padded}


def test_inspect_of_a_log_as_json(rollouts, capsys):
    shown = json.loads(inspected([rollouts.path, "--json"], capsys))
    assert [shown[name] for name in ("rows", "gone", "chunks", "damages")] == [25, 3, 4, []]
    assert shown["segments"] == len(list(Path(rollouts.path).glob("*.seg"))) > 1
    assert shown["tags"] == {"step": {"rows": 25, "values": 4}, "worker": {"rows": 18, "values": 2}}
    assert shown["last_chunk"]["rows"] == 6


def test_inspect_names_what_is_damaged(rollouts, capsys):
    first = Path(rollouts.path) / "000000.seg"
    first.unlink()
    shown = inspected([rollouts.path], capsys)
    assert "were deleted or damaged" in shown.splitlines()[0]
    assert "000000.seg is missing" in shown


def test_inspect_of_logs_without_rows_or_that_are_none(tmp_path, capsys):
    with RolloutLog(tmp_path / "log"):
        assert "0 rows in 0 chunks" in inspected([tmp_path / "log"], capsys)
        assert "has no rows" in command_line.refused("doctor", [tmp_path / "log"], capsys)
    assert "memory://none is no log" in refused(["memory://none"], capsys)
    assert "Protocol not known" in refused(["nowhere://x"], capsys)


def test_of_a_log_rows_of_the_last_append_are_taken(tmp_path, monkeypatch):
    """Within the limit of bytes."""
    whole = samples.rollout(objects=False)
    with RolloutLog(tmp_path / "log", pad_token_id=samples.PAD) as log:
        for step in range(3):
            log.append(whole.clone().set("reward_baselines", torch.arange(7.0) + 7 * step))

    def rows(**limits):
        read, note = saved_batch(tmp_path / "log", **limits)
        assert note == "of the last append, of 21 in all"
        return maskpack.decompress(read)["reward_baselines"].tolist()

    assert rows() == [*range(14, 21)]
    nbytes = report(maskpack.compress(whole, pad_token_id=samples.PAD)).padded_bytes
    assert rows(max_bytes=int(3.5 * nbytes / 7)) == [18, 19, 20]
    monkeypatch.setattr(files, "SAMPLE", 2)
    assert rows() == [19, 20]


def test_the_version(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"maskpack {maskpack.__version__}\n"
