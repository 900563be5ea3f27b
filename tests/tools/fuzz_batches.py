"""Random sequences of batches of changing kinds through one process, as it remembers plans: each is compressed and
decoded, and must be what it was. And random programs of operations on packed and nested rows, against plain indexing
of padded tensors.

A sequence has a few kinds: widths, dtypes, strides, masks, fields that follow from others, sub-batches, Python objects,
padded, jagged and nested batches, results under the layouts of another batch. A batch of a kind has rows, values, pads
and lossy fields of its own. What is remembered is forgotten now and then, and some batches are worked on in threads.

A program has several batches of the same fields in widths and with pads of their own. Each step makes another one from
those that are there: take, slice, split, cat, select, own, pickle, bytes, a file, nest, trim, pack, update.
"""

from __future__ import annotations

import pickle
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import oracle
import samples
import strategies
import torch
from tensordict import NonTensorData, TensorDict

import maskpack as mp
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO, ZEROS
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed import table

COUNT = 500
PAD = 7
KINDS, BATCHES, PROGRAMS, STEPS = 4, 30, 20, 10
FORMS = ("padded", "jagged", "nested", "mixed", "result", "result under nested")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)


def spec_of(rng: np.random.Generator, dtype: torch.dtype) -> list[Any]:
    """Pads that a field may have."""
    one = int(rng.integers(2)) if dtype is torch.bool else int(rng.integers(9))
    kinds: list[list[Any]] = [[one], [mp.EDGE], [mp.PER_ROW], [0, 1], [mp.EDGE, one], [one, mp.EDGE, mp.PER_ROW]]
    kinds += [*3 * [[*ZEROS]], [*ZEROS, mp.PER_ROW], [-0.0, mp.EDGE]] if dtype in strategies.FLOATS else []
    return kinds[rng.integers(len(kinds))]


class Kind(NamedTuple):
    """What batches have in common: `fields` are names, dtypes, words of an element, and whether they lie transposed."""

    form: str
    prompt: int
    response: int
    rows: int
    mask: torch.dtype
    alone: bool
    holes: bool
    fields: tuple[tuple[str, torch.dtype, tuple[int, ...], bool], ...]
    deep: bool
    objects: bool
    registry: mp.MaskNestingRegistry


def kind_of(rng: np.random.Generator) -> Kind:
    """Some names are those of RL_FIELDS, whose hints name each other; `x0`, `x1`, ... are of a registry of its own."""
    names = ["old_log_probs", "rollout_log_probs", "advantages", "values", *(f"x{at}" for at in range(4))]
    chosen = [name for name in names if rng.random() < 0.5]
    fields: list[Any] = []
    specs = dict[str, mp.MaskNestingSpec]()
    for name in chosen:
        own = name[0] == "x" and name[1:].isdigit()
        dtype = DTYPES[rng.integers(len(DTYPES))] if own else torch.float32
        fields.append((name, dtype, (2,) if own and rng.random() < 0.3 else (), bool(own and rng.random() < 0.2)))
        if own:
            specs[name] = mp.MaskNestingSpec(["response", "sequence"], spec_of(rng, dtype))
    return Kind(
        FORMS[rng.integers(len(FORMS))],
        int(rng.integers(0, 6)),
        int(rng.integers(1, 9)),
        int(rng.choice([1, 3, 17])),
        (torch.int64, torch.bool, torch.float32)[rng.integers(3)],
        bool(rng.random() < 0.2),
        bool(rng.random() < 0.3),
        tuple(fields),
        bool(rng.random() < 0.2),
        bool(rng.random() < 0.3),
        mp.RL_FIELDS | specs,
    )


