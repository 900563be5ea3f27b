"""A fuzz target for the byte form: `python -m tests.fuzz_wire --count N --seed S`.

Every golden file is taken apart with plain loops and put together wrong; and one case in 25 is a bomb, a small message
that is made to cost much: depth, claimed sizes, keys that collide, frames of zstd, arrays that are named often. Reading
must give a batch or raise WireFormatError; a batch that was read must decode and be written again. A file with a
checksum must give an equal batch or none.

Limits of each case, as docs/wire-format.md says them:
- 0.5 s of processor time, of all threads of this process (`time.process_time`). What takes longer is tried again, and
  fails if it takes longer again.
- reading: `allowed` bytes, the peak that `tracemalloc` sees, which numpy and bytes objects report to.
- reading, writing and decoding together: MARGIN above `allowed` and the limit of decoded bytes, as the kernel's peak of
  resident memory (VmHWM, set back before each case through /proc/self/clear_refs; Linux only), which counts torch and
  zstd too.

A failure is printed with the seed that makes it again: `--only SEED:NUMBER`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import random
import signal
import sys
import time
import traceback
import tracemalloc
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskpack import MaskpackError, PackedBatch, decompress
from maskpack.errors import WireFormatError
from maskpack.packed.file import container as wire

GOLDEN = Path(__file__).parent / "golden"
SIZES = {f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)}
EXTREMES = (0, 1, -1, 2, 3, 7, 63, 64, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40)
EXTREMES += (2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30)
ODD = (
    None,
    True,
    False,
    "",
    "x",
    "mask",
    "plain",
    [],
    {},
    [0],
    [[]],
    0.5,
    -0.0,
    1e308,
    {"float": "inf"},
    "int64",
    "U8",
)
DEEP = (60, 64, 70, 400, 2000, 100000)
SECONDS = 0.5
STUCK = 20
LIMIT = 1 << 20
MARGIN = 64 << 20
BOMBED = 1 / 25
PARSED, WIDE, WIDE_BITS = 64, 48, 192
"""Bytes for each one of the header, of the arrays, and of bits of layouts, that reading may take."""

# -------------------------------------------------------------------- a message in pieces


@dataclass
class Pieces:
    """A file in pieces; what is here may be wrong."""

    metadata: dict[str, Any]
    manifest: Any
    arrays: list[list[Any]] = field(default_factory=list)  # name, dtype, bytes: in the order of the file

    @classmethod
    def of(cls, data: bytes) -> Pieces:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        metadata = header.pop("__metadata__")
        body = data[8 + size :]
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        arrays = [[name, e["dtype"], body[slice(*e["data_offsets"])]] for name, e in entries]
        return cls(metadata, json.loads(metadata.pop("manifest")), arrays)

    def joined(
        self,
        checksum: bool = True,
        header: Callable[[dict[str, Any]], Any] = id,
        text: Callable[[str], str] = str,
        manifest: Callable[[str], str] = str,
    ) -> bytes:
        """A file. `checksum`: one that is right, where there was one. The others change parts of it on their way."""
        metadata = dict(self.metadata, manifest=manifest(json.dumps(self.manifest)))
        entries: dict[str, Any] = {}
        body = b""
        for name, dtype, raw in self.arrays:
            size = SIZES.get(dtype, 1)
            entry = {"dtype": dtype, "shape": [len(raw) // size], "data_offsets": [len(body), len(body) + len(raw)]}
            body += raw
            entries[name] = entry
        if checksum and "crc32" in metadata:
            lines = [f"{e['dtype']}:{e['data_offsets'][0]}:{e['data_offsets'][1]};" for _, e in numbered(entries)]
            metadata["crc32"] = f"{zlib.crc32((metadata['manifest'] + ''.join(lines)).encode() + body):08x}"
        whole = {"__metadata__": metadata, **entries}
        header(whole)
        raw = text(json.dumps(whole)).encode()
        raw += b" " * (-(len(raw) + 8) % 64)
        return len(raw).to_bytes(8, "little") + raw + body


def deepened(text: str) -> str:
    """With the nests that `mutate` left a mark for."""
    for depth in DEEP:
        text = text.replace(f'"deep {depth}"', "[" * depth + "]" * depth)
    return text


def numbered(entries: dict[str, Any]) -> list[tuple[str, Any]]:
    return sorted(entries.items(), key=lambda item: int(item[0].partition(".")[0]))


def doubled(text: str, rng: random.Random) -> str:
    """A member twice, in one object."""
    places = [place for place in range(len(text)) if text[place] == "{" and text[place + 1 : place + 2] == '"']
    place = rng.choice(places)
    end = text.find(",", place)
    return text[: place + 1] + text[place + 1 : end] + "," + text[place + 1 :]


# -------------------------------------------------------------------- mutations


def byte_mutation(data: bytes, other: bytes, rng: random.Random) -> bytes:
    line = bytearray(data)
    size = int.from_bytes(data[:8], "little")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not line:
            break
        # mostly in the arrays or in the header's text, which get further than the rest
        place = (
            rng.randrange(len(line)) if rng.random() < 0.5 else rng.randrange(min(8 + size, len(line) - 1), len(line))
        )
        way = rng.randrange(7)
        if way <= 1:
            line[place] ^= 1 << rng.randrange(8)
        elif way == 2:
            line[place] = rng.choice((0, 255, 127, 128, rng.randrange(256), ord(rng.choice('0123456789"{}[],:-. '))))
        elif way == 3:
            del line[place : place + rng.choice((1, 8, len(line)))]
        elif way == 4:
            line[place:place] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 2, 8))))
        elif way == 5:
            begin, length = rng.randrange(len(line)), rng.choice((1, 8, 64))
            line[place:place] = line[begin : begin + length]
        else:
            line[place:] = other[rng.randrange(len(other)) :]
    return bytes(line)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container with every place in it."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, dict):
            found += [(item, key) for key in item]
            todo += item.values()
        elif isinstance(item, list):
            found += [(item, place) for place in range(len(item))]
            todo += item
    return found


def mutate(tree: Any, rng: random.Random) -> None:
    """Changes one place of parsed JSON."""
    places = places_in(tree)
    if not places:
        return
    holder, key = rng.choice(places)
    numbers = [(h, k) for h, k in places if type(h[k]) is int]
    if numbers and rng.random() < 0.4:
        holder, key = rng.choice(numbers)
    value = holder[key]
    way = rng.randrange(8)
    if way <= 2 and type(value) is int:
        holder[key] = rng.choice((value + 1, value - 1, value * 2, -value, rng.choice(EXTREMES), rng.choice(EXTREMES)))
    elif way <= 3:
        other, place = rng.choice(places)
        holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
    elif way == 4:
        other, place = rng.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif way == 5:
        del holder[key]
    elif way == 6:
        if isinstance(holder, dict):
            holder[rng.choice((f"{key}x", "hints", "pickle", "json", "codec", "row_pads", "layout"))] = value
        else:
            holder.insert(key, value)
    else:
        holder[key] = rng.choice(ODD + EXTREMES)
    if rng.random() < 0.02 and (isinstance(holder, dict) or key < len(holder)):
        holder[key] = f"deep {rng.choice(DEEP)}"


def mutate_kind(manifest: Any, rng: random.Random) -> None:
    """Another encoding of a field, with whatever arrays there are."""
    entries = manifest.get("fields") if isinstance(manifest, dict) else None
    found = entries if isinstance(entries, list) else []
    fields = [entry for entry in found if isinstance(entry, dict) and {"encoding", "path"} <= set(entry)]
    if fields:
        rng.choice(fields)["encoding"] = encoding([entry["path"] for entry in fields], rng, 0)


def encoding(paths: list[Any], rng: random.Random, depth: int) -> Any:
    number = lambda: rng.randrange(12)  # noqa: E731
    whole: list[dict[str, Any]] = [
        {"kind": "plain", "words": number()},
        {"kind": "narrow", "low": number(), "high": number(), "base": rng.choice((0, 5, *EXTREMES[:20]))},
        {"kind": "bits", "bits": number(), "words": number()},
        {"kind": "runs", "pieces": number(), "counts": number(), "values": number()},
        {"kind": "ramp", "firsts": number(), "step": rng.choice((1, -1, *EXTREMES))},
        {"kind": "steps", "steps": {"kind": "runs", "pieces": number(), "counts": number(), "values": number()}},
        {"kind": "sparse", "per_row": number(), "places": number(), "words": number()},
    ]
    if depth == 0 and rng.random() < 0.5:
        return rng.choice(
            (
                {"kind": "same", "field": rng.choice(paths)},
                {"kind": "joined", "head": rng.choice(paths), "tail": rng.choice(paths)},
                {"kind": "repeated", "index": number(), "rows": encoding(paths, rng, 1)},
                {"kind": "columns", "columns": [encoding(paths, rng, 1) for _ in range(rng.randrange(4))]},
            )
        )
    return rng.choice(whole)


def mutate_array(pieces: Pieces, rng: random.Random) -> None:
    """Another value, size or dtype of an array, in a container that stays sound."""
    if not pieces.arrays:
        return
    array = rng.choice(pieces.arrays)
    size = SIZES[array[1]]
    items = [array[2][place : place + size] for place in range(0, len(array[2]), size)]
    way = rng.randrange(6)
    if way <= 1 and items:
        number = rng.choice((*EXTREMES, rng.randrange(256)))
        items[rng.randrange(len(items))] = (number % 256**size).to_bytes(size, "little")
    elif way == 2:
        del items[rng.randrange(len(items) + 1) :]
    elif way == 3:
        items += items[: rng.choice((1, len(items)))] or [bytes(size)]
    elif way == 4 and items:
        a, b = rng.randrange(len(items)), rng.randrange(len(items))
        items[a], items[b] = items[b], items[a]
    else:
        array[1] = rng.choice(list(SIZES))
        new = SIZES[array[1]]
        items = [(item + bytes(8))[:new] for item in items]
    array[2] = b"".join(items)
    pieces.arrays.sort(key=lambda array: -SIZES[array[1]])


def renumber(pieces: Pieces, rng: random.Random) -> None:
    """Two arrays change their numbers."""
    if len(pieces.arrays) > 1:
        a, b = rng.sample(pieces.arrays, 2)
        a[0], b[0] = b[0], a[0]


# -------------------------------------------------------------------- bombs


class Bomb:
    """A message that is put together from nothing."""

    def __init__(self, rows: int = 1, dims: Any = ()) -> None:
        root = {"dims": None if dims is None else list(dims), "device": None}
        self.manifest: dict[str, Any] = {"rows": rows, "root": root, "axes": [], "layouts": [], "fields": []}
        self.arrays: list[list[Any]] = []

    def array(self, raw: bytes = b"", dtype: str = "U8") -> int:
        self.arrays.append([f"{len(self.arrays)}.x", dtype, raw])
        return len(self.arrays) - 1

    def layout(self, name: str, width: int, rows: int = 1, runs: bytes = b"", starts: bytes = b"") -> None:
        counts = b"\1" * len(starts)
        numbers = [self.array(starts), self.array(counts), self.array(runs or bytes(rows))]
        self.manifest["layouts"].append({"name": name, "width": width, "anchor": 0, "runs": numbers})

    def layout_of_bits(self, name: str, width: int, bits: bytes) -> None:
        number = self.array(bits)
        self.manifest["layouts"].append({"name": name, "width": width, "anchor": 0, "bits": number})

    def tensor(self, name: Any, encoding: Any, kind: str = "dense", dtype: str = "uint8", **more: Any) -> None:
        path = name if isinstance(name, list) else [name]
        entry = {"path": path, "kind": kind, "dtype": dtype, "device": "cpu", "shape": [], "encoding": encoding}
        self.manifest["fields"].append({**entry, **more})

    def object(self, json: Any, depth: int = 0, name: Any = "o") -> None:
        path = name if isinstance(name, list) else [name]
        self.manifest["fields"].append({"path": path, "kind": "object", "depth": depth, "json": json})

    def node(self, path: list[str], dims: Any = ()) -> None:
        node = {"dims": list(dims), "device": None}
        self.manifest["fields"].append({"path": path, "kind": "node", "node": node})

    def constant(self) -> dict[str, Any]:
        """An encoding of any words, all 0, in rows that are not empty."""
        return {"kind": "runs", "pieces": self.array(b"\1"), "counts": self.array(), "values": self.array(b"\0")}

    def joined(self) -> bytes:
        self.arrays.sort(key=lambda array: -SIZES[array[1]])
        return Pieces({"format": "maskpack", "version": "1"}, self.manifest, self.arrays).joined()


def nest(depth: int, leaf: Any = 1) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


def size_of(rng: random.Random, most: int) -> int:
    """Small and large ones alike."""
    return int(most ** rng.random())


def bomb_depth(rng: random.Random) -> Bomb:
    depth, rows = rng.choice((1, 3, 7, 8, 9, 12, 20, 28, 40, 60)), size_of(rng, 300)
    bomb = Bomb(rows)
    way = rng.randrange(3)
    leaf: Any = [] if way == 0 else 1 if way == 1 else {"tuple": [{"dict": [["k", None]]}]}
    bomb.object([nest(depth - 1, leaf) for _ in range(rows)], depth - (way == 0 and depth > 1))
    return bomb


def bomb_paths(rng: random.Random) -> Bomb:
    depth, dims = rng.choice((10, 40, 63, 64, 64, 65, 66, 200)), [1] * rng.choice((0, 0, 1, 28, 29))
    bomb = Bomb()
    for chain in range(size_of(rng, 10)):
        for length in range(1, depth + 1):
            bomb.node([f"a{chain}", *["a"] * (length - 1)], dims)
        bomb.object(1, 0, [f"a{chain}", *["a"] * (depth - 1), "o"])
    return bomb


def bomb_sizes(rng: random.Random) -> Bomb:
    """Large rows, widths, dims and elements, in no bytes."""
    modest = rng.random() < 0.5
    huge = lambda: size_of(rng, 1 << 18 if modest else 1 << 31) - rng.choice((0, 0, 0, 1))  # noqa: E731
    rows = rng.choice((0, 1, 1, 2) if modest else (0, 1, 2, 100, 8191, 8192))
    dims = rng.choice((None, [], [], [huge()], [huge(), huge()], [0, huge(), huge()]))
    bomb = Bomb(rows, dims)
    bomb.layout("m", huge(), rows, bytes(rows))
    full = bytes([1]) * rows
    bomb.layout("n", huge(), rows, full, bytes(rows))
    bomb.manifest["axes"] = ["m", "n"]
    constant = bomb.constant()
    nothing = {"kind": "plain", "words": bomb.array()}
    for number in range(size_of(rng, 10)):
        shape = [*(dims or []), *rng.choices((1, 2, huge()), k=rng.randrange(3))]
        way = rng.randrange(6)
        name = f"x{number}"
        dtype = rng.choice(("uint8", "bool", "uint8", "float8_e5m2"))
        if way == 0:
            bomb.tensor(name, rng.choice((constant, nothing)), dtype=dtype, shape=shape)
        elif way <= 2:
            kind = {"kind": "padded", "dim": rng.randrange(1, 3), "pad": 0, "shape": rng.choice(([1], [huge()]))}
            layout = rng.choice(("m", "n"))
            bomb.tensor(name, nothing if layout == "m" else constant, dtype=dtype, layout=layout, **kind)
        elif way == 3:
            bomb.tensor(name, rng.choice((constant, nothing)), dtype=dtype, kind="jagged", layout=rng.choice("mn"))
        elif way == 4:
            data: Any = None
            sizes = [rows, *(dims or [])]
            if 0 in sizes and dims is not None:
                data = []
                for size in reversed(sizes[: sizes.index(0)]):
                    data = [copy.deepcopy(data) for _ in range(min(size, 9000))]
            bomb.object(data, 0 if data is None else len(sizes), name)
        else:
            bomb.node([name], [*(dims or []), *rng.choice(([], [huge()]))])
            bomb.object(None, 0, [name, "o"])
    return bomb


def bomb_keys(rng: random.Random) -> Bomb:
    """Keys of one hash, and keys that walk far in a table."""
    way, count = rng.randrange(8), size_of(rng, 5000)
    prime = 2**61 - 1
    numbers = [prime * (n + 10) for n in range(count)]
    keys: list[Any] = [{"int": hex(number)} for number in numbers]
    if way == 1:
        keys = [2.0 ** (61 * (n % 33) - 1000) * (1 + n // 33) for n in range(count)]
    elif way == 2:
        keys = [{"tuple": [key]} for key in keys]
    elif way == 3:
        keys = [{"tuple": ["a", {"tuple": [key, 1]}]} for key in keys]
    elif way == 4:
        keys = [n << 40 for n in range(count)]
    elif way == 5:
        keys = [{"scalar": ["float64", (n + 1).to_bytes(8, "little").hex()]} for n in range(count)]
    elif way == 6:
        keys = [str(n) for n in range(count)]
    elif way == 7:
        keys = [nest(rng.randrange(40), {"tuple": [key]}) if n % 50 == 0 else key for n, key in enumerate(keys)]
    bomb = Bomb()
    bomb.object({"dict": [[key, None] for key in keys]})
    return bomb


def bomb_zstd(rng: random.Random) -> Bomb:
    """Frames that stand for much, that nothing refers to, or that are differences to each other."""
    bomb = Bomb()
    records: list[Any] = []
    frames, loose = size_of(rng, 60), rng.random() < 0.5
    count, item = size_of(rng, (1 << 19) // frames), rng.choice((1, 2, 4, 8))
    for number in range(frames):
        count = size_of(rng, 1 << 22) if rng.random() < 0.1 else count
        bomb.array(run_length(count * item))
        lie = rng.choice((1, -1, 2**40)) if loose and rng.random() < 0.1 else 0
        other = rng.choice((None, number, frames - 1)) if loose else rng.choice((None, min(number + 1, frames - 1)))
        records.append([f"i{item}" if item > 1 else "u1", count + lie, None if number == frames - 1 else other])
    claimed = sum(record[1] * item for record in records)
    bomb.array(bytes(rng.choice((0, min(claimed // 256 + 1, 1 << 20), size_of(rng, 100_000)))))
    records.append(None)
    for number, record in enumerate(records):
        if record is not None and (not loose or rng.random() < 0.9):
            dtype = {"u1": "uint8", "i2": "int16", "i4": "int32", "i8": "int64"}[record[0]]
            bomb.object([{"tensor": [number, dtype, [record[1]]]}], 0, f"o{number}")
    bomb.manifest["codec"] = {"name": "zstd", "arrays": records}
    return bomb


def run_length(size: int) -> bytes:
    """A zstd frame for as many zeros, by hand: one block for each 128 KiB."""
    out = b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little")
    while True:
        block = min(size, 131072)
        size -= block
        out += (block << 3 | 2 | (size == 0)).to_bytes(3, "little") + b"\0"
        if not size:
            return out


def bomb_rows(rng: random.Random) -> Bomb:
    """Rows and fields that take no bytes each."""
    rows = rng.choice((8192, 8193, 20_000, 100_000))
    bomb = Bomb(rows)
    if rng.random() < 0.9:
        bomb.array(bytes(rows))
    constant = bomb.constant()
    for number in range(size_of(rng, 600)):
        bomb.tensor(f"x{number}", rng.choice((constant, {"kind": "repeated", "index": 0, "rows": constant})))
    return bomb


def bomb_references(rng: random.Random) -> Bomb:
    """One array, or one field, for many."""
    size, count = size_of(rng, 100_000), size_of(rng, 2000)
    bomb = Bomb()
    number = bomb.array(bytes(size))
    way = rng.randrange(4)
    tensors = [{"tensor": [number, "uint8", [size]]} for _ in range(count)]
    if way == 0:
        bomb.object(tensors)
    elif way == 1:
        bomb.tensor("x", {"kind": "columns", "columns": [bomb.constant() for _ in range(1)] * count}, shape=[count])
    else:
        bomb.tensor("x", {"kind": "plain", "words": number}, shape=[size])
        for other in range(count):
            plain = {"kind": "plain", "words": number}
            bomb.tensor(f"y{other}", plain if way == 2 else {"kind": "same", "field": ["x"]}, shape=[size])
    return bomb


def bomb_names(rng: random.Random) -> Bomb:
    """Many layouts, axes, entries and hints; entries twice; long names."""
    bomb = Bomb()
    count, twice = size_of(rng, 250), rng.random() < 0.3
    long = "n" * size_of(rng, 100_000)
    for number in range(count):
        bomb.layout(f"l{number % 9 if twice else number}", rng.choice((0, 3)), 1)
    bomb.manifest["axes"] = [layout["name"] for layout in bomb.manifest["layouts"]]
    nothing = {"kind": "plain", "words": bomb.array()}
    for number in range(count):
        kind = {"kind": "padded", "layout": f"l{number}", "dim": 1, "pad": 0, "hints": ["delta:x"] * size_of(rng, 20)}
        bomb.tensor(rng.choice(("x", long)) if twice and rng.random() < 0.1 else f"x{number}", nothing, **kind)
    return bomb


def bomb_arrays(rng: random.Random) -> Bomb:
    """Large arrays of small numbers, which are checked in wider ones."""
    size = size_of(rng, 200_000)
    bomb = Bomb()
    ones, rising = b"\1" * size, b"".join(n.to_bytes(4, "little") for n in range(size))
    whole = bomb.array(size.to_bytes(4, "little"), "U32")
    way, more = rng.randrange(6), rng.choice((0, 0, 0, 1, -1))
    encoding: Any = {"kind": "plain", "words": bomb.array(ones)}
    total, dtype = size, "uint8"
    if way == 0:
        total = 8 * size
        encoding = {"kind": "bits", "bits": bomb.array(ones), "words": bomb.array(b"\0\1")}
    elif way == 1:
        counts = bomb.array(ones[1:] if rng.random() < 0.9 else bytes(size - 1))
        encoding = {"kind": "runs", "pieces": whole, "counts": counts, "values": bomb.array(rng.choice((ones, b"\0")))}
        encoding = encoding if rng.random() < 0.7 else {"kind": "steps", "steps": encoding}
    elif way == 2:
        total = 2 * size
        encoding = {"kind": "sparse", "per_row": whole, "places": bomb.array(rising, "U32"), "words": bomb.array(ones)}
    elif way == 3:
        dtype = rng.choice(("int16", "int32", "int64"))
        encoding = {"kind": "narrow", "low": bomb.array(ones), "high": bomb.array(), "base": 5}
    elif way == 4:
        starts = b"".join((2 * n).to_bytes(4, "little") for n in range(size))
        runs = [bomb.array(starts, "U32"), bomb.array(ones), whole]
        bomb.manifest["layouts"] = [{"name": "m", "width": 2 * size + more, "anchor": 0, "runs": runs}]
        bomb.manifest["axes"] = ["m"]
        words = {"kind": "plain", "words": bomb.array(ones)}
        bomb.tensor("y", words, kind="padded", layout="m", dim=1, pad=0)
    bomb.tensor("x", encoding, shape=[total + more], dtype=dtype)
    return bomb


def bomb_bits(rng: random.Random) -> Bomb:
    """Masks as bits, with as many runs as there can be, or of rows and widths that they do not have."""
    rows = size_of(rng, 8000)
    width = size_of(rng, (1 << 19) // rows)
    bomb = Bomb(rows)
    for number in range(size_of(rng, 10)):
        line = bytearray(bytes([rng.choice((0, 0x55, 0x80, 0xAA, 0xFF))]) * ((width + 7) // 8))
        if rng.random() < 0.9:  # nothing behind the width
            line[-1] &= 0xFF << -width % 8 & 0xFF
        bits = bytes(line) * (rows + rng.choice((0, 0, 0, 0, 0, 0, 0, 1, -1)))
        claimed = rng.choice((width, width, width, width, width, 8 * ((width + 7) // 8), width + 8, 2**31 - 1))
        bomb.layout_of_bits(f"l{number}", claimed, bits)
        words = {"kind": "plain", "words": bomb.array(b"\1" * sum(map(int.bit_count, bits)))}
        bomb.tensor(f"x{number}", words, kind="padded", layout=f"l{number}", dim=1, pad=0)
    bomb.manifest["axes"] = [layout["name"] for layout in bomb.manifest["layouts"]]
    return bomb


def bomb_numbers(rng: random.Random) -> Bomb:
    """Numbers of many digits, in pads and objects."""
    digits = size_of(rng, 50_000)
    number = {"int": hex(16**digits - 1)}
    bomb = Bomb()
    bomb.layout("m", 1)
    bomb.manifest["axes"] = ["m"]
    scalar = {"scalar": ["float32", (1).to_bytes(4, "little").hex()]}
    way = rng.randrange(4)
    if way == 0:
        words = {"kind": "plain", "words": bomb.array()}
        bomb.tensor("x", words, kind="padded", layout="m", dim=1, pad=number, dtype=rng.choice(("int64", "float64")))
    elif way == 1:
        bomb.object({"dict": [[number, scalar], [scalar, 1], [{"int": hex((2**61 - 1) * 16**digits + 1)}, 1]]})
    elif way == 2:
        bomb.object([number] * rng.randrange(5))
    else:
        bomb.object([{"float": "f" * digits}, {"text": "ed" * digits}, "\\u0000" * digits])
    return bomb


BOMBS: dict[str, Callable[[random.Random], Bomb]] = {
    name.removeprefix("bomb_"): make for name, make in list(globals().items()) if name.startswith("bomb_")
}


@dataclass
class Mutant:
    name: str  # the seed that makes it again
    source: str
    data: bytes
    resealed: bool  # a checksum that was made to fit the change
    limit: int | None  # of the bytes that it may claim


def mutant(golden: dict[str, bytes], seed: str) -> Mutant:
    rng = random.Random(seed)
    if rng.random() < BOMBED:
        name = rng.choice(sorted(BOMBS))
        return Mutant(seed, f"bomb {name}", BOMBS[name](rng).joined(), False, rng.choice((LIMIT, 64 * LIMIT)))
    source, limit = rng.choice(sorted(golden)), rng.choice((LIMIT, 64 << 30, None))
    if rng.random() < 0.25:
        data = byte_mutation(golden[source], golden[rng.choice(sorted(golden))], rng)
        return Mutant(seed, source, data, False, limit)
    pieces = Pieces.of(golden[source])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        way = rng.randrange(8)
        if way <= 2:
            mutate(pieces.manifest, rng)
        elif way <= 5:
            mutate_array(pieces, rng)
        elif way == 6:
            renumber(pieces, rng)
        else:
            mutate_kind(pieces.manifest, rng)
    resealed = rng.random() < 0.5

    def header(whole: dict[str, Any]) -> None:
        if rng.random() < 0.1:
            mutate(whole, rng)

    def text(whole: str) -> str:
        return doubled(deepened(whole), rng) if rng.random() < 0.03 else deepened(whole)

    return Mutant(seed, source, pieces.joined(resealed, header, text, deepened), resealed, limit)


# -------------------------------------------------------------------- what must hold


class Late(BaseException):
    """Out of time; nothing in between catches it."""


def _alarm(*_: Any) -> None:
    raise Late


Worst = dict[str, tuple[float, str]]
"""What a case took at most, and which one did."""


def note(worst: Worst, name: str, made: Mutant, value: float) -> None:
    worst[name] = max(worst.get(name, (0.0, "")), (value, made.name))


def outcome(made: Mutant, originals: dict[str, bytes], worst: Worst, most: int) -> str:
    """The name of what came of it; anything but a good end is raised. `most`: bytes that reading may take."""
    tracemalloc.start()
    try:
        batch = PackedBatch.from_bytes(made.data, max_bytes=made.limit)
    except WireFormatError as error:
        batch = None
        reason = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    note(worst, "share of the memory for reading", made, peak / most)
    assert peak <= most, f"from_bytes took {peak} bytes of {most} for {len(made.data)}"
    if batch is None:
        assert str(reason).startswith("PackedBatch"), str(reason)
        assert len(str(reason)) < 2000, f"a message of {len(str(reason))} letters"
        try:
            wire.read(made.data, "")
        except WireFormatError:
            return "refused as a container"
        return "refused behind the container"
    written = batch.to_bytes()
    if made.source in originals and sealed(originals[made.source]) and not made.resealed:
        assert written == PackedBatch.from_bytes(originals[made.source]).to_bytes(), "a change behind its checksum"
    again = PackedBatch.from_bytes(written, max_bytes=made.limit)
    assert batch.codec or again.to_bytes() == written, "written twice, and different"
    for form in ("padded", "nested"):
        try:
            decompress(batch, format=form, device="cpu", max_bytes=LIMIT)
        except MaskpackError:
            return "accepted, not decoded"
    return "accepted and decoded"


@functools.cache
def sealed(data: bytes) -> bool:
    """Whether a file has a checksum."""
    return "crc32" in json.loads(data[8:][: int.from_bytes(data[:8], "little")])["__metadata__"]


def allowed(made: Mutant) -> int:
    """Bytes that reading may take, as docs/wire-format.md says."""
    size = len(made.data)
    header = min(int.from_bytes(made.data[:8], "little"), size)
    wide = 0
    try:
        pieces = Pieces.of(made.data)
        records = (pieces.manifest.get("codec") or {}).get("arrays") or []
        body = sum(len(array[2]) for array in pieces.arrays)
        claimed = sum(record[1] * int(record[0][1]) for record in records if record is not None)
        restored = claimed if 0 <= claimed <= min(256 * body, made.limit or claimed) else 0
        numbers = {layout["bits"] for layout in pieces.manifest["layouts"] if "bits" in layout}
        bits = sum(len(raw) for name, _, raw in pieces.arrays if int(name.partition(".")[0]) in numbers)
        wide = 3 * restored + WIDE * max(restored, body) + WIDE_BITS * bits
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    return (1 << 20) + 2 * size + PARSED * header + wide


def peak_of_process() -> int:
    """Bytes of resident memory at most since `forget_peak`; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def tried(made: Mutant, golden: dict[str, bytes], worst: Worst) -> str:
    """`outcome`, within time and memory."""
    most = allowed(made)
    forget_peak()
    before = peak_of_process()
    begin = time.process_time()
    found = outcome(made, golden, worst, most)
    seconds = time.process_time() - begin
    grown = peak_of_process() - before
    note(worst, "bytes of resident memory", made, grown)
    assert grown <= most + LIMIT + MARGIN, f"the case took {grown >> 20} MiB of memory"
    if seconds > SECONDS:
        begin = time.process_time()
        outcome(made, golden, worst, most)
        seconds = min(seconds, time.process_time() - begin)
    note(worst, "seconds", made, seconds)
    assert seconds <= SECONDS, f"the case took {seconds:.2f} s"
    return found


