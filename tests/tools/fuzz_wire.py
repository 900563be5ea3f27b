"""The byte form.

Golden files, and files of all encodings, are taken apart with plain loops and put together wrong: bytes, members of the
manifest, numbers of the table, bytes of the body. Reading must give a batch or raise WireFormatError; a batch that was
read must decode. Some are looked at closely: the memory of the reader, rows that move, bytes that are written again,
and the words, which must be those that the reader in docs/format.md finds. What hangs or reads outside its memory
ends the process that looks at it: play with `--jobs`.

`--table FILE` sets every number of the table of a file to the values of ODD and to its neighbour's, one by one.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maskpack import PackedBatch, decompress, unnest_batch_by_mask
from maskpack.errors import LayoutError, WireFormatError

GOLDEN = Path(__file__).parents[1] / "golden"
NORM = Path(__file__).parents[2] / "docs" / "format.md"
"""The page whose Python blocks, in this order, are one reader."""
SIZES = {f"{kind}{8 * size}": size for kind in "IU" for size in (1, 2, 4, 8)}
ODD = (0, 1, -1, 2**31, 2**62)
EXTREMES = (*ODD, 2, 3, 7, 63, 64, 127, 128, 255, 256, 2**15, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63))
VALUES = (*EXTREMES, None, True, "", "x", "mask", "int64", [], {}, [0], [[]], {"float": "inf"}, 0.5, 1e308, 2**64)
COUNT = 20000
LIMIT = 1 << 22
FREE = (1 << 20) + (1 << 17)
"""Bytes that reading may take beside twice those of a message: layouts may take the first, all else the second."""
SMALL = 1 << 15
"""The widths and the bytes up to which the slow reader of the norm reads a message, too."""
CLOSELY = 16
"""One of so many is looked at closely."""

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
KINDS = ("plain", "blocks", "rle", "delta", "sparse", "dictionary", "columns", "concat", "pieces")
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

    def records(self, *records: Sequence[int]) -> Place:
        """Pads of rows, each the bytes of a record."""
        at, _, _ = self.put(byte for record in records for byte in record)
        return at, len(records[0]), len(records)

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
        """A tensor; a padded one is ragged along dim 1."""
        name = f"f{len(self.fields)}"
        layout, items = self.entries[16 * entry + 1 : 16 * entry + 3]
        form: dict[str, Any] = {"path": [name], "kind": kind, "dtype": dtype, "device": "cpu"}
        form["shape"] = [] if items == 1 else [items]
        if layout < 0:
            form["kind"] = "dense"
        else:
            form["layout"] = self.manifest["layouts"][layout]
        if kind == "padded":
            form["dim"] = 1
        self.manifest["fields"].append(form | more)
        self.fields.append(entry)
        self.pads += pads

    def pieces(self) -> Pieces:
        counts = [len(self.layouts) // 14, len(self.entries) // 16, len(self.fields)]
        table = [*counts, *self.layouts, *self.entries, *self.fields, *self.pads]
        raw = b"".join(written(number, 8) for number in table)
        arrays = [["0.table", "I64", raw], ["1.body", "U8", self.body], *self.more]
        return Pieces({"format": "maskpack", "version": "4"}, self.manifest, arrays)

    def joined(self) -> bytes:
        return self.pieces().joined()


# -------------------------------------------------------------------- mutations


def byte_mutation(data: bytes, other: bytes, rng: random.Random) -> bytes:
    line = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(line))
        way = rng.randrange(8)
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
        elif way == 5:
            del line[place:]
            line = line or bytearray(1)
        elif way == 6:
            line[place // 8 * 8 : place // 8 * 8 + 8] = written(rng.choice((*EXTREMES, rng.getrandbits(64))), 8)
        else:
            line[place:] = other[rng.randrange(len(other)) :] or b"\0"
    return bytes(line)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container with every place in it."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        item = todo.pop()
        places = [*item] if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        found += [(item, place) for place in places]
        todo += [item[place] for place in places]
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
        line[place] = rng.choice((line[place] + near, near, rng.choice(EXTREMES), rng.getrandbits(64)))
        if rng.random() < 0.1:  # a place or an entry over another
            begin, length = rng.randrange(len(line)), rng.choice((3, 16))
            part = line[begin : begin + length]
            line[place : place + len(part)] = part
    pieces.table = line


def mutate_body(pieces: Pieces, rng: random.Random) -> None:
    """Bytes of an array, whose size stays."""
    array = rng.choice(pieces.arrays)
    raw = bytearray(array[2])
    for _ in range(rng.choice((1, 1, 2, 8)) if raw else 0):
        raw[rng.randrange(len(raw))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
    array[2] = bytes(raw)


def mutate_records(pieces: Pieces, rng: random.Random) -> None:
    """Where the pads of a tensor lie, or what they are, also bits of signs that mean nothing."""
    line, body = pieces.table, bytearray(pieces.array(1)[2])
    places = range(len(line) - 3 * line[2], len(line), 3)
    held = [place for place in places if line[place + 2]]
    if not held:
        return
    place, way = rng.choice(held), rng.randrange(4)
    at, size, rows = line[place : place + 3]
    if way == 0:
        other = rng.choice(places)
        line[place : place + 3] = line[other : other + 3]
    elif way == 1:
        which = place + rng.randrange(3)
        near = line[which] + rng.choice((1, -1, 2, 8))
        line[which] = rng.choice((near, near, 0, 1, len(body) - size * rows + 1, rng.choice(EXTREMES)))
    for record in range(at, at + size * rows, size) if way >= 2 else ():
        if way == 3:
            last = rng.randrange(256) << rng.randrange(8) & 255  # perhaps no bits behind the width
            body[record + 1 : record + size] = bytes([*rng.randbytes(size - 2), last])
        elif rng.random() < 0.1:
            body[record : record + 1] = bytes([rng.randrange(3)])
        elif rng.random() < 0.5:
            body[record : record + size] = bytes([1, *bytes(size - 1)])
    pieces.table = line
    pieces.array(1)[2] = bytes(body)


def mutant(sources: Sequence[bytes], seed: str) -> bytes:
    rng = random.Random(seed)
    source = rng.choice(sources)
    if rng.random() < 0.15:
        return byte_mutation(source, rng.choice(sources), rng)
    pieces = Pieces.of(source)
    if rng.random() < 0.1:
        mutate_records(pieces, rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        way = rng.randrange(6)
        if way <= 1:
            mutate(pieces.manifest, rng)
        elif way <= 3:
            mutate_table(pieces, rng)
        else:
            mutate_body(pieces, rng)
    return pieces.joined(rng.random() < 0.9, lambda whole: mutate(whole, rng) if rng.random() < 0.05 else None)


def golden_files() -> list[bytes]:
    return [file.read_bytes() for file in sorted(GOLDEN.glob("*.maskpack"))]


def of_rows(*lengths: int) -> Made:
    made = Made(len(lengths))
    made.layout(max(lengths), 0, 0, 0, made.put([0] * len(lengths)), made.put(lengths), made.put([1]))
    return made


WIDTHS = 0 | 1 << 8 | 2 << 16 | 3 << 24
"""Of the codes of a coded block."""


def coded(made: Made) -> list[Place]:
    """Coded blocks of rows of 4, 2 and 4 words, above 1, 2 and 3: 0, 1 + 1, 3 + 2 and 7 + 5; 7 + 6 and 0; 0."""
    return [made.put([64, 64, 64]), made.put([1, 2, 3]), made.put([0b11100100, 0b101_10_1, 0b0011, 0b110, 0], 4)]


def simple_encodings() -> Made:
    """Each kind of layout, and each kind of entry that refers to no other; pads of rows."""
    made = of_rows(4, 2, 4)
    made.layout(4, 1, 0, 0, made.put([0b1011, 0b0100, 0b1111]))
    made.layout(3, 2, 0, 1)
    made.manifest["axes"] = ["l0", "l1", "l2"]
    plain = made.entry("plain", made.put(range(10)), layout=0)
    made.field(plain, "padded", pads=made.records([0, 1], [1, 0], [0, 3]))
    words = made.put([1]), NONE, made.put([0, 1, 0])
    made.field(made.entry("rle", *words, layout=1), dtype="bool")
    made.field(made.entry("rle", made.put([2, 1, 2]), made.put([1, 3]), made.put(range(5)), layout=0))
    made.field(made.entry("plain", made.put(range(7)), layout=2), "padded", pads=made.records([0, 9]))
    halves = made.entry("plain", made.put(range(8), 2), layout=1, size=2)
    made.field(halves, "padded", "float16", made.records([0, 0, 0, 0b00100000], [0, 0, 0, 0b10010000], [0, 0, 60, 0]))
    made.field(made.entry("delta", made.put([2, 1, 1]), made.put([1]), made.put([1, 2, 3, 4]), layout=0))
    blocks = made.put([2, 0, 3]), made.put([1, 2, 3]), made.put([0b11100100, 0o7654], 4)
    made.field(made.entry("blocks", *blocks, layout=0))
    made.field(made.entry("blocks", *coded(made), layout=0, number=WIDTHS))
    return made


def encodings_of_others() -> Made:
    """Each kind of entry that refers to others."""
    made = of_rows(4, 2, 4)
    made.layout(8, 0, 0, 0, made.put([0]), made.put([8, 4, 8]), made.put([1]))
    plain = made.entry("plain", made.put(range(10)), layout=0)
    made.field(plain)
    near = made.put([130, 128, 2]), made.put([0, 0, 9]), made.put([0b11100100, 0b11100100], 4)
    made.field(made.entry("blocks", *near, layout=0, second=plain))
    stored = made.entry("plain", made.put(range(6)), layout=0)
    made.field(made.entry("dictionary", made.put([5, 6, 5]), made.put([4, 2]), layout=0, number=5, first=stored))
    for second in (-1, plain):  # 0 1 2 0, 0 0, 3 0 4 5
        stored = made.entry("plain", made.put([1, 2, 3, 4, 5]), layout=0)
        places = made.put([1, 0, 1]), made.put([2, 0, 3]), made.put([2, 1, 2])
        made.field(made.entry("sparse", *places, layout=0, first=stored, second=second))
    column = made.entry("plain", made.put(range(10)), layout=0)
    made.entry("delta", made.put([2]), made.put([1]), made.put([3, 1] * 3), layout=0)
    made.field(made.entry("columns", layout=0, items=2, first=column, number=2))
    wide = [made.entry("plain", made.put(range(20)), layout=0, items=2) for _ in range(2)]
    made.field(made.entry("columns", layout=0, items=4, first=wide[0], number=2))
    stored = made.entry("plain", made.put(range(8)), layout=0)
    copies = made.put([1, 2, 1, 1, 0, 2, 2, 1, 1, 1, 0, 1])  # of row 0: 1 new word, 2 copied, 1 new; ...
    made.field(
        made.entry("pieces", made.put([1, 1, 1]), made.put([3, 2, 0, 3]), copies, layout=0, number=1, first=stored)
    )
    made.field(made.entry("concat", layout=1, first=plain, second=plain))
    return made


def tables(file: Path) -> Iterator[tuple[str, bytes]]:
    """A file with every number of its table set to other values."""
    pieces = Pieces.of(file.read_bytes())
    line = pieces.table
    for place, number in enumerate(line):
        for value in dict.fromkeys((*ODD, line[place - 1], line[(place + 1) % len(line)], number + 1, number - 1)):
            pieces.table = [*line[:place], value, *line[place + 1 :]]
            yield f"{file.stem}: number {place} is {value}", pieces.joined()


# -------------------------------------------------------------------- the norm


@lru_cache(1)
def norm() -> dict[str, Any]:
    """The reader that the Python blocks of the norm make up."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", NORM.read_text(), re.DOTALL):
        exec(compile(block, str(NORM), "exec"), names)
    return names


