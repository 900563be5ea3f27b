"""The kernel that reads padded fields on a device, against naive loops; and batches nested by it, against those nested
on the host. Triton interprets it here; on a GPU it runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_tensor
from samples import PAD, VARIANTS, workload
from strategies import Case, batches, generators, patterns
from tensordict import TensorDict
from torch import Tensor

from maskpack import EDGE, PER_ROW, SIGNED_ZERO, MaskNestingSpec, RowLayout, VerifyFirst, compress, nest_batch_by_mask
from maskpack import unnest_batch_by_mask as restore
from maskpack.errors import LayoutError, LossyPadError, MaskpackError
from maskpack.nesting import checks, device_read, survey, verify

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(DEVICE.type == "cpu" and not INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning"),
]
on_the_host = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_cuda.py nests batches on a GPU")
CANARY = 32
TRAILING = ((), (1,), (3,), (2, 2), (8,), (0,), (40,))
AS_ORACLE = {EDGE: oracle.EDGE, PER_ROW: oracle.PER_ROW, SIGNED_ZERO: oracle.SIGNED_ZERO}


class Guarded:
    """Gives out memory between canaries."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = torch.full((nbytes + 2 * CANARY,), 0xA5, dtype=torch.uint8, device=device)
        self._held.append((memory, nbytes))
        return memory[CANARY : CANARY + nbytes].view(dtype).view(tuple(shape))

    def check(self) -> None:
        for memory, nbytes in self._held:
            assert bool((memory[:CANARY] == 0xA5).all())
            assert bool((memory[CANARY + nbytes :] == 0xA5).all())


@contextmanager
def by_kernel(chunk: int = 32) -> Iterator[None]:
    """Fields on the host are read as those on a GPU are."""
    guarded = Guarded()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_read, "uses_triton", lambda device, call: True)
        patch.setattr(device_read, "_new", guarded.empty)
        patch.setattr(device_read, "CHUNK", chunk)
        patch.setattr(device_read, "SPAN", 2 * chunk)
        patch.setattr(verify, "is_away", lambda x: True)
        patch.setattr(checks, "uses_triton", lambda device: True)
        yield
    guarded.check()


# -------------------------------------------------------------------- single fields, against loops


def under(
    rng: np.random.Generator, mask: oracle.Mask, width: int, dtype: torch.dtype, trailing: Any, pad: Any
) -> Tensor:
    """Random bits, with the pad under the mask, but for one element at times."""
    x = strategies.values(rng, (len(mask), width, *trailing), dtype)
    flags = np.array(mask, bool).reshape(len(mask), width)
    if pad is EDGE:
        x = oracle.unpack(oracle.pack(x, mask), mask, width, oracle.EDGE)
    cells = oracle.cells(x).copy()
    if pad is not EDGE:
        pads = np.repeat(np.zeros((), cells.dtype)[None], len(mask))
        for row in range(len(mask)):
            if pad is PER_ROW:
                pads[row] = oracle.cells(strategies.values(rng, (1,), dtype))[0]
            else:
                sign = -0.0 if pad is SIGNED_ZERO and rng.integers(2) else 0.0
                pads[row] = oracle.pad_cell(sign if pad is SIGNED_ZERO else pad, dtype)[()]
        cells[~flags] = np.broadcast_to(pads.reshape(-1, *[1] * (cells.ndim - 1)), cells.shape)[~flags]
    free = np.argwhere(np.broadcast_to(~flags.reshape(*flags.shape, *[1] * len(trailing)), cells.shape))
    if len(free) and rng.integers(3) == 0:
        place = tuple(free[rng.integers(len(free))])
        bits = np.frombuffer(cells[place].tobytes(), np.uint8).copy()
        bits[rng.integers(bits.size)] ^= 1 << rng.integers(8)
        if dtype != torch.bool:
            cells[place] = bits.view(cells.dtype)[0]
    return oracle.from_cells(cells, dtype)


def row_pads(x: Tensor, mask: oracle.Mask, pad: Any) -> np.ndarray:
    """The first element of each row that is masked out; of SIGNED_ZERO, if it is a zero."""
    cells = oracle.cells(x)
    out = np.zeros(len(mask), cells.dtype)
    zeros = {oracle.pad_cell(zero, x.dtype).tobytes() for zero in (0.0, -0.0)}
    for row, line in enumerate(mask):
        free = [place for place, real in enumerate(line) if not real]
        if free and cells[row, free[0]].size:
            first = cells[row, free[0]].reshape(-1)[0]
            if pad is PER_ROW or (first.tobytes() in zeros and x.dtype.is_floating_point and x.dtype.itemsize > 1):
                out[row] = first
    return out


def fits(x: Tensor, mask: oracle.Mask, pad: Any) -> bool:
    if pad is SIGNED_ZERO and (not x.dtype.is_floating_point or x.dtype.itemsize == 1):
        return oracle.fits(x, mask, 0)
    return oracle.fits(x, mask, AS_ORACLE.get(pad, pad))


