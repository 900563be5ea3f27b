"""The table of a packed batch: every encoding of words of every size, against rows that are made and moved in loops."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_batch
from samples import PAD, entry_of, kinds_of, workload
from strategies import Case, batches, patterns
from tensordict import TensorDict
from torch import Tensor

from maskpack import EDGE, PER_ROW, RL_FIELDS, MaskNestingSpec, PackedBatch, compress, decompress
from maskpack import unnest_batch_by_mask as unnest
from maskpack.core import abi
from maskpack.core.pads import SIGNED_ZERO
from maskpack.fields.registry import HINTS
from maskpack.packed import table
from maskpack.packed.join import merged

pytestmark = pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex128)
KINDS = (*abi.KINDS, "near", "coded")
"""The encodings, and blocks of distances to another field."""
WIDTHS = (0, 1, 7, 8, 64, 257)
ANY_HINT = (
    *HINTS,
    "near:x",
    "near:y",
    "near:gone",
    "concat:prompts,responses",
    "concat:x,x",
    "concat:x,y",
    "concat:y,m",
)


# -------------------------------------------------------------------- rows of words


def signed(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype of the words of a tensor."""
    return np.dtype(f"i{min(dtype.itemsize, 8)}")


def words(kind: str, dtype: np.dtype[Any], lengths: Sequence[int], rng: np.random.Generator) -> list[np.ndarray]:
    """Rows with the regularity that an encoding is for. Numbers wrap at the limits of the dtype."""
    info, bits = np.iinfo(dtype), 8 * dtype.itemsize
    limits = np.array([info.min, info.min + 1, -1, 0, 1, info.max - 1, info.max], dtype)

    def noise(size: int) -> np.ndarray:
        any_word = rng.integers(info.min, info.max, size, dtype, endpoint=True)
        return np.where(rng.random(size) < 0.1, rng.choice(limits, size), any_word)

    def small(size: int, most: int) -> np.ndarray:
        return rng.integers(0, most, size).astype(dtype)

    base = noise(1)
    width, few = int(rng.integers(2, min(bits, 8) - 1)), min(bits - 2, 20)
    pool = [noise(max([1, *lengths])) for _ in range(2)]
    wholes: dict[tuple[int, int], np.ndarray] = {}

    def patched(n: int) -> np.ndarray:
        out, at = noise(n), 0
        while at < n:
            begin, count = int(rng.integers(0, n)), int(rng.integers(1, 200))
            part = pool[rng.integers(0, 2)][begin : begin + count][: n - at]
            out[at : at + part.size] = part
            at += part.size + int(rng.integers(0, 12))
        return out

    makers: dict[str, Callable[[int], np.ndarray]] = {
        "blocks": lambda n: np.minimum(base, info.max - 128) + small(n, 1 << width),
        "coded": lambda n: np.minimum(base, info.max - 2**few) + (2 ** (rng.random(n) * few)).astype(dtype),
        "rle": lambda n: np.repeat(noise(n), rng.integers(1, 90, n))[:n],
        "delta": lambda n: np.cumsum(np.repeat(noise(n), 100)[:n], dtype=dtype),
        "sparse": lambda n: np.where(rng.random(n) < 0.03, noise(n), 0),
        "dictionary": lambda n: wholes.setdefault((n, int(rng.integers(0, 2))), noise(n)),
        "pieces": patched,
    }
    return [makers.get(kind, noise)(n).astype(dtype) for n in lengths]


