"""Random tables through the compiled core alone, against lists of words: encode, decode packed and padded, split, take;
the same of bodies that are written to after they were checked; and rows in the order of a trie.

Three threads call the core at a time, which starts threads of its own. Needs NumPy only, so that it runs fast under a
sanitizer. test_sanitized.py builds such libraries.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import runpy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

CORE = Path(__file__).parents[2] / "maskpack/core/_core.so"
abi = runpy.run_path(str(CORE.with_name("abi.py")))  # an import of the package would load torch
ENTRY, STORED, JOB, TARGET = (abi[name] for name in ("ENTRY", "STORED", "JOB", "TARGET"))
CONSTANT, BY_EDGE, BY_ROW = (abi[name] for name in ("CONSTANT", "BY_EDGE", "BY_ROW"))
WORD, EDGE = abi["WORD"], abi["EDGE"]
OF_MASK, OF_LAYOUT, KEPT = (abi[name] for name in ("OF_MASK", "OF_LAYOUT", "KEPT"))
OF_ROWS = [
    (abi[name], number, *[0] * 4) for name, number in (("DICTIONARY", 0), ("PIECES", 0), ("SPARSE", 0), ("SPARSE", 1))
]
"""Forms: a dictionary of plain rows, pieces of them, their words that are not 0, and the distances of these."""
LIBRARY = list[str]()
MARGIN = 16
"""Words behind every output, which stay as they are."""


def address(array: Any) -> int:
    """0 for an array without items, as of tensors."""
    return array.size and array.__array_interface__["data"][0]


class Layout:
    """Spans, and the row of the table of layouts."""

    def __init__(self, width: int, *parts: np.ndarray) -> None:
        self.width, self.parts, self.bounds = width, parts, parts[3]
        self.rows = self.bounds.size - 1
        self.line = np.array([self.rows, width, *map(address, parts)], np.int64)

    def assert_in_order(self) -> None:
        """Spans lie inside the width and rise, with a gap between two of them."""
        starts, counts, splits, bounds = (part.tolist() for part in self.parts)
        for row, (begin, end) in enumerate(itertools.pairwise(splits)):
            last = -1
            for start, count in zip(starts[begin:end], counts[begin:end], strict=True):
                assert last < start < start + count <= self.width
                last = start + count
            assert bounds[row + 1] - bounds[row] == sum(counts[begin:end])


class Mask(Layout):
    """A random mask."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        starts, counts, splits, bounds = [], [], [0], [0]
        for row in mask:
            padded = np.concatenate([[False], row, [False]]).astype(np.int8)
            steps = np.diff(padded)
            starts += np.flatnonzero(steps == 1).tolist()
            counts += (np.flatnonzero(steps == -1) - np.flatnonzero(steps == 1)).tolist()
            splits.append(len(starts))
            bounds.append(bounds[-1] + int(row.sum()))
        super().__init__(mask.shape[1], *(np.array(part, np.int64) for part in (starts, counts, splits, bounds)))


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
        lambda: 2 ** (rng.random(n) * min(17, 8 * dtype.itemsize - 1)),
        lambda: copied(rng, n),
        lambda: with_holes(rng, n),
    ]
    return kinds[rng.integers(len(kinds))]().astype(dtype)


