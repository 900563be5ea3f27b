"""The byte form: round trips, golden files, every way a file can be wrong, and what fuzzing finds.

docs/format.md is the norm. The broken files here are put together by fuzz_wire.Pieces, which knows nothing of
maskpack.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import re
import resource
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import fuzz
import fuzz_wire
import numpy as np
import pytest
import strategies
import torch
import warm_workers
from command_line import output_of
from fuzz_wire import NONE, Made, Pieces, encodings_of_others, of_rows, simple_encodings, with_peak
from golden import make
from hypothesis import given
from needs import needs
from oracle import assert_same_batch
from samples import assert_same
from tensordict import NonTensorData, NonTensorStack, TensorDict

from maskpack import ZERO, MaskNestingSpec, MaskpackError, PackedBatch, compress, decompress
from maskpack.core import abi, native, objects
from maskpack.core import bits as words
from maskpack.errors import LayoutError, WireFormatError
from maskpack.fields.registry import HINTS
from maskpack.packed import decode
from maskpack.packed.file import codec, container

GOLDEN = sorted(make.GOLDEN)


pytestmark = pytest.mark.filterwarnings("ignore")


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


# -------------------------------------------------------------------- round trips


@pytest.mark.parametrize("codec", [None, "zstd"])
@given(strategies.batches())
def test_every_way_out_and_in(codec: str | None, case: strategies.Case) -> None:
    packed = compress(case.batch, **case.options, codec=codec)
    data, sealed = (packed.to_bytes(allow_pickle=True, checksum=checksum) for checksum in (False, True))
    for line in (data, sealed, memoryview(bytes(5) + data)[5:], np.frombuffer(bytearray(b" " + data), np.uint8)[1:]):
        again = PackedBatch.from_bytes(line, allow_pickle=True)
        assert again.codec == codec
        assert_same_batch(decompress(again), case.batch)
    assert again.to_bytes(allow_pickle=True) == data
    with tempfile.TemporaryDirectory() as folder:
        packed.save(f"{folder}/batch", allow_pickle=True, checksum=True)
        assert Path(folder, "batch").read_bytes() == sealed
        mapped = PackedBatch.load(f"{folder}/batch", allow_pickle=True)
        held = PackedBatch.load(Path(folder, "batch"), allow_pickle=True, mmap=False)
        assert_same_batch(decompress(mapped), case.batch)
        os.truncate(f"{folder}/batch", 0)
        assert_same_batch(decompress(held), case.batch)
    for rows in (slice(0, 0), slice(1, 3), [len(packed) - 1, 0] if len(packed) else []):
        part = packed.take(rows)
        back = PackedBatch.from_bytes(part.to_bytes(allow_pickle=True), allow_pickle=True)
        assert_same_batch(decompress(back), decompress(part))
        assert_same_batch(decompress(back, format="nested"), decompress(part, format="nested"))


def test_safetensors_reads_our_files(tmp_path: Path) -> None:
    safetensors = needs("safetensors")
    from safetensors.numpy import load

    for name in GOLDEN:
        seen = {title: value.tobytes() for title, value in load(golden(name)).items()}
        assert seen == {title: raw for title, _, raw in pieces(name).arrays}
        with safetensors.safe_open(make.file(name), "numpy") as opened:
            assert opened.metadata()["format"] == "maskpack"
            assert opened.metadata()["version"] == "4"


# -------------------------------------------------------------------- files


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


def used(packed: PackedBatch, buffers: list[Any], pickled: bytes) -> None:
    """Everything that reads the body; what is read may be wrong, or refused."""
    ways: list[Callable[[], Any]] = [
        lambda: decompress(packed),
        lambda: decompress(packed, format="nested"),
        lambda: decompress(packed.take([len(packed) - 1, 0])),
        lambda: [decompress(part) for part in packed.split(1)],
        lambda: [decompress(pickle.loads(pickle.dumps(part))) for part in packed.split(2)],
        lambda: decompress(pickle.loads(pickled, buffers=buffers)),
        lambda: [decompress(part, widths="trim") for part in pickle.loads(pickled, buffers=buffers).split(2)],
        lambda: PackedBatch.cat([packed, packed]),
        lambda: PackedBatch.from_bytes(packed.to_bytes()),
    ]
    for way in ways:
        with contextlib.suppress(Exception):
            way()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_mapped_file_that_is_written_to_leads_nowhere_else(name: str, tmp_path: Path) -> None:
    """All bytes behind the header may change once they were checked: those of the table, of layouts and of entries of
    all kinds. Nothing outside of them is read or written, which ends the process, or is found by a sanitizer."""
    file, data = tmp_path / "batch.maskpack", golden(name)
    begin = 8 + int.from_bytes(data[:8], "little")

    def run() -> None:
        rng = np.random.default_rng(0)
        for fill in (255, 127, 128, 1, 0, None, None, None):
            file.write_bytes(data)
            packed = PackedBatch.load(file, allow_pickle=name == "pickled")
            buffers: list[Any] = []
            pickled = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
            line = np.frombuffer(data, np.uint8)[begin:].copy()
            some = rng.random(line.size) < (1 if fill is not None else 0.05)
            line[some] = rng.integers(0, 256, int(some.sum())) if fill is None else fill
            with file.open("r+b") as opened:
                opened.seek(begin)
                opened.write(line.tobytes())
            used(packed, buffers, pickled)

    in_a_process(run, seconds=60)


def in_a_process(run: Callable[[], Any], seconds: int = 5, most: int = 64) -> None:
    """Lets it run in a fork that may use so many seconds of CPU, and may raise its peak by so many MiB."""

    def limited() -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, -1))
        run()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used.ru_maxrss
        assert grown < most << 10, f"{grown} KiB"

    process = multiprocessing.get_context("fork").Process(target=limited)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("folders", [True, False], ids=["", "folders cannot be synced"])
def test_save_syncs_the_file_before_it_takes_its_place_and_the_folder_after(
    folders: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "batch.maskpack"
    steps: list[tuple[str, Any]] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        held = os.fstat(handle)
        steps.append(("folder" if stat.S_ISDIR(held.st_mode) else "file", held.st_size))
        if steps[-1][0] == "folder" and not folders:
            raise OSError("not here")
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
    assert file.read_bytes() == packed.to_bytes()


def test_load_names_the_file(tmp_path: Path) -> None:
    for data in (b"", b"x", bytes(200), golden("rollout")[:-1]):
        file = tmp_path / "broken"
        file.write_bytes(data)
        with pytest.raises(WireFormatError, match=r"PackedBatch.load\('.*broken'\): "):
            PackedBatch.load(file)
    with pytest.raises(FileNotFoundError) as error:
        PackedBatch.load(tmp_path / "none")
    assert error.value.filename == str(tmp_path / "none")
    with pytest.raises(FileNotFoundError) as error:
        PackedBatch.from_bytes(golden("rollout")).save(tmp_path / "none" / "x")
    assert error.value.filename == str(tmp_path / "none" / "x")


class _Slow(io.BytesIO):
    """As files without a buffer may: it takes a part of what it is given, and says how much."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data)[:1000])