@dataclass(frozen=True)
class Form:
    """Fields x and same, which are equal, and near, which is close to them; for each dtype. If `kind` is concat, x is
    head and then tail. Elements have dims before the ragged one and behind it."""

    kind: str
    width: int
    pad: Any = 0
    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    dtypes: tuple[torch.dtype, ...] = INTEGERS

    @property
    def cut(self) -> int:
        return self.width // 3

    def batch(self, mask: oracle.Mask, rng: np.random.Generator, kind: str = "", split: bool = True) -> TensorDict:
        """Rows that `kind` is for. Without `split`, head is no part of x."""
        out: dict[str, Tensor] = {}
        masks = self._masks(mask)
        for name, (own, width) in masks.items():
            out[name] = oracle.mask_tensor(own, width)
        for dtype in self.dtypes:
            values = self._values(kind or self.kind, mask, dtype, rng)
            close = oracle.cells(values).view(signed(dtype)) + rng.integers(-3, 4, 1).astype(signed(dtype))
            close = close.view(oracle.cells(values).dtype) if close.size else oracle.cells(values)
            near = oracle.from_cells(close.reshape(values.shape), dtype)
            pads = self._pads(dtype, len(mask), rng)
            out[f"x {dtype}"] = self._padded(values, mask, self.width, pads)
            out[f"same {dtype}"] = out[f"x {dtype}"].clone()
            out[f"near {dtype}"] = self._padded(near, mask, self.width, pads)
            if self.kind == "concat":
                whole = oracle.unpack(values, mask, self.width)
                head = oracle.pack(whole[:, : self.cut], masks["hm"][0])
                if not split:
                    head = self._values("plain", masks["hm"][0], dtype, rng)
                tail = oracle.pack(whole[:, self.cut :], masks["tm"][0])
                out[f"head {dtype}"] = self._padded(head, *masks["hm"], pads)
                out[f"tail {dtype}"] = self._padded(tail, *masks["tm"], pads)
        return TensorDict(out, [len(mask)])

    def registry(self, hinted: bool = True) -> dict[str, MaskNestingSpec]:
        specs = {"m": MaskNestingSpec("m"), "hm": MaskNestingSpec("hm"), "tm": MaskNestingSpec("tm")}
        for dtype in self.dtypes:
            hints = {"concat": f"concat:head {dtype},tail {dtype}", "plain": "delta", "near": "dictionary"}
            hints["coded"] = "blocks"
            for name, own, hint in (
                ("x", "m", hints.get(self.kind, self.kind)),
                ("same", "m", "rle"),
                ("near", "m", f"near:x {dtype}"),
                ("head", "hm", "rle"),
                ("tail", "tm", "blocks"),
            ):
                ragged = 1 + len(self.before)
                specs[f"{name} {dtype}"] = MaskNestingSpec(own, self.pad, ragged, (hint,) if hinted else ())
        return specs

    def _masks(self, mask: oracle.Mask) -> dict[str, tuple[oracle.Mask, int]]:
        masks = {"m": (mask, self.width)}
        if self.kind == "concat":
            masks["hm"] = [row[: self.cut] for row in mask], self.cut
            masks["tm"] = [row[self.cut :] for row in mask], self.width - self.cut
        return masks

    def _values(self, kind: str, mask: oracle.Mask, dtype: torch.dtype, rng: np.random.Generator) -> Tensor:
        """[T, *before, *behind]"""
        shape = *self.before, *self.behind
        items = int(np.prod(shape, dtype=int)) * (2 if dtype.itemsize == 16 else 1)
        tokens = oracle.lengths(mask)
        if kind == "columns":
            several = itertools.islice(itertools.cycle(("delta", "plain", "rle")), items)
            columns = [np.concatenate([*words(each, signed(dtype), tokens, rng), []]) for each in several]
            line = np.stack([column.astype(signed(dtype)) for column in columns], 1) if columns else np.zeros(0)
        else:
            rows = words(kind, signed(dtype), [n * items for n in tokens], rng)
            line = np.concatenate([np.zeros(0, signed(dtype)), *rows])
        raw = np.frombuffer(line.astype(signed(dtype)).tobytes(), f"V{dtype.itemsize}")
        return oracle.from_cells(raw.reshape(sum(tokens), *shape), dtype)

    def _pads(self, dtype: torch.dtype, rows: int, rng: np.random.Generator) -> Any:
        if self.pad is PER_ROW:
            raw = np.frombuffer(rng.bytes(rows * dtype.itemsize), f"V{dtype.itemsize}")
            return oracle.from_cells(raw, dtype)
        if self.pad is SIGNED_ZERO:
            return torch.tensor(rng.choice([0.0, -0.0], rows)).to(dtype)
        return oracle.EDGE if self.pad is EDGE else self.pad

    def _padded(self, values: Tensor, mask: oracle.Mask, width: int, pad: Any) -> Tensor:
        return oracle.unpack(values, mask, width, pad).movedim(1, 1 + len(self.before))