def run(count: int, seed: int, only: str | None = None, talk: bool = False) -> tuple[Counter[str], list[str], Worst]:
    """Counts of outcomes, the failures, and what a case took at most."""
    warnings.simplefilter("ignore")
    golden = {file.stem: file.read_bytes() for file in sorted(GOLDEN.glob("*.maskpack"))}
    assert golden, "no golden files"
    for data in golden.values():  # so that the first mutant pays for no import
        with contextlib.suppress(WireFormatError):  # the pickled one
            decompress(PackedBatch.from_bytes(data))
    counts: Counter[str] = Counter()
    failures: list[str] = []
    worst: Worst = {}
    before = signal.signal(signal.SIGALRM, _alarm)
    begin = time.monotonic()
    for name in [only] if only else [f"{seed}:{number}" for number in range(count)]:
        made = mutant(golden, name)
        signal.setitimer(signal.ITIMER_REAL, STUCK)
        try:
            counts[tried(made, golden, worst)] += 1
        except (Exception, Late) as error:
            signal.setitimer(signal.ITIMER_REAL, 0)
            counts["FAILED"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"{name} ({made.source}): {type(error).__name__}: {error!s:.200} at {last.name}:{last.lineno}"
            )
            if only:
                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        done = sum(counts.values())
        if talk and done % 5000 == 0:
            print(f"{done} in {time.monotonic() - begin:.0f} s: {dict(counts)}, at most {worst}", flush=True)
    signal.signal(signal.SIGALRM, before)
    return counts, failures, worst


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutates the golden files, makes bombs, and reads them.")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SEED:NUMBER of one mutant")
    given = parser.parse_args()
    counts, failures, worst = run(given.count, given.seed, given.only, talk=True)
    for name, number in counts.most_common():
        print(f"{number:8d}  {name}")
    for name, (most, case) in worst.items():
        print(f"{most:12.3f}  {name}, at most, in {case}")
    for failure in failures[:50]:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