def test_files_that_are_open_and_urls(tmp_path: Path) -> None:
    packed = PackedBatch.from_bytes(golden("rollout"))
    stream = io.BytesIO(b"before")
    stream.seek(0, io.SEEK_END)
    packed.save(stream, checksum=True)
    assert stream.getvalue() == b"before" + packed.to_bytes(checksum=True)
    stream.seek(6)
    assert_same(decompress(PackedBatch.load(stream)), decompress(packed))
    for url in ("memory://folder/rollout.maskpack", f"file://{tmp_path}/rollout.maskpack"):
        packed.save(url)
        packed.save(url)  # takes the place of the old one
        assert fsspec.open(url).open().read() == packed.to_bytes()
        assert_same(decompress(PackedBatch.load(url)), decompress(packed))
    slow = _Slow()
    packed.save(slow)
    assert slow.getvalue() == packed.to_bytes()
    with open(tmp_path / "raw", "wb", buffering=0) as raw:
        packed.save(raw)
    assert (tmp_path / "raw").read_bytes() == packed.to_bytes()
    with pytest.raises(FileNotFoundError):
        PackedBatch.load("memory://folder/none")
    for call in (packed.save, PackedBatch.load):
        with pytest.raises(LayoutError, match="file is 'nothing://x'; expected a URL that fsspec can open"):
            call("nothing://x")
        with pytest.raises(LayoutError, match="expected a path, a URL, or an open binary file"):
            call(3)  # type: ignore[arg-type]
        with pytest.raises(LayoutError, match=r"file is a StringIO; expected .* an open binary file"):
            call(io.StringIO())  # type: ignore[arg-type]


def test_a_pipe_that_does_not_wait_loses_nothing_in_silence() -> None:
    packed = compress(TensorDict({"x": torch.randn(60_000, generator=torch.Generator().manual_seed(0))}, [60_000]))
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    waits = pytest.raises(BlockingIOError, match="expected one that waits")
    with open(ends[0], "rb"), open(ends[1], "wb", buffering=0) as full, waits:
        packed.save(full)


def test_keys_and_fields_without_decoding() -> None:
    mask = torch.tensor([[1, 1, 0]])
    sub = TensorDict({"score": torch.ones(1)}, [1])
    packed = compress(TensorDict({"attention_mask": mask, "sub": sub, "old": mask * 1.5}, [1]), registry={})
    assert packed.keys() == ("attention_mask", ("sub", "score"), "old")
    assert list(packed.fields) == list(packed.keys())
    assert packed.fields["old"].dtype is torch.float32
    assert packed.fields["old"].reason == "the registry does not know it"
    assert packed.fields["sub", "score"].reason is None


# -------------------------------------------------------------------- malformed containers


@pytest.mark.parametrize("name", ["no_rows", "zstd", "checksum"])
def test_truncated_at_every_length(name: str) -> None:
    data = golden(name)
    for length in range(len(data)):
        refused(data[:length])


def test_header_too_long() -> None:
    data = golden("rollout")
    odd = int.from_bytes(data[:8], "little") - 1
    refused(odd.to_bytes(8, "little") + data[8:], "a multiple of 8")
    for size in (2**24 + 64, 2**63, 2**64 - 8):
        refused(size.to_bytes(8, "little") + data[8:], f"a header of {size} bytes", "at most 16777216")
    long = b"{" + bytes(2**24 + 7)
    refused((2**24 + 8).to_bytes(8, "little") + long, "a header of 16777224 bytes in 16777232")
    for other in (b"", bytes(8), b"hello, this is text", b"PK" + bytes(30)):
        refused(other, f"data that begins with {other[:16]!r}; expected a packed batch")


def test_the_writer_refuses_a_header_that_is_too_long() -> None:
    batch = TensorDict({"x": torch.zeros(1)}, [1])
    batch.set("text", NonTensorData("x" * 2**24))
    with pytest.raises(WireFormatError, match=r"the header would take \d+ bytes; expected at most 16777216. Split"):
        compress(batch).to_bytes()


def header(change: Callable[[dict[str, Any]], Any], name: str = "rollout") -> bytes:
    return pieces(name).joined(header=change)


def metadata(**values: Any) -> bytes:
    return header(lambda whole: whole["__metadata__"].update(values))


def members(whole: dict[str, Any]) -> dict[str, Any]:
    """The members of the first array that is not empty."""
    return next(entry for name, entry in whole.items() if name != "__metadata__" and entry["shape"] != [0])


def moved(by: int) -> Callable[[dict[str, Any]], Any]:
    """The end of the first array, by a multiple of 8 bytes."""

    def change(whole: dict[str, Any]) -> None:
        entry = members(whole)
        entry["data_offsets"][1] += by
        entry["shape"][0] += by // fuzz_wire.SIZES[entry["dtype"]]

    return change


def renamed(pattern: str) -> Callable[[dict[str, Any]], Any]:
    """The last array, with its number in another form."""

    def change(whole: dict[str, Any]) -> None:
        title = list(whole)[-1]
        whole[pattern.format(title.partition(".")[0])] = whole.pop(title)

    return change


def with_members(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda whole: members(whole).update(values)


def with_end(end: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda whole: members(whole)["data_offsets"].__setitem__(1, end)


HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda whole: whole.pop("__metadata__"), "without our metadata"),
    (lambda whole: whole.update(__metadata__=[]), "without our metadata"),
    (lambda whole: whole["__metadata__"].update(format="pt"), 'expected "format": "maskpack"'),
    (lambda whole: whole["__metadata__"].update(more="x"), "perhaps crc32"),
    (lambda whole: whole["__metadata__"].update(manifest=None), "metadata"),
    (lambda whole: whole["__metadata__"].pop("manifest"), "metadata"),
    (moved(8), "expected it to begin at"),
    (moved(-8), "expected it to begin at"),
    (lambda whole: members(whole)["data_offsets"].__setitem__(0, 8), "begin at 0"),
    (lambda whole: members(whole)["data_offsets"].reverse(), "entry"),
    (with_members(more=1), "dtype, shape and data_offsets"),
    (lambda whole: whole.update({"99.x": [1]}), "an object with data_offsets"),
    (lambda whole: whole.update({"99.x": None}), "an object with data_offsets"),
    *((with_end(end), "") for end in (2**62, 2**63, 10**30, -1, 1.5, True, None, "8")),
    *((with_members(shape=shape), "entry") for shape in ([], [1, 1], [-1], [2**62], [1.0], [True], None, 3, ["1"])),
    *((with_members(dtype=dtype), "entry") for dtype in ("F32", "BOOL", "i64", "", None, 8, ["I64"], "I128")),
    *((renamed(name), "entr") for name in ("x", "", "-1.x", "01x.y", "1e3", "٣.x", "9999999999.x", "77.x")),
    *((renamed(name), "its own number") for name in ("{}", "0{}.x", "+{}.x", " {}.x", "{} .x", "{}x")),
    *(
        (lambda whole, v=v: whole["__metadata__"].update(version=v), f"version {v!r}")
        for v in ("3", "", 4, None, ["4"])
    ),
]


@pytest.mark.parametrize("number", range(len(HEADERS)))
def test_wrong_headers(number: int) -> None:
    change, message = HEADERS[number]
    refused(header(change), message)
    refused(header(change, "dtypes"), message)


