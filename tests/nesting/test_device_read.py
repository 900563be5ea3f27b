"""What the kernel that reads padded fields on a device must see, and what is remembered between its launches.
tests/packed/test_same_rows.py nests any batch by it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from kernels import DEVICE, at, kernel_marks
from oracle import assert_same_tensor
from tensordict import TensorDict
from torch import Tensor

from maskpack import EDGE, PER_ROW, MaskNestingSpec, nest_batch_by_mask, unnest_batch_by_mask
from maskpack.core.pads import ANY_ZERO, SIGNED_ZERO
from maskpack.errors import LayoutError
from maskpack.nesting import device_read, plan, read

pytestmark = [*kernel_marks, pytest.mark.filterwarnings("ignore::maskpack.errors.MaskpackWarning")]


def flipped(x: Tensor, place: tuple[int, ...]) -> Tensor:
    """With one other bit at a place."""
    cells = oracle.cells(x).copy()
    bits = np.frombuffer(cells[place].tobytes(), np.uint8).copy()
    bits[-1] ^= 1
    cells[place] = bits.view(cells.dtype).reshape(cells[place].shape)
    return oracle.from_cells(cells, x.dtype)


@pytest.mark.parametrize("place", range(4))
def test_one_other_bit_is_seen_wherever_it_is(place: int) -> None:
    rng = np.random.default_rng(place)
    mask = [[5 <= col < 40 or (place % 2 == 1 and col == 60) for col in range(70)], [False] * 70]
    spot = ((0, 0), (0, 50), (0, 69), (1, 33))[place]
    fields, registry = {"m": oracle.mask_tensor(mask, 70)}, {"m": MaskNestingSpec("m")}
    dtypes = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex64)
    for dtype, pad in itertools.product(dtypes, (EDGE, (0, PER_ROW, SIGNED_ZERO, ANY_ZERO)[place])):
        trailing = ((), (3,))[(len(fields) // 4 + place) % 2 if pad is not ANY_ZERO else 0]
        values = strategies.values(rng, (sum(oracle.lengths(mask)), *trailing), dtype)
        x = strategies.padded(rng, values, mask, 70, pad)
        if len(fields) % 3 == 0:  # the width last in memory
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        for name, own in ((f"{dtype} {pad}", x), (f"{dtype} {pad} but one bit", flipped(x, spot))):
            fields[name] = strategies.strided(rng, own)
            registry[name] = MaskNestingSpec("m", pad)
    with at("kernels", 32):
        nested = nest_batch_by_mask(TensorDict(fields, [2]).to(DEVICE), registry)
    oracle.assert_same_batch(nested.to("cpu"), nest_batch_by_mask(TensorDict(fields, [2]), registry).to("cpu"))
    for name, x in fields.items():
        own = "one bit" not in name
        assert nested[name].is_nested == own, name
        expected = oracle.pack(x, mask) if own else x
        assert_same_tensor((nested[name].values() if own else nested[name]).cpu(), expected, name)


def test_numbers_of_jobs_beyond_one_search() -> None:
    mask = torch.tensor([[True] * 3 + [False] * 2] * 2)
    names = [str(number) for number in range(2 * device_read.FIRSTS + 3)]
    batch = TensorDict({"m": mask} | {name: int(name) * mask.long() for name in names}, [2])
    with at("kernels", 32):
        nested = nest_batch_by_mask(batch.to(DEVICE), {name: MaskNestingSpec("m") for name in ("m", *names)})
    assert [nested[name].values().tolist() for name in names] == [[int(name)] * 6 for name in names]


def test_forms_are_remembered_by_all_that_they_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[Any] = []
    real = plan._Planner._dense
    monkeypatch.setattr(plan._Planner, "_dense", lambda *given: computed.append(given[1]) or real(*given))
    plan.plans.clear()
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
        (False, batch(), {"registry": registry | {"x": MaskNestingSpec(None)}}),
        (False, batch(), {"registry": registry | {"x": MaskNestingSpec("m", 5)}}),
        (False, batch(), {"registry": registry | {"x": MaskNestingSpec("m", [0.0, 7])}}),
        (True, batch(), {}),
    ):
        options = {"registry": registry, **options}
        computed.clear()
        with at("kernels", 32):
            nested = nest_batch_by_mask(one.to(DEVICE), **options)
        assert known == (not computed)
        oracle.assert_same_batch(unnest_batch_by_mask(nested).to("cpu"), one.to("cpu"))


@pytest.mark.parametrize("place", ["x", "free", "m"])
def test_bools_of_other_bytes_are_refused(place: str) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    registry = {name: MaskNestingSpec("m") for name in ("m", "x")}
    batch = TensorDict({"m": mask.bool(), "x": mask.bool(), "free": mask.bool()}, batch_size=[2])
    batch[place] = torch.tensor([[1, 2, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8).view(torch.bool)
    with at("kernels", 32), pytest.raises(LayoutError, match=rf'field "{place}" is torch\.bool with bytes other'):
        nest_batch_by_mask(batch.to(DEVICE), registry)


def test_bools_on_a_device_are_looked_at_beside_fields_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    odd = torch.tensor([[1, 2, 0, 0], [1, 1, 1, 0]], dtype=torch.uint8).view(torch.bool)
    for module in (plan, read):
        monkeypatch.setattr(module, "is_away", lambda x: getattr(x, "dtype", None) is torch.bool)
    with pytest.raises(LayoutError, match=r'field "free" is torch\.bool with bytes other'):
        nest_batch_by_mask(TensorDict({"m": mask, "x": mask * 3, "free": odd}, [2]), {"m": ("m", 0), "x": ("m", 0)})


def test_fields_that_require_gradients_keep_them() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    x = (torch.rand(2, 4) * mask).requires_grad_()
    batch = TensorDict({"m": mask, "x": x, "y": x.detach().clone()}, batch_size=[2])
    registry = {name: MaskNestingSpec("m") for name in ("m", "x", "y")}
    with at("kernels", 32):
        nested = nest_batch_by_mask(batch.to(DEVICE), registry)
    nested["x"].values().sum().backward()
    assert torch.equal(x.grad, mask.float())
    assert not nested["y"].requires_grad
    assert nested["x"].requires_grad
    assert_same_tensor(unnest_batch_by_mask(nested)["x"].detach().cpu(), x.detach())
