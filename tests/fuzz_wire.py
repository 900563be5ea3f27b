"""A fuzz target for the byte form: `python -m tests.fuzz_wire --count N --seed S`.

Every golden file is taken apart with plain loops and put together wrong. Reading the result must give a batch or raise
WireFormatError, within time and memory; a batch that was read must decode and be written again. A file with a checksum
must give an equal batch or none. A failure is printed with the seed that makes it again: `--only SEED:NUMBER`.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
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

from maskpack import MaskpackError, PackedBatch, WireFormatError, decompress, wire

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
SECONDS = 5
DECODED = 64 << 20

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


@dataclass
class Mutant:
    source: str
    data: bytes
    resealed: bool  # a checksum that was made to fit the change


def mutant(golden: dict[str, bytes], seed: str) -> Mutant:
    rng = random.Random(seed)
    source = rng.choice(sorted(golden))
    if rng.random() < 0.25:
        return Mutant(source, byte_mutation(golden[source], golden[rng.choice(sorted(golden))], rng), False)
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

    return Mutant(source, pieces.joined(resealed, header, text, deepened), resealed)


# -------------------------------------------------------------------- what must hold


class Late(BaseException):
    """Out of time; nothing in between catches it."""


def _alarm(*_: Any) -> None:
    raise Late


def outcome(made: Mutant, originals: dict[str, bytes]) -> str:
    """The name of what came of it; anything but a good end is raised."""
    allowed = 2 * len(made.data) + (1 << 20) + 2 * _squeezed(made.data)
    tracemalloc.start()
    try:
        batch = PackedBatch.from_bytes(made.data)
    except WireFormatError as error:
        batch = None
        reason = error
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak <= allowed, f"from_bytes took {peak} bytes for {len(made.data)}"
    if batch is None:
        assert str(reason).startswith("PackedBatch"), str(reason)
        assert len(str(reason)) < 2000, f"a message of {len(str(reason))} letters"
        try:
            wire.read(made.data, "")
        except WireFormatError:
            return "refused as a container"
        return "refused behind the container"
    written = batch.to_bytes()
    if "crc32" in json.loads(originals[made.source][8:][: int.from_bytes(originals[made.source][:8], "little")])[
        "__metadata__"
    ] and (not made.resealed):
        assert written == PackedBatch.from_bytes(originals[made.source]).to_bytes(), "a change behind its checksum"
    again = PackedBatch.from_bytes(written)
    assert batch.codec or again.to_bytes() == written, "written twice, and different"
    if decoded_size(batch) > DECODED:
        return "accepted, too large to decode here"
    for layout in ("padded", "nested"):
        try:
            decompress(batch, layout=layout, device="cpu")
        except MaskpackError:
            return "accepted, not decoded"
    return "accepted and decoded"


def _squeezed(data: bytes) -> int:
    """Bytes that the codec records stand for, as far as a reader may believe them."""
    try:
        pieces = Pieces.of(data)
        records = pieces.manifest["codec"]["arrays"]
        total = sum(record[1] * 8 for record in records if record is not None)
        return min(max(total, 0), 4096 * len(data))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return 0


def decoded_size(batch: PackedBatch) -> int:
    """Bytes of the padded and nested form with their helpers; sizes of 0 count as 1."""
    total = 0
    for form in batch.schema.forms:
        if form.dtype is None:
            continue
        element = math.prod(max(size, 1) for size in form.shape) * max(form.dtype.itemsize, 8)
        layout = batch.layouts[form.layout] if form.layout is not None else None
        total += element * (max(batch.num_rows, 1) if layout is None else layout.num_rows * layout.width + layout.total)
    for layout in batch.layouts.values():
        total += 16 * (layout.total + layout.num_rows)
    return total


def run(count: int, seed: int, only: str | None = None, talk: bool = False) -> tuple[Counter[str], list[str]]:
    """Counts of outcomes, and the failures."""
    warnings.simplefilter("ignore")
    golden = {file.stem: file.read_bytes() for file in sorted(GOLDEN.glob("*.maskpack"))}
    assert golden, "no golden files"
    for data in golden.values():  # so that the first mutant pays for no import
        with contextlib.suppress(WireFormatError):  # the pickled one
            decompress(PackedBatch.from_bytes(data))
    counts: Counter[str] = Counter()
    failures: list[str] = []
    before = signal.signal(signal.SIGALRM, _alarm)
    begin = time.monotonic()
    for name in [only] if only else [f"{seed}:{number}" for number in range(count)]:
        made = mutant(golden, name)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            counts[outcome(made, golden)] += 1
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
            print(f"{done} in {time.monotonic() - begin:.0f} s: {dict(counts)}", flush=True)
    signal.signal(signal.SIGALRM, before)
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutates the golden files and reads them.")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="SEED:NUMBER of one mutant")
    given = parser.parse_args()
    counts, failures = run(given.count, given.seed, given.only, talk=True)
    for name, number in counts.most_common():
        print(f"{number:8d}  {name}")
    for failure in failures[:50]:
        print(failure)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