def test_headers_that_are_no_json_object() -> None:
    for text in ("[]", "1", " {}", "\ufeff{}", "null"):
        refused(pieces().joined(text=lambda _, text=text: text), "begins with", "a JSON object")
    for text in ("{", "{]", '{"a":}', '{"a":1,}', "{'a':1}", '{"a":01}', '{"a":"\n"}', '{"a":1,"a":2}'):
        refused(pieces().joined(text=lambda _, text=text: text), "no JSON")
    data = golden("rollout")
    refused(data[:40] + b"\xff\xfe" + data[42:], "no JSON", "utf-8")
    refused(data + b"\0", "1 bytes behind the last entry", "none")
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
    refused(pieces().joined(text=lambda text: re.sub(r'"shape": \[\d+\]', f'"shape": {nest}', text, count=1)))


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


def nowhere(manifest: Any) -> None:
    """A sub-batch whose dims are not those of its fields."""
    manifest["fields"].append({"path": ["sub"], "kind": "node", "node": {"dims": [4], "device": None}})
    manifest["fields"].append({**manifest["fields"][0], "path": ["sub", "x"]})


MANIFESTS: list[tuple[Callable[[Any], Any], str]] = [
    *((lambda m, name=name: m.pop(name), "") for name in ("rows", "root", "axes", "layouts", "fields")),
    *((lambda m, rows=rows: m.update(rows=rows), "") for rows in (-1, 2**31, 2**62, 2, 4, 3.0, True, None, "3")),
    (lambda m: m.update(root=None), "node"),
    (lambda m: m["root"].pop("dims"), "node"),
    (lambda m: m["root"].update(dims=[-1]), "node"),
    (lambda m: m["root"].update(dims=[1.5]), "node"),
    (lambda m: m["root"].update(device="tpu"), "node"),
    (lambda m: m["root"].update(dims=[2]), "as the node it lies in"),
    (lambda m: m["root"].update(dims=[2**31 - 1] * 3), "as the node it lies in"),
    (nowhere, "as the node it lies in"),
    (lambda m: m.update(axes=["nowhere"]), "axes"),
    (lambda m: m.update(axes=m["axes"] + m["axes"][:1]), "axes"),
    (lambda m: m.update(axes=[[]]), "axes"),
    (lambda m: m.update(axes=[]), "or an axis"),
]


@pytest.mark.parametrize("number", range(len(MANIFESTS)))
def test_wrong_manifests(number: int) -> None:
    change, message = MANIFESTS[number]
    refused(manifest(change), message)


WRONG_MEMBERS: dict[str, list[Any]] = {
    "kind": ["sparse", None],
    "dtype": ["int128", "int32"],  # the other one has another size
    "device": ["tpu:0", "cuda:200", "cuda:07"],
    "shape": [[2], [-1, -1], [2**30, 2**30, 0], [1] * 29],
    "layout": ["nowhere", "sequence", None],
    "dim": [0, 2],
    "hints": [["x"], ["concat:a,b,c"], "rle"],
    "reason": [5],
    "pad": [0],
    "path": [[], ["prompts"], ["a", "b"], ["_maskpack"], ["\ud800"], [1]],
    "encoding": [None, {"kind": "pickle"}],
}
"""Of the field "responses"."""


@pytest.mark.parametrize("member", WRONG_MEMBERS)
def test_wrong_fields(member: str) -> None:
    for value in WRONG_MEMBERS[member]:
        refused(field("responses", **{member: value}))


# -------------------------------------------------------------------- codec


def squeezed(change: Callable[[Any], Any]) -> bytes:
    return manifest(lambda m: change(m["codec"]), "zstd")


def test_codecs() -> None:
    refused(squeezed(lambda codec: codec.update(name="lz4")), "codec 'lz4'", "one of zstd")
    refused(squeezed(lambda codec: codec["arrays"].pop()), "not one for each")
    refused(manifest(lambda m: m.update(codec=[]), "zstd"), '"name"')
    refused(manifest(lambda m: m.pop("codec"), "zstd"))


def test_the_writer_pays_for_what_shrinks_much() -> None:
    """A message stands for at most 256 times its bytes; what zstd makes smaller than that is padded."""
    needs("zstandard")
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
    zstandard = needs("zstandard")
    number = next(n for n, record in enumerate(pieces("zstd").manifest["codec"]["arrays"]) if record is not None)
    good = pieces("zstd").array(number)[2]
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(800))
    others = [zstandard.compress(bytes(size)) for size in (0, 8, 1 << 20)]
    for frame in (
        b"\0",
        good[:-1],
        good[:9],
        good + good,
        good + b"\0",
        skippable + good,
        streamed,
        bytes(99),
        *others,
    ):
        parts = pieces("zstd")
        parts.array(number)[1:] = ["U8", frame]
        refused(parts.joined(), "zstd frame")


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


def test_pickles_are_read_only_where_allowed(tmp_path: Path) -> None:
    data = compress(trapped()).to_bytes(allow_pickle=True)
    Trap.sprung = False
    refused(data, 'field "trap" is a pickle, which runs code when it is read', "allow_pickle=True")
    assert not Trap.sprung
    PackedBatch.from_bytes(data, allow_pickle=True)
    assert Trap.sprung
    compress(trapped()).save(tmp_path / "file", allow_pickle=True)
    Trap.sprung = False
    with pytest.raises(WireFormatError, match="is a pickle"):
        PackedBatch.load(tmp_path / "file")
    assert not Trap.sprung


def test_the_writer_names_the_field_that_json_cannot_say() -> None:
    nested = TensorDict({"inner": TensorDict({}, [1]).set("odd", NonTensorData([b"x"]))}, [1])
    with pytest.raises(MaskpackError, match=r'field "inner/odd" holds a bytes; expected plain data.*allow_pickle=True'):
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


def test_elements_of_many_dims() -> None:
    batch = TensorDict({"x": torch.zeros(1, *[1] * 28)}, [1])
    assert_same(decompress(PackedBatch.from_bytes(compress(batch).to_bytes())), batch)
    deep = TensorDict({"x": torch.zeros(1, *[1] * 29)}, [1])
    with pytest.raises(MaskpackError, match='field "x" has elements of 29 dims; expected at most 28'):
        compress(deep).to_bytes()


WRONG_OBJECTS: dict[str, list[Any]] = {
    "tuple": ["x"],
    "dict": [
        *(["ab"], [[1, 2, 3]], [[1, 2]], [[["a"], 2]]),
        *([["\ud800", 2]], [["a", 2], ["a", 3]]),  # half a surrogate pair, a key twice
    ],
    "float": [
        *("0000000000000000", "inf", "000000", 1),  # a finite one is a number
        *("000000000000F07F", "00 00 00 00 00 00 f0 7f"),
    ],
    "int": ["0x1", "0XFFFFFFFFFFFFFFFFFFFF", "many"],  # a small one is a number
    "scalar": [["int128", "00"], ["str", "00"], ["object", "0000000000000000"], ["int8", "0000"], ["int8"]],
    "array": [[0, "bfloat16", [2]], [0, "object", [2]]],
    "tensor": [
        *([10**6, "uint8", [2]], [0, "float128", [2]], [0, "uint8", [3]], [0, "int16", [1]], [0, "uint8", [-2]]),
        *([0, "uint8", [0, 2**62]], [0, "uint8", [1] * 29], [0, "uint8"]),
    ],
    "set": [[1]],
}


