"""ops.pack and ops.unpack against naive row loops, in plain torch and by the kernels."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import strategies
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import DEVICE, kernel_marks
from oracle import assert_same_tensor
from strategies import generators, patterns

from maskpack import EDGE, MaskpackError, RowLayout, ops
from maskpack.core import backends
from maskpack.errors import LayoutError, RegistryError

TRAILING = ((), (1,), (3,), (2, 2), (0,), (130,))
MANY_RUNS = [[place % 2 == 0 for place in range(9)], [False] * 9, [place % 3 == 1 for place in range(9)]]
LONG_RUNS = [[4 <= place < 140 for place in range(150)], [False] * 150, [True] * 150]
MASKS = {"many runs": MANY_RUNS, "long runs": LONG_RUNS}
BACKENDS: list[Any] = ["auto", pytest.param("triton", marks=kernel_marks)]
"""Tensors lie on the host, or where the kernels run."""


def there(x: Any, backend: Any) -> Any:
    """On the device of a backend, with the same strides, which may name a cell twice: its storage is copied."""
    if backend == "auto" or DEVICE.type == "cpu" or not isinstance(x, torch.Tensor):
        return x
    if x.is_conj() or x.is_neg():
        return x.to(DEVICE)
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(DEVICE)
    return storage.as_strided(x.shape, x.stride(), x.storage_offset())


def layout_of(mask: oracle.Mask, width: int, backend: Any = "auto") -> RowLayout:
    return RowLayout.from_mask(there(oracle.mask_tensor(mask, width), backend))


@st.composite
def cases(draw: st.DrawFn) -> tuple[oracle.Mask, int, torch.dtype, tuple[int, ...], np.random.Generator]:
    width = draw(st.one_of(st.integers(0, 9), st.sampled_from([31, 32, 33, 64, 200]), st.integers(65, 160)))
    mask = draw(patterns(rows=draw(st.integers(0, 4)), width=width))
    return mask, width, draw(st.sampled_from(strategies.DTYPES)), draw(st.sampled_from(TRAILING)), draw(generators())


# -------------------------------------------------------------------- against the oracle


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases())
def test_pack(case: Any, backend: Any) -> None:
    mask, width, dtype, trailing, rng = case
    x = strategies.strided(rng, strategies.values(rng, (len(mask), width, *trailing), dtype))
    before = oracle.cells(x).tobytes()
    got = ops.pack(there(x, backend), layout_of(mask, width, backend), backend=backend)
    assert_same_tensor(got.cpu(), oracle.pack(x, mask))
    assert got.is_contiguous()
    assert oracle.cells(x).tobytes() == before


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 2)], ids=str)
def test_masks_of_any_leading_dims(lead: tuple[int, ...], trailing: tuple[int, ...]) -> None:
    """As `x[mask]`, element by element, and back."""
    source = torch.Generator().manual_seed(len(lead))
    mask = torch.rand((*lead, 7), generator=source) < 0.5
    x = torch.randn((*lead, 7, *trailing), generator=source)
    naive = [x[place] for place in np.ndindex(*mask.shape) if mask[place]]
    packed = ops.pack(x, mask)
    assert_same_tensor(packed, torch.stack(naive) if naive else x.new_zeros((0, *trailing)))
    back = ops.unpack([packed, packed], mask, -3.0)
    own = torch.full_like(x, -3.0)
    for place in np.ndindex(*mask.shape):
        if mask[place]:
            own[place] = x[place]
    for seen in back:
        assert_same_tensor(seen, own)
    assert RowLayout.from_mask(mask).num_rows == int(np.prod(lead))
    assert torch.equal(RowLayout.from_mask(mask).to_mask().view(mask.shape), mask)


@pytest.mark.parametrize("backend", BACKENDS)
@given(case=cases(), pad=st.sampled_from([0, 1, EDGE, "of rows"]))
def test_unpack(case: Any, pad: Any, backend: Any) -> None:
    mask, width, dtype, trailing, rng = case
    pad = strategies.values(rng, (len(mask),), dtype) if pad == "of rows" else pad
    values = strategies.strided(rng, strategies.values(rng, (oracle.offsets(mask)[-1], *trailing), dtype))
    before = oracle.cells(values).tobytes()
    layout = layout_of(mask, width, backend)
    got = ops.unpack(there(values, backend), layout, there(pad, backend), backend=backend)
    assert_same_tensor(got.cpu(), oracle.unpack(values, mask, width, oracle.EDGE if pad is EDGE else pad))
    assert got.is_contiguous()
    assert oracle.cells(values).tobytes() == before


@pytest.mark.parametrize("pad", [[-100, 300], [1.5, 2.0]], ids=str)
def test_pads_of_another_dtype_are_not_cast(pad: list[float]) -> None:
    with pytest.raises(RegistryError, match=r"pad_value is a tensor of .*; expected torch\.uint8, as the values are"):
        ops.unpack(torch.arange(2).to(torch.uint8), torch.tensor([[1, 0, 1], [0, 0, 0]]), torch.tensor(pad))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS)
def test_any_strides(name: str, backend: Any) -> None:
    mask = MASKS[name]
    rows, width = len(mask), len(mask[0])
    layout = layout_of(mask, width, backend)
    base = torch.arange(rows * width * 4, dtype=torch.float32)
    views = {
        "transposed": base[: rows * width].view(width, rows).t(),
        "expanded rows": base[:width].expand(rows, width),
        "expanded width": base[:rows, None].expand(rows, width),
        "expanded features": base[: rows * width].view(rows, width, 1).expand(rows, width, 3),
        "strided": base[: rows * width * 2].view(rows, 2 * width)[:, ::2],
        "offset": base[1 : 1 + rows * (width + 2)].view(rows, width + 2)[:, 2:],
        "features first": base[: rows * width * 4].view(4, rows, width).permute(1, 2, 0),
        "flipped": base[: rows * width].view(rows, width).flip(1),
        "conjugate": torch.complex(base[: rows * width], base[: rows * width] + 1).view(rows, width).conj(),
        "negated": torch.complex(base[: rows * width], base[: rows * width] + 1).view(rows, width).conj().imag,
    }
    for kind, x in views.items():
        packed = oracle.pack(x, mask)
        assert_same_tensor(ops.pack(there(x, backend), layout, backend=backend).cpu(), packed, kind)
        for values in (torch.stack([packed, packed], -1)[..., 1], x.flatten(0, 1)[: layout.num_tokens]):
            got = ops.unpack(there(values, backend), layout, backend=backend).cpu()
            assert_same_tensor(got, oracle.unpack(values.resolve_conj().resolve_neg(), mask, width), kind)


@pytest.mark.parametrize("pad", [float("nan"), -0.0, float("inf"), -100, 0.1, True])
def test_pads_of_floats(pad: Any) -> None:
    for name, mask in MASKS.items():
        width = len(mask[0])
        for dtype in strategies.FLOATS:
            values = torch.zeros(oracle.offsets(mask)[-1], dtype=dtype)
            assert_same_tensor(
                ops.unpack(values, layout_of(mask, width), pad), oracle.unpack(values, mask, width, pad), name
            )


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 2**53 + 1),
        (torch.int64, -(2**63)),
        (torch.uint8, 255),
        (torch.uint16, 65535),
        (torch.uint32, 2**32 - 1),
        (torch.int8, -128),
        (torch.int64, 151643),
        (torch.int32, 7.0),
    ],
)
def test_pads_of_integers(dtype: torch.dtype, pad: Any) -> None:
    mask = MANY_RUNS
    values = torch.zeros(oracle.offsets(mask)[-1], dtype=dtype)
    assert_same_tensor(ops.unpack(values, layout_of(mask, 9), pad), oracle.unpack(values, mask, 9, pad))


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.int64, 0.5),
        (torch.uint8, -100),
        (torch.uint8, 256),
        (torch.int8, 200),
        (torch.bool, 2),
        (torch.int64, float("nan")),
        (torch.float32, 1j),
    ],
)
def test_a_pad_that_the_dtype_cannot_hold_is_an_error(dtype: torch.dtype, pad: Any) -> None:
    values = torch.zeros(2, dtype=dtype)
    with pytest.raises(MaskpackError, match=r"^unpack: "):
        ops.unpack(values, RowLayout.from_lengths([2], 3), pad)


def test_results_are_copies() -> None:
    for mask in (*MASKS.values(), [[True] * 9]):
        layout = layout_of(mask, len(mask[0]))
        x = torch.ones(len(mask), len(mask[0]))
        values = ops.pack(x, layout)
        values.zero_()
        assert x.min() == 1
        padded = ops.unpack(values, layout)
        padded.fill_(3)
        assert values.max() == 0


# -------------------------------------------------------------------- gradients


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pad", [0, 3.5, EDGE])
def test_gradients_of_both_orders(pad: Any, backend: Any) -> None:
    mask = [[False, True, False, True], [False] * 4, [True, True, True, False]]
    layout = layout_of(mask, 4, backend)
    for trailing in ((), (2,)):
        x = there(torch.randn(3, 4, *trailing, dtype=torch.float64), backend).requires_grad_()
        values = there(torch.randn(layout.num_tokens, *trailing, dtype=torch.float64), backend).requires_grad_()
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda x: ops.pack(x * x, layout, backend=backend), (x,))
            assert check(lambda values: ops.unpack(values * values, layout, pad, backend=backend), (values,))


@pytest.mark.parametrize("pad", [0, 3.5, EDGE])
@pytest.mark.parametrize("name", MASKS)
def test_values_are_the_same_with_and_without_gradients(name: str, pad: Any) -> None:
    mask = MASKS[name]
    width = len(mask[0])
    layout = layout_of(mask, width)
    for dtype in (*strategies.FLOATS, torch.complex64):
        values = strategies.values(np.random.default_rng(1), (layout.num_tokens, 2), dtype)
        grad = oracle.copy(values).requires_grad_()
        got = ops.unpack(grad, layout, pad)
        assert got.requires_grad
        assert_same_tensor(got, ops.unpack(values, layout, pad))
        with torch.no_grad():
            assert not ops.unpack(grad, layout, pad).requires_grad
            assert_same_tensor(ops.unpack(grad, layout, pad), got)
        x = got.detach().requires_grad_()
        assert_same_tensor(ops.pack(x, layout), values)


def test_gradient_without_real_values() -> None:
    layout = RowLayout.from_mask(torch.zeros(2, 3))
    x = torch.ones(2, 3, requires_grad=True)
    ops.pack(x, layout).sum().backward()
    assert_same_tensor(x.grad, torch.zeros(2, 3))
    for pad in (0, EDGE):
        values = torch.zeros(0, requires_grad=True)
        padded = ops.unpack(values, layout, pad)
        assert_same_tensor(padded, torch.zeros(2, 3))
        if padded.requires_grad:
            padded.sum().backward()
            assert_same_tensor(values.grad, torch.zeros(0))


# -------------------------------------------------------------------- several at once, backends


def test_several_fields_are_each_as_alone() -> None:
    layout = layout_of(MANY_RUNS, 9)
    x, y = torch.arange(27).view(3, 9), torch.rand(3, 9, 2)
    packed = ops.pack([x, y], layout)
    assert isinstance(packed, list)
    for values, alone in zip(packed, (x, y), strict=True):
        assert_same_tensor(values, ops.pack(alone, layout))
    for pads, each in ((7, (7, 7)), ([7, EDGE], (7, EDGE)), ((0, torch.tensor([1.0, 2.0, 3.0])), None)):
        padded = ops.unpack(tuple(packed), layout, pads)
        for values, out, pad in zip(packed, padded, each or pads, strict=True):
            assert_same_tensor(out, ops.unpack(values, layout, pad))
    assert ops.pack([], layout) == []
    assert ops.unpack([], layout) == []


def test_equal_pads_of_other_bits() -> None:
    layout = RowLayout.from_lengths([0, 0], 1)
    values = [torch.zeros(0), torch.zeros(0, dtype=torch.float64)]
    for _ in range(2):
        for pads in ([0.0, -0.0], [-0.0, 0.0], [0, -0.0], [False, 0.0], [1, True], [1.0, 1]):
            for out, pad, value in zip(ops.unpack(values, layout, pads), pads, values, strict=True):
                assert_same_tensor(out, torch.full((2, 1), pad, dtype=value.dtype))


def test_a_folder_is_no_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_of_a_test").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not backends.is_installed("kernels_of_a_test")
    (tmp_path / "kernels_of_a_test" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert backends.is_installed("kernels_of_a_test")
    assert not backends.is_installed("no_package_of_this_name")


def test_the_switch_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_INSTALLED", True)
    cuda = torch.device("cuda", 0)
    assert backends.uses_triton(cuda)
    assert not backends.uses_triton(torch.device("cpu"))
    monkeypatch.setenv("MASKPACK_TRITON", "0")
    assert not backends.uses_triton(cuda)
    assert backends.uses_triton(cuda, "triton")
    monkeypatch.setattr(backends, "_INSTALLED", False)
    monkeypatch.delenv("MASKPACK_TRITON")
    assert not backends.uses_triton(cuda)
    with pytest.raises(LayoutError, match=r"but Triton is not installed"):
        backends.uses_triton(cuda, "triton")


def test_one_graph_for_a_compiler_on_the_host() -> None:
    def there_and_back(x: torch.Tensor, layout: RowLayout) -> torch.Tensor:
        return ops.unpack(ops.pack(x * 2, layout) + 1, layout, 3.0)

    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    for mask in (MANY_RUNS, [[True] * 9, [False] * 9, [True] * 4 + [False] * 5]):
        layout = layout_of(mask, 9)
        assert layout.indices.numel() == layout.num_tokens  # read once before
        x = torch.rand(3, 9, requires_grad=True)
        assert_same_tensor(compiled(x, layout).detach(), there_and_back(x, layout).detach())
        (gradient,) = torch.autograd.grad(compiled(x, layout).sum(), x)
        assert_same_tensor(gradient, 2.0 * torch.tensor(mask))
