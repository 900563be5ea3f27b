"""One property: whatever host, device, plan, slice, pickle and file do, rows are equal, bit for bit.

    dtypes x pads x masks x trailing dims x forms     remembered plans; host and device; rows; bytes and files

What is expected comes from naive loops (oracle.py). test_device_work.py has what this cannot see."""

from __future__ import annotations

import itertools
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import kernels
import numpy as np
import oracle
import pytest
import samples
import strategies
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import IS_GPU, PLACES, Place, at, encoding_of, of_host_alone
from strategies import Case, batches, row_ops, rows_after
from tensordict import TensorDict
from torch import Tensor

from maskpack import (
    EDGE,
    PER_ROW,
    MaskNestingSpec,
    PackedBatch,
    compress,
    decompress,
    nest_batch_by_mask,
    unnest_batch_by_mask,
)
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO
from maskpack.errors import MaskpackError
from maskpack.packed import decode as on_host
from maskpack.packed import table as tables

pytestmark = [
    pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning"),
    pytest.mark.parametrize("place", PLACES),
]


def is_interpreted(place: str) -> bool:
    """The interpreter takes its time: it sees smaller batches, and fewer."""
    return place == "kernels" and not IS_GPU


@pytest.fixture(autouse=True)
def nothing_remembered() -> None:
    tables.forget()


# -------------------------------------------------------------------- the ways


WAYS: dict[str, Callable[[PackedBatch], PackedBatch]] = {
    "pickle": lambda packed: pickle.loads(pickle.dumps(packed)),
    "bytes": lambda packed: PackedBatch.from_bytes(packed.to_bytes(allow_pickle=True), allow_pickle=True),
    "cat": lambda packed: PackedBatch.cat([pickle.loads(pickle.dumps(part)) for part in (packed[:1], packed[1:])]),
}
ROWS: list[Any] = [slice(1, 4), [3, 0, 0, 2], slice(None, None, -1), slice(0, 0)]


def decoded(packed: PackedBatch, device: torch.device, *names: Any, format: Any = "padded") -> TensorDict:
    """Restored from a format, on the host; decoded by kernels alone, if the place has some."""
    with pytest.MonkeyPatch.context() as patch:
        if kernels.decode.uses_triton(device, call="decompress"):
            patch.setattr(on_host, "decoded", lambda packed, forms, nested: {form.path: 1 / 0 for form in forms})
        out = decompress(packed, *names, format=format, device=device)
    return (out if format == "padded" else unnest_batch_by_mask(out)).to("cpu")


def assert_rows(packed: PackedBatch, batch: TensorDict, device: torch.device, *names: Any) -> None:
    expected = batch.select(*names) if names else batch
    for format in ("padded", "nested"):
        oracle.assert_same_batch(decoded(packed, device, *names, format=format), expected.to("cpu"))