@pytest.mark.parametrize("kind", WRONG_OBJECTS)
def test_wrong_objects(kind: str) -> None:
    for value in WRONG_OBJECTS[kind]:
        refused(field("temperature", json={kind: value}))
        refused(field("temperature", json=[{kind: value}]))


@pytest.mark.parametrize("value", [{"tuple": [], "dict": []}, {}, "\ud800"], ids=repr)
def test_objects_of_no_kind(value: Any) -> None:
    refused(field("temperature", json=value))
    refused(field("temperature", json=[value]))


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


def test_the_limit_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "batch.maskpack"
    file.write_bytes(golden("rollout"))
    size = sum(tensor.numel() * tensor.element_size() for tensor in make.rollout().batch.values(True, True))
    for mapped in (True, False):
        assert_same(decompress(PackedBatch.load(file, mmap=mapped, max_bytes=1 << 20)), make.rollout().batch)
        assert_same(decompress(PackedBatch.load(file, mmap=mapped, max_bytes=None)), make.rollout().batch)
        with pytest.raises(WireFormatError, match=r"PackedBatch.load\(.*max_bytes, or None, if you trust"):
            PackedBatch.load(file, mmap=mapped, max_bytes=size - 1)


# -------------------------------------------------------------------- what is read can be trusted


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


# -------------------------------------------------------------------- messages that are put together from nothing


