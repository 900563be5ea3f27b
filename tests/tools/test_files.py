"""The files that trainers save are read, exactly, and run no code. What is not read is one line on what to do."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
import types
import zipfile
from fractions import Fraction
from functools import partial

import command_line
import numpy as np
import pytest
import samples
import torch
from fuzz_wire import Pieces
from golden import make_torch
from needs import needs
from tensordict import NonTensorData, TensorDict

import maskpack
from maskpack.tools import cli, doctor
from maskpack.tools.files import Unusable, saved_batch

B = len(samples.ROWS)


refused = partial(command_line.refused, "doctor")

# -------------------------------------------------------------------- dicts and lists

ROWS = [torch.tensor(row) for row in ([3, 1, 4], [1], [5, 9, 2, 6])]
FLOATS = [row / 8 for row in ROWS]


def columns(**more):
    """As slime's train data."""
    return {"tokens": ROWS, "logp": FLOATS, "reward": [0.5, 1.0, 2.0], "length": [3, 1, 4], "step": 7, **more}


def samples_of(data):
    return [{name: data[name][row] for name in data if name != "step"} for row in range(3)]


def plain(data):
    """With lists of numbers in place of tensors."""
    return {name: [x.tolist() for x in value] if name in ("tokens", "logp") else value for name, value in data.items()}


def arrays_of(data):
    return {name: [x.numpy() for x in value] if name in ("tokens", "logp") else value for name, value in data.items()}


LISTS = {
    "a dict of lists": (columns(), ""),
    "of arrays": (arrays_of(columns()), ""),
    "of numbers": (plain(columns()), ""),
    "with other lists": (columns(texts=["a", "b", "c"], images=[{"x": torch.ones(2)}] * 3), ""),
    "a list of rows": (samples_of(columns()), "joined from 3 dicts"),
    "in a dict": ({"rollout_id": 3, "samples": samples_of(plain(columns()))}, "joined from 3 dicts"),
}


def holds_rows(read):
    """Whether a batch has ROWS, FLOATS and the numbers, one by one."""
    for name, rows in (("tokens", ROWS), ("logp", FLOATS)):
        assert read[name].is_nested
        assert [row.tolist() for row in read[name].unbind()] == [row.tolist() for row in rows]
        assert read[name].dtype == rows[0].dtype
    assert (read["reward"].tolist(), read["length"].tolist()) == ([0.5, 1.0, 2.0], [3, 1, 4])
    assert read.batch_size == (3,)


@pytest.mark.parametrize("case", LISTS)
def test_lists_of_rows_are_jagged_columns(case, tmp_path, capsys):
    data, note = LISTS[case]
    torch.save(data, tmp_path / "b")
    read, seen = saved_batch(tmp_path / "b", True)
    holds_rows(read)
    assert seen == note
    assert cli.main(["doctor", str(tmp_path / "b"), "--allow-pickle"]) in (0, 1)
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'b'}: 3 rows, ")


@pytest.mark.parametrize("lines", [False, True])
def test_json(lines, tmp_path):
    rows = samples_of(plain(columns()))
    (tmp_path / "b").write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    holds_rows(saved_batch(tmp_path / "b")[0])


@pytest.mark.parametrize("kind", [dict, lambda item: TensorDict(item, [2])], ids=["dict", "TensorDict"])
def test_of_micro_batches_the_first_is_taken(kind, tmp_path):
    items = [{"ids": torch.arange(6).view(2, 3) + n, "logp": torch.ones(2, 3)} for n in range(4)]
    torch.save([kind(item) for item in items], tmp_path / "b")
    read, note = saved_batch(tmp_path / "b")
    samples.assert_same(read, TensorDict(items[0], [2]))
    assert note == "the first of 4 micro-batches"


def test_a_dict_with_a_tensor_without_dims(tmp_path):
    """As num_items_in_batch in the inputs of TRL's loss."""
    torch.save({"x": torch.ones(2, 3), "num_items": torch.tensor(7)}, tmp_path / "b")
    read, _ = saved_batch(tmp_path / "b")
    assert (read.batch_size, read["num_items"]) == ((2,), 7)


# -------------------------------------------------------------------- other formats

TENSORS = {"ids": torch.arange(6).view(2, 3), "on": torch.tensor([[True, False, True]] * 2)}
TENSORS |= {"half": torch.ones(2, 3, dtype=torch.float16) / 3, "reward": torch.tensor([0.5, -0.0])}


