"""The byte form of a packed batch, as a container: a manifest and numbered arrays, in one legal safetensors file.

    8 bytes        N, little-endian
    N bytes        JSON: {"__metadata__": {format, version, manifest, crc32?}, "0.name": {dtype, shape, offsets}, ...}
    the rest       the arrays: aligned to their item size, widest items first, no gap, no overlap

docs/format.md is the norm. write.py and read.py deal with the contents of the manifest.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
import re
import reprlib
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from maskpack.core.bits import Words
from maskpack.errors import LayoutError, WireFormatError

FORMAT, VERSION = "maskpack", "4"
MAX_HEADER = 1 << 24
"""Bytes of the longest header."""
ALIGNMENT = 64
FREE_BYTES = 1 << 20
"""Bytes of memory that the layouts of a message may take whatever its size; what they take more needs as many bytes of
arrays, so that a few bytes cannot make a reader set up tables for 2^31 rows."""
MOST_PATH = 64
"""Names in the path of an entry: sub-batches inside each other are walked by recursion."""
_DTYPES = {f"{kind.upper()}{8 * size}": np.dtype(f"<{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,8})\.")
_LONGEST = 500
_REMEDY = "Read a file or bytes that PackedBatch.save or to_bytes wrote, whole and unchanged."


def layout_bytes(layouts: int, rows: int, spans: int) -> int:
    """Bytes that some layouts take in memory, with so many spans in all."""
    return 16 * (layouts * (rows + 1) + spans)


@dataclass(frozen=True)
class Message:
    """A manifest, and the arrays that it numbers."""

    manifest: dict[str, Any]
    arrays: Sequence[Words]


class Pieces:
    """The bytes of a message, not yet joined: the header, then the arrays in their order."""

    def __init__(self, message: Message, names: Sequence[str], *, checksum: bool = False) -> None:
        arrays = [np.ascontiguousarray(array) for array in message.arrays]
        self._order = sorted(range(len(arrays)), key=lambda number: -arrays[number].itemsize)
        self.arrays = [arrays[number] for number in self._order]
        self.nbytes = sum(array.nbytes for array in self.arrays)
        entries: dict[str, Any] = {}
        end = 0
        for number, array in zip(self._order, self.arrays, strict=True):
            begin, end = end, end + array.nbytes
            entry = {"dtype": _NAMES[array.dtype], "shape": [array.size], "data_offsets": [begin, end]}
            entries[f"{number}.{names[number]}"] = entry
        metadata = {"format": FORMAT, "version": VERSION, "manifest": _dumps(message.manifest)}
        if checksum:
            metadata["crc32"] = _crc(metadata["manifest"], entries, map(_raw, self.arrays))
        text = _dumps({"__metadata__": metadata, **entries}).encode()
        if len(text) + ALIGNMENT > MAX_HEADER:
            raise WireFormatError(
                f"PackedBatch: the header would take {len(text)} bytes; expected at most {MAX_HEADER}. Split the batch."
            )
        text += b" " * (-(len(text) + 8) % ALIGNMENT)
        self.header = len(text).to_bytes(8, "little") + text

    def joined(self) -> bytes:
        """All of them as bytes."""
        return b"".join([self.header, *map(_raw, self.arrays)])

    def write(self, out: Any) -> None:
        """Writes them to an open binary file. Files without a buffer take a part of what they are given; raises
        BlockingIOError if one that does not wait takes nothing."""
        for piece in map(memoryview, (self.header, *map(_raw, self.arrays))):
            while piece.nbytes:
                done: int | None = out.write(piece)
                if done is None and isinstance(out, io.RawIOBase):
                    raise BlockingIOError(
                        "PackedBatch.save: the file takes nothing now; expected one that waits. Pass one."
                    )
                piece = piece[piece.nbytes if done is None else done :]

    def save(self, file: str, call: str) -> None:
        """Writes them to a file, which takes the place of an old one when all of it is on the disk, or to a URL of
        fsspec, in one piece. Raises LayoutError for a URL that fsspec has no file system for."""
        remote, path = _place(file, call)
        if remote is not None:
            remote.pipe_file(path, self.joined())
            return
        target = Path(path)
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("wb") as out:
                self.write(out)
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
        except OSError as error:
            if error.filename is not None:
                error.filename = str(target)
            raise
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not every system can open a directory or sync it
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _place(file: str, call: str) -> tuple[Any, str]:
    """The file system of fsspec, None for a file of this machine, and the path in it. Raises LayoutError, which names
    the package or the protocol, if there is none."""
    if "://" not in file:
        return None, file
    try:
        fs, path = cast("tuple[Any, str]", fsspec.core.url_to_fs(file))  # type: ignore[reportUnknownMemberType]
    except (ImportError, ValueError) as error:
        raise LayoutError(f"{call}: file is {file!r}; expected a URL that fsspec can open: {error}.") from error
    return None if isinstance(fs, LocalFileSystem) else fs, path


def file_bytes(file: str, mapped: bool, call: str) -> Any:
    """The bytes of a file: mapped to memory, or read into it. Those behind a URL of fsspec are always read. Raises
    LayoutError as `Pieces.save`."""
    remote, path = _place(file, call)
    if remote is not None:
        return remote.cat_file(path)
    with open(path, "rb") as opened:
        if mapped and os.fstat(opened.fileno()).st_size:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return opened.read()


def read_message(data: Any, call: str) -> Message:
    """The message in `data`, an object with bytes; the arrays are read-only views of it. Raises WireFormatError."""
    view = _bytes_of(data, call)
    start = bytes(view[:16])
    if start[8:9] != b"{":
        fail(call, f"data that begins with {start!r}", "a packed batch: eight bytes, then a JSON object")
    size = int.from_bytes(view[:8], "little")
    if size > MAX_HEADER or size > len(view) - 8 or (size + 8) % 8:
        fail(
            call, f"a header of {size} bytes in {len(view)}", f"a multiple of 8, at most {MAX_HEADER} and what follows"
        )
    body = view[8 + size :]
    parsed = loads(bytes(view[8 : 8 + size]), call)
    metadata = parsed.pop("__metadata__", None)
    if not isinstance(metadata, dict) or cast("dict[str, Any]", metadata).get("format") != FORMAT:
        fail(call, "a safetensors file without our metadata", f'"format": "{FORMAT}"')
    known = cast("dict[str, Any]", metadata)
    if known.get("version") != VERSION:
        fail(call, f"version {brief(known.get('version'))}", f'"{VERSION}"')
    text, crc = known.get("manifest"), known.get("crc32")
    if not isinstance(text, str) or set(known) - {"format", "version", "manifest", "crc32"}:
        fail(call, f"metadata {brief(sorted(known))}", "format, version, manifest and perhaps crc32")
    arrays = _arrays(parsed, _aligned(body), call)
    if "crc32" in known and crc != _crc(text, parsed, [body]):
        fail(call, f"checksum {brief(crc)}", "that of the bytes")
    return Message(loads(text.encode("utf-8", "surrogatepass"), call), arrays)


def _arrays(entries: dict[str, Any], body: Any, call: str) -> list[Words]:
    found: dict[int, Words] = {}
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: _begin(item[1], call)):
        dtype = _DTYPES.get(str(entry.get("dtype")))
        shape, begin, after = entry.get("shape"), *entry["data_offsets"]
        if dtype is None or not isinstance(shape, list) or set(entry) != {"dtype", "shape", "data_offsets"}:
            fail(call, f"entry {brief(name)} is {brief(entry)}", "dtype, shape and data_offsets of integers")
        if begin != end or after < begin or after > len(body):
            fail(
                call,
                f"entry {brief(name)} at {begin} to {after}",
                f"it to begin at {end} and to end inside {len(body)} bytes",
            )
        end = after
        sizes = cast("list[Any]", shape)
        if len(sizes) != 1 or type(sizes[0]) is not int or sizes[0] * dtype.itemsize != after - begin:
            seen = f"entry {brief(name)} of shape {brief(sizes)} in {after - begin} bytes"
            fail(call, seen, "one dim that fills them")
        if begin % dtype.itemsize:
            fail(call, f"entry {brief(name)} at {begin}", f"a multiple of {dtype.itemsize}")
        number = _NUMBER.match(name)
        if number is None or int(number[1]) in found:
            fail(call, f"entry {brief(name)}", "a name that begins with its own number")
        found[int(number[1])] = np.frombuffer(body, dtype, sizes[0], begin)
    if end != len(body):
        fail(call, f"{len(body) - end} bytes behind the last entry", "none")
    if set(found) != set(range(len(found))):
        fail(call, f"entries numbered {sorted(found)[:8]}...", "0, 1, 2, ...")
    return [found[number] for number in range(len(found))]


def _aligned(body: Any) -> Any:
    """The bytes, in memory where arrays of every item size may begin."""
    line: Words = np.frombuffer(body, np.uint8)
    if line.ctypes.data % 8 == 0 or not line.size:
        return body
    return memoryview(line.tobytes())


def _begin(entry: Any, call: str) -> tuple[int, int]:
    offsets = cast("dict[str, Any]", entry).get("data_offsets") if isinstance(entry, dict) else None
    pair = cast("list[Any]", offsets) if isinstance(offsets, list) else []
    if len(pair) != 2 or any(type(place) is not int or not 0 <= place < 1 << 62 for place in pair):
        fail(call, f"an entry {brief(entry)}", "an object with data_offsets [begin, end]")
    return pair[0], pair[1]


def loads(text: bytes, call: str) -> dict[str, Any]:
    """A JSON object without double names and without numbers that are not finite or beyond int64. Raises
    WireFormatError."""
    try:
        parsed = json.loads(
            text.decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_int64,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise WireFormatError(
            f"{call}: the header is no JSON: {str(error)[:200]}; expected an object. {_REMEDY}"
        ) from error
    if not isinstance(parsed, dict):
        fail(call, f"a header that is a {type(parsed).__name__}", "a JSON object")
    return cast("dict[str, Any]", parsed)


def fail(call: str, seen: str, expected: str) -> NoReturn:
    """Raises WireFormatError. `seen` is cut: it may hold names of any length."""
    seen = seen if len(seen) <= _LONGEST else f"{seen[:_LONGEST]}..."
    raise WireFormatError(f"{call}: {seen}; expected {expected}. {_REMEDY}")


def brief(value: Any) -> str:
    """`repr`, cut to a line; it does not fail for deep nesting and for integers of many digits."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"a {type(value).__name__} that is too long to be shown"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _int64(text: str) -> int:
    # the length first: long ones take quadratic time
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f"the integer {text[:24]} is beyond 64 bits")
    return int(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:24]} is too large")
    return number


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _bytes_of(data: Any, call: str) -> memoryview:
    try:
        view = memoryview(data)
    except TypeError:
        fail(call, f"a {type(data).__name__}", "bytes, or an object with a buffer")
    if not view.c_contiguous:
        fail(call, "a buffer with gaps", "one that is contiguous")
    return view.toreadonly().cast("B") if view.nbytes else memoryview(b"")


def _raw(array: Words) -> memoryview:
    return array.data.cast("B") if array.size else memoryview(b"")


def _crc(manifest: str, entries: dict[str, Any], parts: Iterable[Any]) -> str:
    """Of the manifest, of what each array is and where, by their numbers, and of the arrays."""
    numbered = sorted(entries.items(), key=lambda item: int(item[0].partition(".")[0]))
    lines = [f"{entry['dtype']}:{entry['data_offsets'][0]}:{entry['data_offsets'][1]};" for _, entry in numbered]
    crc = zlib.crc32("".join([manifest, *lines]).encode("utf-8", "surrogatepass"))
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