def test_the_limit_of_decompress_counts_what_it_would_give() -> None:
    """Whole fields, in the form that is asked for, in the widths and rows that they have now."""
    mask = torch.arange(100).expand(4, 100) < 2
    batch = TensorDict({"m": mask, "a": mask.double(), "b": mask.long()}, [4])
    packed = compress(batch, registry={name: MaskNestingSpec("m") for name in ("m", "a", "b")})
    whole, one = 4 * 100 * (1 + 8 + 8), 4 * 100 * 8
    for some, names, form, most in (
        (packed, (), {}, whole),
        (packed, ("a",), {}, one),
        (packed[:1], (), {"device": "cpu"}, whole // 4),
        (packed.take([0] * 1000), (), {}, 250 * whole),
        (packed, (), {"widths": "trim"}, whole // 50),
        (packed, (), {"format": "nested"}, whole // 50 + 4 * (13 + 8 * 3 + 2 + 9 + 9)),
    ):
        decompress(some, *names, max_bytes=most, **form)
        with pytest.raises(LayoutError, match=r"decompress: these fields take (\d+) bytes .*pass max_bytes=\1\."):
            decompress(some, *names, max_bytes=most - 1, **form)


def test_the_limit_of_decompress_counts_signs_of_zeros() -> None:
    mask = torch.arange(4000).expand(50, 4000) < 1
    zeros = torch.where(torch.arange(4000) % 2 == 0, -0.0, 0.0)
    batch = TensorDict({"m": mask, "a": torch.where(mask, 1.0, zeros)}, [50])
    packed = compress(batch, registry={"m": MaskNestingSpec("m"), "a": MaskNestingSpec("m", ZERO)})
    held = list(decompress(packed, format="nested").values(include_nested=True, leaves_only=True))
    tensors = [x.values() if x.is_nested else x for x in held if isinstance(x, torch.Tensor)]
    assert sum(x.nbytes for x in tensors) > 2 * 50 * 500  # a mask, and signs
    with pytest.raises(LayoutError, match="decompress: these fields take"):
        decompress(packed, format="nested", max_bytes=sum(x.nbytes for x in tensors))
    decompress(packed, format="nested", max_bytes=2 * sum(x.nbytes for x in tensors))


def zeros(made: Made, rows: int = 1, **more: int) -> int:
    """An entry of words 0, in few bytes; one for any number of rows."""
    return made.entry("rle", made.put([1]), NONE, made.put([0]), **more)


def test_claims_are_added_up_before_memory_is_taken() -> None:
    wide, long, deep = Made(), Made(2**20), Made()
    wide.layout(2**31 - 1, 0, 0, 0, wide.put([0]), wide.put([1]), wide.put([1]))
    wide.field(zeros(wide, layout=0), "padded", pads=wide.records([0, 0]))
    wide.manifest["axes"] = ["l0"]
    for _ in range(8):
        long.field(zeros(long))
    deep.field(zeros(deep, items=2**30))
    for made, size in ((wide, 2**31 - 1), (long, 8 << 20), (deep, 1 << 30)):
        data = made.joined()
        message = " bytes in memory, padded; expected at most"
        _, peak = with_peak(refused, data, message, "max_bytes", max_bytes=size - 1)
        assert peak < 2 * len(data) + (1 << 20)
        packed = PackedBatch.from_bytes(data, max_bytes=size + (1 << 20))
        with pytest.raises(LayoutError, match=r"decompress: these fields take \d+ bytes padded; expected at most"):
            decompress(packed, max_bytes=size - 1)


def test_layouts_take_as_many_bytes_as_their_message_and_a_little_more() -> None:
    mask, parts, rows = Made(), Made(), Made(2**20)
    mask.layout(1 << 19, 1, 0, 0, mask.put(b"\x55" * (1 << 16)))
    parts.layout(4000, 1, 0, 0, parts.put(b"\x55" * 500))
    for _ in range(100):
        parts.layout(4000, 2)
    rows.layout(0, 1)
    for made in (mask, parts, rows):
        data = made.joined()
        _, peak = with_peak(refused, data, "spans that rise within its width, and layouts that take at most")
        assert peak < 2 * len(data) + (1 << 20)
    batch = TensorDict({"m": torch.arange(1 << 18).view(2, -1) % 2}, [2])
    assert_same(
        decompress(PackedBatch.from_bytes(compress(batch, registry={"m": MaskNestingSpec("m")}).to_bytes())), batch
    )


def test_spans_of_a_row_have_a_gap() -> None:
    for second in (1, 2, 3):
        made = Made()
        made.layout(5, 0, 0, 0, made.put([0, second]), made.put([2, 1]), made.put([2]))
        made.manifest["axes"] = ["l0"]
        if second > 2:
            assert PackedBatch.from_bytes(made.joined()).layouts["l0"].to_mask().tolist() == [[1, 1, 0, 1, 0]]
        else:
            refused(made.joined(), "spans that rise within its width")


# -------------------------------------------------------------------- tables that a reader must refuse


CANNOT = "an entry that cannot be decoded"


def test_tables_that_lead_outside_their_arrays() -> None:
    def dictionary(index: Iterable[int] = (0, 0), stored: Iterable[int] = (3,)) -> Made:
        made = of_rows(3, 3)
        made.entry("plain", made.put([1, 2, 3]), layout=0)
        made.field(made.entry("dictionary", made.put(index), made.put(stored), layout=0, first=0))
        return made

    PackedBatch.from_bytes(dictionary().joined())
    refused(dictionary(index=(1, 1)).joined(), 'field "f0"', CANNOT)
    refused(dictionary(stored=(2,)).joined(), CANNOT)
    shared = dictionary()
    shared.field(0)
    refused(shared.joined())
    twice = dictionary()
    twice.field(twice.entry("dictionary", twice.put([0, 0]), twice.put([3]), layout=0, first=0))
    refused(twice.joined(), CANNOT)
    idle = dictionary()
    idle.entry("plain", (2**40, 8, 1))
    refused(idle.joined(), "an entry of the table that no field needs")
    huge = of_rows(3, 3)
    huge.entry("rle", huge.put([1]), NONE, huge.put([0]), layout=0)
    huge.field(huge.entry("dictionary", huge.put([0, 2]), huge.put([3, 2**31 - 1, 3], 4), layout=0, first=0))
    refused(huge.joined(), CANNOT, max_bytes=1 << 20)


def test_indices_of_dictionaries_do_not_wrap() -> None:
    def dictionary(number: int, *index: int) -> bytes:
        made = of_rows(3, 3)
        made.entry("plain", made.put([1, 2, 3, 4, 5, 6]), layout=0)
        places = made.put(index, 8), made.put([3, 3])
        made.field(made.entry("dictionary", *places, layout=0, first=0, number=number))
        return made.joined()

    most = 2**63 - 1
    packed = PackedBatch.from_bytes(dictionary(most - 1, most - 1, most))
    for rows in (slice(0, 2), slice(1, 2), slice(0, 1), slice(0, 0)):
        part = PackedBatch.from_bytes(packed[rows].to_bytes())
        assert decompress(part)["f0"].values().tolist() == [1, 2, 3, 4, 5, 6][3 * rows.start : 3 * rows.stop]
    refused(dictionary(most, most, most + 1), CANNOT)
    refused(dictionary(1, 1, 2**64 - 1), CANNOT)


def test_copies_of_words_that_are_not_stored() -> None:
    def pieces(
        copies: Iterable[int] = (1, 2, 1, 0),
        each: Iterable[int] = (0, 1),
        stored: Iterable[int] = (3, 1),
        number: int = 0,
    ) -> bytes:
        made = of_rows(3, 3)
        made.entry("plain", made.put(range(1, 1 + sum(stored))), layout=0)
        places = made.put(each), made.put(stored), made.put(copies)
        made.field(made.entry("pieces", *places, layout=0, first=0, number=number))
        return made.joined()

    packed = PackedBatch.from_bytes(pieces())
    for rows in (slice(0, 2), slice(1, 2), slice(0, 1), slice(0, 0)):
        for part in (packed[rows], PackedBatch.from_bytes(packed[rows].to_bytes()), packed[rows].own()):
            assert decompress(part)["f0"].values().tolist() == [1, 2, 3, 4, 1, 2][3 * rows.start : 3 * rows.stop]
    one_more = pieces((1, 2, 2, 0), (0, 1), (2, 3, 1), 1)  # a row that was stored before these
    assert decompress(PackedBatch.from_bytes(one_more))["f0"].values().tolist() == [3, 4, 5, 6, 1, 2]
    for copy in ((2, 2, 1, 0), (1, 2, 2, 0), (1, 2, 1, 2), (1, 0, 1, 0), (1, 3, 1, 0), (1, 2, 1), (1, 2, 255, 0)):
        refused(pieces(copy), 'field "f0"', CANNOT)
    refused(pieces((1, 2, 1, 0) * 2), CANNOT)
    refused(pieces(each=(1, 1)), CANNOT)
    refused(pieces(stored=(3, 2)), CANNOT)
    refused(pieces(stored=(3, 1, 1)), CANNOT)
    refused(pieces(number=-1), CANNOT)
    refused(pieces(number=1), CANNOT)
    for number in (1 << 20, 2**63 - 1):
        idle = of_rows(1)
        words = zeros(idle, layout=0)
        copy = idle.put([0, 1, number, 0], 8)
        idle.field(idle.entry("pieces", idle.put([1]), idle.put([1]), copy, layout=0, first=words, number=number))
        refused(idle.joined(), CANNOT, max_bytes=1 << 20)


def test_a_stored_row_that_nothing_uses_counts_in_its_bytes() -> None:
    for elements, fits in ((1 << 14, True), (1 << 16, False)):
        made = of_rows(1, 1)
        stored = made.entry("rle", made.put([1]), NONE, made.put([0]), layout=0, size=8)
        rows = made.put([1, 2]), made.put([elements, 1, 1], 4)
        made.field(made.entry("dictionary", *rows, layout=0, size=8, first=stored), dtype="int64")
        if fits:
            packed = PackedBatch.from_bytes(made.joined(), max_bytes=1 << 18)
            assert decompress(packed)["f0"].values().tolist() == [0, 0]
        else:
            refused(made.joined(), CANNOT, max_bytes=1 << 18)


@pytest.mark.parametrize("kind", ["rle", "delta"])
def test_every_stretch_has_a_word(kind: str) -> None:
    for lengths in ((3, 1), (4, 1), (1, 4), (0, 1), (2, 3)):
        made = of_rows(4, 4)
        made.field(made.entry(kind, made.put([2, 2]), made.put(lengths), made.put([5, 6, 7, 8]), layout=0))
        if max(lengths) < 4 and min(lengths) > 0:
            PackedBatch.from_bytes(made.joined())
        else:
            refused(made.joined(), CANNOT)


@pytest.mark.parametrize(("head", "tail", "fits"), [(1, 1, True), (2, 1, False), (1, 2, False)])
def test_both_parts_of_joined_bools_are_bools(head: int, tail: int, fits: bool) -> None:
    made = of_rows(2)
    made.layout(4, 0, 0, 0, made.put([0]), made.put([4]), made.put([1]))
    parts = [made.entry("plain", made.put([0, word]), layout=0) for word in (head, tail)]
    for part in parts:
        made.field(part)
    made.field(made.entry("concat", layout=1, first=parts[0], second=parts[1]), dtype="bool")
    if fits:
        PackedBatch.from_bytes(made.joined())
    else:
        refused(made.joined(), 'field "f2"')


def test_rows_of_pieces_that_take_no_bytes_count_by_what_decoding_them_takes() -> None:
    made = Made(1 << 16)
    stored = made.entry("rle", made.put([1]), NONE, made.put([7]))
    made.field(made.entry("pieces", made.put([0]), made.put([1]), first=stored))
    data = made.joined()
    assert (decompress(PackedBatch.from_bytes(data, max_bytes=1 << 21))["f0"] == 7).all()
    refused(data, CANNOT, max_bytes=1 << 19)


def test_stretches_of_stored_words_as_another_writer_may_store_them() -> None:
    """0 1 2 0, 0 0, 3 0 4 5, also beside another field; and all that a reader refuses of these."""

    def sparse(
        zeros: tuple[int, ...] = (1, 0, 1),
        stored: tuple[int, ...] = (2, 0, 3),
        lengths: tuple[int, ...] = (2, 1, 2),
        items: int = 1,
        size: int = 1,
        beside: dict[str, int] | None = None,
    ) -> bytes:
        made = of_rows(4, 2, 4)
        numbers = made.put(range(1, 1 + sum(stored * 3 if len(stored) == 1 else stored)), size)
        inner = made.entry("plain", numbers, layout=0, items=items, size=size)
        if beside is not None:
            rising = made.put([2]), made.put([1]), made.put([10, 1, 20, 1, 250, 1])
            near = made.entry("delta", *rising, **{"layout": 0} | beside)
        places = made.put(zeros), made.put(stored), made.put(lengths)
        made.field(made.entry("sparse", *places, layout=0, first=inner, second=-1 if beside is None else near))
        return made.joined()

    row_ends = 0, 4, 6, 10
    for data, want in (
        (sparse(), [0, 1, 2, 0, 0, 0, 3, 0, 4, 5]),
        (sparse(beside={}), [0, 12, 14, 0, 0, 0, 253, 0, 0, 2]),
        (sparse((1,), (2, 0, 2), (1,)), [0, 1, 0, 2, 0, 0, 0, 3, 0, 4]),
        (sparse((0,), (1,), (1,)), [1, 0, 0, 0, 2, 0, 3, 0, 0, 0]),
        (sparse((), (0,), ()), [0] * 10),
    ):
        packed = PackedBatch.from_bytes(data)
        for rows in (slice(0, 3), slice(1, 3), slice(0, 1), slice(1, 2), slice(0, 0)):
            for part in (packed[rows], PackedBatch.from_bytes(packed[rows].to_bytes()), packed[rows].own()):
                own = want[row_ends[rows.start] : row_ends[rows.stop]]
                assert decompress(part)["f0"].values().tolist() == own
    for zeros in ((1, 0, 2), (2, 1, 1), (3, 0, 1), (1, 0), (1, 0, 1, 0), (), (255, 0, 1), (2,)):
        refused(sparse(zeros), 'field "f0"', CANNOT)
    for stored in ((2, 0, 4), (2, 1, 3), (1, 0, 3), (2, 0), (2, 0, 3, 0), (0, 0, 3), (5, 0, 0), (0,)):
        refused(sparse(stored=stored), CANNOT)
    for lengths in ((2, 1, 1), (2, 0, 3), (3, 1, 2), (2, 1), (2, 1, 2, 1), (), (2,), (0,), (1,)):
        refused(sparse(lengths=lengths), CANNOT)
    refused(sparse((1,), (2, 0, 3), (1,)), CANNOT)
    for wrong in (
        {"items": 2},
        {"size": 2},
        {"beside": {"layout": -1}},
        {"beside": {"items": 2}},
        {"beside": {"size": 2}},
    ):
        refused(sparse(**wrong), CANNOT)
    long = Made(1)
    stored = long.entry("rle", long.put([1]), NONE, long.put([1]))
    half = long.put([1 << 33], 8)
    long.field(
        long.entry("sparse", long.put([1]), half, long.put([1]), items=1 << 34, first=stored), shape=[1 << 10, 1 << 24]
    )
    in_a_process(lambda: PackedBatch.from_bytes(long.joined()), 6, 200)


def under_mask(rows: int, *records: Sequence[int], dtype: str = "float16", items: int = 1) -> Pieces:
    """Rows of 4 positions, the second and the third of which are valid: the words 1 and 2, 3 and 4, ...; of bools 1."""
    made, size, pair = Made(rows), min(getattr(torch, dtype).itemsize, 8), 1 + (dtype == "complex128")
    made.layout(4, 1, 0, 0, made.put([0b0110] * rows))
    made.manifest["axes"] = ["l0"]
    words = [1 if dtype == "bool" else 1 + word for word in range(2 * rows * items * pair)]
    entry = made.entry("plain", made.put(words, size), layout=0, size=size, items=items * pair)
    pads = made.records(*records) if records else NONE
    made.field(entry, "padded", dtype, pads, shape=[items] if items > 1 else [])
    return made.pieces()


def padded_words(parts: Pieces) -> list[list[int]]:
    return decompress(PackedBatch.from_bytes(parts.joined()))["f0"].view(torch.int16).tolist()


@pytest.mark.parametrize("rows", range(4))
def test_records_of_pads(rows: int) -> None:
    lines = [(2 * row + 1, 2 * row + 2) for row in range(rows)]
    ones = [[15360, first, last, 15360] for first, last in lines]
    for record, want in (
        ([0, 0, 60], ones),
        ([1, 0, 0], [[first, first, last, last] for first, last in lines]),
        ([0, 0, 60, 0b10000000], [[-(2**15), first, last, 15360] for first, last in lines]),
        *(([2, 0, 0], None), ([0, 0], None), ([0, 0, 0, 0, 0], None)),
    ):
        for count in range(5):
            parts = under_mask(rows, *[record] * count)
            if (want is not None and count in (1, rows)) or rows == count == 0:
                assert padded_words(parts) == (want or [])
            else:
                refused(parts.joined(), 'field "f0"', f"1 or {rows} of" if want is not None else "")
    parts = under_mask(rows, [9, 0, 0, 60])  # from any byte on
    at = parts.table[-3]
    parts.table = [*parts.table[:-3], at + 1, 3, 1]
    assert padded_words(parts) == ones


def test_wrong_records() -> None:
    good = under_mask(2, [0, 0, 60], [1, 0, 0])
    assert padded_words(good) == [[15360, 1, 2, 15360], [3, 3, 4, 4]]
    at, end = good.table[-3], len(good.array(1)[2])
    for place in (
        *((begin, 3, 2) for begin in (-1, -8, end - 5, end, 2**62, -(2**63))),
        *((at, size, 2) for size in (-3, 0, 1, 2, 5, 2**31, 2**62, 2**63 - 1)),
        *((at, 3, count) for count in (-2, 0, 3, 2**62, -(2**63))),
    ):
        parts = under_mask(2, [0, 0, 60], [1, 0, 0])
        parts.table = [*parts.table[:-3], *place]
        refused(parts.joined(), 'field "f0"')
    for record in ([0, 2], [0, 255], [1, 1], [2, 0]):
        refused(under_mask(2, record, dtype="bool").joined(), "a word, EDGE and zeros, bools of 0 and 1 alone")
    for record in ([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 16], [0, 0, 0, 8], [0, 0, 0, 1]):
        refused(under_mask(2, [0, 0, 60, 0], record).joined(), "a word, EDGE and zeros")
    assert padded_words(under_mask(1, [0, 0, 0, 0b01100000])) == [[0, 1, 2, 0]]  # signs of tokens mean nothing
    for kind in ("flat", "jagged", "dense"):
        made = Made(1, None if kind == "flat" else ())
        made.layout(1, 1, 0, 0, made.put([1]))
        made.field(made.entry("plain", made.put([7]), layout=-1 if kind == "dense" else 0), kind)
        PackedBatch.from_bytes(made.joined())
        record = made.records([0, 7])
        for place in (record, (-1, 1, 0), (len(made.body) + 1, 1, 0), (0, -1, 0), (0, 2**31, 0)):
            made.pads = [*place]
            refused(made.joined(), 'field "f0"', "records inside the body" if place[2] == 0 else "and only there")


@pytest.mark.parametrize("dtype", words.DTYPES)
def test_signs_are_those_of_numbers_that_have_them(dtype: str) -> None:
    size = getattr(torch, dtype).itemsize
    signed = dtype in ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
    for items, signs in ((1, 0), (1, 1), (2, 0), (2, 1), (1, 2)):
        data = under_mask(2, bytes(1 + size) + b"\x90" * signs, dtype=dtype, items=items).joined()
        if signs and not (signed and items == signs == 1):
            refused(data, 'field "f0"', "beside padded fields, and only there")
        else:
            x = decompress(PackedBatch.from_bytes(data))["f0"].view(torch.uint8).view(2, 4, -1)
            for row, position in ((0, 0), (0, 3), (1, 0), (1, 3)):
                assert x[row, position].tolist()[:-1] == [0] * (x.shape[2] - 1)
                assert x[row, position, -1] == (128 if signs else 0)


def test_names_of_dims() -> None:
    def named(change: Callable[[Any], Any]) -> bytes:
        return manifest(change, "zeros")

    for names in ([], ["rows", "x"], [None], [""], "r", [1], ["\udc00"]):
        refused(named(lambda m, names=names: m["root"].update(names=names)), "names of dims")
    refused(named(lambda m: m["root"].update(dims=[1], names=["rows", "rows"])), "names of dims")
    refused(named(lambda m: m["root"].update(dims=None)))


MANY_ROWS: dict[str, Callable[[Made], int]] = {
    "rle": zeros,
    "delta": lambda m: m.entry("delta", m.put([2]), m.put([1]), m.put([0]), items=2),
    "sparse": lambda m: m.entry("sparse", NONE, m.put([0]), first=m.entry("plain", NONE)),
    "blocks": lambda m: m.entry("blocks", (0, 1, 0), (0, 1, 0), (0, 4, 0), items=0),
    "dictionary": lambda m: m.entry("dictionary", m.put([0]), m.put([1]), first=m.entry("plain", m.put([1]))),
    "pieces": lambda m: m.entry("pieces", m.put([0]), m.put([1]), first=zeros(m)),
    "columns": lambda m: m.entry("columns", items=2, first=[zeros(m), zeros(m)][0], number=2),
    "concat": lambda m: m.entry("concat", items=2, first=zeros(m), second=zeros(m)),
}


def idle_entries() -> Made:
    made = Made(1 << 20)
    for _ in range(4000):
        zeros(made)
    made.field(zeros(made))
    return made


def many_layouts_and_fields() -> Made:
    made = Made(0)
    for _ in range(20_000):
        made.layout(1)
    entry = made.entry("plain", layout=19_999)
    for _ in range(30_000):
        made.field(entry, "flat")
    made.body = bytes(20_000 * 16)
    return made


def one_long_row(**form: Any) -> Made:
    made = Made(1)
    stretches = made.put([1 << 34], 8), made.put([1]), made.put([0])
    made.field(made.entry("delta", *stretches, items=1 << 34), **form)
    return made


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        (idle_entries, False),
        (lambda: one_long_row(dtype="bool", shape=[]), False),  # more words than the field has
        (lambda: one_long_row(shape=[1 << 10, 1 << 24]), True),
        (many_layouts_and_fields, True),
    ],
)
def test_what_a_message_says_is_not_looked_at_one_by_one(made: Callable[[], Made], fits: bool) -> None:
    data = made().joined()
    in_a_process(lambda: PackedBatch.from_bytes(data) if fits else refused(data), 6, 200)


@pytest.mark.parametrize("kind", MANY_ROWS)
def test_rows_of_one_length_are_checked_at_once(kind: str) -> None:
    made = Made(2**31 - 1)
    for _ in range(8):
        made.field(MANY_ROWS[kind](made), dtype="bool")
    in_a_process(lambda: PackedBatch.from_bytes(made.joined()), 2)


def test_rows_that_are_not_taken_are_not_decoded() -> None:
    made = Made(1 << 20)
    made.field(made.entry("delta", made.put([2]), made.put([1]), made.put([5, 1] * (1 << 20)), items=4096))
    row = (5 + np.arange(4096)) % 256

    def run() -> None:
        packed = PackedBatch.from_bytes(made.joined())
        for rows in ([0, 5], [2**20 - 1, 7, 7], slice(0, 9, 4)):
            taken = decompress(packed.take(rows))["f0"].numpy()
            assert (taken == row).all()

    in_a_process(run)


def test_stored_rows_of_a_dictionary_that_no_row_uses_are_not_decoded() -> None:
    made = Made(2)
    stored = made.entry("rle", made.put([1]), NONE, made.put([3, 4, 5]))
    one = made.entry("dictionary", made.put([2, 0]), made.put([1, 1 << 26, 1], 8), first=stored)
    made.field(made.entry("concat", items=2, first=one, second=one))

    def run() -> None:
        packed = PackedBatch.from_bytes(made.joined(), max_bytes=80 << 20)
        for ways in (packed, *packed.split(1), packed.take([1, 0]).take([1, 0])):
            assert decompress(ways, max_bytes=80 << 20)["f0"].tolist() in ([[5, 5], [3, 3]], [[5, 5]], [[3, 3]])

    in_a_process(run)


def test_dictionaries_store_no_more_rows_than_they_have_rows_and_numbers() -> None:
    """Bounds of stored rows take memory that nobody claims."""
    for last in (3, 4, 1 << 27):
        made = Made(2)
        made.layout(1, 0, 0, 0, NONE, NONE, made.put([0]))
        stored = made.entry("plain", layout=0)
        made.field(made.entry("dictionary", made.put([0, last], 8), made.put([0]), layout=0, first=stored))
        data = made.joined()
        in_a_process(lambda data=data: refused(data, 'field "f0"', CANNOT))


def test_a_dictionary_is_split_row_by_row() -> None:
    n = 100_000
    made = Made(n)
    stored = made.entry("plain", made.put(range(n), 4), size=4)
    made.field(made.entry("dictionary", made.put(range(n), 4), made.put([1]), size=4, first=stored), dtype="int32")
    packed = PackedBatch.from_bytes(made.joined())
    table = packed.table

    def run() -> None:
        line = table.layout_rows, table.body, n, table.marks, np.arange(n + 1)
        entries, _ = native.split(table.entries, table.stored, *line)
        assert (entries["number"][:, 1] == np.arange(n)).all()

    in_a_process(run, 3)
    for part, row in zip(packed[n - 3 :].split(1), range(n - 3, n), strict=True):
        assert decompress(part)["f0"].tolist() == [row]


def test_a_field_claims_a_byte_for_each_row() -> None:
    made = Made(1 << 15)
    made.layout(1, 0, 0, 0, NONE, NONE, made.put([0]))
    for _ in range(4):
        made.field(made.entry("rle", made.put([0]), layout=0))
    claimed = 4 * 2**15 + 16 * (2**15 + 1)
    PackedBatch.from_bytes(made.joined(), max_bytes=claimed)
    refused(made.joined(), "bytes in memory, padded", max_bytes=claimed - 1)


def test_coded_blocks_as_another_writer_may_store_them() -> None:
    def made(number: int = fuzz_wire.WIDTHS, **places: Callable[[Made], Any]) -> bytes:
        out = of_rows(4, 2, 4)
        a, b, c = fuzz_wire.coded(out)
        a, c = (change(out) if (change := places.get(name)) else own for name, own in (("a", a), ("c", c)))
        out.field(out.entry("blocks", a, b, c, layout=0, number=number))
        return out.joined()

    rows = [[1, 3, 6, 13], [15, 2], [3, 3, 3, 3]]
    assert [row.tolist() for row in decompress(PackedBatch.from_bytes(made()))["f0"].unbind()] == rows
    wide, short = [0b11100100, 0b101_10_1, 0b0011, 0b110, 0b11], [0b11100100, 0b101_10_1, 0b0011]
    for data in (
        made(0),
        made(29 << 24),
        made(1 << 32 | fuzz_wire.WIDTHS),
        made(-1),
        *(made(a=lambda m, said=said: m.put([64, said, 64])) for said in (65, 96, 192, 33, 127)),
        made(c=lambda m: m.put(wide, 4)),
        *(made(c=lambda m, n=n: m.put(short[:n], 4)) for n in range(4)),
        made(c=lambda m: m.put([*wide[:4], 0, 0], 4)),
    ):
        refused(data, 'field "f0"', CANNOT)


def test_hints_that_name_each_other_in_a_long_chain() -> None:
    made = of_rows(1, 1, 1)
    entry = made.entry("plain", made.put([1, 2, 3]), layout=0)
    for at in range(3000):
        made.field(entry, hints=[f"near:f{at + 1}"])
    packed = PackedBatch.from_bytes(made.joined())
    assert decompress(packed.take([2, 0]), "f0", "f2999")["f0"].values().tolist() == [3, 1]
    assert decompress(PackedBatch.cat([packed, packed]), "f7")["f7"].values().tolist() == [1, 2, 3, 1, 2, 3]


def chain(steps: int) -> Made:
    made = of_rows(70, 1)
    entry = made.entry("plain", made.put(range(71)), layout=0)
    made.field(entry)
    for _ in range(steps):
        places = made.put([129, 129]), made.put([0, 0]), made.put([0] * 9, 4)
        entry = made.entry("blocks", *places, layout=0, second=entry)
        made.field(entry)
    return made


def test_chains_of_near_fields_have_an_end() -> None:
    back = decompress(PackedBatch.from_bytes(chain(8).joined()))
    assert back["f8"].values().tolist() == list(range(71))
    refused(chain(9).joined(), 'field "f9"', CANNOT)


def test_no_entry_refers_to_a_concat() -> None:
    """Entries that lead on to two others each would be a tree, of a number of entries that nothing claims."""
    made = encodings_of_others()
    blocks = made.put([128, 128, 128]), made.put([0, 0, 0]), (0, 4, 0)
    made.field(made.entry("blocks", *blocks, layout=1, second=made.fields[-1]))
    refused(made.joined(), f'field "f{len(made.fields) - 1}"', CANNOT)
    nothing = Made(1 << 24)
    entry = nothing.entry("plain", items=0)
    for _ in range(8):
        entry = nothing.entry("concat", items=0, first=entry, second=entry)
    nothing.field(entry, shape=[0])
    in_a_process(lambda: refused(nothing.joined(), 'field "f0"', CANNOT), 2)


def test_columns_are_those_of_one_entry() -> None:
    def columns(first: int) -> bytes:
        made = of_rows(2, 1)
        for _ in range(4):
            made.entry("plain", made.put([1, 2, 3]), layout=0)
        for begin in (0, first):
            made.field(made.entry("columns", layout=0, items=2, first=begin, number=2))
        for column in (2, 3):  # a field may be one, too
            made.field(column)
        return made.joined()

    back = decompress(PackedBatch.from_bytes(columns(2)))
    assert back["f1"].values().tolist() == [[1, 1], [2, 2], [3, 3]]
    assert back["f2"].values().tolist() == [1, 2, 3]
    for first in (0, 1):
        refused(columns(first), 'field "f1"', CANNOT)


# -------------------------------------------------------------------- fuzzing, in a process of its own


def fuzzed(*arguments: str) -> None:
    output_of(*warm_workers.python(), fuzz.__file__, "wire", "--jobs", "1", *arguments)


def test_a_short_run_of_the_fuzzer() -> None:
    fuzzed("--count", "1500", "--seed", "7")


@pytest.mark.parametrize("name", ["repeated_rows", "rollout", "many_runs"])
def test_numbers_of_a_table_set_to_others(name: str) -> None:
    fuzzed("--table", str(make.file(name)), "--every", "3")


@pytest.mark.parametrize("made", [simple_encodings(), encodings_of_others()], ids=["simple", "of others"])
def test_numbers_of_a_table_of_all_encodings_set_to_others(made: Made, tmp_path: Path) -> None:
    file = tmp_path / "made"
    file.write_bytes(made.joined())
    assert fuzz_wire.outcome_closely(made.joined(), fuzz_wire.norm()) == "accepted and decoded, as the norm says"
    fuzzed("--table", str(file), "--every", "3")


def test_tables_of_all_encodings() -> None:
    entries = [*simple_encodings().entries, *encodings_of_others().entries]
    assert set(entries[::16]) == set(range(len(fuzz_wire.KINDS)))


# -------------------------------------------------------------------- the norm


@pytest.mark.parametrize("name", [name for name in GOLDEN if name != "zstd"])
def test_the_reader_of_the_norm_reads_golden_files(name: str) -> None:
    """Against the tensors that went in."""
    norm = fuzz_wire.norm()
    assert norm["read"](golden(name))
    fuzz_wire.assert_as_the_norm_says(golden(name), make.GOLDEN[name]().batch, norm)


def test_the_norm_names_every_constant() -> None:
    text = " ".join(fuzz_wire.NORM.read_text().split())
    for part in (
        f"at most 2^{container.MAX_HEADER.bit_length() - 1},",
        f"more than 2^{container.FREE_BYTES.bit_length() - 1} bytes beyond",
        f"at most {codec.MOST} times as long",
        f"at most {objects.MOST_DIMS} sizes",
        f"at most {objects.MOST_DIMS} `dims`",
        f"and at most {objects.MOST_DEPTH}.",
        f"a list of 1 to {container.MOST_PATH} names",
        f"and {objects.ITEM_BYTES} bytes for each entry of a",
        f"{decode.MAX_BYTES >> 30} GiB unless it",
        f"At most {abi.MOST_STEPS} steps",
        *(f"{number}. `{kind}`" for number, kind in enumerate(abi.KINDS)),
        *words.DTYPES,
        *HINTS,
    ):
        assert part in text, part


def test_golden_files_are_small_and_cover_every_encoding() -> None:
    assert sum(make.file(name).stat().st_size for name in GOLDEN) < 200_000
    assert {file.stem for file in make.HERE.glob("*.maskpack")} == set(GOLDEN)
    shown, layouts = "", set()
    for name in GOLDEN:
        packed = PackedBatch.from_bytes(golden(name), allow_pickle=name == "pickled")
        kinds = {"/".join(path): packed.table.kind(number) for path, number in packed.numbers.items()}
        assert {path: kinds[path] for path in make.GOLDEN[name]().kinds} == make.GOLDEN[name]().kinds
        shown += " ".join(kinds.values())
        layouts |= set(packed.table.stored["kind"].tolist())
    assert all(kind in shown for kind in abi.KINDS)
    assert layouts == {abi.AS_SPANS, abi.AS_MASK, abi.AS_PART}