@st.composite
def forms(draw: st.DrawFn, kind: str) -> Form:
    floats = draw(st.booleans())
    some = st.lists(st.sampled_from(FLOATS if floats else INTEGERS), min_size=1, max_size=2, unique=True)
    dtypes = tuple(draw(some))
    pads = [0, EDGE, PER_ROW, SIGNED_ZERO, 2.0] if floats else [0, EDGE, PER_ROW, 127]
    if torch.complex128 in dtypes or torch.float8_e4m3fn in dtypes:
        pads.remove(SIGNED_ZERO)
    before = draw(st.sampled_from([(), (), (3,)]))
    behind = draw(st.sampled_from([(2,), (3,)] if kind == "columns" else [(), (), (2,), (0,)]))
    return Form(kind, draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(pads)), before, behind, dtypes)


def assert_rows(packed: PackedBatch, want: TensorDict) -> None:
    """The padded batch, from here and from files and pickles; and its packed values."""
    for there in (packed, PackedBatch.from_bytes(packed.to_bytes()), pickle.loads(pickle.dumps(packed))):
        assert_same_batch(decompress(there), want)
        assert_same_batch(unnest(decompress(there, format="nested")), want)


# -------------------------------------------------------------------- there and back, by rows and by fields


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_rows_of_every_encoding(kind: str, data: st.DataObject) -> None:
    form = data.draw(forms(kind))
    rng = data.draw(strategies.generators())
    mask = data.draw(patterns(width=form.width))
    rows = range(len(mask))
    batch = form.batch(mask, rng)
    packed = compress(batch, registry=form.registry())
    assert_rows(packed, batch)
    for name, value in batch.items():
        spec = form.registry()[name]
        own = form._masks(mask)[spec.masks[0]][0]
        values = decompress(packed, name, format="nested")[name].values()
        oracle.assert_same_tensor(values, oracle.pack(value.movedim(spec.ragged_dim, 1), own))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, len(mask)), st.integers(0, len(mask)))))
    sizes = [start, stop - start, len(mask) - stop]
    for part, begin in zip(packed.split(sizes), (0, start, stop), strict=True):
        own = rows[begin : begin + len(part)]
        assert_same_batch(decompress(part), oracle.take_rows(batch, own))
        low, high = sorted(data.draw(st.tuples(st.integers(0, len(own)), st.integers(0, len(own)))))
        assert_rows(part[low:high], oracle.take_rows(batch, own[low:high]))
        if len(own):
            picked = data.draw(st.lists(st.integers(0, len(own) - 1), max_size=6))
            assert_rows(part.take(picked), oracle.take_rows(batch, [own[row] for row in picked]))


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_fields_leave_and_come_together(kind: str, data: st.DataObject) -> None:
    form = data.draw(forms(kind))
    batch = form.batch(data.draw(patterns(width=form.width)), data.draw(strategies.generators()))
    packed = compress(batch, registry=form.registry())[: len(batch)]
    homes = {name: data.draw(st.integers(0, 2)) for name in batch.keys()}  # noqa: SIM118
    parts = [[name for name, home in homes.items() if home == number] for number in range(3)]
    split = [packed.select(*names) for names in parts if names]
    for part, names in zip(split, filter(None, parts), strict=True):
        assert_rows(part, batch.select(*names))
    order = data.draw(st.permutations([(name,) for name in homes]))
    assert_rows(merged(split, order), TensorDict({path[0]: batch[path[0]] for path in order}, batch.batch_size))