def test_npz(tmp_path, capsys):
    np.savez(tmp_path / "b.npz", **{name: x.numpy() for name, x in TENSORS.items()})
    samples.assert_same(saved_batch(tmp_path / "b.npz")[0], TensorDict(TENSORS, [2]))
    np.savez_compressed(tmp_path / "wide.npz", x=np.zeros((1 << 10, 1 << 10)))
    assert "Give a larger --max-bytes" in refused([tmp_path / "wide.npz", "--max-bytes", 1 << 20], capsys)
    assert len(saved_batch(tmp_path / "wide.npz", max_bytes=1 << 24)[0]) == 1 << 10


def test_safetensors_of_others_say_how_to_read_them(tmp_path, capsys):
    """The remedy is run."""
    safetensors = needs("safetensors.torch")
    safetensors.save_file(TENSORS, tmp_path / "weights", {"format": "pt"})
    shown = refused([tmp_path / "weights"], capsys)
    assert "weights is a safetensors file, as of the weights of a model, and no packed batch" in shown
    code = re.search(r"torch\.save\(.*\)", shown)[0].replace("batch.pt", str(tmp_path / "b"))
    exec(code, {"torch": torch, "safetensors": sys.modules["safetensors"]})
    samples.assert_same(saved_batch(tmp_path / "b")[0].select(*TENSORS), TensorDict(TENSORS, [2]))


def test_parquet_and_one_array_say_how_to_read_them(tmp_path, capsys, monkeypatch):
    """The remedies are run."""
    monkeypatch.chdir(tmp_path)
    pyarrow, data = needs("pyarrow"), plain(columns())
    parquet = needs("pyarrow.parquet")
    parquet.write_table(pyarrow.table({name: data[name] for name in data if name != "step"}), "b.parquet")
    shown = refused(["b.parquet"], capsys)
    exec(re.search(r"torch\.save\(.*\)", shown)[0], {"torch": torch, "pyarrow": pyarrow})
    holds_rows(saved_batch("batch.pt")[0].set("logp", torch.nested.as_nested_tensor(FLOATS, layout=torch.jagged)))
    np.save("ids.npy", TENSORS["ids"].numpy())
    code = re.search(r"numpy\.savez\(.*\)", refused(["ids.npy"], capsys))[0]
    exec(code.replace(", ...", ""), {"numpy": np})
    assert torch.equal(saved_batch("batch.npz")[0]["input_ids"], TENSORS["ids"])


