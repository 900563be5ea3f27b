"""The byte form: round trips, golden files, every way a file can be wrong, and what fuzzing finds.

docs/wire-format.md is the norm. The broken files here are put together by fuzz_wire.Pieces, which knows nothing of
maskpack.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import pickle
import re
import signal
import stat
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fuzz_wire
import numpy as np
import pytest
import strategies
import torch
from fuzz_wire import Pieces
from golden import make
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch
from samples import assert_same
from tensordict import NonTensorData, NonTensorStack, TensorDict, tensorclass

from maskpack import MaskNestingSpec, MaskpackError, PackedBatch, compress, decompress
from maskpack.core import bits as words
from maskpack.core import objects
from maskpack.errors import LayoutError, WireFormatError
from maskpack.fields import registry
from maskpack.layout import row_layout as mp_layout
from maskpack.packed import decode, encodings
from maskpack.packed import references as sharing
from maskpack.packed.file import codec
from maskpack.packed.file import container as wire
from maskpack.packed.file import read as reading

GOLDEN = sorted(make.GOLDEN)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def golden(name: str) -> bytes:
    return make.file(name).read_bytes()


def pieces(name: str = "rollout") -> Pieces:
    return Pieces.of(golden(name))


def refused(data: Any, *parts: str, **more: Any) -> None:
    with pytest.raises(WireFormatError) as error:
        PackedBatch.from_bytes(data, **more)
    message = str(error.value)
    assert message.startswith("PackedBatch.from_bytes: "), message
    assert all(part in message for part in parts), message
    assert "; expected " in message
    assert len(message) < 1500


def the_field(parts: Pieces, name: str) -> Any:
    return next(entry for entry in parts.manifest["fields"] if entry["path"] == [name])


def array(parts: Pieces, number: int) -> list[Any]:
    return next(entry for entry in parts.arrays if entry[0].partition(".")[0] == str(number))


def put(parts: Pieces, number: int, dtype: str, items: list[int]) -> None:
    entry = array(parts, number)
    size = fuzz_wire.SIZES[dtype]
    entry[1:] = [dtype, b"".join((item % 256**size).to_bytes(size, "little") for item in items)]
    parts.arrays.sort(key=lambda entry: -fuzz_wire.SIZES[entry[1]])


# -------------------------------------------------------------------- golden files


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_are_read_exactly(name: str) -> None:
    expected = make.GOLDEN[name]().batch
    packed = PackedBatch.from_bytes(golden(name), allow_pickle=name == "pickled")
    assert_same(decompress(packed), expected)


@pytest.mark.parametrize("name", GOLDEN)
def test_the_writer_gives_the_golden_bytes(name: str) -> None:
    made = make.GOLDEN[name]()
    data = make.packed(made).to_bytes(**made.writing)
    if name == "zstd":  # frames differ between releases of zstd
        assert_same(decompress(PackedBatch.from_bytes(data)), made.batch)
        now, then = Pieces.of(data).manifest, pieces(name).manifest
        assert now == then
    else:
        assert data == golden(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_show_what_they_are_for(name: str) -> None:
    shown = json.dumps(pieces(name).manifest)
    for kind in make.GOLDEN[name]().kinds:
        assert f'"kind": "{kind}"' in shown
    assert ("crc32" in pieces(name).metadata) == (name == "checksum")


def test_golden_files_are_small_and_cover_every_encoding() -> None:
    assert sum(make.file(name).stat().st_size for name in GOLDEN) < 200_000
    assert {file.stem for file in make.HERE.glob("*.maskpack")} == set(GOLDEN)
    shown = "".join(json.dumps(pieces(name).manifest) for name in GOLDEN)
    for kind in ["plain", "narrow", "bits", "runs", "ramp", "steps", "sparse", "repeated", "columns", "same", "joined"]:
        assert f'"kind": "{kind}"' in shown
    for kind in ["padded", "flat", "jagged", "dense", "object", "node"]:
        assert f'"kind": "{kind}"' in shown
    assert '"name": "zstd"' in shown
    records = [record for record in pieces("zstd").manifest["codec"]["arrays"] if record is not None]
    assert any(record[2] is not None for record in records)
    assert any(record[2] is None for record in records)
    forms = [set(layout) & {"runs", "bits"} for name in GOLDEN for layout in pieces(name).manifest["layouts"]]
    assert {"runs"} in forms
    assert {"bits"} in forms


# -------------------------------------------------------------------- round trips


@given(strategies.batches())
def test_every_way_out_and_in(case: strategies.Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = compress(case.batch, **case.options)
    data = packed.to_bytes(allow_pickle=True)
    assert_same_batch(decompress(PackedBatch.from_bytes(data, allow_pickle=True)), case.batch)
    sealed = packed.to_bytes(allow_pickle=True, checksum=True)
    again = PackedBatch.from_bytes(sealed, allow_pickle=True)
    assert_same_batch(decompress(again), case.batch)
    assert again.to_bytes(allow_pickle=True) == data
    for protocol in range(2, 6):
        assert_same_batch(decompress(pickle.loads(pickle.dumps(packed, protocol=protocol))), case.batch)
    for rows in (slice(0, 0), slice(1, 3), [len(packed) - 1, 0] if len(packed) else []):
        part = packed.take(rows)
        back = PackedBatch.from_bytes(part.to_bytes(allow_pickle=True), allow_pickle=True)
        assert_same_batch(decompress(back), decompress(part))
        assert_same_batch(decompress(back, format="nested"), decompress(part, format="nested"))


@given(strategies.batches(objects=False, min_rows=1))
def test_with_a_codec(case: strategies.Case) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = compress(case.batch, **case.options, codec="zstd")
    back = PackedBatch.from_bytes(packed.to_bytes(allow_pickle=True), allow_pickle=True)
    assert back.codec == "zstd"
    assert_same_batch(decompress(back), case.batch)
    assert_same_batch(decompress(pickle.loads(pickle.dumps(packed))), case.batch)


@pytest.mark.parametrize("name", [*strategies.MANY_RUNS, *strategies.FEW_RUNS])
def test_masks_of_any_number_of_runs(name: str) -> None:
    mask, width = (strategies.MANY_RUNS | strategies.FEW_RUNS)[name]
    batch, options = strategies.batch_under(mask, width)
    packed = compress(batch, registry=options)
    data = packed.to_bytes(checksum=True)
    (layout,) = Pieces.of(data).manifest["layouts"]
    assert ("bits" in layout) == (name in strategies.MANY_RUNS)
    assert ("runs" in layout) == (name in strategies.FEW_RUNS)
    again = PackedBatch.from_bytes(data)
    assert again.to_bytes(checksum=True) == data
    for form in (again, pickle.loads(pickle.dumps(packed)), pickle.loads(pickle.dumps(again, protocol=2))):
        seen, want = form.layouts["mask"], packed.layouts["mask"]
        assert (seen.width, seen.anchor, seen.num_rows) == (width, want.anchor, len(mask))
        assert all(map(np.array_equal, seen.table, want.table))
        assert {part.dtype for part in seen.table} == {np.dtype(np.int64)}
        assert_same(decompress(form), batch)
        assert_same_batch(decompress(form, format="nested"), decompress(packed, format="nested"))
        assert_same(decompress(form.take([-1, 0])), batch[[-1, 0]]) if len(mask) else None


@pytest.mark.parametrize("name", strategies.MANY_RUNS)
def test_masks_of_many_runs_take_their_bits_and_little_more(name: str) -> None:
    mask, width = strategies.MANY_RUNS[name]
    bits = len(mask) * ((width + 7) // 8)
    real = torch.tensor(mask, dtype=torch.bool).view(len(mask), width)
    packed = compress(TensorDict({"mask": real}, [len(mask)]), registry={"mask": MaskNestingSpec("mask")})
    free = max(len(mask) - wire.FREE_ROWS, 0)
    assert packed.nbytes <= bits + len(mask) + 16  # and which rows are not empty
    assert len(packed.to_bytes()) <= bits + len(mask) + free + 1500
    assert len(pickle.dumps(packed)) <= bits + len(mask) + 2000


@given(strategies.batches(), st.sampled_from([-(10**6), 0, 256]))
def test_every_way_in_bits(case: strategies.Case, few: int) -> None:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setattr("maskpack.layout.row_layout._FEW_BYTES", few)
        packed = compress(case.batch, **case.options)
        data = packed.to_bytes(allow_pickle=True)
        assert few >= 0 or "runs" not in {key for layout in Pieces.of(data).manifest["layouts"] for key in layout}
        for back in (PackedBatch.from_bytes(data, allow_pickle=True), pickle.loads(pickle.dumps(packed))):
            assert_same_batch(decompress(back), case.batch)
            assert dict(back.layouts) == dict(packed.layouts)
            assert [x.anchor for x in back.layouts.values()] == [x.anchor for x in packed.layouts.values()]


@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("checksum", [False, True])
def test_files(tmp_path: Path, codec: str | None, checksum: bool) -> None:
    made = make.rollout()
    packed = compress(made.batch, **made.options, codec=codec)
    file = tmp_path / "batch.maskpack"
    packed.save(file, checksum=checksum)
    assert file.read_bytes() == packed.to_bytes(checksum=checksum)
    assert_same(decompress(PackedBatch.load(file)), made.batch)
    assert_same(decompress(PackedBatch.load(str(file))), made.batch)


def test_selected_rows_of_a_file_write_their_own_bytes_only(tmp_path: Path) -> None:
    batch = TensorDict({"x": torch.arange(4000.0).view(4, 1000).sqrt()}, [4])
    packed = compress(batch)
    part = PackedBatch.from_bytes(packed.to_bytes())[1:2].to_bytes()
    assert len(part) < len(packed.to_bytes()) // 3
    assert_same(decompress(PackedBatch.from_bytes(part)), batch[1:2])


def test_pickle_protocol_5_has_two_buffers_which_come_back_read_only() -> None:
    """One holds the arrays as `compress` laid them, the other those of the layouts."""
    batch = make.rollout().batch
    packed = compress(batch, pad_token_id=99)
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2
    bodies = [bytearray(buffer.raw()) for buffer in buffers]
    back = pickle.loads(stream, buffers=[memoryview(body).toreadonly() for body in bodies])
    assert_same(decompress(back), batch)
    words = back.fields[("reward_baselines",)].words
    assert not words.flags.writeable
    assert np.shares_memory(words, np.frombuffer(bodies[0], np.uint8)), "no copy"
    with pytest.raises(ValueError, match="read-only"):
        words[0] = 1


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import load

    for name in GOLDEN:
        seen = load(golden(name))
        parts = pieces(name)
        assert set(seen) == {entry[0] for entry in parts.arrays}
        for title, dtype, raw in parts.arrays:
            assert seen[title].tobytes() == raw
            assert seen[title].dtype.itemsize == fuzz_wire.SIZES[dtype]
        with safetensors.safe_open(make.file(name), "numpy") as opened:
            assert opened.metadata()["format"] == "maskpack"
            assert opened.metadata()["version"] == "1"


@pytest.mark.parametrize("name", GOLDEN)
def test_the_container_as_the_norm_says(name: str) -> None:
    data = golden(name)
    size = int.from_bytes(data[:8], "little")
    assert (8 + size) % 64 == 0
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
    assert sorted(int(title.partition(".")[0]) for title, _ in entries) == list(range(len(entries)))
    end, widest = 0, 8
    for _, entry in entries:
        begin, after = entry["data_offsets"]
        item = fuzz_wire.SIZES[entry["dtype"]]
        assert begin == end
        assert begin % item == 0
        assert item <= widest
        assert entry["shape"] == [(after - begin) // item]
        end, widest = after, item
    assert end == len(data) - 8 - size


@pytest.mark.parametrize("shift", range(9))
def test_a_buffer_may_begin_anywhere(shift: int) -> None:
    for kind in (bytes, bytearray):
        line = kind(bytes(shift) + golden("dtypes"))
        assert_same(decompress(PackedBatch.from_bytes(memoryview(line)[shift:])), make.dtypes().batch)
    line = np.frombuffer(bytes(shift) + golden("dtypes"), np.uint8)[shift:]
    assert_same(decompress(PackedBatch.from_bytes(line)), make.dtypes().batch)


def test_what_is_no_buffer() -> None:
    refused("text", "a str", "bytes, or an object with a buffer")
    refused(np.zeros((64, 2), np.uint8)[:, 0], "a buffer with gaps", "contiguous")


# -------------------------------------------------------------------- files


def test_save_is_atomic(tmp_path: Path) -> None:
    file = tmp_path / "batch.maskpack"
    batch = TensorDict({"x": torch.arange(3.0)}, [3])
    compress(batch).save(file)
    before = file.read_bytes()
    other = TensorDict({"x": torch.arange(4.0)}, [4])
    other.set("odd", NonTensorData({1}))
    with pytest.raises(MaskpackError):
        compress(other).save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["batch.maskpack"]


def test_a_save_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "batch.maskpack"
    packed = compress(TensorDict({"x": torch.arange(3.0)}, [3]))
    packed.save(file)
    before = file.read_bytes()

    def broken(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        compress(TensorDict({"x": torch.arange(4.0)}, [4])).save(file)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["batch.maskpack"]


def test_load_maps_the_file(tmp_path: Path) -> None:
    file = tmp_path / "batch.maskpack"
    batch = TensorDict({"x": torch.arange(5000.0).sqrt()}, [5000])
    compress(batch).save(file)
    back = PackedBatch.load(file)
    base: Any = back.fields[("x",)].words
    while isinstance(base, np.ndarray):
        base = base.base
    assert isinstance(base.obj, mmap.mmap)
    file.unlink()
    assert_same(decompress(back), batch)


def test_load_without_a_map_survives_what_happens_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "batch.maskpack"
    batch = TensorDict({"x": torch.arange(50_000.0).sqrt()}, [50_000])
    compress(batch).save(file)
    back = PackedBatch.load(file, mmap=False)
    os.truncate(file, 100)
    assert_same(decompress(back), batch)


def test_a_map_of_a_file_that_is_cut_off_kills_the_process(tmp_path: Path) -> None:
    """As the docstring of `load` says: no error can be raised for it."""
    file = tmp_path / "batch.maskpack"
    compress(TensorDict({"x": torch.arange(50_000.0).sqrt()}, [50_000])).save(file)
    code = "import os, sys, maskpack\npacked = maskpack.PackedBatch.load(sys.argv[1])\n"
    code += "os.truncate(sys.argv[1], 4096)\nmaskpack.decompress(packed)\n"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGBUS


def test_save_syncs_the_file_before_it_takes_its_place_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "batch.maskpack"
    steps: list[tuple[str, Any]] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        held = os.fstat(handle)
        steps.append(("folder" if stat.S_ISDIR(held.st_mode) else "file", held.st_size))
        sync(handle)

    def replaced(self: Path, target: Any) -> Any:
        steps.append(("replaced", self.stat().st_size))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    packed = compress(TensorDict({"x": torch.arange(50_000.0).sqrt()}, [50_000]))
    packed.save(file)
    size = len(packed.to_bytes())
    assert steps[:2] == [("file", size), ("replaced", size)], "all bytes are on the disk when the name changes"
    assert [name for name, _ in steps[2:]] == ["folder"]


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def synced(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError("not here")
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    batch = TensorDict({"x": torch.arange(3.0)}, [3])
    compress(batch).save(tmp_path / "batch.maskpack")
    assert_same(decompress(PackedBatch.load(tmp_path / "batch.maskpack")), batch)


def test_load_names_the_file(tmp_path: Path) -> None:
    for data in (b"", b"x", bytes(200), golden("rollout")[:-1]):
        file = tmp_path / "broken"
        file.write_bytes(data)
        with pytest.raises(WireFormatError, match=r"PackedBatch.load\('.*broken'\): "):
            PackedBatch.load(file)
    with pytest.raises(FileNotFoundError):
        PackedBatch.load(tmp_path / "none")


# -------------------------------------------------------------------- malformed containers


@pytest.mark.parametrize("name", ["no_rows", "zstd", "checksum"])
def test_truncated_at_every_length(name: str) -> None:
    data = golden(name)
    for length in range(len(data)):
        refused(data[:length])


def test_longer_than_its_arrays() -> None:
    refused(golden("rollout") + b"\0", "1 bytes behind the last entry", "none")


def test_header_too_long() -> None:
    data = golden("rollout")
    for size in (2**24 + 64, 2**63, 2**64 - 8):
        refused(size.to_bytes(8, "little") + data[8:], f"a header of {size} bytes", "at most 16777216")
    long = bytes(2**24 + 8)
    refused((2**24 + 8).to_bytes(8, "little") + long, "a header of 16777224 bytes in 16777232")
    refused(bytes(8), "begins with b''", "a JSON object")


def test_header_of_odd_length() -> None:
    data = golden("rollout")
    size = int.from_bytes(data[:8], "little")
    refused((size - 1).to_bytes(8, "little") + data[8:], "a multiple of 8")


def test_the_writer_refuses_a_header_that_is_too_long() -> None:
    batch = TensorDict({"x": torch.zeros(1)}, [1])
    batch.set("text", NonTensorData("x" * 2**24))
    with pytest.raises(WireFormatError, match=r"the header would take \d+ bytes; expected at most 16777216. Split"):
        compress(batch).to_bytes()


def header(change: Callable[[dict[str, Any]], Any], name: str = "rollout") -> bytes:
    return pieces(name).joined(header=change)


def metadata(**values: Any) -> bytes:
    return header(lambda whole: whole["__metadata__"].update(values))


def test_header_that_is_no_object() -> None:
    for text in ("[]", "1", " {}", "\ufeff{}", "null"):
        refused(pieces().joined(text=lambda _, text=text: text), "begins with", "a JSON object")


def test_header_that_is_no_json() -> None:
    for text in ("{", "{]", '{"a":}', '{"a":1,}', "{'a':1}", '{"a":01}', '{"a":"\n"}'):
        refused(pieces().joined(text=lambda _, text=text: text), "no JSON")
    data = golden("rollout")
    refused(data[:40] + b"\xff\xfe" + data[42:], "no JSON", "utf-8")


def test_foreign_safetensors_files() -> None:
    refused(header(lambda whole: whole.pop("__metadata__")), "without our metadata", '"format": "maskpack"')
    refused(metadata(format="pt"), "without our metadata")
    refused(header(lambda whole: whole.update(__metadata__=[])), "without our metadata")


@pytest.mark.parametrize("version", ["2", "0", "", 1, None, "1.0", ["1"]])
def test_unknown_version(version: Any) -> None:
    refused(metadata(version=version), f"version {version!r}", 'expected "1"')


def test_unknown_metadata() -> None:
    refused(metadata(more="x"), "metadata", "perhaps crc32")
    refused(metadata(manifest=None), "metadata")
    refused(header(lambda whole: whole["__metadata__"].pop("manifest")), "metadata")


def first(whole: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in whole.items() if name != "__metadata__" and entry["shape"] != [0])


def test_overlap() -> None:
    def change(whole: dict[str, Any]) -> None:
        entry = first(whole)
        entry["data_offsets"][1] += 8
        entry["shape"][0] += 8 // fuzz_wire.SIZES[entry["dtype"]]

    refused(header(change), "expected it to begin at")


def test_gap() -> None:
    def change(whole: dict[str, Any]) -> None:
        entry = first(whole)
        entry["data_offsets"][1] -= 8
        entry["shape"][0] -= 8 // fuzz_wire.SIZES[entry["dtype"]]

    refused(header(change, "dtypes"), "expected it to begin at")
    refused(header(lambda whole: first(whole)["data_offsets"].__setitem__(0, 8)), "begin at 0")


def test_out_of_bounds() -> None:
    def change(whole: dict[str, Any]) -> None:
        entry = list(whole.values())[-1]
        entry["data_offsets"][1] += 1
        entry["shape"][0] += 1

    refused(header(change), "inside")


@pytest.mark.parametrize("end", [2**62, 2**63, 10**30, -1, 1.5, True, None, "8"])
def test_huge_and_odd_offsets(end: Any) -> None:
    refused(header(lambda whole: first(whole)["data_offsets"].__setitem__(1, end)))


def test_offsets_that_run_backwards() -> None:
    refused(header(lambda whole: first(whole)["data_offsets"].reverse()), "entry")


def test_misaligned() -> None:
    parts = pieces()
    parts.arrays.reverse()  # bytes first, words behind them
    refused(parts.joined(), "a multiple of")


@pytest.mark.parametrize("shape", [[], [1, 1], [-1], [2**62], [1.0], [True], None, 3, ["1"]])
def test_wrong_counts(shape: Any) -> None:
    refused(header(lambda whole: first(whole).update(shape=shape)), "entry")


@pytest.mark.parametrize("dtype", ["F32", "BOOL", "i64", "", None, 8, ["I64"], "I128"])
def test_wrong_dtype(dtype: Any) -> None:
    refused(header(lambda whole: first(whole).update(dtype=dtype)), "entry")


def test_entries_with_more_or_other_members() -> None:
    refused(header(lambda whole: first(whole).update(more=1)), "entry", "dtype, shape and data_offsets")
    refused(header(lambda whole: whole.update({"99.x": [1]})), "an object with data_offsets")
    refused(header(lambda whole: whole.update({"99.x": None})), "an object with data_offsets")


@pytest.mark.parametrize("name", ["x", "", "-1.x", "01x.y", "1e3", "٣.x", "9999999999.x", "0.again", "77.x"])
def test_names_without_their_number(name: str) -> None:
    def change(whole: dict[str, Any]) -> None:
        known = list(whole)
        title = known[-1] if not known[-1].startswith("0.") else known[-2]
        whole[name] = whole.pop(title)

    refused(header(change), "entr")


@pytest.mark.parametrize("name", ["{}", "0{}.x", "+{}.x", " {}.x", "{} .x", "{}x"])
def test_names_with_their_number_in_another_form(name: str) -> None:
    def change(whole: dict[str, Any]) -> None:
        title = list(whole)[-1]
        whole[name.format(title.partition(".")[0])] = whole.pop(title)

    refused(header(change), "a name that begins with its own number")


def test_duplicate_names() -> None:
    text = pieces().joined(text=lambda text: text.replace('{"__metadata__":', '{"a":1,"a":2,"__metadata__":', 1))
    refused(text, "a name comes twice")
    twice = pieces().joined(manifest=lambda text: text.replace('{"rows": 3', '{"rows": 3, "rows": 3', 1))
    refused(twice, "a name comes twice")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, str(2**63), "1e400"])
def test_numbers_that_are_none(number: str) -> None:
    refused(pieces().joined(manifest=lambda text: text.replace('"rows": 3', f'"rows": {number}', 1)), "no JSON")
    refused(pieces().joined(text=lambda text: text.replace("[0,", f"[{number},", 1).replace("[0 ", "", 1)), "")


@pytest.mark.parametrize("depth", [65, 300, 500, 900, 5000, 200_000])
def test_deep_nesting(depth: int) -> None:
    nest = "[" * depth + "]" * depth

    def deep(text: str) -> str:
        assert '"json": 0.7' in text
        return text.replace('"json": 0.7', f'"json": {nest}', 1)

    refused(pieces().joined(manifest=deep))
    wrapped = '{"tuple": [' * depth + "]}" * depth
    refused(pieces().joined(manifest=lambda text: text.replace('"json": 0.7', f'"json": {wrapped}', 1)))
    refused(pieces().joined(manifest=lambda text: text.replace('"shape": []', f'"shape": {nest}', 1)))
    refused(pieces().joined(text=lambda text: text.replace('"shape": [3]', f'"shape": {nest}', 1)))


# -------------------------------------------------------------------- checksum


def test_bad_checksum() -> None:
    data = bytearray(golden("checksum"))
    for place in (len(data) - 1, len(data) - 40):
        data[place] ^= 1
        refused(bytes(data), "checksum", "that of the bytes")
        data[place] ^= 1
    for crc in ("00000000", "", None, 5, [], "x" * 8):
        parts = pieces("checksum")
        parts.metadata["crc32"] = crc
        refused(parts.joined(checksum=False), "checksum", "that of the bytes")


def test_the_checksum_covers_what_the_arrays_are() -> None:
    parts = pieces("checksum")
    alike = [entry for entry in parts.arrays if entry[1] == "U8" and len(entry[2]) == 3]
    alike[0][0], alike[1][0] = alike[1][0], alike[0][0]
    refused(parts.joined(checksum=False), "checksum")
    parts = pieces("checksum")
    number = the_field(parts, "reward_baselines")["encoding"]["words"]
    array(parts, number)[1] = "U32"
    refused(parts.joined(checksum=False), "checksum")


def test_the_checksum_by_another_reading() -> None:
    """As docs/wire-format.md says it, over raw bytes."""
    data = golden("checksum")
    size = int.from_bytes(data[:8], "little")
    whole = json.loads(data[8 : 8 + size])
    known = whole.pop("__metadata__")
    line = known["manifest"].encode()
    for _, entry in sorted(whole.items(), key=lambda item: int(item[0].split(".")[0])):
        line += "{}:{}:{};".format(entry["dtype"], *entry["data_offsets"]).encode()
    assert known["crc32"] == f"{zlib.crc32(line + data[8 + size :]):08x}"


# -------------------------------------------------------------------- malformed manifests


def manifest(change: Callable[[Any], Any], name: str = "rollout") -> bytes:
    parts = pieces(name)
    change(parts.manifest)
    return parts.joined()


def field(name: str, **values: Any) -> bytes:
    parts = pieces("rollout")
    the_field(parts, name).update(values)
    return parts.joined()


def test_untouched_pieces_are_read() -> None:
    """That the tests below refuse a file for its change, not for the way it is put together."""
    for name in GOLDEN:
        back = PackedBatch.from_bytes(pieces(name).joined(), allow_pickle=name == "pickled")
        assert_same(decompress(back), make.GOLDEN[name]().batch)


@pytest.mark.parametrize("member", ["rows", "root", "axes", "layouts", "fields"])
def test_missing_members(member: str) -> None:
    refused(manifest(lambda m: m.pop(member)))


def test_unknown_members() -> None:
    refused(manifest(lambda m: m.update(more=1)), "members ['more']", "none but")
    refused(manifest(lambda m: m["layouts"][0].update(more=1)), "members ['more']")
    refused(manifest(lambda m: m["root"].update(more=1)), "expected dims and device")
    refused(field("responses", more=1), "members ['more']")
    refused(field("reward_baselines", layout="prompt"), "members ['layout']")
    parts = pieces()
    the_field(parts, "reward_baselines")["encoding"]["more"] = 1
    refused(parts.joined(), "members ['more']")
    refused(manifest(lambda m: m["codec"].update(more=1), "zstd"), "members ['more']")


@pytest.mark.parametrize("rows", [-1, 2**31, 2**62, 2, 4, 3.0, True, None, "3"])
def test_wrong_rows(rows: Any) -> None:
    refused(manifest(lambda m: m.update(rows=rows)))


def test_rows_that_nobody_paid_for() -> None:
    for rows in (wire.FREE_ROWS + 1, 2**31 - 1):
        refused(manifest(lambda m, rows=rows: m.update(rows=rows, fields=[], layouts=[], axes=[])), "in fewer bytes")
    for rows in (wire.FREE_ROWS, wire.FREE_ROWS + 1, 3 * wire.FREE_ROWS):
        batch = TensorDict({"x": torch.ones(rows, 2)}, [rows])
        for packed in (compress(batch), compress(batch, codec="zstd"), compress(batch)[:]):
            assert_same(decompress(PackedBatch.from_bytes(packed.to_bytes())), batch)
            assert_same(decompress(pickle.loads(pickle.dumps(packed))), batch)


@pytest.mark.parametrize(
    "root", [None, {}, {"dims": [-1], "device": None}, {"dims": [1.5], "device": None}, {"dims": [], "device": "tpu"}]
)
def test_wrong_nodes(root: Any) -> None:
    refused(manifest(lambda m: m.update(root=root)), "node")


def test_fields_that_have_not_the_dims_of_their_node() -> None:
    refused(manifest(lambda m: m["root"].update(dims=[2])), "of shape", "as the node it lies in")
    refused(manifest(lambda m: m["root"].update(dims=[2**31 - 1] * 3)), "as the node it lies in")
    parts = pieces("forms")
    the_field(parts, "other")["node"]["dims"] = [4]
    refused(parts.joined(), "as the node it lies in")
    the_field(parts, "other")["node"]["dims"] = None
    refused(parts.joined(), "as the node it lies in")


def test_axes() -> None:
    refused(manifest(lambda m: m.update(axes=["nowhere"])), "axes")
    refused(manifest(lambda m: m.update(axes=m["axes"] + m["axes"][:1])), "axes")
    refused(manifest(lambda m: m.update(axes=[])), "or an axis")
    refused(manifest(lambda m: m.update(axes=[[]])), "axes")


@pytest.mark.parametrize(
    ("member", "value"),
    [("width", -1), ("width", 2), ("width", 2**31), ("anchor", -1), ("anchor", 99), ("runs", [0, 1]), ("name", 3)],
)
def test_wrong_layouts(member: str, value: Any) -> None:
    refused(manifest(lambda m: m["layouts"][2].update({member: value})))


def test_layouts_twice_or_on_shared_arrays() -> None:
    refused(manifest(lambda m: m["layouts"][1].update(name=m["layouts"][0]["name"])), "each once")
    refused(manifest(lambda m: m["layouts"][1].update(runs=m["layouts"][0]["runs"])), "arrays of its own")
    refused(manifest(lambda m: m["layouts"][1].update(runs=[0, 0, 0])), "arrays of its own")


RUNS = {
    "touching": ([0, 2], [2, 1], [2, 0, 0]),
    "overlapping": ([0, 1], [2, 1], [2, 0, 0]),
    "unsorted": ([3, 0], [1, 1], [2, 0, 0]),
    "empty": ([0], [0], [1, 0, 0]),
    "outside": ([2], [2], [1, 0, 0]),
    "too few": ([0], [1], [2, 0, 0]),
    "too many": ([0, 2], [1, 1], [1, 0, 0]),
    "uneven": ([0, 2], [1], [1, 1, 0]),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_a_layout(name: str) -> None:
    parts = pieces()
    numbers = parts.manifest["layouts"][0]["runs"]
    for number, items in zip(numbers, RUNS[name], strict=True):
        put(parts, number, "U8", items)
    refused(parts.joined(), "layout 'prompt'", "sound runs")


def test_bits_of_a_layout() -> None:
    def changed(dtype: str, items: list[int]) -> bytes:
        parts = pieces("many_runs")
        put(parts, parts.manifest["layouts"][0]["bits"], dtype, items)
        return parts.joined()

    bits = list(array(pieces("many_runs"), 0)[2])  # 8 rows of 131 positions, 17 bytes each
    assert len(bits) == 8 * 17
    PackedBatch.from_bytes(changed("U8", bits))
    wanted = "17 bytes for each of 8 rows, and 0 behind the width"
    for dtype, items in (("U8", bits[:-1]), ("U8", [*bits, 0]), ("U8", []), ("I8", bits), ("U16", bits[::2])):
        refused(changed(dtype, items), "layout 'mask' 131 wide", wanted)
    for row in (0, 7):
        for place in range(131, 17 * 8):
            behind = list(bits)
            behind[17 * row + place // 8] |= 1 << 7 - place % 8
            refused(changed("U8", behind), "layout 'mask' 131 wide", wanted)
    less = list(bits)
    less[-1] = 0
    refused(changed("U8", less), '"ids"')  # another mask: a field has other lengths


def test_layouts_have_runs_or_bits() -> None:
    def changed(change: Callable[[Any], Any]) -> bytes:
        parts = pieces("many_runs")
        change(parts.manifest["layouts"])
        return parts.joined()

    refused(changed(lambda layouts: layouts[0].update(runs=[0, 1, 2])), "members ['runs']")
    refused(changed(lambda layouts: layouts[1].update(bits=0)), "members ['runs']")
    refused(changed(lambda layouts: layouts[1].pop("runs")), '"runs" is None')
    refused(changed(lambda layouts: layouts[0].update(bits=1)), "17 bytes for each of 8 rows")
    refused(changed(lambda layouts: layouts[1].update(runs=[0, 2, 3])), "arrays of its own")
    for number in (-1, 10**6, 1.0, True, None, "0", [0], {}):
        refused(changed(lambda layouts, number=number: layouts[0].update(bits=number)))
    for width in (0, 1, 128, 137, 2**31 - 1):
        refused(changed(lambda layouts, width=width: layouts[0].update(width=width)))


def test_a_writer_of_another_kind_may_take_bits_for_any_layout() -> None:
    """The smaller form is the writer's choice: every golden file is read alike with its layouts as bits."""
    for name in GOLDEN:
        if name == "zstd":  # its arrays are compressed
            continue
        parts = pieces(name)
        runs = [layout for layout in parts.manifest["layouts"] if "runs" in layout]
        for layout in runs:
            starts, counts, per_row = (list(as_integers(array(parts, number))) for number in layout.pop("runs"))
            left = iter(zip(starts, counts, strict=True))
            size = (layout["width"] + 7) // 8
            lines = [[0] * size for _ in per_row]
            for line, number in zip(lines, per_row, strict=True):
                for start, count in [next(left) for _ in range(number)]:
                    for place in range(start, start + count):
                        line[place // 8] |= 1 << 7 - place % 8
            layout["bits"] = len(parts.arrays)
            parts.arrays.append([f"{layout['bits']}.bits", "U8", bytes(byte for line in lines for byte in line)])
        back = PackedBatch.from_bytes(parts.joined(), allow_pickle=name == "pickled")
        assert_same(decompress(back), make.GOLDEN[name]().batch)
        if name != "pickled":
            assert back.to_bytes() == PackedBatch.from_bytes(golden(name)).to_bytes()


def as_integers(entry: list[Any]) -> list[int]:
    size = fuzz_wire.SIZES[entry[1]]
    return [int.from_bytes(entry[2][at : at + size], "little") for at in range(0, len(entry[2]), size)]


def test_runs_of_a_wrong_dtype() -> None:
    parts = pieces()
    put(parts, parts.manifest["layouts"][0]["runs"][0], "I8", [1, 0])
    refused(parts.joined(), "unsigned integers below")
    put(parts, parts.manifest["layouts"][0]["runs"][0], "U64", [2**63, 0])
    refused(parts.joined(), "unsigned integers below")


@pytest.mark.parametrize("number", [-1, 10**6, 2**62, 1.0, True, None, "0", [0]])
def test_wrong_array_numbers(number: Any) -> None:
    parts = pieces()
    the_field(parts, "reward_baselines")["encoding"]["words"] = number
    refused(parts.joined(), "array number")


WRONG_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown kind": ("responses", {"kind": "sparse"}),
    "no kind": ("responses", {"kind": None}),
    "unknown dtype": ("responses", {"dtype": "int128"}),
    "dtype of another size": ("responses", {"dtype": "int32"}),
    "unknown device": ("responses", {"device": "tpu:0"}),
    "device beyond": ("responses", {"device": "cuda:200"}),
    "device with a zero": ("responses", {"device": "cuda:07"}),
    "shape of another size": ("responses", {"shape": [2]}),
    "negative shape": ("responses", {"shape": [-1, -1]}),
    "huge shape": ("responses", {"shape": [2**30, 2**30, 0]}),
    "many dims": ("responses", {"shape": [1] * 29}),
    "unknown layout": ("responses", {"layout": "nowhere"}),
    "another layout": ("responses", {"layout": "sequence"}),
    "no layout": ("responses", {"layout": None}),
    "dim 0": ("responses", {"dim": 0}),
    "dim 2": ("responses", {"dim": 2}),
    "unknown hint": ("responses", {"hints": ["x"]}),
    "hint of three": ("responses", {"hints": ["join:a,b,c"]}),
    "hints that are none": ("responses", {"hints": "runs"}),
    "reason that is none": ("responses", {"reason": 5}),
    "unknown pad": ("responses", {"pad": {"pad": "SIGNED_ZERO"}}),
    "token pad": ("responses", {"pad": {"pad": "PAD_TOKEN_ID"}}),
    "pad of text": ("responses", {"pad": "0"}),
    "pad that the dtype does not hold": ("responses", {"pad": 0.5}),
    "pad beyond float": ("advantages", {"pad": {"int": hex(10**400)}}),
    "complex pad of a real dtype": ("advantages", {"pad": {"complex": [1.0, 0.0]}}),
    "complex pad of ints": ("advantages", {"pad": {"complex": [1, 0]}}),
    "scalar pad": ("responses", {"pad": {"scalar": ["int64", "0000000000000000"]}}),
    "row pads missing": ("responses", {"pad": {"pad": "PER_ROW"}}),
    "row pads too many": ("responses", {"row_pads": 0}),
    "empty path": ("responses", {"path": []}),
    "path twice": ("responses", {"path": ["prompts"]}),
    "path nowhere": ("responses", {"path": ["a", "b"]}),
    "path of the layouts": ("responses", {"path": ["_maskpack"]}),
    "path of half a surrogate pair": ("responses", {"path": ["\ud800"]}),
    "path of numbers": ("responses", {"path": [1]}),
    "no encoding": ("responses", {"encoding": None}),
    "unknown encoding": ("responses", {"encoding": {"kind": "pickle"}}),
}