def assert_same_rows(
    made: Sequence[TensorDict], place: str, path: Path, chunk: int = 256, **options: Any
) -> tuple[list[PackedBatch], list[Place]]:
    """Of batches of one signature, one after the other, padded and nested; of the last one also what becomes of it in
    each way, a few fields in each. Returns it, packed from both forms, and what the place did."""
    batch, nested = made[-1], [nest_batch_by_mask(batch, **options) for batch in made]
    expected = {"padded": packed_in_turn(made, **options), "nested": packed_in_turn(nested, **options)}
    for form, last in (("padded", made[-1:]), ("nested", nested[-1:])):  # about as small as anew
        assert expected[form].nbytes <= 1.02 * packed_in_turn(last, **options).nbytes + 4096
    out: list[PackedBatch] = []
    places: list[Place] = []
    for form in ("padded", "nested"):
        tables.forget()
        with at(place, chunk) as here:
            given = [batch.to(here.device) for batch in made]
            if form == "nested":
                given = [nest_batch_by_mask(batch, **options) for batch in given]
                for own, back in zip(made, map(unnest_batch_by_mask, given), strict=True):
                    oracle.assert_same_batch(back.to("cpu"), own.to("cpu"))
            packed = packed_in_turn(given, **options)
            left = set[Any]() if place == "host" else of_host_alone(expected[form])
            assert encoding_of(packed, left) == encoding_of(expected[form], left)
            oracle.assert_same_batch(decoded(packed, here.device, format=form), batch.to("cpu"))
        out.append(packed)
        places.append(here)
    out[0].save(path / "packed")
    mapped, names = PackedBatch.load(path / "packed"), [*batch.keys()]
    ways = [(way(packed), slice(None)) for way in WAYS.values()]
    ways += [(own[rows], rows) for own in (packed, mapped) for rows in ROWS]
    turns = [*enumerate(ways)]
    if is_interpreted(place):  # each batch goes a third of the ways
        turns = turns[len(names) % 3 :: 3]
    with at(place, chunk) as here:
        for turn, (own, rows) in turns:
            some = names[turn % 4 :: 4]
            taken = oracle.take_rows(batch.select(*some), np.arange(len(batch))[rows].tolist()).to("cpu")
            format = ("padded", "nested")[turn // 4 % 2]
            oracle.assert_same_batch(decoded(own, here.device, *some, format=format), taken)
    return out, places


def packed_in_turn(made: Sequence[TensorDict], **options: Any) -> PackedBatch:
    """The last of some batches, packed by what was remembered of those before."""
    tables.forget()
    return [compress(batch, **options) for batch in made][-1]


# -------------------------------------------------------------------- every dtype, pad, mask, trailing shape and form


WIDTH, LENGTHS = 330, (0, 1, 63, 300, 300, 330)
DTYPES = (
    *(torch.int64, torch.float32, torch.uint8, torch.bfloat16, torch.bool, torch.complex128, torch.int16),
    *(torch.float64, torch.int32, torch.float8_e4m3fn, torch.uint16),
)
PADS = (1, EDGE, PER_ROW, SIGNED_ZERO, ANY_ZERO)
SHAPES: list[tuple[tuple[int, ...], int]] = [((), 1), ((), 1), ((3,), 1), ((2, 2), 2), ((0,), 1), ((3,), 2)]
"""Trailing dims, and the dim of the width."""


def _runs(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.repeat(rng.integers(-90, 90, n // 40 + 1), 40)[:n]


WORDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "plain": lambda rng, n: rng.integers(-(2**63), 2**63 - 1, n),
    "blocks": lambda rng, n: rng.integers(0, 100, n) + 20 * rng.integers(-9, 9),
    "rle": _runs,
    "delta": lambda rng, n: np.cumsum(_runs(rng, n)),
    "sparse": lambda rng, n: rng.integers(-(2**62), 2**62, n) * (rng.random(n) < 0.02),
    "dictionary": lambda rng, n: np.random.default_rng(n).integers(0, 100, n),
}
"""Words of a row that an encoding is the smallest for."""


def tokens(
    rng: np.random.Generator, kind: str, mask: oracle.Mask, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """Packed values [T, *shape] whose bits are words of a kind, row by row and column by column."""
    items = int(np.prod(shape))
    rows = [
        np.array([WORDS[kind](rng, n) for _ in range(items)], np.int64).reshape(items, n).T
        for n in oracle.lengths(mask)
    ]
    words = torch.from_numpy(np.concatenate(rows))
    if dtype == torch.bool:
        words = words % 2 == 1
    elif dtype.itemsize == 16:
        words = torch.stack([words, -words], -1).view(dtype)
    else:
        words = words.to({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).view(dtype)
    return words.reshape(len(words), *shape)


def masks(rng: np.random.Generator, holes: bool) -> oracle.Mask:
    """Rows of LENGTHS tokens: of one span, or of many in every other row."""
    flags = np.zeros((len(LENGTHS), WIDTH), np.bool_)
    for row, length in enumerate(LENGTHS):
        start = (WIDTH - length) // 2
        many = holes and row % 2 == 0
        flags[row, rng.permutation(WIDTH)[:length] if many else slice(start, start + length)] = True
    return flags.tolist()


def every_field(seed: int, turn: int, holes: bool, share: int) -> tuple[TensorDict, dict[str, MaskNestingSpec]]:
    """A batch with fields of all words and pads, or of some; dtypes and shapes change with `turn`."""
    rng = np.random.default_rng(seed)
    mask = masks(rng, holes)
    fields: dict[str, Tensor] = {"mask": oracle.mask_tensor(mask, WIDTH), "rows": torch.arange(len(LENGTHS))}
    registry = {"mask": MaskNestingSpec("mask"), "rows": MaskNestingSpec(None)}

    def add(name: str, values: Tensor, pad: Any, dim: int = 1, *hints: str) -> None:
        x = strategies.padded(rng, values, mask, WIDTH, pad).movedim(1, dim).contiguous()
        fields[name] = strategies.strided(np.random.default_rng(len(fields) + turn), x)
        registry[name] = MaskNestingSpec("mask", pad, dim, hints=hints)

    for number, (kind, pad) in enumerate(itertools.product(WORDS, PADS)):
        dtype, (shape, dim) = DTYPES[(number + 3 * turn) % len(DTYPES)], SHAPES[(number + turn) % len(SHAPES)]
        if pad is EDGE:
            dtype, shape, dim = torch.int64, (), 1
        elif (number + turn) % share:
            continue
        add(f"{kind} {pad}", tokens(rng, kind, mask, dtype, shape), pad, dim, *["dictionary"] * (kind == "dictionary"))
    for dim, kind in enumerate(("delta", "blocks"), 1):
        add(f"columns {dim}", tokens(rng, kind, mask, (torch.int32, torch.int16)[dim - 1], (2, 4)), 1, dim, "columns")
    near = 1000 * tokens(rng, "blocks", mask, torch.int32, ())
    some = torch.arange(len(near)) // 40 % 2
    for kind in ("blocks", "rle", "delta"):
        add(f"holes in {kind}", tokens(rng, kind, mask, torch.int32, ()) * some, 0, 1, "sparse")
    add(
        "holes",
        (near + torch.from_numpy(rng.integers(-3, 4, len(near)))).int() * some.int(),
        0,
        1,
        "sparse",
        "near:near",
    )
    for name, before in (("near", ""), ("nearer", "near:near"), ("nearest", "near:nearer")):
        add(name, near, 0, 1, *([before] if before else []))
        near = near * 1000 + torch.from_numpy(rng.integers(-3, 4, len(near))).int()
    add("ids", torch.from_numpy(2 ** (17 * rng.random(len(near)))).long(), 1)
    return TensorDict(fields, batch_size=[len(LENGTHS)]), registry


@pytest.mark.parametrize(("turn", "holes"), [(0, False), (1, True), (2, True)])
def test_every_dtype_pad_mask_shape_and_form(place: str, turn: int, holes: bool, tmp_path: Path) -> None:
    share = 8 if is_interpreted(place) else 1
    made, (registry, _) = zip(*(every_field(seed, turn, holes, share) for seed in (turn, turn + 7)), strict=True)
    packed, places = assert_same_rows(made, place, tmp_path, registry=registry)
    for own, here in zip(packed, places, strict=True):
        assert place == "host" or len(here.encoded[-1].numbers) > 12
        kinds = " ".join(own.table.kind(number) for number in range(len(own.tensors)))
        assert {*WORDS, "columns"} - ({"sparse"} if place == "kernels" else set()) <= {*kinds.split()}
        assert {form.kind for form in own.tensors} == {"padded", "dense"}
        assert own.table.entries[own.table.fields[own.numbers["ids",]]]["number"]  # its blocks have codes


@pytest.mark.parametrize("kinds", [("blocks", "rle"), ("sparse", "delta"), ("plain", "blocks")])
def test_fields_that_are_joined(place: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    specs = {name: MaskNestingSpec(name) for name in "htw"}
    specs |= {"head": MaskNestingSpec("h", 5), "tail": MaskNestingSpec("t", 5)}
    specs["whole"] = MaskNestingSpec("w", 5, hints=("concat:head,tail",))

    def joined(seed: int) -> TensorDict:
        rng, fields = np.random.default_rng(seed), dict[str, Tensor]()
        for name, kind in zip(("head", "tail"), kinds, strict=True):
            mask = masks(rng, holes=True)
            fields[name[0]] = oracle.mask_tensor(mask, WIDTH)
            fields[name] = strategies.padded(rng, tokens(rng, kind, mask, torch.int64, ()), mask, WIDTH, 5)
        fields["whole"], fields["w"] = (torch.cat([fields[a], fields[b]], 1) for a, b in (("head", "tail"), "ht"))
        return TensorDict(fields, batch_size=[len(LENGTHS)])

    made = [joined(0), joined(1)]
    for packed in assert_same_rows(made, place, tmp_path, registry=specs)[0]:
        assert packed.table.kind(packed.numbers["whole",]) == "concat"


PLANNED = ("reference", "multi-turn", "routed-experts", "ppo")
"""The workloads whose third padded batch on a device has a plan."""


@pytest.mark.parametrize("variant", samples.VARIANTS)
def test_workloads(place: str, variant: str, tmp_path: Path) -> None:
    rows = 5 if is_interpreted(place) else 6
    made = [samples.workload(variant, rows, 24, 100, fill=0.4, group=3, seed=seed) for seed in range(3)]
    verify = variant != "ppo"
    _, (padded, nested) = assert_same_rows(made, place, tmp_path, 64, pad_token_id=samples.PAD, verify=verify)
    if place == "kernels":
        assert padded.plans == ([True] if variant in PLANNED else [])
        assert any(found is not None and len(found.numbers) >= 8 for found in nested.encoded)


# -------------------------------------------------------------------- any batch


MORE = ({}, {"verify": False}, {"strict_mask_nesting": True})


@given(batches(), st.data())
def test_any_batch(place: str, case: Case, data: st.DataObject) -> None:
    batch = case.batch
    tables.forget()
    with at(place, chunk=data.draw(st.sampled_from([8, 1024]))) as here:
        for _ in range(2):
            packed = compress(batch.to(here.device), **case.options)
            assert_rows(packed, batch, here.device)
        ops = data.draw(row_ops(case.rows, max_size=2))
        for op in ops:
            packed = op.on_packed(packed)
        assert_rows(packed, oracle.take_rows(batch, rows_after(ops, case.rows, even_chunks=True)), here.device)


@given(batches(), st.sampled_from(MORE))
def test_any_batch_is_nested_as_on_the_host(place: str, case: Case, more: dict[str, Any]) -> None:
    """With the same warnings and errors."""
    batch, options = case.batch, {**case.options, **more}
    expected = outcome(lambda: nest_batch_by_mask(batch, **options))
    with at(place) as here:
        given = batch.to(here.device)
        before = oracle.snapshot(given)
        seen = outcome(lambda: nest_batch_by_mask(given, **options))
        assert oracle.snapshot(given) == before
        assert seen[1:] == expected[1:]
        if seen[0] is not None:
            oracle.assert_same_batch(seen[0].to("cpu"), expected[0].to("cpu"))
            if more.get("verify", True):
                oracle.assert_same_batch(unnest_batch_by_mask(seen[0]).to("cpu"), batch.to("cpu"))


def outcome(call: Callable[[], Any]) -> tuple[Any, Any, list[str]]:
    """What a call returns; its error; its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            out, error = call(), None
        except MaskpackError as raised:
            out, error = None, (type(raised), str(raised))
    return out, error, sorted(str(item.message) for item in caught)


# -------------------------------------------------------------------- what may differ under one signature


def of_floats(change: Callable[[Tensor, Tensor], Any]) -> TensorDict:
    """[6, 9] with a mask of floats and pads on both sides; `change` may write to the field and the mask."""
    place, begin, end = torch.arange(9), torch.tensor([0, 0, 0, 4, 2, 0]), torch.tensor([3, 9, 0, 5, 7, 9])
    mask = ((place >= begin[:, None]) & (place < end[:, None])).float()
    x = torch.rand(6, 9) * mask
    change(x, mask)
    return TensorDict({"m": mask, "x": x, "dense": torch.arange(6)}, [6])


def put(to: str, row: int, column: int, value: float) -> Callable[[Tensor, Tensor], None]:
    return lambda x, mask: {"x": x, "m": mask}[to].__setitem__((row, column), value)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, mask: None,
    "a stray value": put("x", 0, 8, 1.0),
    "a stray value on the left": put("x", 4, 0, 1.0),
    "minus zero": put("x", 0, 8, -0.0),
    "nan": put("x", 0, 8, float("nan")),
    "other pads": lambda x, mask: x.masked_fill_(mask == 0, -1.0),
    "pads of rows": lambda x, mask: x.copy_(torch.where(mask == 0, torch.arange(6.0)[:, None], x)),
    "edges": lambda x, mask: x.copy_(torch.arange(6.0)[:, None].expand(6, 9)),
    "another value of the mask": lambda x, mask: mask.mul_(2),
    "two values of the mask": put("m", 1, 0, 3.0),
    "minus zero in the mask": put("m", 0, 8, -0.0),
    "nan in the mask": put("m", 0, 8, float("nan")),
    "no tokens": lambda x, mask: (x.zero_(), mask.zero_()),
    "all tokens": lambda x, mask: (x.fill_(0.5), mask.fill_(1)),
    "holes": lambda x, mask: (x[:, ::2].zero_(), mask[:, ::2].zero_()),
}
UNSEEN = ("nothing", "another value of the mask", "two values of the mask", "no tokens", "all tokens", "holes")
"""Those of which nothing is lost if the pad 0 is taken unseen."""


@pytest.mark.parametrize("pads", [(), (0.0, PER_ROW), (EDGE, 0.0), (-1.0, 0.0, PER_ROW)], ids=str)
@pytest.mark.parametrize("verify", [True, False])
def test_batches_of_one_signature_follow_each_other(place: str, pads: tuple[Any, ...], verify: Any) -> None:
    """The plan of the one before serves a batch, or does not; the schema is that of a batch without a plan."""
    spec = MaskNestingSpec("m", [*pads]) if pads else MaskNestingSpec("m")
    options = {"registry": {"m": MaskNestingSpec("m"), "x": spec}, "verify": verify}
    names = [name for name in CHANGES if verify or (name in UNSEEN and pads[:1] in ((), (0.0,)))]
    random.Random(0).shuffle(names)
    torch.manual_seed(0)
    names = [own for name in names for own in ("nothing", "nothing", name)]  # on a device the second makes the plan
    made = [of_floats(CHANGES[name]) for name in names]
    with at(place) as here:
        remembered = [compress(batch.to(here.device), **options) for batch in made]
        turns = [*zip(remembered, made, names, strict=True)]
        for packed, batch, name in turns[2::3] if is_interpreted(place) else turns:
            assert_rows(packed, batch, here.device)
            tables.forget()
            fresh = compress(batch.to(here.device), **options)
            if place == "host" or name not in ("no tokens", "all tokens"):  # of these, plans on a device keep their pad
                assert packed.schema == fresh.schema


@settings(max_examples=50)
@given(case=batches(), seed=st.integers(0, 2**32 - 1))
def test_random_batches_with_changed_bytes(place: str, case: Case, seed: int) -> None:
    """A plan, and no plan, do the same to batches in which some bytes became others: both raise, or both are exact."""
    rng, batch = random.Random(seed), case.batch
    tables.forget()
    with at(place) as here:
        outcome(lambda: compress(batch.to(here.device), **case.options))
        for _ in range(3):
            for tensor in batch.values(include_nested=True, leaves_only=True):
                if type(tensor) is Tensor and tensor.numel() and not tensor.is_nested and rng.random() < 0.4:
                    word = tensor[tuple(rng.randrange(size) for size in tensor.shape)].reshape(1).view(torch.uint8)
                    word[rng.randrange(len(word))] ^= 1 << rng.randrange(8)
            there = batch.to(here.device)  # where torch copies strided bools, their bytes are 0 or 1 again
            packed, *seen = outcome(partial(compress, there, **case.options))
            tables.forget()
            fresh, *expected = outcome(partial(compress, there, **case.options))
            assert seen == expected
            if packed is not None:
                assert_rows(packed, there, here.device)
                assert packed.schema == fresh.schema