def test_a_stream_and_a_folder_of_files(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", tmp_path / "pipe"):
        assert "is a stream, and a batch is read from a file. Save it to one" in refused([name], capsys)
    (tmp_path / "shards").mkdir()
    for number in range(2):
        torch.save(dict(samples.rollout_with().items()), tmp_path / "shards" / f"{number}.pt")
    shown = refused([tmp_path / "shards"], capsys)
    assert shown.endswith(f"is a folder of files and no log. Give the files: {tmp_path / 'shards'}/*.pt\n")
    assert "All files: " in command_line.printed("doctor", sorted((tmp_path / "shards").glob("*.pt")), capsys)


@pytest.mark.parametrize("version", ["0.10.0", "0.14.3"])
def test_files_of_torch_save_with_other_versions_of_tensordict(version):
    """The maker is tests/golden/make_torch.py."""
    samples.assert_same(saved_batch(make_torch.HERE / f"tensordict-{version}.pt")[0], make_torch.batch())


def test_a_folder_of_a_memory_mapped_tensordict_may_hold_pickles(tmp_path):
    batch = samples.rollout_with(
        none=torch.zeros(B, 0), sub=TensorDict({"half": torch.ones(B, 2, dtype=torch.bfloat16)}, [B])
    )
    batch.set("info", NonTensorData({"step": 1}, batch_size=[B]))
    batch.clone().memmap(str(tmp_path / "m"))
    with pytest.raises(Unusable, match=r"m is a folder of TensorDict\.memmap\. Give --allow-pickle"):
        saved_batch(tmp_path / "m")
    samples.assert_same(saved_batch(tmp_path / "m", True)[0].select(*batch.keys()).clone().clear_device_(), batch)


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


# -------------------------------------------------------------------- a DataProto, and what runs code


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
def test_a_data_proto_is_read_without_verl(form, flags, data_proto, tmp_path):
    """With its objects and numbers."""
    images = np.array([{"pixel_values": torch.full((b + 1, 2), float(b))} for b in range(B)], dtype=object)
    info = {"temperature": 0.7, "global_token_num": list(range(B)), "uid": "not a row"}
    batch = samples.rollout_with()
    file = data_proto(tmp_path / "b", batch, arrays(multi_modal_inputs=images), info, form=form)
    read, _ = saved_batch(file, bool(flags))
    samples.assert_same(read.select(*batch.keys()), batch)
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
    batch = {"x": Running(mark)} if form == "inside" else samples.rollout_with()
    evil = {} if form == "inside" else {"evil": np.array([Running(mark)] * B, dtype=object)}
    file = data_proto(tmp_path / "b", batch, evil, {}, form="pickle" if form == "pickle" else "torch")
    said = refused([file], capsys)
    assert re.search(f"cannot be read: UnpicklingError: .*{reason}", said)
    assert "Give --allow-pickle if you trust the file" in said
    assert not mark.exists()
    if form != "inside":
        saved_batch(file, True)
        assert mark.exists()


def test_damaged_files_are_one_line(data_proto, tmp_path, capsys):
    for form, flags in FORMS:
        whole = data_proto(tmp_path / "whole", samples.rollout_with(), arrays(), {}, form=form).read_bytes()
        for end in range(0, len(whole), len(whole) // 20):
            (tmp_path / "b").write_bytes(whole[:end])
            refused([tmp_path / "b", *flags], capsys)


def test_arrays_of_no_bytes_and_of_other_rows(data_proto, tmp_path, capsys):
    file = data_proto(tmp_path / "a", None, {"x": np.zeros(1 << 14, "V0")}, {}, form="pickle")
    assert "'x' has 16384 items" in refused([file, "--allow-pickle"], capsys)
    file = data_proto(tmp_path / "b", samples.rollout_with(), {"x": np.zeros(B + 1)}, {}, form="torch")
    assert f"'x' has {B + 1} items for rows [{B}]" in refused([file], capsys)


def test_verls_own_files(tmp_path):
    protocol = needs("verl.protocol")
    tensors = {name: samples.rollout_with()[name] for name in samples.rollout_with().keys()}  # noqa: SIM118
    data = protocol.DataProto.from_dict(tensors=tensors, non_tensors=arrays(), meta_info={"temperature": 1.0})
    data.save_to_disk(tmp_path / "b")
    torch.save(data, tmp_path / "c")
    for name in ("b", "c"):
        assert len(saved_batch(tmp_path / name, True)[0]) == B


# -------------------------------------------------------------------- files that claim more than they hold


def wide(path, width):
    """A packed file of a few bytes, whose response fields are `width` wide."""
    parts = Pieces.of(maskpack.compress(samples.rollout_with().select("response_mask", "old_log_probs")).to_bytes())
    table = next(entry for entry in parts.arrays if entry[0] == "0.table")
    table[2] = table[2][:24] + width.to_bytes(8, "little") + table[2][32:]  # behind the counts, the first layout
    path.write_bytes(parts.joined())
    return path


@pytest.mark.parametrize("command", ["doctor", "inspect"])
@pytest.mark.parametrize("width", [1 << 26, 2**31 - 1])
def test_a_packed_file_is_not_decoded_before_its_widths_are_looked_at(command, width, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "decompress", lambda *_, **__: pytest.fail("decoded"))
    said = command_line.refused(command, [wide(tmp_path / "b.mp", width)], capsys)
    assert re.search(rf".* expected at most {1 << 30}. Give a larger --max-bytes if", said)


@pytest.mark.parametrize("command", ["doctor", "inspect"])
def test_the_limit_can_be_given(command, tmp_path, capsys):
    file = wide(tmp_path / "b.mp", 1000)
    size = sum(array.nbytes for _, array in maskpack.decompress(maskpack.PackedBatch.load(file)).items())
    for limit, status in ((size // 2, 2), (2 * size, 0)):
        said = command_line.printed(command, [file, "--max-bytes", limit], capsys, status)
        assert (f"expected at most {limit}" in said) == (status == 2)


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
        assert re.search(
            rf"holds {1 << 32}\d* bytes padded|holds \d+ bytes padded; expected at most {1 << 30}",
            command_line.refused(command, [tmp_path / name], capsys),
        )
