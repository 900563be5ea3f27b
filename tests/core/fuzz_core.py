"""Random tables through the compiled core alone, against lists of words: encode, decode packed and padded, split, take;
and rows in the order of a trie.

    python tests/core/fuzz_core.py LIBRARY FIRST_SEED COUNT

Several threads call the core at a time, which starts threads of its own. Needs NumPy only, so that it runs fast under a
sanitizer. test_sanitized.py builds such libraries.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

PLACE = [("at", "i8"), ("size", "i8"), ("count", "i8")]
_FIELD = "padded packed row_stride outer outer_stride size items layout mode pad pad_high row_pads stray"
FIELD = [(name, "i8") for name in _FIELD.split()]
_FIRST = "padded layout items size rows bounds index integers hints near head tail columns num_pads"
JOB = [
    ("field", FIELD),
    *((name, "i8") for name in _FIRST.split()),
    ("pads", "i8", (4, 3)),
    ("form", "i8", 8),
    *((name, "i8") for name in ("result", "pad", "first", "count")),
    ("row_pads", PLACE),
]
ENTRY = [(name, "i8") for name in ["kind", "layout", "items", "size", "number", "first", "second"]]
ENTRY += [(name, PLACE) for name in "abc"]
STORED = [*((name, "i8") for name in ["width", "anchor", "kind", "parent", "low"]), *((name, PLACE) for name in "abc")]
TARGET = [("field", FIELD), ("padded", "i8"), ("entry", "i8"), ("rows", "i8")]
CONSTANT, EDGE, BY_ROW = 1, 2, 3
DICTIONARY = (8, 0, 0, 0, 0, 0, 0, 0)
"""A form: a dictionary of plain rows."""
MARGIN = 16
"""Words behind every output, which stay as they are."""


def address(array: Any) -> int:
    """0 for an array without items, as of tensors."""
    return array.size and array.__array_interface__["data"][0]


class Mask:
    """Spans of a random mask, and its row of the table of layouts."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask, self.width = mask, mask.shape[1]
        starts, counts, splits, bounds = [], [], [0], [0]
        for row in mask:
            padded = np.concatenate([[False], row, [False]]).astype(np.int8)
            steps = np.diff(padded)
            starts += np.flatnonzero(steps == 1).tolist()
            counts += (np.flatnonzero(steps == -1) - np.flatnonzero(steps == 1)).tolist()
            splits.append(len(starts))
            bounds.append(bounds[-1] + int(row.sum()))
        self.parts = [np.array(part, np.int64) for part in (starts, counts, splits, bounds)]
        self.bounds = self.parts[3]
        self.line = np.array([len(mask), self.width, *map(address, self.parts)], np.int64)