@pytest.mark.parametrize("name", WRONG_FIELDS)
def test_wrong_fields(name: str) -> None:
    refused(field(WRONG_FIELDS[name][0], **WRONG_FIELDS[name][1]))


@pytest.mark.parametrize("number", [1e300, 1e39])
def test_pads_that_a_complex_dtype_does_not_hold(number: float) -> None:
    parts = pieces("forms")
    the_field(parts, "complex")["pad"] = {"complex": [number, 0.0]}
    refused(parts.joined(), "one that its dtype holds")


def test_row_pads() -> None:
    for dtype, items in (("I16", [1]), ("I16", [1, 2, 3]), ("I32", [1, 2])):
        parts = pieces("forms")
        put(parts, the_field(parts, "per_row")["row_pads"], dtype, items)
        refused(parts.joined(), "row pads")
    for items in ([0, 0, 0], [0, 0], [0] * 5):
        parts = pieces("forms")
        put(parts, the_field(parts, "per_row_128")["row_pads"], "I64", items)
        refused(parts.joined(), "row pads")


# -------------------------------------------------------------------- encodings


def encoded(name: str, golden_name: str = "encodings", **arrays: tuple[str, list[int]]) -> bytes:
    """A golden file with other arrays in the encoding of one field."""
    parts = pieces(golden_name)
    entry = the_field(parts, name)["encoding"]
    entry = entry.get("steps", entry.get("rows", entry) if "index" not in arrays else entry)
    for member, (dtype, items) in arrays.items():
        put(parts, entry[member], dtype, items)
    return parts.joined()