def assert_read(fields: dict[str, tuple[Tensor, oracle.Mask, tuple[Any, ...], bool]]) -> None:
    layouts: dict[int, RowLayout] = {}
    given = {}
    for name, (x, mask, pads, checked) in fields.items():
        if id(mask) not in layouts:
            layouts[id(mask)] = RowLayout.from_mask(oracle.mask_tensor(mask, x.shape[1]).to(DEVICE))
        here = x.to(DEVICE) if DEVICE.type == "cuda" else x
        given[name] = device_read.PaddedField(here, layouts[id(mask)], pads, checked)
        assert device_read.fits(here, layouts[id(mask)])
    seen = device_read.read(given, DEVICE)
    flags = seen.flags.cpu().tolist()
    for name, (x, mask, pads, checked) in fields.items():
        assert_same_tensor(seen.values[name].cpu(), oracle.pack(x, mask), name)
        assert (name in seen.places) == checked
        if checked:
            odd = [False] if x.dtype == torch.bool else []
            assert flags[seen.places[name]] == [not fits(x, mask, pad) for pad in pads] + odd, (name, pads)
        for pad in pads:
            if pad in (PER_ROW, SIGNED_ZERO):
                got = oracle.cells(seen.row_pads[name, pad])
                assert got.tobytes() == row_pads(x, mask, pad).tobytes(), (name, pad)


@given(st.data(), generators())
def test_values_flags_and_row_pads(data: st.DataObject, rng: np.random.Generator) -> None:
    fields: dict[str, Any] = {}
    rows = data.draw(st.integers(0, 4))
    for axis in range(data.draw(st.integers(1, 2))):
        width = data.draw(st.sampled_from([0, 1, 5, 16, 33, 70]))
        mask = data.draw(patterns(rows=rows, width=width))
        for number in range(data.draw(st.integers(1, 3))):
            dtype = data.draw(st.sampled_from(strategies.DTYPES))
            some = [EDGE, 0, 1, PER_ROW, SIGNED_ZERO]
            pads = tuple(data.draw(st.lists(st.sampled_from(some), min_size=1, max_size=4, unique=True)))
            trailing = data.draw(st.sampled_from(TRAILING))
            x = under(rng, mask, width, dtype, trailing, data.draw(st.sampled_from(some)))
            if trailing and data.draw(st.booleans()):  # the width last in memory
                x = x.movedim(1, -1).contiguous().movedim(-1, 1)
            fields[f"{axis} {number}"] = strategies.strided(rng, x), mask, pads, data.draw(st.booleans())
    with by_kernel():
        assert_read(fields)


@pytest.mark.parametrize("trailing", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128])
@pytest.mark.parametrize("place", range(4))
def test_one_other_bit_is_seen_wherever_it_is(dtype: torch.dtype, trailing: tuple[int, ...], place: int) -> None:
    rng = np.random.default_rng(place)
    mask = [[5 <= col < 40 or (place % 2 == 1 and col == 60) for col in range(70)], [False] * 70]
    spot = ((0, 0), (0, 50), (0, 69), (1, 33))[place]
    for pad in (EDGE, (0, PER_ROW, SIGNED_ZERO)[place % 3]):
        x = strategies.values(rng, (2, 70, *trailing), dtype)
        x = oracle.unpack(oracle.pack(x, mask), mask, 70, oracle.EDGE if pad is EDGE else 0)
        cells = oracle.cells(x).copy()
        bits = np.frombuffer(cells[spot].tobytes(), np.uint8).copy()
        bits[-1] ^= 1
        cells[spot] = bits.view(cells.dtype).reshape(cells[spot].shape)
        with by_kernel():
            fields = {"x": (x, mask, (pad,), True), "y": (oracle.from_cells(cells, dtype), mask, (pad,), True)}
            assert_read(fields)


def test_nothing_but_values_is_read_of_fields_that_are_not_checked() -> None:
    mask = oracle.mask_rows(torch.rand(3, 50, generator=torch.Generator().manual_seed(0)) < 0.3)
    x = torch.arange(150.0).view(3, 50)
    with by_kernel():
        assert_read({"x": (x, mask, (), False), "y": (x.to(torch.int16), mask, (PER_ROW,), False)})


def test_numbers_of_jobs_beyond_one_search() -> None:
    mask = [[True] * 3 + [False] * 2] * 2
    x = torch.arange(10).view(2, 5)
    many = {f"{number}": (x + number, mask, (0,), True) for number in range(2 * device_read.FIRSTS + 3)}
    with by_kernel():
        assert_read(many)


# -------------------------------------------------------------------- whole batches, against the host


