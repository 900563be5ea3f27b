"""A fuzz target for the byte form: `python -m tests.fuzz_wire --count N --seed S`.

Golden files are taken apart with plain loops and put together wrong: bytes, members of the manifest, numbers of the
table, bytes of the body. Reading must give a batch or raise WireFormatError; a batch that was read must decode, move
its rows and be written again. What hangs or reads outside its memory ends the process: tests run this in another one.
To look closer, build the core with `python hatch_build.py -fsanitize=address,undefined` and preload libasan.

`--table NAME` sets every number of the table of a golden file to the values of ODD and to its neighbour's, one by one.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import signal
import sys
import tracemalloc
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from maskpack import PackedBatch, decompress
from maskpack.errors import LayoutError, WireFormatError

GOLDEN = Path(__file__).parent / "golden"
SIZES = {f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)}
ODD = (0, 1, -1, 2**31, 2**62)
EXTREMES = (*ODD, 2, 3, 7, 63, 64, 127, 128, 255, 256, 2**15, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63))
VALUES = (
    *EXTREMES,
    None,
    True,
    "",
    "x",
    "mask",
    "dense",
    [],
    {},
    [0],
    [[]],
    0.5,
    1e308,
    {"float": "inf"},
    "int64",
    2**64,
)
SECONDS = 20
LIMIT = 1 << 22
FREE = 1 << 20

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

    def array(self, number: int) -> list[Any]:
        return next(entry for entry in self.arrays if entry[0].partition(".")[0] == str(number))

    @property
    def table(self) -> list[int]:
        return integers(self.array(0)[2], 8)

    @table.setter
    def table(self, numbers: Iterable[int]) -> None:
        self.array(0)[2] = b"".join(written(number, 8) for number in numbers)

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
            numbered = sorted(entries.items(), key=lambda item: int(item[0].partition(".")[0]))
            lines = [f"{e['dtype']}:{e['data_offsets'][0]}:{e['data_offsets'][1]};" for _, e in numbered]
            metadata["crc32"] = f"{zlib.crc32((metadata['manifest'] + ''.join(lines)).encode() + body):08x}"
        whole = {"__metadata__": metadata, **entries}
        header(whole)
        raw = text(json.dumps(whole)).encode()
        raw += b" " * (-(len(raw) + 8) % 64)
        return len(raw).to_bytes(8, "little") + raw + body


def written(number: int, size: int) -> bytes:
    return (number % 256**size).to_bytes(size, "little")


def integers(raw: bytes, size: int) -> list[int]:
    return [int.from_bytes(raw[at : at + size], "little", signed=True) for at in range(0, len(raw), size)]


NONE = (0, 1, 0)
KINDS = ("plain", "narrow", "blocks", "bitmap", "rle", "arange", "delta", "sparse", "dictionary", "columns", "concat")
Place = Sequence[int]


class Made:
    """A message that is put together from nothing: arrays, layouts, entries and fields, one after the other."""

    def __init__(self, rows: int = 1, dims: Sequence[int] | None = ()) -> None:
        root = {"dims": None if dims is None else list(dims), "device": None}
        self.manifest: dict[str, Any] = {"rows": rows, "root": root, "axes": [], "layouts": [], "fields": [], "body": 1}
        self.layouts: list[int] = []
        self.entries: list[int] = []
        self.fields: list[int] = []
        self.pads: list[int] = []
        self.body = b""
        self.more: list[list[Any]] = []

    def put(self, numbers: Iterable[int], size: int = 1) -> Place:
        raw = b"".join(written(number, size) for number in numbers)
        at = len(self.body)
        self.body += raw + bytes(-len(raw) % 8)
        return at, size, len(raw) // size

    def layout(self, width: int, kind: int = 0, parent: int = 0, low: int = 0, *places: Place) -> int:
        places = (*places, NONE, NONE, NONE)[:3]
        self.layouts += [width, 0, kind, parent, low, *(number for place in places for number in place)]
        self.manifest["layouts"].append(f"l{len(self.manifest['layouts'])}")
        return len(self.manifest["layouts"]) - 1

    def entry(self, kind: str, *places: Place, layout: int = -1, **more: int) -> int:
        """Of bytes, with one word an element, unless `more` says otherwise."""
        known = {"items": 1, "size": 1, "number": 0, "first": -1, "second": -1} | more
        places = (*places, NONE, NONE, NONE)[:3]
        self.entries += [KINDS.index(kind), layout, *known.values(), *(n for place in places for n in place)]
        return len(self.entries) // 16 - 1

    def field(self, entry: int, kind: str = "jagged", dtype: str = "uint8", pads: Place = NONE, **more: Any) -> None:
        name = f"f{len(self.fields)}"
        layout, items = self.entries[16 * entry + 1 : 16 * entry + 3]
        form: dict[str, Any] = {"path": [name], "kind": kind, "dtype": dtype, "device": "cpu"}
        form["shape"] = [] if items == 1 else [items]
        if layout < 0:
            form["kind"] = "dense"
        else:
            form["layout"] = self.manifest["layouts"][layout]
        self.manifest["fields"].append(form | more)
        self.fields.append(entry)
        self.pads += pads

    def object(self, json: Any, depth: int = 0, **more: Any) -> None:
        self.manifest["fields"].append({"path": ["o"], "kind": "object", "depth": depth, "json": json, **more})

    def pieces(self) -> Pieces:
        counts = [len(self.layouts) // 14, len(self.entries) // 16, len(self.fields)]
        table = [*counts, *self.layouts, *self.entries, *self.fields, *self.pads]
        raw = b"".join(written(number, 8) for number in table)
        arrays = [["0.table", "I64", raw], ["1.body", "U8", self.body], *self.more]
        return Pieces({"format": "maskpack", "version": "2"}, self.manifest, arrays)

    def joined(self) -> bytes:
        return self.pieces().joined()


# -------------------------------------------------------------------- mutations


def byte_mutation(data: bytes, other: bytes, rng: random.Random) -> bytes:
    line = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(line))
        way = rng.randrange(6)
        if way <= 1:
            line[place] ^= 1 << rng.randrange(8)
        elif way == 2:
            line[place] = rng.choice((0, 255, 127, 128, rng.randrange(256), ord(rng.choice('0123456789"{}[],:-. '))))
        elif way == 3:
            del line[place : place + rng.choice((1, 8, 1000))]
            line = line or bytearray(1)
        elif way == 4:
            begin, length = rng.randrange(len(line)), rng.choice((1, 8, 64))
            line[place:place] = line[begin : begin + length]
        else:
            line[place:] = other[rng.randrange(len(other)) :] or b"\0"
    return bytes(line)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container with every place in it."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        item = todo.pop()
        inner = (
            list(item.items()) if isinstance(item, dict) else list(enumerate(item)) if isinstance(item, list) else []
        )
        found += [(item, place) for place, _ in inner]
        todo += [part for _, part in inner]
    return found


def mutate(tree: Any, rng: random.Random) -> None:
    """Changes one place of parsed JSON."""
    places = places_in(tree)
    if not places:
        return
    holder, key = rng.choice(places)
    way = rng.randrange(5)
    if way <= 1:
        holder[key] = copy.deepcopy(rng.choice(VALUES))
    elif way == 2:
        other, place = rng.choice(places)
        holder[key] = copy.deepcopy(other[place])
    elif way == 3:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice((f"{key}x", "hints", "pickle", "json", "codec", "axis", "layout"))] = holder[key]
    else:
        holder.insert(key, holder[key])


def mutate_table(pieces: Pieces, rng: random.Random) -> None:
    line = pieces.table
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(3, len(line)) if len(line) > 3 else rng.randrange(len(line))
        near = rng.choice((1, -1, 2, 8, -8, line[rng.randrange(len(line))]))
        line[place] = rng.choice((line[place] + near, near, rng.choice(EXTREMES)))
    pieces.table = line


def mutate_body(pieces: Pieces, rng: random.Random) -> None:
    """Bytes of an array, whose size stays."""
    array = rng.choice(pieces.arrays)
    raw = bytearray(array[2])
    for _ in range(rng.choice((1, 1, 2, 8)) if raw else 0):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
    array[2] = bytes(raw)


def mutant(golden: dict[str, bytes], seed: str) -> bytes:
    rng = random.Random(seed)
    source = golden[rng.choice(sorted(golden))]
    if rng.random() < 0.15:
        return byte_mutation(source, golden[rng.choice(sorted(golden))], rng)
    pieces = Pieces.of(source)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        way = rng.randrange(6)
        if way <= 1:
            mutate(pieces.manifest, rng)
        elif way <= 3:
            mutate_table(pieces, rng)
        else:
            mutate_body(pieces, rng)
    return pieces.joined(rng.random() < 0.9, lambda whole: mutate(whole, rng) if rng.random() < 0.05 else None)


def tables(name: str) -> Iterator[tuple[str, bytes]]:
    """A golden file with every number of its table set to other values."""
    pieces = Pieces.of((GOLDEN / f"{name}.maskpack").read_bytes())
    line = pieces.table
    for place, number in enumerate(line):
        for value in dict.fromkeys((*ODD, line[place - 1], line[(place + 1) % len(line)], number + 1, number - 1)):
            pieces.table = [*line[:place], value, *line[place + 1 :]]
            yield f"{name}: number {place} is {value}", pieces.joined()


# -------------------------------------------------------------------- what must hold


def outcome(data: bytes, limit: int | None = LIMIT) -> str:
    """The name of what came of it; anything but a good end is raised."""
    tracemalloc.start()
    try:
        packed = PackedBatch.from_bytes(data, max_bytes=limit)
    except WireFormatError as error:
        message = str(error)
        assert message.startswith("PackedBatch.from_bytes: "), message
        assert "; expected " in message
        assert len(message) < 2000
        return "refused"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * len(data) + FREE + 2 * (limit or 0), f"{peak} bytes for {len(data)}"
    try:
        whole = decompress(packed, max_bytes=limit)
        decompress(packed, format="nested", max_bytes=limit)
    except LayoutError:  # a nested form that torch does not have, a limit
        return "accepted, not decoded"
    assert len(packed) == whole.batch_size[0] if whole.batch_size else True
    again = PackedBatch.from_bytes(packed.to_bytes())
    assert packed.codec or again.to_bytes() == packed.to_bytes()
    if whole.batch_size and 0 < len(packed) < 1000:
        for part in (*packed.chunk(2), packed[1:], packed[0:0], packed.take([-1, 0])):
            decompress(PackedBatch.from_bytes(part.to_bytes()))
    return "accepted and decoded"


def run(cases: Iterable[tuple[str, bytes]]) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and the failures. A case that hangs ends the process."""
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for name, data in cases:
        signal.alarm(SECONDS)
        try:
            counts[outcome(data)] += 1
        except Exception as error:
            counts["FAILED"] += 1
            failures.append(f"{name}: {type(error).__name__}: {error!s:.300}")
        signal.alarm(0)
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutates the golden files, and reads them.")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SEED:NUMBER of one mutant")
    parser.add_argument("--table", nargs="*", help="golden files whose tables are changed number by number")
    given = parser.parse_args()
    golden = {file.stem: file.read_bytes() for file in sorted(GOLDEN.glob("*.maskpack"))}
    names = [given.only] if given.only else [f"{given.seed}:{number}" for number in range(given.count)]
    cases: Iterable[tuple[str, bytes]] = ((name, mutant(golden, name)) for name in names)
    if given.table:
        cases = (case for name in given.table for case in tables(name))
    counts, failures = run(cases)
    print(dict(counts))
    print("\n".join(failures[:20]))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