def test_a_layout_that_is_columns_of_another_finds_it_among_those_of_other_tables() -> None:
    mask = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
    fields = {"attention_mask": mask, "responses": mask[:, 2:] * 5, "input_ids": mask * 7}
    batch = TensorDict({"m": mask.flip(1), "x": mask.flip(1) * 3, **fields}, [2])
    registry = RL_FIELDS | {name: MaskNestingSpec("m") for name in "mx"}
    parts = [compress(batch.select(*names), registry=registry, pad_token_id=0) for names in (("m", "x"), fields)]
    assert abi.AS_PART in parts[1].table.stored["kind"]
    order = [(name,) for name in ("m", "x", *fields)]
    whole = PackedBatch.from_bytes(merged(parts, order).to_bytes())
    assert_rows(whole, batch.select(*(path[0] for path in order)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_equal_pads_of_rows(dtype: torch.dtype) -> None:
    """One record is stored for all rows."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]])
    x = torch.where(mask.bool(), torch.arange(9.0).view(3, 3), 2.0).to(dtype)
    batch = TensorDict({"m": mask, "x": x}, [3])
    packed = compress(batch, registry={"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", PER_ROW)})
    assert packed.forms["x",].kind == "padded"
    assert packed.table.pads["count"].tolist() == [1, 1]
    assert_rows(packed, batch)
    assert_rows(packed[1:], batch[1:])


# -------------------------------------------------------------------- which encoding it is


def long_mask(rows: int = 8, width: int = 700) -> oracle.Mask:
    lengths = [0, width, *(300 + 53 * row for row in range(rows - 2))]
    return [[place < length for place in range(width)] for length in lengths]


@pytest.mark.parametrize("hinted", [True, False], ids=["hinted", "by itself"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_encoding_is_taken_for_what_it_is_for(kind: str, hinted: bool) -> None:
    form = Form(kind, 700, behind=(3,) if kind == "columns" else ())
    mask = long_mask()
    if kind == "dictionary":
        mask = [row for row in mask[1:] for _ in range(3)]
    for seed in range(3):
        batch = form.batch(mask, np.random.default_rng(seed))
        packed = compress(batch, registry=form.registry(hinted))
        found = kinds_of(packed)
        for dtype in INTEGERS:
            name, size = f"x {dtype}", dtype.itemsize
            number = packed.numbers[name,]
            own = sum(
                place["size"] * place["count"]
                for at in packed.table.own_entries(number)
                for place in packed.table.entry_places(at)
            )
            assert own <= packed.words_nbytes((name,))
            if kind not in ("concat", "dictionary", "columns", "pieces"):
                assert entry_of(packed, f"same {dtype}") == entry_of(packed, name)
            if kind == "near" and hinted:
                assert found[f"near {dtype}"] == "blocks"
                assert packed.table.entries[entry_of(packed, f"near {dtype}")]["second"] == entry_of(packed, name)
            elif kind in ("near", "concat", "columns") and not hinted:
                continue
            elif size >= {"pieces": 4}.get(kind, 1):
                assert found[name].split(" ")[0] == {"near": "plain", "coded": "blocks"}.get(kind, kind), (
                    name,
                    found[name],
                )


@pytest.mark.parametrize("variant", ["reference", "multi-turn", "negative-zeros"])
def test_fields_of_the_reference_workload(variant: str) -> None:
    batch = workload(variant, 64, 96, 448)
    packed = compress(batch, pad_token_id=PAD)
    found = {name: kind.split(" ")[0] for name, kind in kinds_of(packed).items()}
    want = {"prompts": "dictionary", "input_ids": "concat", "position_ids": "delta"}
    assert {name: found[name] for name in want} == want
    assert entry_of(packed, "token_level_scores") == entry_of(packed, "token_level_rewards")
    assert entry_of(packed, "advantages") == entry_of(packed, "returns")
    assert_same_batch(decompress(packed), batch)


def test_what_is_equal_stays_small_with_more_tokens() -> None:
    """Ten times the response: masks, positions, rewards and advantages take (almost) no byte more."""
    short, long = (compress(workload(rows=64, prompt=64, response=width), pad_token_id=PAD) for width in (448, 4480))
    for name in ("attention_mask", "position_ids", "response_mask", "advantages", "token_level_scores", "returns"):
        assert long.select(name).nbytes <= short.select(name).nbytes + 64, name


@pytest.mark.parametrize("size", [255, 256, 257, 2047, 2048, 2049, 70_000])
@pytest.mark.parametrize("hints", [(), ("rle",), ("rle", "sparse"), ("delta",)])
def test_a_sample_is_not_the_whole(size: int, hints: tuple[str, ...]) -> None:
    """One odd word, anywhere, beside words that every sample takes for equal, rising, or few."""
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", hints=hints)}
    for family in (np.ones(size, np.int64), np.arange(size), np.zeros(size, np.int64), np.arange(size) % 2):
        for place in (None, 0, 1, 63, 127, 128, 200, size - 65, size - 1):
            x = torch.from_numpy(family.copy())[None].repeat(2, 1)
            if place is not None:
                x[1, place] = 2**40 + 7
            batch = TensorDict({"m": torch.ones_like(x), "x": x}, [2])
            packed = compress(batch, registry=registry)
            assert torch.equal(decompress(packed)["x"], x)
            assert packed.nbytes <= x.nbytes + 64


# -------------------------------------------------------------------- fields that follow from others


def followed(packed: PackedBatch) -> None:
    """Raises where an entry refers to one that does not come before it, or to one that a reader refuses."""
    for at, entry in enumerate(packed.table.entries):
        kind, first, second = abi.KINDS[int(entry["kind"])], int(entry["first"]), int(entry["second"])
        inner = {
            "concat": [first, second],
            "dictionary": [first],
            "pieces": [first],
            "sparse": [first, *[second] * (second >= 0)],
            "columns": range(first, first + int(entry["number"])),
        }
        for other in inner.get(kind, [second] if kind == "blocks" and second >= 0 else []):
            assert 0 <= other < at
            assert abi.KINDS[int(packed.table.entries[other]["kind"])] != "concat"


def line(*rows: list[int]) -> tuple[Tensor, Tensor]:
    """Rows of words as a padded field of ones and more, and its mask."""
    mask = [[place < len(row) for place in range(9)] for row in rows]
    values = torch.tensor([word for row in rows for word in row], dtype=torch.int64)
    return oracle.unpack(values, mask, 9), oracle.mask_tensor(mask, 9)


def fields_of(order: Sequence[str], rows: dict[str, list[list[int]]], hints: dict[str, tuple[str, ...]]) -> PackedBatch:
    """Each field under a mask of its own, packed; it must come back."""
    batch: dict[str, Tensor] = {}
    for name in order:
        batch[name], batch[f"{name} mask"] = line(*rows[name])
    specs = {name: MaskNestingSpec(f"{name} mask", hints=hints.get(name, ())) for name in order}
    specs |= {f"{name} mask": MaskNestingSpec(f"{name} mask") for name in order}
    whole = TensorDict(batch, [len(rows[order[0]])])
    packed = compress(whole, registry=specs)
    followed(packed)
    assert_rows(packed, whole)
    return packed


@pytest.mark.parametrize("order", list(itertools.permutations(["abc", "ab", "a"])))
def test_a_concat_is_no_part_of_a_concat(order: tuple[str, ...]) -> None:
    """abc = ab + c and ab = a + b: only one of the two follows from others."""
    rows = {"a": [[7], [70]], "b": [[800], [5]], "c": [[6], [600]], "ab": [[7, 800], [70, 5]]}
    rows["abc"] = [[7, 800, 6], [70, 5, 600]]
    hints = {"ab": ("concat:a,b",), "abc": ("concat:ab,c",)}
    packed = fields_of(list(dict.fromkeys([*order, *rows])), rows, hints)
    assert sorted(kind for kind in kinds_of(packed).values() if kind == "concat") == ["concat"]


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_circle_of_concats(order: tuple[str, ...]) -> None:
    """a = b + c, b = a + c, where c has no words: each of a and b could follow from the other."""
    rows = {"a": [[3, 1, 2], [9, 9, 8, 7]], "b": [[3, 1, 2], [9, 9, 8, 7]], "c": [[], []]}
    hints = {"a": ("concat:b,c",), "b": ("concat:a,c", "concat:c,a"), "c": ("concat:a,b", "near:a")}
    assert list(kinds_of(fields_of(order, rows, hints)).values()).count("concat") <= 1


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ([[7, 70, 1], [5, 3]], "concat:head,tail"),
        ([[7, 70], [1, 5, 2]], "concat:head,tail"),
        (None, "concat:tail,head"),
        (None, "concat:head,gone"),
        (None, "concat:head,head"),
        (None, "blocks"),
    ],
    ids=str,
)
def test_what_is_no_concat(change: list[list[int]] | None, hint: str) -> None:
    rows = {"head": [[7, 70], [5]], "tail": [[1], [2]], "whole": [[7, 70, 1], [5, 2]]}
    names = ["whole", "head", "tail"]
    assert kinds_of(fields_of(names, rows, {"whole": ("concat:head,tail",)}))["whole"] == "concat"
    packed = fields_of(names, {**rows, "whole": change or rows["whole"]}, {"whole": (hint,)})
    assert kinds_of(packed)["whole"] != "concat"


def test_a_long_chain_of_near_fields() -> None:
    rng = np.random.default_rng(0)
    names = [f"x{number}" for number in range(12)]
    steps = torch.from_numpy(rng.integers(0, 3, (12, 4, 300))).cumsum(0)
    values = torch.from_numpy(rng.integers(-(2**60), 2**60, (4, 300))) + steps
    batch = TensorDict({"m": torch.ones(4, 300), **dict(zip(names, values, strict=True))}, [4])
    registry = {"m": MaskNestingSpec("m"), "x0": MaskNestingSpec("m")}
    registry |= {new: MaskNestingSpec("m", hints=(f"near:{old}",)) for old, new in itertools.pairwise(names)}
    for order in (batch, TensorDict(dict(reversed(list(batch.items()))), [4])):
        packed = compress(order, registry=registry)
        assert sum(kind == "blocks" for kind in kinds_of(packed).values()) == 10
        assert_rows(packed, order)
        assert_rows(packed[1:3], order[1:3])


def test_equal_fields_share_one_entry() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 50_000, (6, 400)))
    other, holes = x.clone(), torch.ones_like(x)
    other[4, 333] += 1
    holes[:, 100] = 0
    batch = TensorDict({"m": torch.ones_like(x), "holes": holes, "a": x, "b": x.clone(), "int32": x.int()}, [6])
    batch["other"], batch["beside"], batch["free"], batch["again"] = other, x * holes, x.clone(), x.clone()
    under = {"m": "m", "holes": "holes", "a": "m", "b": "m", "int32": "m", "other": "m", "beside": "holes"}
    packed = compress(batch, registry={name: MaskNestingSpec(mask) for name, mask in under.items()})
    entries = {name: entry_of(packed, name) for name in batch.keys()}  # noqa: SIM118
    assert entries["a"] == entries["b"]
    assert len(set(entries.values())) == len(entries) - 1, "others differ in a word, the dtype, or the layout"
    assert packed.select("a", "b").nbytes == packed.select("b").nbytes + 9, "a record of its pad"
    assert_rows(packed, batch)
    for part in (packed[2:5], packed.take([5, 2, 2]), PackedBatch.cat([packed, packed[1:3]])):
        assert entry_of(part, "a") == entry_of(part, "b")
    out = decompress(packed)
    out["a"].fill_(-1)
    assert_same_batch(out.exclude("a"), batch.exclude("a"))


@given(batches(objects=False), st.data())
def test_hints_change_no_bit(case: Case, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(case.registry, key=str)), max_size=8, unique=True))
    hints = st.lists(st.sampled_from(ANY_HINT), max_size=3).map(tuple)
    registry = case.registry | {
        name: dataclasses.replace(case.registry[name], hints=data.draw(hints)) for name in names
    }
    packed = compress(case.batch, registry=registry, pad_token_id=case.pad_token_id)
    followed(packed)
    assert_same_batch(decompress(PackedBatch.from_bytes(packed.to_bytes())), case.batch)
    assert_same_batch(unnest(decompress(packed, format="nested")), case.batch)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64], ids=str)
def test_token_ids_are_coded(dtype: torch.dtype) -> None:
    """Each block takes what its words take in the widths that the entry names, or in one width if that is about as
    few bits."""
    rng = np.random.default_rng(3)
    few = 14 if dtype is torch.int16 else 20
    lengths = [4000, 256, 63, 64, 1, 0, 511, 257]
    ids = [(-5 + 2 ** (rng.random(n) * few)).astype(np.int64) for n in lengths]
    ids[3] = np.full(64, 2**few - 6)  # of one width
    ids[0][254::256] = ids[0][255::256] = 2**few - 6  # the last words of blocks are long
    x = torch.zeros(8, 4000, dtype=dtype)
    for row, line in enumerate(ids):
        x[row, : line.size] = torch.tensor(line)
    batch = TensorDict({"m": torch.arange(4000) < torch.tensor(lengths)[:, None], "x": x}, [8])
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    packed = compress(batch, registry=registry)
    entry = packed.table.entries[entry_of(packed, "x")]
    assert kinds_of(packed)["x"] == "blocks"
    widths = [int(entry["number"]) >> 8 * code & 255 for code in range(4)]
    assert widths == sorted(widths)
    assert widths[3] <= few + 1
    said, numbers, expected = packed.table.array(entry["a"]).tolist(), 0, list[int]()
    line_of_c = packed.table.array(entry["c"]).view("<u4").tolist()
    for line in ids:
        for block in (line[at : at + 256] for at in range(0, line.size, 256)):
            above, bits = (block - block.min()).tolist(), int(block.max() - block.min()).bit_length()
            ends = list(itertools.accumulate(2**width for width in widths))
            used = sum(next(width for width, end in zip(widths, ends, strict=True) if one < end) for one in above)
            coded = -(-len(above) // 16) + -(-used // 32)
            lanes, places = (1, len(above)) if len(above) < 64 else (8, -(-len(above) // 8))
            plain = -(-places * bits // 32) * lanes
            expected.append(64 if 16 * coded < 15 * plain else bits)
            numbers += coded if expected[-1] == 64 else plain
            assert expected[-1] != 64 or not used % 32 or line_of_c[numbers - 1] >> used % 32 == 0  # what is behind
    assert said == expected
    assert 4 < said.count(64) < len(said)
    assert int(entry["c"]["count"]) == numbers
    assert_rows(packed, batch)
    for rows in ([7, 0, 3], [6], [4, 5, 2, 2]):
        assert_rows(packed.take(rows), oracle.take_rows(batch, rows))
    for low, high in ((1, 7), (2, 3), (6, 8), (5, 5)):
        assert_rows(packed[low:high], oracle.take_rows(batch, range(low, high)))


# -------------------------------------------------------------------- what is remembered, and who works


@pytest.mark.parametrize("kind", KINDS)
def test_a_remembered_form_is_exact_when_the_data_change(kind: str) -> None:
    form = Form(kind, 600, PER_ROW, behind=(2,))
    masks = [long_mask(6, 600), [], [[False] * 600] * 3, long_mask(3, 600)]
    for seed, (mask, other) in enumerate(itertools.product(masks, KINDS)):
        for now in (kind, other):
            batch = form.batch(mask, np.random.default_rng(seed), now)
            assert_same_batch(decompress(compress(batch, registry=form.registry())), batch)


def test_a_form_that_a_sample_does_not_show_is_kept() -> None:
    """Floats are not tried as steps unless a hint asks for it."""
    x = (torch.randint(0, 200, (8, 1)) + torch.arange(400)).int().view(torch.float32)
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", hints=("delta",))}
    packs = [compress(TensorDict({"m": torch.ones(8, 400), "x": x}, [8]), registry=registry) for _ in range(3)]
    assert {kinds_of(packed)["x"] for packed in packs} == {"delta"}
    assert len({packed.to_bytes() for packed in packs}) == 1


def drifting(way: int, share: float, dtype: np.dtype[Any], rng: np.random.Generator) -> np.ndarray:
    """[12, 500]: rows whose regularity becomes another while `share` goes from 0 to 1."""
    rows, width = 12, 500
    info = np.iinfo(dtype)

    def noise(*shape: int) -> np.ndarray:
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)

    few = np.where(rng.random((rows, width)) < share, noise(rows, width), rng.integers(0, 9, (rows, width)))
    stretch = max(1, round(200 ** (1 - share)))
    some = max(1, round(2 + share * (rows - 2)))
    made = {
        0: lambda: rng.integers(0, 2 ** (1 + round(share * (8 * dtype.itemsize - 2))), (rows, width)),
        1: lambda: np.where(rng.random((rows, width)) < 0.01 + 0.7 * share, noise(rows, width), 0),
        2: lambda: np.repeat(noise(rows, width), stretch, 1)[:, :width],
        3: lambda: noise(some, width)[np.arange(rows) % some],
        4: lambda: np.where(rng.random((rows, 1)) < share, noise(rows, width), np.arange(width)),
        5: lambda: few,
        6: lambda: np.cumsum(rng.random((rows, width)) < 0.5 + 0.5 * share, 1),
        7: lambda: np.repeat(drifting(2, 1 - share, dtype, rng)[:3], 4, 0),
    }
    return made[way]().astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("way", range(8))
def test_a_drift_of_the_data_costs_little(way: int, dtype: torch.dtype) -> None:
    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m")}
    numbers = signed(dtype)
    rng = np.random.default_rng(way)
    drift = [0.0, 0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 0.7, 0.3, 0.0]
    made = [torch.from_numpy(drifting(way, share, numbers, rng)).view(dtype) for share in drift]
    steps = [TensorDict({"m": torch.ones(x.shape), "x": x}, [len(x)]) for x in made]
    remembered = [compress(batch, registry=registry) for batch in steps]
    for packed, batch in zip(remembered, steps, strict=True):
        table.forget()
        anew = compress(batch, registry=registry)
        assert packed.nbytes <= 1.02 * anew.nbytes + 256, (kinds_of(packed), kinds_of(anew))
        assert_same_batch(decompress(packed), batch)