def padded(rng: np.random.Generator, kind: Kind, lossy: bool, first: bool) -> TensorDict:
    """`first`: under the masks are the first pads of the registry."""
    rows = int(rng.integers(1, kind.rows + 1))
    before, behind = rng.integers(0, kind.prompt + 1, rows), rng.integers(0, kind.response + 1, rows)
    places = np.arange(kind.prompt)[None], np.arange(kind.response)[None]
    prompt, response = places[0] >= kind.prompt - before[:, None], places[1] < behind[:, None]
    holes = response & (rng.random(response.shape) < 0.7) if kind.holes else response
    on = torch.from_numpy(np.concatenate([prompt, response], 1))
    own = torch.from_numpy(response)
    ids = torch.from_numpy(rng.integers(0, 40_000, on.shape))
    ids = torch.where(on, ids, PAD)
    batch: dict[str, Any] = {"response_mask": torch.from_numpy(holes).to(kind.mask)}
    if kind.alone:
        own = torch.from_numpy(np.flip(np.maximum.accumulate(np.flip(holes, 1), 1), 1).copy())
    else:
        batch |= {"attention_mask": on.to(kind.mask), "prompts": ids[:, : kind.prompt].clone(), "input_ids": ids}
    batch["responses"] = torch.where(own, ids[:, kind.prompt :], PAD)
    for name, dtype, more, turned in kind.fields:
        x = torch.from_numpy(
            rng.integers(-3 if dtype.is_signed else 0, 2 if dtype is torch.bool else 99, (*own.shape, *more))
        )
        x = x.to(dtype) * (torch.rand(()).to(dtype) if dtype.is_floating_point else 1)
        pads = kind.registry[name].pads[:1] if first else kind.registry[name].pads
        x = strategies.padded(rng, x[own], own.tolist(), kind.response, pads[rng.integers(len(pads))])
        batch[name] = x.transpose(0, 1).contiguous().transpose(0, 1) if turned else x
    out = TensorDict(batch, [rows])
    if lossy and kind.fields:
        x = batch[kind.fields[rng.integers(len(kind.fields))][0]]
        x.view(torch.uint8 if x.dtype is torch.bool else x.dtype)[rng.integers(rows), -1] = 1
    if kind.objects:
        out.set("temperature", NonTensorData(float(rng.random()), batch_size=[rows]))
    return TensorDict({"actor": out, "index": torch.arange(rows)}, [rows]) if kind.deep else out


def jagged(nested: TensorDict) -> TensorDict:
    return TensorDict({name: x for name, x in nested.items() if name != LAYOUTS}, nested.batch_size)


def check(rng: np.random.Generator, kind: Kind) -> str:
    """One batch of a kind; how it was sent."""
    options: dict[str, Any] = {"registry": kind.registry, "pad_token_id": PAD}
    verify = bool(rng.random() < 0.7)
    lossy = verify and bool(rng.random() < 0.15)
    whole = padded(rng, kind, lossy, not verify)
    options["verify"] = verify
    want: Any = whole
    given: Any = whole
    like: Any = None
    if kind.form != "padded" and not (kind.deep and kind.form in ("jagged", "mixed")):
        nested = mp.nest_batch_by_mask(whole, **options)
        if kind.form.startswith("result") and not kind.alone and not kind.deep:
            like = nested if kind.form.endswith("nested") else mp.compress(whole, **options)
            given = want = whole.select("responses", *(name for name, *_ in kind.fields))
        elif kind.form == "nested":
            given = nested
            if not lossy and not kind.objects and rng.random() < 0.5:
                more = padded(rng, kind, False, not verify)
                given = samples.joined([nested, mp.nest_batch_by_mask(more, **options)])
                want = torch.cat([whole, more])
        elif kind.form in ("jagged", "mixed"):
            given = want = jagged(nested)
            if kind.form == "mixed":
                given.set("index", torch.arange(len(whole)))
    packed = mp.compress(given, like=like, **options)
    oracle.assert_same_batch(mp.decompress(packed), want)
    rows = rng.integers(0, len(packed), 3).tolist()
    oracle.assert_same_batch(mp.decompress(pickle.loads(pickle.dumps(packed[rows]))), oracle.take_rows(want, rows))
    return kind.form


# -------------------------------------------------------------------- programs


class Field(NamedTuple):
    """`more` are the dims of an element, `dim` is that of the width."""

    axis: str
    dtype: torch.dtype
    more: tuple[int, ...] = ()
    dim: int = 1