def words(rng: np.random.Generator, lengths: list[int], dtype: np.dtype[Any], items: int) -> np.ndarray:
    info, n = np.iinfo(dtype), sum(lengths) * items
    kinds = [
        lambda: rng.integers(info.min, info.max, n, dtype, endpoint=True),
        lambda: rng.integers(0, min(150_000, info.max), n),
        lambda: (rng.random(n) < 0.3) * 7,
        lambda: np.repeat(rng.integers(0, 100, n // 7 + 1), 7)[:n],
        lambda: np.concatenate([[], *(np.arange(m * items) * 3 + rng.integers(0, 9) for m in lengths)]),
        lambda: np.cumsum(rng.random(n) < 0.9),
        lambda: (rng.random(n) < 0.02) * rng.integers(1, 99, n),
        lambda: np.full(n, rng.integers(info.min, info.max, dtype=dtype)),
        lambda: np.concatenate([[], *(np.arange(m * items) % 50 * rng.integers(1, 3) for m in lengths)]),
    ]
    return kinds[rng.integers(len(kinds))]().astype(dtype)


class Table(NamedTuple):
    entries: np.ndarray
    fields: np.ndarray
    body: np.ndarray
    stored: np.ndarray


class Core:
    def __init__(self, library: str) -> None:
        self.core = ctypes.CDLL(library)

    def call(self, name: str, *numbers: int) -> int:
        function = getattr(self.core, f"maskpack_{name}")
        function.argtypes, function.restype = [ctypes.c_int64] * len(numbers), ctypes.c_int64
        return function(*numbers)

    def encode(self, jobs: np.ndarray, mask: Mask, threads: int) -> Table:
        """The jobs of a mask as a table, whose layouts were given and, which must be the same, scanned."""
        scanned = jobs.copy()
        layouts = address(mask.line), 1
        found = self._encoded(
            "encode", jobs, lambda table: (address(jobs), jobs.size, *layouts, address(table.stored)), threads
        )
        bits = mask.mask.astype(np.int8)
        masks, cuts = np.array([address(bits), 1, *bits.shape, mask.width, -1, 0]), np.array([0, -1, mask.width])
        first = address(masks), 1, address(cuts)
        last = 1, address(scanned), jobs.size
        again = self._encoded("compress", scanned, lambda table: (*first, address(table.stored), *last), threads)
        assert all((one == other).all() for one, other in zip(found, again, strict=True))
        return found

    def _encoded(self, name: str, jobs: np.ndarray, source: Callable[[Table], tuple[int, ...]], threads: int) -> Table:
        jobs["first"] = np.concatenate([[0], np.cumsum(jobs["columns"] + 3)[:-1]])
        entries = np.zeros(int((jobs["columns"] + 3).sum()), ENTRY)
        slots = np.full(entries.nbytes, 0xBE, np.uint8)  # as memory that was in use before
        given, room = jobs.copy(), 0
        fields, count = np.zeros(jobs.size, np.int64), np.zeros(1, np.int64)
        while True:
            jobs[...] = given
            table = Table(entries, fields, np.full(room + 1, 0xAA, np.uint8), np.zeros(1, STORED))
            places = map(address, (slots, entries, count, fields, table.body))
            used = self.call(name, *source(table), *places, room, threads)
            assert used != -1, jobs["result"]
            assert table.body[room] == 0xAA
            if used >= 0:
                return Table(entries[: int(count[0])], fields, table.body[: used + 1].copy(), table.stored)
            assert room < -2 - used
            room = -2 - used

    def decode(self, targets: np.ndarray, table: Table, mask: Mask, threads: int = 1, given: bool = True) -> None:
        """`given`: with the layouts of the mask, not those in the body."""
        rows = len(mask.mask)
        layouts = address(mask.line) if given else 0, address(table.stored), 1 - given
        numbers = (
            address(targets),
            targets.size,
            address(table.entries),
            *layouts,
            address(table.body),
            rows,
            0,
            threads,
        )
        assert self.call("decode", *numbers) == 0

    def packed(self, entry: int, table: Table, mask: Mask, want: np.ndarray) -> None:
        out = np.full(want.size + MARGIN, 0x55, want.dtype)
        target = np.zeros(1, TARGET)
        target["field"]["packed"], target["entry"] = address(out[: want.size]), entry
        target["rows"] = len(mask.mask)
        self.decode(target, table, mask)
        assert (out[: want.size] == want).all(), entry
        assert (out[want.size :] == np.full(MARGIN, 0x55, want.dtype)).all()


def run(core: Core, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(0, 9)), int(rng.choice([0, 1, 5, 40, 700]))
    ways = [lambda: np.zeros(width, bool), lambda: np.ones(width, bool), lambda: rng.random(width) < 0.5]
    ways.append(lambda: np.arange(width) >= rng.integers(0, width + 1))
    mask = Mask(np.array([ways[rng.integers(4)]() for _ in range(rows)], bool).reshape(rows, width))
    lengths = np.diff(mask.bounds).tolist()
    jobs = np.zeros(int(rng.integers(1, 5)), JOB)
    for name in ("near", "head", "tail"):
        jobs[name] = -1
    jobs["form"][:, [0, 3]] = -1
    truth: list[np.ndarray] = []
    padded: list[np.ndarray] = []
    held: list[Any] = []
    for at, job in enumerate(jobs):
        dtype = np.dtype(f"i{rng.choice([1, 2, 4, 8])}")
        outer, inner = int(rng.choice([1, 1, 3])), int(rng.choice([0, 1, 1, 1, 2, 2, 20, 136]))
        values = words(rng, lengths, dtype, outer * inner)
        before = jobs[at - 1]
        if at and (before["size"], before["items"]) == (dtype.itemsize, outer * inner) and rng.random() < 0.7:
            values = (truth[-1] + rng.integers(-3, 4, values.size)).astype(dtype)
            job["near"] = at - 1
        pad, mode = int(rng.integers(0, 5)), int(rng.choice([CONSTANT, EDGE, BY_ROW]))
        full = np.zeros((rows, outer, width, inner), dtype)
        elements = values.reshape(int(mask.bounds[-1]), outer, inner)
        for row in range(rows):
            own, seen = elements[mask.bounds[row] : mask.bounds[row + 1]], 0
            for column in range(width):
                seen += int(mask.mask[row, column])
                nearest = own[max(seen - 1, 0)] if len(own) else 0
                under = {CONSTANT: pad, EDGE: nearest, BY_ROW: row}[mode]
                full[row, :, column] = nearest if mask.mask[row, column] else under
        truth.append(values)
        padded.append(full)
        line = job["field"]
        line["outer"], line["size"], line["items"] = outer, dtype.itemsize, inner
        line["row_stride"], line["outer_stride"] = full[:1].nbytes or 0, width * inner * dtype.itemsize
        line["padded"], line["packed"] = address(full), address(values)
        job["padded"], job["bounds"] = rng.random() < 0.7, address(mask.bounds)
        job["items"], job["size"], job["rows"], job["integers"] = outer * inner, dtype.itemsize, rows, 1
        items = outer * inner
        parts = [count for count in range(2, items + 1) if items % count == 0]
        job["columns"] = rng.choice(parts) if rng.random() < 0.5 and parts else 0
        trials = [[mode, pad, 0]] if rng.random() < 0.7 else [[CONSTANT, 77, 0], [mode, pad, 0]]
        job["num_pads"] = len(trials)
        job["pads"][: len(trials)] = trials
    for threads in (1, 3, 2):  # then in the forms that were chosen before, then as dictionaries, which may not fit
        if threads == 2:
            jobs["form"] = DICTIONARY
        table = core.encode(jobs, mask, threads)
        entries, fields, body, stored = table
        targets, outs = np.zeros(jobs.size, TARGET), []
        for at, job in enumerate(jobs):
            core.packed(int(fields[at]), table, mask, truth[at])
            target, out = targets[at : at + 1], np.full(padded[at].size + MARGIN, 0x55, padded[at].dtype)
            outs.append(out)
            target["field"] = job["field"]
            mode = job["pads"][int(job["pad"])] if job["padded"] else job["pads"][int(job["num_pads"]) - 1]
            pads = np.arange(rows, dtype=out.dtype)
            held.append(pads)
            target["field"]["padded"], target["field"]["row_pads"] = address(out[:-MARGIN]), address(pads)
            target["field"]["mode"], target["field"]["pad"] = mode[0], mode[1]
            target["padded"], target["entry"], target["rows"] = 1, fields[at], rows
        core.decode(targets, table, mask, threads, bool(rng.random() < 0.5))
        for out, full in zip(outs, padded, strict=True):
            assert (out[:-MARGIN].reshape(full.shape) == full).all()
            assert (out[-MARGIN:] == np.full(MARGIN, 0x55, full.dtype)).all()
        cuts = np.sort(rng.integers(0, rows + 1, 4))
        parts, of_parts = np.zeros((3, entries.size), ENTRY), np.zeros((3, 1), STORED)
        numbers = address(entries), entries.size, address(stored), 1, address(mask.line), address(body), rows
        assert core.call("split", *numbers, address(cuts), 3, address(parts), address(of_parts)) == 0
        for part, (begin, end) in zip(parts, itertools.pairwise(cuts), strict=True):
            own = Mask(mask.mask[begin:end])
            for at, job in enumerate(jobs):
                low, high = (int(mask.bounds[row]) * int(job["items"]) for row in (begin, end))
                core.packed(int(fields[at]), table._replace(entries=part), own, truth[at][low:high])


def order(core: Core, seed: int) -> None:
    """Of random rows, which begin with tokens of rows before them: any two share the least of what lies between."""
    rng = np.random.default_rng(seed)
    ids: list[list[int]] = []
    words = [[0, 1], [-(2**63), 2**63 - 1, -1, 0], list(range(60))][rng.integers(3)]
    for _ in range(rng.integers(0, 12)):
        before = ids[rng.integers(len(ids))] if ids else []
        ids.append(before[: rng.integers(0, len(before) + 1)] + rng.choice(words, rng.integers(0, 70)).tolist())
    items = int(rng.integers(0, 3))
    rows = [[(word, *(rng.random(items) < 0.01).tolist()) for word in row] for row in ids]
    flat = np.array([token for row in rows for token in row], np.int64).reshape(-1, 1 + items)
    tokens, beside = flat[:, 0].copy(), flat[:, 1:].copy()
    bounds = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    out = np.full((2, len(rows) + 1), -7, np.int64)
    places = address(tokens), address(beside), items, address(bounds), len(rows), address(out), address(out[1])
    assert core.call("order_prefixes", *places) == 0
    assert (out[:, -1] == -7).all()
    assert sorted(out[0, :-1]) == list(range(len(rows)))
    for first, one in enumerate(out[0, :-1]):
        for last in range(first + 1, len(rows)):
            pairs = itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(rows[one], rows[out[0, last]], strict=False)
            )
            assert len(list(pairs)) == out[1, first + 1 : last + 1].min()


if __name__ == "__main__":
    library, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda number: run(Core(library), number), range(first, first + count)))
        list(pool.map(lambda number: order(Core(library), number), range(first, first + count)))
    print("no difference")