def copied(rng: np.random.Generator, n: int) -> np.ndarray:
    """Words that repeat others in stretches of any length."""
    out = rng.integers(0, 150_000, n)
    for _ in range(n // 40):
        begin, end = sorted(rng.integers(0, n, 2).tolist())
        length = min(int(rng.integers(1, 300)), n - end)
        out[end : end + length] = out[begin : begin + length]
    return out


def with_holes(rng: np.random.Generator, n: int) -> np.ndarray:
    """Words that are 0 in stretches of any length."""
    ends = np.cumsum(rng.integers(1, rng.choice([2, 40, 300]), n + 1))
    return rng.integers(1, 150_000, n) * (np.searchsorted(ends, np.arange(n), "right") % 2)


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
        """The jobs of a mask as a table, whose layouts were given and, which must be the same, scanned, in one thread
        where these are three."""
        self.read(jobs.copy(), mask, threads)
        bits, again = mask.mask.astype(np.int8), jobs.copy()
        way = OF_MASK if jobs.size % 2 else OF_LAYOUT
        at = address(bits if way == OF_MASK else mask.line)
        origin, cuts = np.array([at, 1, *bits.shape, mask.width, -1, way, 0, 0]), np.array([0, -1, mask.width])
        whole, out, scan = np.zeros(6, np.int64), np.zeros(6, np.int64), np.zeros(20 * mask.rows + 2, np.int64)
        told = *(address(origin), 1, address(cuts), 1, address(again)), address(whole), address(out), mask.rows
        room = 0
        while True:
            memory = np.full(room + MARGIN, 0x55)
            used = self.call("make_layouts", *told, address(scan), address(memory), room, threads)
            assert (memory[room:] == 0x55).all()
            if used >= 0:
                break
            room = -2 - used
        one, other = self._encoded(jobs, mask.line, threads), self._encoded(again, out, 4 - threads)
        assert all((own == same).all() for own, same in zip(one, other, strict=True))
        return one

    def read(self, jobs: np.ndarray, mask: Mask, threads: int) -> None:
        """Padded fields to packed values, which must be those that they were made of, unless no pad fits."""
        held: list[tuple[Any, Any, bytes]] = []
        for job in jobs:
            nbytes = int(mask.bounds[-1] * job["items"] * job["size"]) if job["padded"] else 0
            want = ctypes.string_at(int(job["field"]["packed"]), nbytes) if nbytes else b""
            out, records = (np.full(size + MARGIN, 0x55, np.uint8) for size in (nbytes, mask.rows * (1 + job["size"])))
            if job["padded"]:
                job["field"]["packed"], job["field"]["pads"] = address(out[:nbytes]), address(records)
            held.append((out, records, want))
        self.call("read", address(jobs), jobs.size, address(mask.line), threads)
        for job, (out, records, want) in zip(jobs, held, strict=True):
            assert (out[-MARGIN:] == 0x55).all()
            assert (records[-MARGIN:] == 0x55).all()
            assert (job["pad"] >= 0) == (job["padded"] and job["result"] == 0)
            assert job["result"] or out[:-MARGIN].tobytes() == want

    def _encoded(self, jobs: np.ndarray, layout: np.ndarray, threads: int) -> Table:
        jobs["first"] = np.concatenate([[0], np.cumsum(jobs["columns"] + 3)[:-1]])
        entries = np.zeros(int((jobs["columns"] + 3).sum()), ENTRY)
        slots = np.full(entries.nbytes, 0xBE, np.uint8)  # as memory that was in use before
        given, room = jobs.copy(), 0
        fields, count = np.zeros(jobs.size, np.int64), np.zeros(1, np.int64)
        while True:
            jobs[...] = given
            table = Table(entries, fields, np.full(room + 1, 0xAA, np.uint8), np.zeros(1, STORED))
            places = map(address, (slots, entries, count, fields, table.body))
            told = address(jobs), jobs.size, address(layout), 1, address(table.stored)
            used = self.call("encode", *told, *places, room, threads)
            assert used != -1, jobs["result"]
            assert table.body[room] == 0xAA
            if used >= 0:
                table.body[used] = 0xAA
                return Table(entries[: int(count[0])], fields, table.body[: used + 1].copy(), table.stored)
            assert room < -2 - used
            room = -2 - used

    def layout(self, table: Table, width: int, rows: int) -> Layout:
        """The layout in the body."""
        splits, bounds = np.zeros((2, rows + 1), np.int64)
        places = address(table.stored), address(table.body), rows, address(splits), address(bounds)
        count = self.call("read_layout", *places, 0, 0)
        starts, counts = np.full((2, count + 1), -1)
        count = self.call("read_layout", *places, address(starts), address(counts))
        return Layout(width, starts[:count], counts[:count], splits, bounds)

    def decode(
        self,
        targets: np.ndarray,
        table: Table,
        layout: Layout,
        threads: int = 1,
        kept: np.ndarray | None = None,
        marks: np.ndarray | None = None,
    ) -> None:
        """`marks` may be of bytes that were in the body before."""
        rows, out = layout.rows, layout
        if kept is not None:
            ends = np.cumsum([0, *np.diff(layout.bounds)[kept]], dtype=np.int64)
            nothing = np.zeros(0, np.int64)
            out = Layout(layout.width, nothing, nothing, np.zeros(kept.size + 1, np.int64), ends)
            marks = self.marks(table, layout) if marks is None else marks
        some = (0, 0) if marks is None or kept is None else (address(marks), address(kept))
        places = map(address, (table.entries, layout.line, table.body))
        given = np.array([*places, rows, rows, *some, 0, out.rows])
        numbers = address(targets), targets.size, address(given), 1, address(out.line), out.rows
        assert self.call("decode", *numbers, 0, threads) == 0

    def marks(self, table: Table, layout: Layout) -> np.ndarray:
        """Where the rows of entries begin."""
        places = address(table.entries), table.entries.size, address(layout.line), address(table.body)
        numbers = *places, layout.rows, layout.rows
        marks = np.full(self.call("mark", *numbers, 0, 0) + MARGIN, 0x55)
        assert self.call("mark", *numbers, address(marks), marks.size - MARGIN) == marks.size - MARGIN
        assert (marks[-MARGIN:] == 0x55).all()
        return marks

    def packed(
        self,
        entry: int,
        table: Table,
        layout: Layout,
        want: np.ndarray,
        kept: np.ndarray | None = None,
        marks: np.ndarray | None = None,
    ) -> np.ndarray:
        """The words of an entry, as many as are wanted."""
        out = np.full(want.size + MARGIN, 0x55, want.dtype)
        target = np.zeros(1, TARGET)
        target["field"]["packed"], target["entry"] = address(out[: want.size]), entry
        for name in ("items", "size", "layout"):
            target["field"][name] = table.entries[name][entry]
        self.decode(target, table, layout, kept=kept, marks=marks)
        assert (out[want.size :] == np.full(MARGIN, 0x55, want.dtype)).all()
        return out[: want.size]

    def split(self, table: Table, layout: Layout, cuts: np.ndarray) -> list[Table]:
        parts, stored = np.zeros((cuts.size - 1, table.entries.size), ENTRY), np.zeros((cuts.size - 1, 1), STORED)
        numbers = address(table.entries), table.entries.size, address(table.stored), 1, address(layout.line)
        marks = self.marks(table, layout)
        places = (
            address(table.body),
            layout.rows,
            address(marks),
            address(cuts),
            len(parts),
            address(parts),
            address(stored),
        )
        assert self.call("split", *numbers, *places) == 0
        return [table._replace(entries=part, stored=own) for part, own in zip(parts, stored, strict=True)]


def run(core: Core, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(0, 9)), int(rng.choice([0, 1, 5, 40, 700]))
    if width <= 40 and rng.random() < 0.5:  # several marks of rows
        rows = int(rng.integers(9, 40))
    ways = [lambda: np.zeros(width, bool), lambda: np.ones(width, bool), lambda: rng.random(width) < 0.5]
    ways.append(lambda: np.arange(width) >= rng.integers(0, width + 1))
    mask = Mask(np.array([ways[rng.integers(4)]() for _ in range(rows)], bool).reshape(rows, width))
    lengths = np.diff(mask.bounds).tolist()
    jobs = np.zeros(int(rng.integers(1, 5)), JOB)
    for name in ("near", "head", "tail"):
        jobs[name] = -1
    jobs["form"]["kind"] = jobs["form"]["inner_kind"] = -1
    truth: list[np.ndarray] = []
    padded: list[np.ndarray] = []
    pads: list[np.ndarray] = []
    for at, job in enumerate(jobs):
        dtype = np.dtype(f"i{rng.choice([1, 2, 4, 8])}")
        outer, inner = int(rng.choice([1, 1, 3])), int(rng.choice([0, 1, 1, 1, 2, 2, 20, 136]))
        values = words(rng, lengths, dtype, outer * inner)
        before = jobs[at - 1]
        if at and (before["size"], before["items"]) == (dtype.itemsize, outer * inner) and rng.random() < 0.7:
            values = (truth[-1] + rng.integers(-3, 4, values.size)).astype(dtype)
            job["near"] = at - 1
        pad, mode = int(rng.integers(0, 5)), int(rng.choice([CONSTANT, BY_EDGE, BY_ROW]))
        full = np.zeros((rows, outer, width, inner), dtype)
        elements = values.reshape(int(mask.bounds[-1]), outer, inner)
        for row in range(rows):
            own, seen = elements[mask.bounds[row] : mask.bounds[row + 1]], 0
            for column in range(width):
                seen += int(mask.mask[row, column])
                nearest = own[max(seen - 1, 0)] if len(own) else 0
                under = {CONSTANT: pad, BY_EDGE: nearest, BY_ROW: row}[mode]
                full[row, :, column] = nearest if mask.mask[row, column] else under
        truth.append(values)
        padded.append(full)
        line = job["field"]
        line["outer"], line["size"], line["items"] = outer, dtype.itemsize, inner
        line["row_stride"], line["outer_stride"] = full[:1].nbytes or 0, width * inner * dtype.itemsize
        line["padded"], line["packed"] = address(full), address(values)
        job["padded"] = rng.random() < 0.7
        job["items"], job["size"], job["rows"], job["integers"] = outer * inner, dtype.itemsize, rows, 1
        items = outer * inner
        parts = [count for count in range(2, items + 1) if items % count == 0]
        job["columns"] = rng.choice(parts) if rng.random() < 0.5 and parts else 0
        trials = [(mode, (pad, 0))] if rng.random() < 0.7 else [(CONSTANT, (77, 0)), (mode, (pad, 0))]
        job["num_pads"] = len(trials)
        job["pads"][: len(trials)] = trials
        word = np.full(rows, pad, dtype)
        if mode == BY_ROW:
            seen = (~mask.mask).any(1) & (outer * inner > 0)
            word = np.where(seen, np.arange(rows), 0).astype(dtype)
        pads.append(records(word, mode == BY_EDGE, not job["padded"] and rng.random() < 0.3))
        if not job["padded"]:
            job["given"], (job["given_count"], job["given_size"]) = address(pads[-1]), pads[-1].shape
    for threads in (1, 3, 2):  # then in the forms that were chosen before, then in others, which may not fit
        if threads == 2:
            jobs["form"] = OF_ROWS[rng.integers(4)]
        table = core.encode(jobs, mask, threads)
        fields = table.fields
        targets, outs = np.zeros(jobs.size, TARGET), []
        for at, job in enumerate(jobs):
            assert (core.packed(int(fields[at]), table, mask, truth[at]) == truth[at]).all()
            kept = rng.integers(0, rows, 2 * rows) if rows else np.zeros(0, np.int64)  # in any order, and repeated
            ends = mask.bounds * job["items"]
            want = np.concatenate([truth[at][:0], *(truth[at][ends[row] : ends[row + 1]] for row in kept)])
            if kept.size:
                assert (core.packed(int(fields[at]), table, mask, want, kept) == want).all()
            target, out = targets[at : at + 1], np.full(padded[at].size + MARGIN, 0x55, padded[at].dtype)
            outs.append(out)
            target["field"] = job["field"]
            if rows and not (job["padded"] and int(job["pad"]) < job["num_pads"] - 1):
                place = job["under_mask"]
                own = table.body[int(place["at"]) :][: int(place["size"] * place["count"])]
                want = pads[at][:1] if (pads[at] == pads[at][:1]).all() else pads[at]
                assert (own.reshape(-1, want.shape[1]) == want).all()
                assert place["count"] == len(want)
            put_pads(target, out, pads[at][:, : 1 + out.itemsize])
            target["padded"], target["entry"] = 1, fields[at]
        core.decode(targets, table, core.layout(table, width, rows) if rng.random() < 0.5 else mask, threads)
        for out, full in zip(outs, padded, strict=True):
            assert (out[:-MARGIN].reshape(full.shape) == full).all()
            assert (out[-MARGIN:] == np.full(MARGIN, 0x55, full.dtype)).all()
        cuts = np.sort(rng.integers(0, rows + 1, 4))
        for part, (begin, end) in zip(core.split(table, mask, cuts), itertools.pairwise(cuts), strict=True):
            own = Mask(mask.mask[begin:end])
            for at, job in enumerate(jobs):
                low, high = (int(mask.bounds[row]) * int(job["items"]) for row in (begin, end))
                want = truth[at][low:high]
                assert (core.packed(int(fields[at]), part, own, want) == want).all()
        for _ in range(4):
            written_to(core, rng, table, mask, jobs)
    stay_padded(core, mask, jobs, truth, padded)


def records(words: np.ndarray, edges: Any, signs: bool = False) -> np.ndarray:
    """The pads of rows, with bits of a few positions."""
    own = np.zeros((words.size, 1 + words.itemsize + signs), np.uint8)
    own[:, 0] = np.where(edges, EDGE, WORD)
    own[:, 1 : 1 + words.itemsize] = words.view(np.uint8).reshape(-1, words.itemsize)
    own[:, 1 + words.itemsize :] = 0b10110010
    return own


def put_pads(target: np.ndarray, out: np.ndarray, pads: np.ndarray) -> None:
    """Where a target is written to, and the pads of its rows."""
    target["field"]["padded"], target["field"]["pads"] = address(out[:-MARGIN]), address(pads)
    target["field"]["pads_size"], target["field"]["pads_step"] = pads.shape[1], pads.strides[0]


def stay_padded(core: Core, mask: Mask, jobs: np.ndarray, truth: list[np.ndarray], padded: list[np.ndarray]) -> None:
    """Fields that may stay padded do so if something else than their pad is under the mask, and only then."""
    jobs = jobs.copy()
    jobs["padded"] &= jobs["field"]["outer"] == 1
    jobs["keeps"] = jobs["padded"]
    jobs["pads"][:, 0], jobs["num_pads"] = (CONSTANT, (77, 0)), 1
    for threads in (1, 3):
        table = core.encode(jobs, mask, threads)
        for at, job in enumerate(jobs):
            stray = bool((padded[at].transpose(0, 2, 1, 3)[~mask.mask] != 77).any())
            kept = bool(job["padded"]) and stray
            assert (job["result"] == KEPT) == kept
            want = padded[at].reshape(-1) if kept else truth[at]
            assert (core.packed(int(table.fields[at]), table, mask, want) == want).all()


def written_to(core: Core, rng: np.random.Generator, table: Table, mask: Mask, jobs: np.ndarray) -> None:
    """Any bytes may be in a body once it was checked: nothing is read or written outside of it and of the outputs.
    Layouts that are read from it then are no longer those that the table was made for."""
    body, marks = table.body, core.marks(table, mask)
    part = rng.random(body.size) < rng.choice([0.01, 0.3, 1])
    body[part] = rng.choice(np.array([0, 1, 127, 255, *rng.integers(0, 256, 4)], np.uint8), int(part.sum()))
    layout = core.layout(table, mask.width, mask.rows)
    layout.assert_in_order()
    rows = rng.integers(0, mask.rows, 2 * mask.rows) if mask.rows else np.zeros(0, np.int64)
    for at, job in enumerate(jobs):  # rows that were marked before the bytes were written
        size = int(np.diff(mask.bounds)[rows].sum()) * int(job["items"])
        if rows.size:
            core.packed(int(table.fields[at]), table, mask, np.zeros(size, f"i{job['size']}"), rows, marks)
    cuts = np.sort(rng.integers(0, mask.rows + 1, 3))
    parts = list(zip(core.split(table, mask, cuts), itertools.pairwise(cuts), strict=True))
    parts = [(part, core.layout(part, mask.width, int(end - begin))) for part, (begin, end) in parts]
    for own, spans in ((table, mask), (table, layout), *parts):
        spans.assert_in_order()
        kept = np.arange(0, spans.rows, 2)
        sizes = int(spans.bounds[-1]), int(np.diff(spans.bounds)[kept].sum())
        for at, job in enumerate(jobs):
            for rows, size in list(zip((None, kept), sizes, strict=True))[: 1 + (kept.size > 0)]:
                core.packed(
                    int(table.fields[at]), own, spans, np.zeros(size * int(job["items"]), f"i{job['size']}"), rows
                )
            full = np.full(spans.rows * mask.width * int(job["items"]) + MARGIN, 0x55, f"i{job['size']}")
            target = np.zeros(1, TARGET)
            pads = records(np.zeros(spans.rows, full.dtype), rng.random(spans.rows) < 0.5, bool(rng.random() < 0.5))
            target["field"] = job["field"]
            put_pads(target, full, pads)
            target["padded"], target["entry"] = 1, table.fields[at]
            core.decode(target, own, spans)
            assert (full[-MARGIN:] == np.full(MARGIN, 0x55, full.dtype)).all()


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


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library", default=str(CORE), help="the compiled core")


def session(given: argparse.Namespace) -> None:
    LIBRARY.append(given.library)


def play(seed: int) -> Counter[str]:
    seeds = range(3 * seed, 3 * seed + 3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda own: run(Core(LIBRARY[-1]), own), seeds))
        list(pool.map(lambda own: order(Core(LIBRARY[-1]), own), seeds))
    return Counter(tables=3)