def bytes_of(x: torch.Tensor) -> bytes:
    x = x.detach().contiguous()
    real = torch.view_as_real(x) if x.dtype == torch.complex128 else x
    return real.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_as_the_norm_says(data: bytes, batch: Any, norm: dict[str, Any]) -> None:
    """Row by row: real values, and padded forms, of each tensor of a batch."""
    for path, (entry, rows, spans, records) in norm["read"](data).items():
        x = batch.get(path)
        item = x.dtype.itemsize
        raw = [b"".join(word.to_bytes(min(item, 8), "little") for word in row) for row in rows]
        if x.is_nested:
            assert b"".join(raw) == bytes_of(x.values())
            assert [len(row) // item for row in raw] == (x.offsets().diff() * int(np.prod(entry["shape"]))).tolist()
        elif entry["kind"] != "padded":
            assert b"".join(raw) == bytes_of(x)
        else:
            moved = x.movedim(entry["dim"], 1)
            element = item * int(np.prod(entry["shape"], dtype=int))
            for b, row in enumerate(raw):
                items = [row[place : place + element] for place in range(0, len(row), element or 1)]
                items = items if element else [b""] * sum(count for _, count in spans[b])
                line = norm["padded"](items, spans[b], moved.shape[1], records[b], item, element)
                assert b"".join(line) == bytes_of(moved[b]), (path, b)


# -------------------------------------------------------------------- what must hold


def read(data: bytes, limit: int | None) -> PackedBatch | None:
    """The batch; None if it is refused, as it must be."""
    try:
        return PackedBatch.from_bytes(data, max_bytes=limit)
    except WireFormatError as error:
        message = str(error)
        assert message.startswith("PackedBatch.from_bytes: "), message
        assert "; expected " in message
        assert len(message) < 2000
        return None


def outcome(data: bytes, limit: int | None = LIMIT) -> str:
    """The name of what came of it; anything but a good end is raised."""
    packed = read(data, limit)
    if packed is None:
        return "refused"
    try:
        decompress(packed, max_bytes=limit)
    except LayoutError:  # a limit
        return "accepted, not decoded"
    return "accepted and decoded"


def with_peak(call: Callable[..., Any], *given: Any, **more: Any) -> tuple[Any, int]:
    """What a call gives, and the bytes that it took at most."""
    tracemalloc.start()
    try:
        return call(*given, **more), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def outcome_closely(data: bytes, norm: dict[str, Any], limit: int | None = LIMIT) -> str:
    packed, peak = with_peak(read, data, limit)
    restored = 2 * (limit or 0) if b"codec" in data else 0
    assert peak < 2 * len(data) + FREE + restored, f"{peak} bytes for {len(data)}"
    if packed is None:
        return "refused, closely"
    try:
        whole = decompress(packed, max_bytes=limit)
        nested = decompress(packed, format="nested", max_bytes=limit)
    except LayoutError:  # a nested form that torch does not have, a limit
        return "accepted, not decoded"
    assert len(packed) == whole.batch_size[0] if whole.batch_size else True
    again = PackedBatch.from_bytes(packed.to_bytes())
    assert packed.codec or again.to_bytes() == packed.to_bytes()
    if whole.batch_size and 0 < len(packed) < 1000:
        for part in (*packed.chunk(2), packed[1:], packed[0:0], packed.take([-1, 0])):
            decompress(PackedBatch.from_bytes(part.to_bytes()))
    narrow = all(layout.width <= SMALL for layout in packed.table.layouts.values())
    if packed.codec or not narrow or whole.bytes() > SMALL:
        return "accepted and decoded, closely"
    assert_as_the_norm_says(data, whole, norm)
    back = unnest_batch_by_mask(nested)
    for path in whole.keys(True, True):
        if isinstance(x := whole.get(path), torch.Tensor) and not x.is_nested:
            assert bytes_of(back.get(path)) == bytes_of(x), path
    return "accepted and decoded, as the norm says"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--table", nargs="*", type=Path, help="files whose tables are changed number by number")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="of these changes, about one of N, drawn")


def session(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    norm()
    if not given.table:
        sources()  # before processes fork


@lru_cache(1)
def sources() -> list[bytes]:
    return [*golden_files(), simple_encodings().joined(), encodings_of_others().joined()]


def cases(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Counter[str]]]] | None:
    """Those of --table."""
    if not given.table:
        return None
    drawn = random.Random(0)
    changed = (one for file in given.table for one in tables(file) if not drawn.randrange(given.every))
    return ((name, partial(closely, data)) for name, data in changed)


def closely(data: bytes) -> Counter[str]:
    return Counter([outcome_closely(data, norm())])


def play(seed: int) -> Counter[str]:
    data = mutant(sources(), str(seed))
    return Counter([outcome(data)]) if seed % CLOSELY else closely(data)