FIELDS = {
    "attention_mask": Field("sequence", torch.int64),
    "input_ids": Field("sequence", torch.int64),
    "prompts": Field("prompt", torch.int64),
    "responses": Field("response", torch.int64),
}


@dataclass
class Rows:
    """Padded tensors.

    Attributes:
        fields: those that lie under a mask.
        frames: the width and the anchor of each axis.
        masks: bool [B, width] of each axis.
        cells: [B, width, *more] of each field.
        pads: of each field and row, the cell that new columns hold; None for EDGE.
        index: int64 [B], a field without a mask.
        told: the fields that LAYOUTS has; whether their masks were trimmed, each by itself; and the axes that it has.
    """

    fields: dict[str, Field]
    frames: dict[str, tuple[int, int]]
    masks: dict[str, np.ndarray]
    cells: dict[str, np.ndarray]
    pads: dict[str, list[Any]]
    index: np.ndarray
    told: tuple[tuple[str, ...], bool, frozenset[str]] = ((), False, frozenset())

    def tensors(self) -> dict[str, torch.Tensor]:
        out = {name: oracle.from_cells(self.cells[name], own.dtype) for name, own in self.fields.items()}
        out = {name: x.movedim(1, self.fields[name].dim).contiguous() for name, x in out.items()}
        return out | {"index": torch.from_numpy(self.index)}

    def take(self, rows: Any) -> Rows:
        rows = np.arange(len(self.index))[rows]
        masks, cells = ({name: x[rows] for name, x in held.items()} for held in (self.masks, self.cells))
        pads = {name: [own[row] for row in rows] for name, own in self.pads.items()}
        return replace(self, masks=masks, cells=cells, pads=pads, index=self.index[rows])

    def select(self, names: list[str]) -> Rows:
        fields = {name: own for name, own in self.fields.items() if name in names}
        return replace(self, fields=fields)

    def widened(self, frames: dict[str, tuple[int, int]]) -> Rows:
        masks, cells = dict[str, np.ndarray](), dict[str, np.ndarray]()
        for axis, (width, anchor) in frames.items():
            left = anchor - self.frames[axis][1]
            masks[axis] = np.zeros((len(self.index), width), bool)
            masks[axis][:, left : left + self.frames[axis][0]] = self.masks[axis]
        for name, own in self.fields.items():
            before, (width, anchor) = self.cells[name], frames[own.axis]
            left, mask = anchor - self.frames[own.axis][1], self.masks[own.axis]
            cells[name] = np.zeros((len(self.index), width, *own.more), before.dtype)
            for row, out in enumerate(cells[name]):
                valid, pad = before[row][mask[row]], self.pads[name][row]
                by_edge = pad is None and len(valid)
                out[:left] = valid[0] if by_edge else np.zeros((), out.dtype) if pad is None else pad
                out[left:] = valid[-1] if by_edge else np.zeros((), out.dtype) if pad is None else pad
                out[left : left + before.shape[1]] = before[row]
        return replace(self, frames=frames, masks=masks, cells=cells)

    @staticmethod
    def cat(parts: list[Rows]) -> Rows:
        frames = dict[str, tuple[int, int]]()
        for axis in parts[0].frames:
            left = max(own.frames[axis][1] for own in parts)
            frames[axis] = left + max(own.frames[axis][0] - own.frames[axis][1] for own in parts), left
        wide = [own.widened(frames) for own in parts]
        masks = {axis: np.concatenate([own.masks[axis] for own in wide]) for axis in frames}
        cells = {name: np.concatenate([own.cells[name] for own in wide]) for name in parts[0].fields}
        pads = {name: [pad for own in wide for pad in own.pads[name]] for name in parts[0].fields}
        index = np.concatenate([own.index for own in wide])
        told = (
            parts[0].told[0],
            any(own.told[1] for own in parts),
            frozenset.intersection(*(own.told[2] for own in parts)),
        )
        return Rows(parts[0].fields, frames, masks, cells, pads, index, told)

    def nested(self) -> Rows:
        return replace(self, told=(tuple(self.fields), *self.told[1:]))

    def packed_again(self) -> Rows:
        """Packed from nested rows, whose layouts without fields are forgotten."""
        return replace(self, told=(*self.told[:2], frozenset(own.axis for own in self.fields.values())))

    @property
    def kind(self) -> Any:
        """Equal for nested batches that tensordict joins, and of which one takes the pads of the other by `update`."""
        return self.frames, self.told, id(self.masks) if self.told[1] else None

    def trimmed(self) -> Rows:
        frames, kept = dict[str, tuple[int, int]](), dict[str, slice]()
        for axis, (_, anchor) in self.frames.items():
            real = np.flatnonzero(self.masks[axis].any(0))
            begin, end = (int(real[0]), int(real[-1]) + 1) if real.size else (0, 0)
            frames[axis], kept[axis] = (end - begin, min(max(anchor - begin, 0), end - begin)), slice(begin, end)
        masks = {axis: mask[:, kept[axis]] for axis, mask in self.masks.items()}
        cells = {name: self.cells[name][:, kept[own.axis]] for name, own in self.fields.items()}
        return replace(self, frames=frames, masks=masks, cells=cells, told=(tuple(self.fields), True, self.told[2]))