def outcome(call: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = call()
        except MaskpackError as error:
            return type(error), str(error)
    return made, sorted(str(item.message) for item in caught)


def assert_nests_alike(batch: TensorDict, **options: Any) -> None:
    before = oracle.snapshot(batch)
    want = outcome(lambda: nest_batch_by_mask(batch, **options))
    with by_kernel(256):
        seen = outcome(lambda: nest_batch_by_mask(batch, **options))
    assert oracle.snapshot(batch) == before
    assert seen[1] == want[1]
    if isinstance(want[0], type):
        assert seen[0] is want[0]
        return
    oracle.assert_same_batch(seen[0], want[0])
    with by_kernel(256):
        restored = restore(seen[0])
    oracle.assert_same_batch(restored, restore(want[0]))


MORE = ({}, {"verify": "never"}, {"on_loss": "error"}, {"on_loss": "drop"}, {"strict_mask_nesting": True})


@on_the_host
@given(batches(), st.sampled_from(MORE))
def test_batches_nest_as_on_the_host(case: Case, more: dict[str, Any]) -> None:
    assert_nests_alike(case.batch, **case.options, **more)


@on_the_host
@given(batches())
def test_batches_are_packed_as_on_the_host(case: Case) -> None:
    want = compress(case.batch, **case.options)
    with by_kernel(256):
        seen = compress(case.batch, **case.options)
    assert seen.schema == want.schema
    assert [form.pads_by_bits for form in seen.tensors] == [form.pads_by_bits for form in want.tensors]
    assert seen.to_bytes(allow_pickle=True) == want.to_bytes(allow_pickle=True)


@on_the_host
@pytest.mark.parametrize("variant", VARIANTS)
def test_workloads_nest_as_on_the_host(variant: str) -> None:
    batch = workload(variant, 2)
    assert_nests_alike(batch, pad_token_id=PAD)
    first, other = VerifyFirst(), VerifyFirst()
    for _ in range(2):
        want = nest_batch_by_mask(batch, pad_token_id=PAD, verify=first)
        with by_kernel(256):
            seen = nest_batch_by_mask(batch, pad_token_id=PAD, verify=other)
        oracle.assert_same_batch(seen, want)
    assert first.times == other.times


@on_the_host
def test_forms_are_remembered_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    real = survey._Planner._dense
    monkeypatch.setattr(survey._Planner, "_dense", lambda *given: computed.append(given[1]) or real(*given))
    survey._known_forms.clear()
    rng = torch.Generator().manual_seed(0)

    def batch(width: int = 12, stray: int = 0, **more: Any) -> TensorDict:
        mask = (torch.rand(3, width, generator=rng) < 0.5).long()
        fields = {"m": mask, "x": mask * torch.randint(1, 9, (3, width), generator=rng) + stray * (1 - mask)}
        return TensorDict({**fields, "free": torch.rand(3, generator=rng)}, batch_size=[3]).update(more)

    registry = {"m": MaskNestingSpec("m"), "x": MaskNestingSpec("m", [0, 7])}
    for known, one, options in (
        (False, batch(), {}),
        (True, batch(), {}),
        (True, batch(stray=7), {}),
        (True, batch(stray=5), {}),
        (False, batch(13), {}),
        (False, batch(y=torch.zeros(3, 12)), {}),
        (False, batch(), {"ignore_dense_fields": ["x"]}),
        (False, batch(), {"registry": registry | {"x": MaskNestingSpec("m", 5)}}),
        (False, batch(), {"registry": registry | {"x": MaskNestingSpec("m", [0.0, 7])}}),
        (True, batch(), {}),
    ):
        options = {"registry": registry, **options}
        want = outcome(lambda one=one, options=options: nest_batch_by_mask(one, **options))
        computed.clear()
        with by_kernel():
            seen = outcome(lambda one=one, options=options: nest_batch_by_mask(one, **options))
        assert known == (not computed)
        assert seen[1] == want[1]
        oracle.assert_same_batch(seen[0], want[0])
        computed.clear()


@on_the_host
@pytest.mark.parametrize("place", ["x", "free", "m"])
def test_bools_of_other_bytes_are_refused(place: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    registry = {name: MaskNestingSpec("m") for name in ("m", "x")}
    batch = TensorDict({"m": mask.bool(), "x": mask.bool(), "free": mask.bool()}, batch_size=[2])
    batch[place] = torch.tensor([[1, 2, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8).view(torch.bool)
    with by_kernel(), pytest.raises(LayoutError, match=rf'field "{place}" is torch\.bool with bytes other'):
        nest_batch_by_mask(batch, registry, ignore_dense_fields=["free"])


@on_the_host
def test_the_message_names_what_is_lost() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    batch = TensorDict({"m": mask, "x": mask * 3 + torch.tensor([0, 0, 0, 5])}, batch_size=[2])
    registry = {name: MaskNestingSpec("m") for name in ("m", "x")}
    with by_kernel(), pytest.raises(LossyPadError, match=r'field "x" holds 5 at \(0, 3\)'):
        nest_batch_by_mask(batch, registry, on_loss="error")


@on_the_host
def test_fields_that_require_gradients_keep_them() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    x = (torch.rand(2, 4) * mask).requires_grad_()
    batch = TensorDict({"m": mask, "x": x, "y": x.detach().clone()}, batch_size=[2])
    registry = {name: MaskNestingSpec("m") for name in ("m", "x", "y")}
    with by_kernel():
        nested = nest_batch_by_mask(batch, registry)
    nested["x"].values().sum().backward()
    assert torch.equal(x.grad, mask.float())
    assert not nested["y"].requires_grad