WRONG_ARRAYS: dict[str, tuple[str, dict[str, tuple[str, list[int]]]]] = {
    "plain: too few": ("plain", {"words": ("I64", [1] * 7)}),
    "plain: too many": ("plain", {"words": ("I64", [1] * 9)}),
    "plain: other size": ("plain", {"words": ("I32", [1] * 8)}),
    "plain: unsigned": ("plain", {"words": ("U64", [1] * 8)}),
    "narrow: signed": ("narrow1", {"low": ("I8", [1] * 8)}),
    "narrow: too few": ("narrow1", {"low": ("U8", [1] * 7)}),
    "narrow: too wide": ("narrow2", {"low": ("U32", [1] * 8)}),
    "narrow: third byte beside one": ("narrow1", {"high": ("U8", [1] * 8)}),
    "narrow: third bytes missing": ("narrow3", {"high": ("U8", [1] * 7)}),
    "narrow: third byte of two": ("narrow3", {"high": ("U16", [1] * 8)}),
    "bits: too few": ("bits", {"bits": ("U8", [1] * 2)}),
    "bits: signed": ("bits", {"bits": ("I8", [1] * 3)}),
    "bits: one word": ("bits", {"words": ("U8", [1])}),
    "bits: words of another size": ("bits", {"words": ("I16", [0, 1])}),
    "runs: no pieces": ("runs", {"pieces": ("U8", [0, 2, 0, 1])}),
    "runs: pieces of an empty row": ("runs", {"pieces": ("U8", [1, 2, 1, 1])}),
    "runs: more pieces than words": ("runs", {"pieces": ("U8", [4, 2, 0, 1])}),
    "runs: too few pieces": ("runs", {"pieces": ("U8", [1, 2, 0])}),
    "runs: signed pieces": ("runs", {"pieces": ("I8", [1, 2, 0, 1])}),
    "runs: wide pieces": ("runs", {"pieces": ("U64", [1, 2, 0, 1])}),
    "runs: a piece too long": ("runs", {"counts": ("U8", [4])}),
    "runs: a piece of nothing": ("runs", {"counts": ("U8", [0])}),
    "runs: a count too many": ("runs", {"counts": ("U8", [2, 1])}),
    "runs: counts beyond": ("runs", {"counts": ("U32", [2**32 - 1])}),
    "runs: values missing": ("runs", {"values": ("I8", [4, 5, 4])}),
    "runs: unsigned values": ("runs", {"values": ("U8", [4, 4, 251, 4])}),
    "runs: values too wide": ("runs_one", {"values": ("I32", [1])}),
    "ramp: too few": ("ramp", {"firsts": ("I8", [1, 2])}),
    "ramp: unsigned": ("ramp", {"firsts": ("U8", [1, 2, 3, 4])}),
    "steps: a piece too long": ("steps", {"counts": ("U8", [9])}),
    "sparse: outside its row": ("sparse", {"places": ("U8", [3, 0])}),
    "sparse: falling": ("sparse", {"per_row": ("U8", [2, 0, 0, 0]), "places": ("U8", [2, 1])}),
    "sparse: one place twice": ("sparse", {"per_row": ("U8", [2, 0, 0, 0]), "places": ("U8", [2, 2])}),
    "sparse: too many": ("sparse", {"per_row": ("U8", [1, 1, 0, 1])}),
    "sparse: wide places": ("sparse", {"places": ("U64", [2, 0])}),
    "sparse: words of another size": ("sparse", {"words": ("I64", [2, 0])}),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_wrong_arrays(name: str) -> None:
    path, arrays = WRONG_ARRAYS[name]
    refused(encoded(path, **arrays), "an encoding that gives its words")


@pytest.mark.parametrize("base", [2**63, -(2**63) - 1, 1.0, None])
def test_wrong_numbers_of_encodings(base: Any) -> None:
    for name, member in (("narrow1", "base"), ("ramp", "step")):
        parts = pieces("encodings")
        the_field(parts, name)["encoding"][member] = base
        refused(parts.joined())


@pytest.mark.parametrize("index", [[0, 1, 0, 2], [0, 0, 0, 0], [0, 1, 1, 0], [0, 2, 0, 2], [0, 1, 0], [1, 1, 1, 1]])
def test_wrong_repeated_rows(index: list[int]) -> None:
    refused(encoded("plain", "repeated_rows", index=("U8", index)), "an encoding that gives its words")


def test_repeated_rows_of_other_encodings() -> None:
    for kind in ("repeated", "columns", "same", "joined"):
        parts = pieces("repeated_rows")
        the_field(parts, "plain")["encoding"]["rows"]["kind"] = kind
        refused(parts.joined(), f"encoded as '{kind}'")


def test_columns_that_are_not_those_of_the_element() -> None:
    for change in (lambda columns: columns.pop(), lambda columns: columns.append(columns[0]), lambda c: c.clear()):
        parts = pieces("encodings")
        change(the_field(parts, "columns")["encoding"]["columns"])
        refused(parts.joined(), "columns")


def same(target: str) -> dict[str, Any]:
    return {"kind": "same", "field": [target]}


def linked(name: str = "encodings", **links: Any) -> bytes:
    parts = pieces(name)
    for target, encoding in links.items():
        the_field(parts, target)["encoding"] = encoding
    return parts.joined()


def test_references_that_lead_back() -> None:
    refused(linked(plain=same("plain")), 'takes the words of "plain"')
    refused(linked(plain=same("same")), "takes the words of")
    refused(linked(plain=same("runs"), runs=same("plain"), same=same("ramp")), "takes the words of")
    refused(linked(plain=same("runs"), runs=same("ramp")), "takes the words of")

    def joined(head: str, tail: str) -> dict[str, Any]:
        return {"kind": "joined", "head": [head], "tail": [tail]}

    refused(linked("rollout", input_ids=joined("input_ids", "responses")), "takes the words of")
    refused(linked("rollout", prompts=joined("input_ids", "responses")), "takes the words of")
    refused(linked("rollout", input_ids=joined("prompts", "prompts")), "other lengths")
    refused(linked("rollout", input_ids=joined("responses", "reward_baselines")), "words of another size")


def test_references_to_nothing() -> None:
    refused(linked(plain=same("nowhere")), 'takes the words of "nowhere"')
    refused(linked("rollout", responses=same("uid")), 'takes the words of "uid"')
    refused(linked("rollout", responses=same("prompts")), "other lengths")
    refused(linked(plain=same("sparse")), "words of another size")
    refused(linked(plain={"kind": "same", "field": []}), "path")


# -------------------------------------------------------------------- codec


def squeezed(change: Callable[[Any], Any]) -> bytes:
    return manifest(lambda m: change(m["codec"]), "zstd")


def test_codecs() -> None:
    refused(squeezed(lambda codec: codec.update(name="lz4")), "codec 'lz4'", "one of zstd")
    refused(squeezed(lambda codec: codec["arrays"].pop()), "not one for each")
    refused(manifest(lambda m: m.update(codec=[]), "zstd"), '"name"')
    refused(manifest(lambda m: m.pop("codec"), "zstd"), "field")


def record(change: Callable[[list[Any]], Any], nth: int = 0) -> bytes:
    def changed(codec: Any) -> None:
        change([record for record in codec["arrays"] if record is not None][nth])

    return squeezed(changed)


def test_zstd_bombs() -> None:
    for size in (2**40, 2**31, 5000 * 2000):
        refused(record(lambda record, size=size: record.__setitem__(1, size)), "that stand for", "256 times")
    refused(record(lambda record: record.__setitem__(1, -1)), "codec record")
    refused(record(lambda record: record.__setitem__(1, record[1] + 1)), "a zstd frame of")
    zstandard = pytest.importorskip("zstandard")
    frame = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    parts = pieces("zstd")
    number = next(n for n, record in enumerate(parts.manifest["codec"]["arrays"]) if record is not None)
    parts.manifest["codec"]["arrays"][number][1] = (1 << 28) // 4
    array(parts, number)[1:] = ["U8", frame]
    refused(parts.joined(), "that stand for 2684", "256 times")


def frames(*arrays: tuple[bytes, list[Any] | None], fields: Iterable[Any] = (), rows: int = 1) -> bytes:
    """A message with a codec: each array is zstd of the bytes given, or plain where it has no record."""
    zstandard = pytest.importorskip("zstandard")
    held = [raw if record is None else zstandard.compress(raw) for raw, record in arrays]
    records = [record for _, record in arrays]
    parts = said(rows=rows, fields=list(fields), codec={"name": "zstd", "arrays": records})
    parts.arrays = [[f"{number}.x", "U8", raw] for number, raw in enumerate(held)]
    return parts.joined()


def test_what_zstd_restores_is_bounded_for_all_arrays_together() -> None:
    noise = np.random.default_rng(0).bytes(5000)
    tensors = [obj([{"tensor": [number, "uint8", [1 << 20]]} for number in range(2)])]
    blank = bytes(1 << 20), ["u1", 1 << 20, None]
    refused(frames(blank, blank, fields=tensors), f"that stand for {2 << 20}; expected at most 256 times as many")
    refused(frames(blank, blank, (noise, None), fields=tensors), f"stand for {2 << 20}")
    PackedBatch.from_bytes(frames(blank, blank, (noise * 2, None), fields=tensors))
    more = frames(blank, blank, (noise * 2, None), fields=tensors)
    refused(more, "with the compressed arrays, the batch takes", max_bytes=(2 << 20) - 1)


def test_zstd_restores_nothing_that_is_not_used() -> None:
    blank, noise = (bytes(5000), ["u1", 5000, None]), (bytes(100), None)
    used = [obj([{"tensor": [1, "uint8", [5000]]}])]
    PackedBatch.from_bytes(frames(noise, blank, fields=used))
    refused(frames(blank, blank, noise, fields=used), "compressed arrays [0] that nothing refers to")
    refused(frames(noise, blank), "compressed arrays [1] that nothing refers to")


def test_rows_are_paid_for_in_bytes_that_travel() -> None:
    """Else a few bytes of zstd would pay for many."""
    rows = 1 << 20
    blank = bytes(rows), ["u1", rows, None]
    used = [obj([{"tensor": [0, "uint8", [rows]]}])]
    refused(frames(blank, (bytes(8000), None), fields=used, rows=rows), f"{rows} rows in fewer bytes")


def test_the_writer_pays_for_what_shrinks_much() -> None:
    """A message stands for at most 256 times its bytes; what zstd makes smaller than that is padded."""
    pytest.importorskip("zstandard")
    period = torch.randint(0, 99, (512,), generator=torch.Generator().manual_seed(0)).repeat(4096)
    batch = TensorDict({"x": period.view(8, -1)}, [8])
    data = compress(batch, codec="zstd").to_bytes()
    body = len(data) - 8 - int.from_bytes(data[:8], "little")
    records = [record for record in Pieces.of(data).manifest["codec"]["arrays"] if record is not None]
    claimed = sum(record[1] * int(record[0][1]) for record in records)
    assert body == -(-claimed // 256)
    assert body < batch["x"].nbytes // 256
    assert_same(decompress(PackedBatch.from_bytes(data)), batch)
    assert_same(decompress(pickle.loads(pickle.dumps(compress(batch, codec="zstd")))), batch)


def test_zstd_frames_that_are_none() -> None:
    zstandard = pytest.importorskip("zstandard")
    number = next(n for n, record in enumerate(pieces("zstd").manifest["codec"]["arrays"]) if record is not None)
    good = array(pieces("zstd"), number)[2]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(800))
    for frame in (b"\0", good[:-1], good[:9], good + good, good + b"\0", skippable + good, streamed, bytes(99)):
        parts = pieces("zstd")
        array(parts, number)[1:] = ["U8", frame]
        refused(parts.joined(), "zstd frame")


@pytest.mark.parametrize("other", [-1, 99, 1.0, True, "1", [], {}])
def test_differences_to_no_array(other: Any) -> None:
    refused(record(lambda record: record.__setitem__(2, other)), "codec record")


def test_differences_that_lead_back() -> None:
    def cycle(codec: Any) -> None:
        numbers = [number for number, record in enumerate(codec["arrays"]) if record is not None]
        for number, other in zip(numbers, numbers[1:] + numbers[:1], strict=True):
            codec["arrays"][number][2] = other

    refused(squeezed(cycle), "the difference to itself")

    def own(codec: Any) -> None:
        number = next(number for number, record in enumerate(codec["arrays"]) if record is not None)
        codec["arrays"][number][2] = number

    refused(squeezed(own), "the difference to itself")
    refused(record(lambda record: record.__setitem__(2, 0), 1), "the difference to one of another size")


# -------------------------------------------------------------------- objects


class Trap:
    """Sets a flag if it is unpickled."""

    sprung = False

    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> str:
    Trap.sprung = True
    return "sprung"


def trapped() -> TensorDict:
    batch = TensorDict({"x": torch.zeros(1)}, [1])
    batch.set("trap", NonTensorStack(NonTensorData(Trap())))
    return batch


def test_pickles_are_read_only_where_allowed() -> None:
    data = compress(trapped()).to_bytes(allow_pickle=True)
    Trap.sprung = False
    refused(data, 'field "trap" is a pickle, which runs code when it is read', "allow_pickle=True")
    assert not Trap.sprung
    PackedBatch.from_bytes(data, allow_pickle=True)
    assert Trap.sprung


def test_files_with_pickles(tmp_path: Path) -> None:
    compress(trapped()).save(tmp_path / "file", allow_pickle=True)
    Trap.sprung = False
    with pytest.raises(WireFormatError, match="is a pickle"):
        PackedBatch.load(tmp_path / "file")
    assert not Trap.sprung
    PackedBatch.load(tmp_path / "file", allow_pickle=True)
    assert Trap.sprung


def test_the_writer_names_the_field_that_json_cannot_say(tmp_path: Path) -> None:
    packed = compress(trapped())
    with pytest.raises(
        MaskpackError, match=r'field "trap" holds a Trap; expected what JSON can say.*allow_pickle=True'
    ):
        packed.to_bytes()
    with pytest.raises(MaskpackError, match='field "trap" holds a Trap'):
        packed.save(tmp_path / "file")
    nested = TensorDict({"inner": TensorDict({}, [1]).set("odd", NonTensorData([b"x"]))}, [1])
    with pytest.raises(MaskpackError, match='field "inner/odd" holds a bytes'):
        compress(nested).to_bytes()


def test_arrays_of_an_object_that_is_pickled_after_all_travel_once() -> None:
    batch = TensorDict({"x": torch.zeros(1)}, [1])
    batch.set("odd", NonTensorData([torch.arange(10_000), {1}]))
    data = compress(batch).to_bytes(allow_pickle=True)
    assert len(data) < 90_000
    back = decompress(PackedBatch.from_bytes(data, allow_pickle=True))
    assert torch.equal(back["odd"][0], torch.arange(10_000))


def test_unpickled_arrays_may_be_written_to() -> None:
    batch = TensorDict({"x": torch.zeros(1)}, [1])
    batch.set("odd", NonTensorData(np.zeros(3, np.complex128)))
    back = PackedBatch.from_bytes(compress(batch).to_bytes(allow_pickle=True), allow_pickle=True)
    decompress(back)["odd"][0] = 1


def test_names_that_are_no_text() -> None:
    packed = compress(TensorDict({"\ud800": torch.zeros(1)}, [1]))
    with pytest.raises(MaskpackError, match="surrogate"):
        packed.to_bytes()


def test_elements_of_many_dims() -> None:
    batch = TensorDict({"x": torch.zeros(1, *[1] * 28)}, [1])
    assert_same(decompress(PackedBatch.from_bytes(compress(batch).to_bytes())), batch)
    deep = TensorDict({"x": torch.zeros(1, *[1] * 29)}, [1])
    with pytest.raises(MaskpackError, match='field "x" has elements of 29 dims; expected at most 28'):
        compress(deep).to_bytes()


WRONG_OBJECTS: dict[str, Any] = {
    "two entries": {"tuple": [], "dict": []},
    "no entry": {},
    "unknown": {"set": [1]},
    "tuple of text": {"tuple": "x"},
    "dict of texts": {"dict": ["ab"]},
    "dict of three": {"dict": [[1, 2, 3]]},
    "list as a key": {"dict": [[[1], 2]]},
    "dict as a key": {"dict": [[{"dict": []}, 2]]},
    "key twice": {"dict": [[1, 2], [1, 3]]},
    "key twice by value": {"dict": [[1, 2], [True, 3]]},
    "tensor as a key": {"dict": [[{"tensor": [0, "uint8", [2]]}, 2]]},
    "tensor in a key": {"dict": [[{"tuple": [{"tensor": [0, "uint8", [2]]}]}, 2]]},
    "finite float": {"float": "0000000000000000"},
    "float of text": {"float": "inf"},
    "float of three bytes": {"float": "000000"},
    "float of a number": {"float": 1},
    "small int": {"int": "0x1"},
    "int in capitals": {"int": "0XFFFFFFFFFFFFFFFFFFFF"},
    "int of text": {"int": "many"},
    "text that JSON says": {"text": "61"},
    "text in capitals": {"text": "EDA080"},
    "text with blanks": {"text": "ed a0 80"},
    "text that is no UTF-8": {"text": "ff"},
    "half a surrogate pair": "\ud800",
    "scalar of an unknown dtype": {"scalar": ["int128", "00"]},
    "scalar of text": {"scalar": ["str", "00"]},
    "scalar of an object": {"scalar": ["object", "0000000000000000"]},
    "scalar of two bytes": {"scalar": ["int8", "0000"]},
    "scalar without bits": {"scalar": ["int8"]},
    "tensor of an unknown array": {"tensor": [10**6, "uint8", [2]]},
    "tensor of an unknown dtype": {"tensor": [0, "float128", [2]]},
    "tensor of a numpy dtype": {"array": [0, "bfloat16", [2]]},
    "array of objects": {"array": [0, "object", [2]]},
    "tensor of another size": {"tensor": [0, "uint8", [3]]},
    "tensor of another item size": {"tensor": [0, "int16", [1]]},
    "tensor of negative size": {"tensor": [0, "uint8", [-2]]},
    "tensor beyond memory": {"tensor": [0, "uint8", [0, 2**62]]},
    "tensor of many dims": {"tensor": [0, "uint8", [1] * 29]},
    "tensor without shape": {"tensor": [0, "uint8"]},
}


@pytest.mark.parametrize("name", WRONG_OBJECTS)
def test_wrong_objects(name: str) -> None:
    refused(field("temperature", json=WRONG_OBJECTS[name]))
    refused(field("temperature", json=[WRONG_OBJECTS[name]]))


def test_objects_of_other_rows() -> None:
    refused(field("uid", json=["a", "b"]), "lists of (3,) items")
    refused(field("uid", json="abc"), "lists of (3,) items")
    refused(field("uid", depth=-1), "depth -1")
    refused(field("uid", depth=10**9), "depth")
    refused(field("uid", depth=2), "lists of (3,) items")
    refused(field("uid", stacked=True), "stacked")
    refused(field("uid", pickle=[0]), "pickle")
    refused(field("uid", pickle=[0]), "either json or pickle", allow_pickle=True)


# -------------------------------------------------------------------- what a message may claim


TABLES = [["0.starts", "U32", bytes(4)], ["1.counts", "U32", (1).to_bytes(4, "little")], ["2.runs", "U8", b"\1"]]
ZERO = ["3.zero", "U8", b"\0"]


def said(**manifest: Any) -> Pieces:
    """A message of one row; the layout "m" of the arrays TABLES is there if a width is given."""
    width = manifest.pop("width", None)
    layout = [] if width is None else [{"name": "m", "width": width, "anchor": 0, "runs": [0, 1, 2]}]
    whole = {"rows": 1, "root": {"dims": [], "device": None}, "axes": [], "layouts": layout, "fields": []}
    arrays = [list(entry) for entry in [*TABLES, ZERO]]
    return Pieces({"format": "maskpack", "version": "1"}, {**whole, **manifest}, arrays)


def zeros(name: str, **members: Any) -> dict[str, Any]:
    """A field whose words are all 0: by `runs`, in no bytes at all."""
    runs = {"kind": "runs", "pieces": 2, "counts": 4, "values": 3}
    entry = {"path": [name], "kind": "dense", "dtype": "uint8", "device": "cpu", "shape": [], "encoding": runs}
    return {**entry, **members}


def obj(json: Any, depth: int = 0, **members: Any) -> dict[str, Any]:
    return {"path": ["o"], "kind": "object", "depth": depth, "json": json, **members}


def empty(parts: Pieces) -> bytes:
    """With array 4, which is empty."""
    parts.arrays.append(["4.empty", "U8", b""])
    return parts.joined()


CLAIMS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "elements": (1 << 30, lambda: empty(said(fields=[zeros("x", shape=[1 << 20, 1 << 10])]))),
    "a width": (
        2**31 - 1,
        lambda: empty(said(width=2**31 - 1, axes=["m"], fields=[zeros("x", kind="padded", layout="m", dim=1, pad=0)])),
    ),
    "a width around elements": (
        1 << 30,
        lambda: empty(
            said(
                width=1 << 20,
                axes=["m"],
                fields=[zeros("x", kind="padded", layout="m", dim=2, pad=0, shape=[1 << 10])],
            )
        ),
    ),
    "many fields": (
        1 << 30,
        lambda: empty(said(fields=[zeros(f"x{n}", shape=[1 << 20], dtype="uint8") for n in range(1 << 10)])),
    ),
    "no batch dim": (
        1 << 30,
        lambda: empty(said(root={"dims": None, "device": None}, fields=[zeros("x", shape=[1 << 30])])),
    ),
    "a sub-batch": (
        1 << 30,
        lambda: empty(
            said(
                fields=[
                    {"path": ["s"], "kind": "node", "node": {"dims": [1 << 10], "device": None}},
                    zeros("x", path=["s", "x"], shape=[1 << 10, 1 << 20]),
                ]
            )
        ),
    ),
    "batch dims": (1 << 30, lambda: said(root={"dims": [1 << 30], "device": None}, fields=[obj(None)]).joined()),
    "a tensor in an object": (
        3 << 20,
        lambda: Pieces(
            {"format": "maskpack", "version": "1"},
            {
                **said().manifest,
                "fields": [obj([{"tensor": [0, "uint8", [1 << 10]]} for _ in range(3 << 10)])],
            },
            [["0.x", "U8", bytes(1 << 10)]],
        ).joined(),
    ),
}
"""Messages of a few bytes, and how many they claim."""


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_are_added_up_before_memory_is_taken(name: str) -> None:
    size, make_it = CLAIMS[name]
    data = make_it()
    tracemalloc.start()
    try:
        refused(data, " bytes in memory, padded; expected at most", "max_bytes", max_bytes=size - 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(data) + (1 << 20)
    packed = PackedBatch.from_bytes(data, max_bytes=size + (1 << 20))
    if name != "batch dims":  # what an object is worth for all of them, it is worth once
        with pytest.raises(LayoutError, match=r"decompress: these fields take \d+ bytes padded; expected at most"):
            decompress(packed, max_bytes=size - 1)


def test_the_limit_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "batch.maskpack"
    file.write_bytes(golden("rollout"))
    size = sum(tensor.numel() * tensor.element_size() for tensor in make.rollout().batch.values(True, True))
    for mapped in (True, False):
        assert_same(decompress(PackedBatch.load(file, mmap=mapped, max_bytes=1 << 20)), make.rollout().batch)
        assert_same(decompress(PackedBatch.load(file, mmap=mapped, max_bytes=None)), make.rollout().batch)
        with pytest.raises(WireFormatError, match=r"PackedBatch.load\(.*max_bytes, or None, if you trust"):
            PackedBatch.load(file, mmap=mapped, max_bytes=size - 1)


@pytest.mark.parametrize("limit", [-1, 1.5, True, "64"])
def test_limits_that_are_none(limit: Any, tmp_path: Path) -> None:
    packed = PackedBatch.from_bytes(golden("rollout"))
    packed.save(tmp_path / "b")
    for call, made in (
        ("PackedBatch.from_bytes", lambda: PackedBatch.from_bytes(golden("rollout"), max_bytes=limit)),
        ("PackedBatch.load", lambda: PackedBatch.load(tmp_path / "b", max_bytes=limit)),
        ("decompress", lambda: decompress(packed, max_bytes=limit)),
    ):
        with pytest.raises(LayoutError, match=rf"^{call}: max_bytes is .*; expected a whole number from 0"):
            made()
    with pytest.raises(LayoutError, match=r"PackedBatch.load: mmap is 'no'; expected True or False"):
        PackedBatch.load(tmp_path / "b", mmap="no")


def test_the_default_limit() -> None:
    field = {"kind": "padded", "layout": "m", "dim": 1, "pad": 0}
    shape = [33]
    data = empty(said(width=2**31 - 1, axes=["m"], fields=[zeros("x", **field, shape=shape)]))
    refused(data, f"at most {64 << 30}")
    packed = PackedBatch.from_bytes(data, max_bytes=None)
    with pytest.raises(
        LayoutError, match=rf"take {33 * (2**31 - 1)} bytes padded; expected at most {64 << 30}. Decode"
    ):
        decompress(packed)


def test_the_limit_of_decompress_counts_what_it_would_give() -> None:
    """Whole fields, in the form that is asked for, in the widths that they have now."""
    mask = torch.zeros(4, 100, dtype=torch.bool)
    mask[:, :2] = True
    batch = TensorDict({"m": mask, "a": mask.double(), "b": mask.long()}, [4])
    packed = compress(batch, registry={name: MaskNestingSpec("m") for name in ("m", "a", "b")})
    whole, one = 4 * 100 * (1 + 8 + 8), 4 * 100 * 8
    assert_same(decompress(packed, max_bytes=whole), batch)
    assert_same(decompress(packed, "a", max_bytes=one), batch.select("a"))
    assert_same(decompress(packed[:1], max_bytes=whole // 4), batch[:1])
    assert_same(decompress(packed, max_bytes=None), batch)
    decompress(packed, widths="trim", max_bytes=whole // 50)
    decompress(packed, format="nested", max_bytes=whole // 10)
    decompress(packed, "a", format="nested", max_bytes=one // 10)
    for names, form, most in (
        ((), {}, whole - 1),
        (("a",), {}, one - 1),
        ((), {"widths": "trim"}, whole // 50 - 1),
        ((), {"format": "nested"}, whole // 50),
        ((), {"device": "cpu"}, whole - 1),
    ):
        with pytest.raises(LayoutError, match=r"decompress: these fields take (\d+) bytes .*pass max_bytes=\1\."):
            decompress(packed, *names, max_bytes=most, **form)
    with pytest.raises(LayoutError, match="nested"):
        decompress(packed, format="nested", max_bytes=1)
    many = packed.take([0] * 1000)
    with pytest.raises(LayoutError, match="take 1700000 bytes padded"):
        decompress(many, max_bytes=whole)


def test_depth_without_content() -> None:
    """tensordict takes 2^depth steps to ask a stack of stacks for its device."""
    nest: Any = 1
    for _ in range(8):
        nest = [nest]
    back = decompress(PackedBatch.from_bytes(said(fields=[obj(nest, 8)]).joined()))
    assert back.get("o").tolist() == nest
    for depth in (9, 16, 28):
        deeper: Any = 1
        for _ in range(depth):
            deeper = [deeper]
        refused(said(fields=[obj(deeper, depth)]).joined(), f"of depth {depth}", "at most 8")
    stack: Any = NonTensorStack(NonTensorData(0))
    for _ in range(8):
        stack = NonTensorStack(stack)
    packed = compress(TensorDict({"x": torch.zeros(1)}, [1]).set("o", stack))
    assert decompress(packed).get("o").tolist() == stack.tolist()
    with pytest.raises(MaskpackError, match=r'field "o" has stacks of 9 dims; expected at most 8'):
        packed.to_bytes()


def test_stacks_without_items_take_no_memory_for_their_sizes() -> None:
    dims = [1 << 20, 1 << 10]
    for rows, data in ((0, []), (1, [[[] for _ in range(3)]])):
        node = {"dims": dims if rows == 0 else [3, 0, 1 << 29], "device": None}
        parts = said(rows=rows, root=node, fields=[obj(data, 1 + len(node["dims"]))])
        packed = PackedBatch.from_bytes(parts.joined())
        tracemalloc.start()
        try:
            entry = decompress(packed).get("o")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 1 << 20
        assert entry.batch_size == torch.Size([rows, *node["dims"]])


def test_paths_and_batch_dims_have_an_end() -> None:
    def chain(depth: int) -> list[dict[str, Any]]:
        node = {"dims": [], "device": None}
        return [{"path": ["a"] * length, "kind": "node", "node": node} for length in range(1, depth + 1)]

    decompress(PackedBatch.from_bytes(said(fields=chain(64)).joined()))
    refused(said(fields=chain(65)).joined(), "path", "1 to 64 names")
    refused(said(fields=[obj(1)], root={"dims": [1] * 29, "device": None}).joined(), "dims", "at most 28")
    deep = TensorDict({"x": torch.zeros(1)}, [1])
    for _ in range(64):
        deep = TensorDict({"a": deep}, [1])
    with pytest.raises(MaskpackError, match=r"a path of 65 names; expected at most 64"):
        compress(deep).to_bytes()
    assert_same(decompress(PackedBatch.from_bytes(compress(deep["a"]).to_bytes())), deep["a"])
    wide = TensorDict({}, [1] * 30).set("o", NonTensorData(1, batch_size=[1] * 30))
    with pytest.raises(MaskpackError, match="the batch has 29 batch dims behind its rows; expected at most 28"):
        compress(wide).to_bytes()


def keys(made: Iterable[Any]) -> bytes:
    return said(fields=[obj({"dict": [[key, None] for key in made]})]).joined()


def whole(number: int) -> Any:
    return number if -(2**63) <= number < 2**63 else {"int": hex(number)}


COLLIDING: dict[str, Callable[[int], Any]] = {
    "ints": lambda n: whole((2**61 - 1) * (n + 10)),
    "floats": lambda n: 2.0 ** (61 * n - 900),
    "tuples": lambda n: {"tuple": [whole((2**61 - 1) * (n + 10))]},
    "tuples of tuples": lambda n: {"tuple": ["a", {"tuple": [whole((2**61 - 1) * (n + 10)), 1]}]},
    "scalars and ints": lambda n: (
        whole((2**61 - 1) * n + 1) if n else {"scalar": ["float32", np.float32(1).tobytes().hex()]}
    ),
}


@pytest.mark.parametrize("kind", COLLIDING)
def test_keys_of_one_hash(kind: str) -> None:
    """A dict compares each of them with all others."""
    assert len(decompress(PackedBatch.from_bytes(keys(map(COLLIDING[kind], range(16)))))["o"]) == 16
    refused(keys(map(COLLIDING[kind], range(17))), "a dict with 17 keys of one hash, more than 16")
    inner = said(fields=[obj([{"tuple": [{"dict": [[COLLIDING[kind](n), 1] for n in range(20)]}]}])])
    refused(inner.joined(), "a dict with 20 keys of one hash")


def test_many_keys() -> None:
    """Of texts any number: Python salts their hashes."""
    assert len(decompress(PackedBatch.from_bytes(keys(range(1 << 15))))["o"]) == 1 << 15
    refused(keys(range((1 << 15) + 1)), "a dict with 32769 keys that are not text, more than 32768")
    assert len(decompress(PackedBatch.from_bytes(keys(map(str, range(100_000)))))["o"]) == 100_000


def test_the_writer_says_no_dict_that_a_reader_refuses() -> None:
    for data, problem in (
        ({(2**61 - 1) * n: 0 for n in range(2, 19)}, "a dict with 17 keys of one hash"),
        (dict.fromkeys(range((1 << 15) + 1)), "a dict with 32769 keys that are not text"),
    ):
        packed = compress(TensorDict({"x": torch.zeros(1)}, [1]).set("o", NonTensorData([data])))
        with pytest.raises(MaskpackError, match=f'field "o" holds {problem}.*allow_pickle=True'):
            packed.to_bytes()
        back = PackedBatch.from_bytes(packed.to_bytes(allow_pickle=True), allow_pickle=True)
        assert decompress(back)["o"] == [data]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_keys_that_cannot_be_compared(dtype: str) -> None:
    one = {"scalar": [dtype, np.ones((), dtype).tobytes().hex()]}
    huge = {"int": hex((2**61 - 1) * 10**400 + 1)}  # has the hash of 1
    for pair in ([one, huge], [huge, one]):
        refused(keys(pair), "one as to_bytes writes it")


def test_pads_inside_each_other() -> None:
    parts = pieces()
    the_field(parts, "advantages")["pad"] = "here"
    for depth in (1, 2, *range(300, 500)):
        pad = '{"complex": [' * depth + "0.0" + ", 0.0]}" * depth
        refused(parts.joined(manifest=lambda text, pad=pad: text.replace('"here"', pad)))


def test_integers_of_many_digits_are_shown_as_such() -> None:
    refused(field("advantages", pad={"int": hex(10**5000)}), "too long to be shown")


def test_long_names_are_cut_in_messages() -> None:
    refused(said(fields=[zeros("x" * 100_000, dtype="int128")]).joined(), 'field "xxxx')


# -------------------------------------------------------------------- what is read can be trusted


@tensorclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def test_a_sub_batch_of_a_class_has_fields_of_that_class() -> None:
    def data(kind: str, *names: str, above: tuple[str, ...] = ("s",)) -> bytes:
        node = {"path": list(above), "kind": "node", "node": {"dims": [], "device": None, "kind": kind}}
        return empty(said(fields=[node, *(zeros("", path=[*above, name]) for name in names)]))

    own = f"{__name__}:Pair"
    back = decompress(PackedBatch.from_bytes(data(own, "left", "right"))).get("s")
    assert type(back) is Pair
    assert back.right.tolist() == [0]
    for name in ("other", "__class__", "_tensordict", "batch_size"):
        refused(data(own, "left", name), f'field "s/{name}" in a sub-batch of class Pair', "a field of that class")
    for kind in ("tensordict.tensorclass:TensorClass", "tensordict:NonTensorData", f"{__name__}:Trap", "builtins:dict"):
        refused(data(kind, "left"), "a tensorclass that this process has")


def test_messages_are_short_and_name_the_field() -> None:
    long = "x" * 100_000
    for data in (
        field("responses", dtype=long),
        field("responses", kind=long),
        field("responses", layout=long),
        field("temperature", json={long: 1}),
        manifest(lambda m: m.update(axes=[long] * 1000)),
        metadata(version=long),
        header(lambda whole: whole.update({long: whole.pop(list(whole)[-1])})),
    ):
        refused(data)
    with pytest.raises(WireFormatError, match='field "advantages"'):
        PackedBatch.from_bytes(field("advantages", dtype="int64"))


def test_reading_changes_nothing() -> None:
    data = golden("forms")
    before = copy.deepcopy(data)
    packed = PackedBatch.from_bytes(bytearray(data))
    decompress(packed)["per_row"].zero_()
    assert_same(decompress(packed), make.forms().batch)
    assert data == before


def test_a_short_run_of_the_fuzzer() -> None:
    counts, failures, _ = fuzz_wire.run(2000, seed=7)
    assert not failures, "\n".join(failures)
    deep = sum(counts.values()) - counts["refused as a container"]
    assert deep > 0.4 * sum(counts.values()), counts
    assert counts["accepted and decoded"] > 0.05 * sum(counts.values()), counts


@pytest.mark.parametrize("kind", ["Plain", "Sparse", "Runs"])
def test_the_fuzzer_finds_a_check_that_is_missing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getattr(encodings, kind), "problem", lambda *_: None)
    _, failures, _ = fuzz_wire.run(600, seed=8)
    assert failures


def test_the_fuzzer_finds_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_wrong_keys", lambda _: None)
    made = fuzz_wire.Mutant("", "keys", keys(whole((2**61 - 1) * (n + 10)) for n in range(20_000)), False, None)
    with pytest.raises(AssertionError, match=r"the case took \d+\.\d+ s"):
        fuzz_wire.tried(made, {}, {})


@pytest.mark.skipif(not fuzz_wire.peak_of_process(), reason="this system does not tell")
def test_the_fuzzer_finds_what_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlimited(batch: PackedBatch, **options: Any) -> TensorDict:
        return decompress(batch, **{**options, "max_bytes": None})

    monkeypatch.setattr(fuzz_wire, "decompress", unlimited)
    made = fuzz_wire.Mutant("", "sizes", empty(said(fields=[zeros("x", shape=[800 << 20])])), False, None)
    with pytest.raises(AssertionError, match=r"the case took \d+ MiB of memory"):
        fuzz_wire.tried(made, {}, {})


def test_registry_pads_that_json_does_not_know() -> None:
    batch = TensorDict({"m": torch.tensor([[1, 0]]), "x": torch.tensor([[5, 2**64 - 1]], dtype=torch.uint64)}, [1])
    packed = compress(batch, registry={"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", 2**64 - 1)})
    assert packed.forms[("x",)].kind == "padded"
    assert_same(decompress(PackedBatch.from_bytes(packed.to_bytes())), batch)


# -------------------------------------------------------------------- the norm


NORM = Path(__file__).parents[2] / "docs" / "wire-format.md"


@pytest.fixture(scope="module")
def norm() -> dict[str, Any]:
    """The reader that the norm's Python blocks make up."""
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", NORM.read_text(), re.DOTALL)
    assert len(blocks) == 7
    for block in blocks:
        exec(compile(block, str(NORM), "exec"), names)
    return names


def bytes_of(x: torch.Tensor) -> bytes:
    x = x.detach().contiguous()
    real = torch.view_as_real(x) if x.dtype == torch.complex128 else x
    return real.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "zstd"])
def test_the_reader_of_the_norm_reads_golden_files(name: str, norm: dict[str, Any]) -> None:
    """Row by row: real values, and padded forms, against the tensors that went in."""
    expected = make.GOLDEN[name]().batch
    seen = norm["read"](golden(name))
    assert seen
    parts = pieces(name)
    for path, (entry, rows, runs) in seen.items():
        x = expected.get(path)
        size = norm["itemsize"](entry["dtype"])
        words = min(size, 8)
        values = b"".join(word.to_bytes(words, "little") for row in rows for word in row)
        if x.is_nested:
            assert values == bytes_of(x.values())
            assert [len(row) * words // size for row in rows] == x.offsets().diff().tolist()
        elif entry["kind"] != "padded":
            assert values == bytes_of(x)
        else:
            moved = x.movedim(entry["dim"], 1)
            element = size * int(np.prod(entry["shape"], dtype=int))
            for b, row in enumerate(rows):
                raw = b"".join(word.to_bytes(words, "little") for word in row)
                items = [raw[place : place + element] for place in range(0, len(raw), element)]
                pad = pad_bytes(entry, b, parts, element, size)
                norm["ZERO"] = bytes(element)
                line = norm["padded"](items, runs[b], moved.shape[1], pad)
                assert b"".join(line) == bytes_of(moved[b]), (path, b)


def pad_bytes(entry: Any, row: int, parts: Pieces, element: int, size: int) -> Any:
    """One padded element, as the norm says; numbers through torch."""
    pad = entry["pad"]
    if pad == {"pad": "EDGE"}:
        return "EDGE"
    if pad == {"pad": "PER_ROW"}:
        item = array(parts, entry["row_pads"])[2][row * size : (row + 1) * size]
        return item * (element // size)
    number = pad
    if isinstance(pad, dict) and "float" in pad:
        (number,) = struct.unpack("<d", bytes.fromhex(pad["float"]))
    elif isinstance(pad, dict) and "int" in pad:
        return int(pad["int"], 16).to_bytes(size, "little") * (element // size)
    elif isinstance(pad, dict):
        number = complex(*pad["complex"])
    return bytes_of(torch.tensor(number).to(getattr(torch, entry["dtype"]))) * (element // size)


def test_the_codec_of_the_norm(norm: dict[str, Any]) -> None:
    zstandard = pytest.importorskip("zstandard")
    parts = pieces("zstd")
    expected = make.zstd().batch
    records = parts.manifest["codec"]["arrays"]

    def restored(number: int) -> list[int]:
        _, dtype, raw = array(parts, number)
        if records[number] is None:
            return norm["integers"](raw, dtype.replace("I", "U"))
        kind, size, other = records[number]
        item = int(kind[1])
        content = norm["unshuffled"](zstandard.ZstdDecompressor().decompress(raw), size, item)
        words = norm["integers"](content, f"U{8 * item}")
        if other is None:
            return words
        return [norm["undone"](word, base, 8 * item) for word, base in zip(words, restored(other), strict=True)]

    seen = 0
    for name in ("rollout_log_probs", "old_log_probs"):
        number = the_field(parts, name)["encoding"]["words"]
        real = expected[name][expected["mask"] != 0]
        assert b"".join(word.to_bytes(4, "little") for word in restored(number)) == bytes_of(real)
        seen += records[number] is not None
    assert seen == 2


def test_the_norm_names_every_constant() -> None:
    text = NORM.read_text()
    assert f"at most 2^{wire.MAX_HEADER.bit_length() - 1}," in text
    assert f"Beyond 2^{wire.FREE_ROWS.bit_length() - 1} the body" in text
    assert f"at most {codec.MOST} times as long" in text
    assert f"at most {objects.MOST_DIMS} sizes" in text
    assert re.search(rf"save more than {mp_layout._FEW_BYTES}\s+bytes", text)
    assert f"at most {objects.MOST_DIMS} `dims`" in text
    assert f"and at most {objects.MOST_DEPTH};" in text
    assert f"a list of 1 to {wire.MOST_PATH} names" in text
    assert f"more than {objects.MOST_KEYS} keys" in text
    assert f"more than {objects.MOST_COLLIDING} such keys" in text
    assert f"and {objects.ITEM_BYTES} bytes for each entry of a" in text
    assert f"{decode.MAX_BYTES >> 30} GiB unless it" in text
    assert f"{reading.TABLE_BYTES} bytes for each run" in text
    assert f"{fuzz_wire.PARSED} bytes for\neach byte of the header" in text
    assert f"{fuzz_wire.WIDE} bytes for each byte of the arrays, and {fuzz_wire.WIDE_BITS} for `bits`" in text
    for name in [*words.DTYPES, *sharing.KINDS, *registry.HINTS]:
        assert name in text