def through_a_file(packed: mp.PackedBatch) -> mp.PackedBatch:
    with tempfile.TemporaryDirectory() as folder:
        packed.save(Path(folder, "rows"))
        return mp.PackedBatch.load(Path(folder, "rows"))


WAYS: tuple[Callable[[mp.PackedBatch], mp.PackedBatch], ...] = (
    lambda packed: packed.own(),
    lambda packed: pickle.loads(pickle.dumps(packed, 5)),
    lambda packed: mp.PackedBatch.from_bytes(packed.to_bytes()),
    through_a_file,
)
"""Of packed rows to another owner of the same rows."""


class Held(NamedTuple):
    """A packed or a nested batch, and its rows."""

    batch: Any
    rows: Rows


class Program:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.done: Counter[str] = Counter(programs=1)
        self.fields = dict(FIELDS)
        self.plain = bool(self.rng.random() < 0.7)
        """Whether tensordict takes and joins rows of all fields."""
        dtypes = strategies.PLAIN_DTYPES if self.plain else strategies.DTYPES
        for at in range(3):
            more = self.one(((), (), (), (2,), (3,)))
            dtype = self.one((*dtypes, *3 * strategies.FLOATS))
            self.fields[f"x{at}"] = Field(
                self.one(("sequence", "prompt", "response")), dtype, more, self.one((1, 1 + len(more)))
            )
        self.held = [self.new() for _ in range(3)]

    def one(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    # ---------------------------------------------------------------- batches

    def new(self) -> Held:
        prompt, response, count = self.one((0, 1, 3, 6)), self.one((1, 4, 7, 16)), self.one((0, 1, 1, 2, 3, 5))
        ways: list[Callable[[int], Any]] = [np.zeros, np.ones, lambda n: self.rng.random(n) < 0.5]
        ways += [lambda n: np.arange(n) >= self.rng.integers(n + 1), lambda n: np.arange(n) < self.rng.integers(n + 1)]
        mask = np.zeros((count, prompt + response), bool)
        for row in mask:
            row[:prompt], row[prompt:] = self.one(ways)(prompt), self.one(ways)(response)
        if self.rng.random() < 0.3:  # columns that no row needs
            mask[:, : self.rng.integers(prompt + 1)] = mask[:, prompt + self.rng.integers(response + 1) :] = False
        frames = {"sequence": (prompt + response, prompt), "prompt": (prompt, prompt), "response": (response, 0)}
        masks = {"sequence": mask, "prompt": mask[:, :prompt], "response": mask[:, prompt:]}
        return self.filled(Rows(self.fields, frames, masks, {}, {}, self.rng.integers(0, 999, count)))

    def filled(self, rows: Rows, nested: bool = False) -> Held:
        """Other values and pads under the same masks, packed or nested."""
        verify, registry = bool(self.rng.random() < 0.7), mp.RL_FIELDS
        cells, pads = dict[str, np.ndarray](), dict[str, list[Any]]()
        whole = rows.masks["sequence"]
        ids = np.where(whole, self.rng.integers(0, 999, whole.shape), PAD)
        prompt = rows.frames["prompt"][0]
        made = {"input_ids": ids, "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "attention_mask": whole}
        for name, own in rows.fields.items():
            mask, spec = rows.masks[own.axis], [PAD if name in made and name != "attention_mask" else 0]
            if name in made:
                x = torch.from_numpy(made[name].astype(np.int64))
            else:
                spec = spec_of(self.rng, own.dtype)
                registry = registry | {name: mp.MaskNestingSpec(own.axis, spec, own.dim)}
                values = strategies.values(self.rng, (int(mask.sum()), *own.more), own.dtype)
                chosen = self.one([*spec, spec[-1], spec[-1]] if verify else spec[:1])
                x = strategies.padded(self.rng, values, mask.tolist(), mask.shape[1], chosen)
            cells[name] = oracle.cells(x)
            pads[name] = pads_of(x, mask, spec)
        rows = replace(rows, cells=cells, pads=pads, told=(tuple(rows.fields), False, frozenset(rows.frames)))
        batch = TensorDict(rows.tensors(), [len(rows.index)])
        call = mp.nest_batch_by_mask if nested or self.rng.random() < 0.3 else mp.compress
        return Held(call(batch, registry=registry, pad_token_id=PAD, verify=verify), rows)

    # ---------------------------------------------------------------- steps

    def take(self, own: Held) -> Held:
        count = len(own.rows.index)
        index = self.rng.integers(0, count, int(self.rng.integers(1, 2 * count + 1))) if count else np.zeros(0, int)
        if not isinstance(own.batch, mp.PackedBatch):
            return Held(samples.rows_of(own.batch, torch.from_numpy(index)), own.rows.take(index))
        return Held(own.batch.take(index), own.rows.take(index))

    def slice(self, own: Held) -> Held:
        begin, end = np.sort(self.rng.integers(0, len(own.rows.index) + 1, 2)).tolist()
        return Held(samples.rows_of(own.batch, slice(begin, end)), own.rows.take(slice(begin, end)))

    def split(self, own: Held) -> Held:
        """Into parts that are joined again in another order."""
        cut, count = int(self.rng.integers(0, len(own.rows.index) + 1)), len(own.rows.index)
        order = [*range(cut, count), *range(cut)]
        parts = samples.parts_of(own.batch, [cut, count - cut])
        return Held(self.join(parts[::-1]), own.rows.take(order))

    def join(self, parts: list[Any]) -> Any:
        return mp.PackedBatch.cat(parts) if isinstance(parts[0], mp.PackedBatch) else samples.joined(parts)

    def cat(self, own: Held) -> Held:
        like = [other for other in (own, *self.held) if other.rows.fields.keys() == own.rows.fields.keys()]
        like = [other for other in like if type(other.batch) is type(own.batch)]
        if not isinstance(own.batch, mp.PackedBatch):  # nested batches have one width, and were selected alike
            like = [other for other in like if other.rows.kind == own.rows.kind]
        parts = [own, *(self.one(like) for _ in range(int(self.rng.integers(1, 4))))]
        if sum(len(part.rows.index) for part in parts) > 40:
            return own
        return Held(self.join([part.batch for part in parts]), Rows.cat([part.rows for part in parts]))

    def select(self, own: Held) -> Held:
        names = [name for name in own.rows.fields if self.rng.random() < 0.7]
        more = () if isinstance(own.batch, mp.PackedBatch) else (LAYOUTS,)
        return Held(own.batch.select(*names, "index", *more), own.rows.select(names))

    def sent(self, own: Held) -> Held:
        if not isinstance(own.batch, mp.PackedBatch):
            return Held(pickle.loads(pickle.dumps(own.batch)), own.rows)
        return Held(self.one(WAYS)(own.batch), own.rows)

    def nest(self, own: Held) -> Held:
        if not isinstance(own.batch, mp.PackedBatch):
            return Held(mp.compress(own.batch, pad_token_id=PAD), own.rows.packed_again())
        return Held(mp.decompress(own.batch, format="nested"), own.rows.nested())

    def trim(self, own: Held) -> Held:
        packed = own.batch if isinstance(own.batch, mp.PackedBatch) else mp.compress(own.batch, pad_token_id=PAD)
        rows = own.rows.trimmed()
        self.compare(mp.decompress(packed, widths="trim"), rows)
        return Held(mp.decompress(packed, format="nested", widths="trim"), rows)

    def update(self, own: Held) -> Held:
        """The values and the pads of another nested batch with the same masks."""
        masks, names = own.rows.masks, own.rows.fields.keys()
        columns = np.concatenate([masks["prompt"], masks["response"]], 1)  # trimmed rows have other ones
        plain = np.array_equal(columns, masks["sequence"])
        if isinstance(own.batch, mp.PackedBatch) or names != self.fields.keys() or not plain:
            return own
        other = self.filled(own.rows, nested=True)
        if other.rows.kind != own.rows.kind:  # its masks were trimmed each by itself
            return own
        return Held(own.batch.clone(recurse=False).update(other.batch), other.rows)

    STEPS: tuple[Callable[..., Held], ...] = (take, slice, split, cat, cat, cat, select, sent, nest, nest, trim, update)

    # ---------------------------------------------------------------- checks

    def compare(self, seen: TensorDict, rows: Rows) -> None:
        want = rows.tensors()
        assert set(seen.keys()) == set(want)
        for name, x in want.items():
            oracle.assert_same_tensor(seen[name], x, name)

    def check(self, own: Held) -> None:
        if not isinstance(own.batch, mp.PackedBatch):
            self.compare(mp.unnest_batch_by_mask(own.batch), own.rows)
            return
        for name in own.rows.fields:
            form = own.batch.forms[name,]
            assert (form.kind, form.reason) == ("padded", None), form
        self.compare(mp.decompress(own.batch), own.rows)
        self.compare(mp.unnest_batch_by_mask(mp.decompress(own.batch, format="nested")), own.rows)

    def run(self) -> Counter[str]:
        for _ in range(STEPS):
            step = self.one(self.STEPS)
            own = self.held[-1] if self.rng.random() < 0.5 else self.one(self.held)
            made = step(self, own if self.plain or isinstance(own.batch, mp.PackedBatch) else self.nest(own))
            self.check(made)
            self.held.append(made)
            self.done[step.__name__] += 1
        return self.done


def pads_of(x: torch.Tensor, mask: np.ndarray, spec: list[Any]) -> list[Any]:
    """Of each row, the cell that new columns hold, by the first pad that fits all rows; None for EDGE."""
    cells = oracle.cells(x)
    names = {
        mp.EDGE: oracle.EDGE,
        mp.PER_ROW: oracle.PER_ROW,
        SIGNED_ZERO: oracle.SIGNED_ZERO,
        ANY_ZERO: oracle.ANY_ZERO,
    }
    pad = next(pad for pad in spec if oracle.fits(x, mask.tolist(), names.get(pad, pad)))
    if pad is mp.EDGE:
        return [None] * len(mask)
    if pad is mp.PER_ROW or pad is SIGNED_ZERO or (pad is ANY_ZERO and x.dim() > 2):
        under = [own[~on].reshape(-1)[:1] for own, on in zip(cells, mask, strict=True)]
        return [own[0] if own.size else np.zeros((), cells.dtype)[()] for own in under]
    return [oracle.pad_cell(0 if pad is ANY_ZERO else pad, x.dtype)[()]] * len(mask)


def play(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    kinds = [kind_of(rng) for _ in range(KINDS)]
    done: Counter[str] = Counter()
    table.forget()

    def one(number: int) -> str:
        own = np.random.default_rng([seed, number])
        return check(own, kinds[own.integers(len(kinds))])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.errors.MaskpackWarning)
        for number in range(BATCHES):
            if rng.random() < 0.05:
                table.forget()
            done[one(number)] += 1
        with ThreadPoolExecutor(3) as pool:
            done.update(pool.map(one, range(BATCHES, 2 * BATCHES)))
        for number in range(PROGRAMS):
            done += Program(PROGRAMS * seed + number).run()
    return done + Counter(batches=2 * BATCHES)
