"""packed_attention against loops over rows, tokens and heads in float64, and its gradients against theirs. Flex
attention runs uncompiled here: slowly, and without gradients."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_loops import OnGpu, attend, bounds, head_major, in_turn, naive, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from maskpack.errors import ReplayError
from maskpack.ops import attention as module
from maskpack.ops.attention import packed_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def error(seen: Tensor, truth: Tensor) -> float:
    assert seen.shape == truth.shape
    return float((seen.double() - truth).detach().abs().max())


# -------------------------------------------------------------------- values


@pytest.mark.parametrize("lengths", [[1] * 9, [9, 131, 2]], ids=["a token each", "long"])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (1, None), (3, None), (100, None), (None, 2.0), (3, 2.0)])
def test_flex_attention_sees_the_same_tokens(lengths: list[int], window: int | None, cap: float | None) -> None:
    qkv = tensors(lengths)
    seen = attend(qkv, lengths, window=window, softcap=cap, backend="flex")
    assert error(seen, naive(*qkv, in_turn(lengths), 0.4, window, cap)) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)],
)
@pytest.mark.parametrize("lengths", [[4, 1, 6], [9, 131, 2]], ids=str)
def test_dtypes_keep_their_precision(lengths: list[int], dtype: torch.dtype, limit: float) -> None:
    qkv = tensors(lengths, dtype=dtype)
    for window, cap in itertools.product([None, 2], [None, 1.5]):
        seen = attend(qkv, lengths, window=window, softcap=cap)
        assert seen.dtype == dtype
        assert error(seen, naive(*qkv, in_turn(lengths), 0.4, window, cap)) < limit


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Tensor], list[int], dict[str, Any]]:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    kv, group, dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 8]))
    qkv = tensors(lengths, (kv * group, kv), dim, torch.float64, seed=draw(st.integers(0, 99)))
    if draw(st.booleans()):  # as models give them
        qkv = [head_major(x) for x in qkv]
    options = {
        "scale": draw(st.sampled_from([0.1, 1.0])),
        "window": draw(st.none() | st.integers(1, 10)),
        "softcap": draw(st.none() | st.sampled_from([0.5, 30.0])),
    }
    return qkv, lengths, options


@settings(max_examples=60)
@given(problems())
def test_any_rows_heads_windows_and_caps(problem: tuple[list[Tensor], list[int], dict[str, Any]]) -> None:
    """Values, and the gradients of a weighted sum of them."""
    qkv, lengths, options = problem
    before = [x.clone() for x in qkv]
    leaves = [x.requires_grad_() for x in qkv]
    outs = attend(leaves, lengths, **options), naive(*leaves, in_turn(lengths), *options.values())
    slopes = torch.linspace(-1, 1, outs[0].numel(), dtype=torch.float64).view(outs[0].shape)
    ours, theirs = ([out, *torch.autograd.grad((out * slopes).sum(), leaves)] for out in outs)
    assert all(error(seen, truth) < 1e-12 for seen, truth in zip(ours, theirs, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(qkv, before, strict=True))


@pytest.mark.parametrize("size", [8, 16, 20])
def test_flex_is_given_what_its_kernels_on_a_gpu_take(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 16 at least, and not the kernel for few queries, which does not support any number of keys."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    own, calls = flex.flex_attention, []
    monkeypatch.setattr(flex, "flex_attention", lambda *qkv, **more: calls.append((qkv, more)) or own(*qkv, **more))
    source = torch.Generator().manual_seed(0)
    qkv = [torch.randn(12, heads, size, generator=source, dtype=torch.float64) for heads in (4, 2, 2)]
    assert error(attend(qkv, [5, 7], backend="flex"), naive(*qkv, in_turn([5, 7]), 0.4, None, None)) < 1e-12
    assert {x.shape[-1] for x in calls[0][0]} == {max(size, 16)}
    assert calls[0][1]["kernel_options"]["FORCE_USE_FLEX_ATTENTION"]


def test_masks_are_released_with_their_bounds() -> None:
    lengths = [3, 4]
    ends = bounds(lengths)
    for window in (None, 2):
        packed_attention(*tensors(lengths), ends, 4, scale=0.4, window=window, backend="flex")
    held = weakref.ref(ends)
    del ends
    gc.collect()
    assert held() is None


def test_a_pass_keeps_its_masks_whatever_another_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers ask for two in turn; another thread may be in between."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    make, made = flex.create_block_mask, []
    monkeypatch.setattr(flex, "create_block_mask", lambda *given, **more: made.append(1) or make(*given, **more))
    passes = {tuple(lengths): bounds(lengths) for lengths in ([3, 4], [4, 3])}
    qkv = tensors([3, 4])
    for window in (None, 2, None, 2):
        for lengths, ends in passes.items():
            seen = packed_attention(*qkv, ends, 4, scale=0.4, window=window, backend="flex")
            assert error(seen, naive(*qkv, in_turn(lengths), 0.4, window, None)) < 1e-5
    assert len(made) == 4


def test_auto_on_the_cpu_is_rows() -> None:
    lengths = [3, 1, 7]
    qkv = tensors(lengths)
    assert torch.equal(attend(qkv, lengths), attend(qkv, lengths, backend="rows"))
    assert module.backend_for(qkv[0].bfloat16(), None) == "rows"


@pytest.mark.parametrize("backend", ["rows", "flex"])
def test_no_tokens_give_no_outputs(backend: Any) -> None:
    empty = torch.zeros(0, 4, 8)
    seen = packed_attention(empty, empty[:, :2], empty[:, :2], bounds([]), 0, scale=1.0, backend=backend)
    assert (tuple(seen.shape), seen.dtype) == ((0, 4, 8), torch.float32)


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("backend", "need"),
    [
        (
            "flash",
            "a GPU with flash-attn (2 for soft caps, 2 or 3 for D other than 32, 64, 96 or 128), and half precision",
        ),
        ("varlen", "a GPU with half precision, no softcap"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_gpu_are_refused_elsewhere(backend: Any, need: str, dtype: torch.dtype) -> None:
    """Not replaced without a word: who names one means it."""
    message = f'backend "{backend}" with {dtype} on cpu; it needs {need}. Use backend="auto".'
    with pytest.raises(ReplayError, match=re.escape(message)):
        attend(tensors([3, 4], dtype=dtype), [3, 4], backend=backend)


# -------------------------------------------------------------------- which flash-attn


def on_gpu(dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [x.as_subclass(OnGpu) for x in tensors([3, 4], dim=dim, dtype=dtype)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Any]]]:
    """`machine(packages, capability, varlen)` puts packages there, by name, a GPU, and the `varlen_attn` of torch; it
    returns the list of calls."""

    def varlen_2_11(*rows: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> None: ...

    def there(packages: dict[str, Any], capability: tuple[int, int] = (9, 0), varlen: Any = varlen_2_11) -> list[Any]:
        calls: list[Any] = []
        of_torch: Any = None if varlen is None else ModuleType("varlen")
        if of_torch is not None:
            of_torch.varlen_attn = varlen
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", of_torch)
        for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
            found = packages.get(name)
            monkeypatch.setitem(sys.modules, name, found(name, calls) if callable(found) else found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        module._varlen_func.cache_clear()
        module._varlen_attn.cache_clear()
        return calls

    yield there
    module._varlen_func.cache_clear()
    module._varlen_attn.cache_clear()


def flash(version: int, *, pair: bool = False) -> Callable[..., ModuleType]:
    """Makes packages with a kernel of that version, with a log-sum-exp beside its output if `pair`."""

    def package(name: str, calls: list[Any]) -> ModuleType:
        made = ModuleType(name)

        def flash_attn_varlen_func(
            q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
            softmax_scale: float, causal: bool, window_size: Any, **softcap: float,
        ) -> Any:  # fmt: skip
            assert softcap == ({} if version == 4 else {"softcap": 0.0})
            calls.append((version, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal))
            calls.append(window_size)
            return (q + version, None) if pair else q + version

        made.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
        return made

    return package


flash_2, flash_3, flash_4 = flash(2), flash(3), flash(4, pair=True)


def early_4(name: str, calls: list[Any]) -> ModuleType:
    """As the first versions were: without the sizes of rows, and without gradients."""
    made = ModuleType(name)
    made.flash_attn_varlen_func = lambda q, k, v, cu_seqlens_q=None, cu_seqlens_k=None: q  # type: ignore[attr-defined]
    return made


def empty(name: str, calls: list[Any]) -> ModuleType:
    return ModuleType(name)


INSTALLED: dict[str, tuple[dict[str, Any], int | None]] = {
    "none": ({}, None),
    "a namespace": ({"flash_attn": empty}, None),
    "4": ({"flash_attn": empty, "flash_attn.cute": flash_4}, 4),
    "4 without log-sum-exp": ({"flash_attn": empty, "flash_attn.cute": flash(4)}, 4),
    "2": ({"flash_attn": flash_2}, 2),
    "2 with an early 4": ({"flash_attn": flash_2, "flash_attn.cute": early_4}, 2),
    "both": ({"flash_attn": flash_2, "flash_attn.cute": flash_4}, 4),
    "3": ({"flash_attn_interface": flash_3}, 3),
    "3 with log-sum-exp": ({"flash_attn_interface": flash(3, pair=True)}, 3),
    "2 and 3": ({"flash_attn": flash_2, "flash_attn_interface": flash_3}, 3),
    "3 and 4": ({"flash_attn": empty, "flash_attn.cute": flash_4, "flash_attn_interface": flash_3}, 4),
}


@pytest.mark.parametrize("name", INSTALLED)
def test_the_fastest_kernel_that_is_there_is_taken(machine: Any, name: str) -> None:
    packages, want = INSTALLED[name]
    calls = machine(packages)
    query, key, value = on_gpu()
    assert module.backend_for(query, None) == ("varlen" if want is None else "flash")
    if want is None:
        with pytest.raises(ReplayError, match="needs a GPU with flash-attn"):
            attend([query, key, value], [3, 4], backend="flash")
        return
    ends, all_tokens = bounds([3, 4]), (None, None) if want == 4 else (-1, -1)
    for window, sides in ((None, all_tokens), (3, (2, 0))):
        assert torch.equal(attend([query, key, value], [3, 4], window=window), query + want)
        (used, *rows, longest_q, longest_k, scale, causal), seen = calls
        assert (used, longest_q, longest_k, scale, causal) == (want, 4, 4, 0.4, True)
        assert all(torch.equal(x, ends) for x in rows)
        assert seen == sides
        calls.clear()


def varlen_2_10(q: Any, k: Any, v: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int) -> None: ...


@pytest.mark.parametrize("of_torch", [None, varlen_2_10], ids=["2.9", "2.10"])
def test_flex_stands_in_where_torch_has_no_varlen(machine: Any, of_torch: Any) -> None:
    machine({}, varlen=of_torch)
    assert module.backend_for(on_gpu()[0], None) == "flex"
    with pytest.raises(ReplayError, match=r'backend "varlen" with .*; it needs a GPU with torch 2\.11 or later'):
        attend(on_gpu(), [3, 4], backend="varlen")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Any) -> Path:
    """Of a `flash_attn` that is imported from there."""
    machine({})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn")
    monkeypatch.delitem(sys.modules, "flash_attn.cute")
    (tmp_path / "flash_attn").mkdir()
    return tmp_path / "flash_attn"


def test_a_folder_is_no_kernel(folder: Path) -> None:
    (folder / "other_part").mkdir()
    assert importlib.util.find_spec("flash_attn") is not None
    assert module.backend_for(on_gpu()[0], None) == "varlen"


def test_a_package_that_cannot_be_imported_is_named_once(folder: Path) -> None:
    (folder / "__init__.py").write_text("def flash_attn_varlen_func(max_seqlen_q): ...")
    (folder / "cute.py").write_text("raise RuntimeError('made for another compiler')")
    message = r"flash_attn\.cute is not used, because its import failed \(RuntimeError: made for another compiler\)"
    with pytest.warns(RuntimeWarning, match=message):
        taken = [module._flash_package(on_gpu()[0], None)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        taken.append(module._flash_package(on_gpu()[0], None))
    assert taken == ["flash_attn"] * 2


def test_a_package_whose_own_needs_are_missing_is_not_there(folder: Path) -> None:
    (folder / "__init__.py").touch()
    (folder / "cute.py").write_text("import no_package_of_this_name")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.backend_for(on_gpu()[0], None) == "varlen"


BOTH = {"flash_attn": flash_2, "flash_attn.cute": flash_4}
FOUR = {"flash_attn": empty, "flash_attn.cute": flash_4}
THREE = {"flash_attn_interface": flash_3}
ALL = {**BOTH, **THREE}


@pytest.mark.parametrize(
    ("packages", "capability", "dim", "dtype", "softcap", "want"),
    [
        (BOTH, (9, 0), 128, torch.float16, None, "flash_attn.cute"),
        (BOTH, (10, 0), 32, torch.bfloat16, None, "flash_attn.cute"),
        *((BOTH, (9, 0), dim, torch.bfloat16, None, "flash_attn") for dim in (8, 16, 40, 48, 72, 80, 104, 112)),
        *((FOUR, (9, 0), dim, torch.float16, None, "varlen") for dim in (8, 16, 40, 48, 72, 80, 104, 112)),
        (BOTH, (12, 0), 64, torch.bfloat16, None, "flash_attn"),
        (BOTH, (8, 0), 64, torch.bfloat16, None, "flash_attn"),
        (BOTH, (9, 0), 64, torch.bfloat16, 20.0, "flash_attn"),
        (BOTH, (9, 0), 136, torch.bfloat16, None, "flash_attn"),
        (ALL, (9, 0), 128, torch.bfloat16, None, "flash_attn.cute"),
        (ALL, (9, 0), 80, torch.bfloat16, None, "flash_attn_interface"),
        (ALL, (9, 0), 256, torch.float16, None, "flash_attn_interface"),
        (ALL, (9, 0), 12, torch.float16, None, "flash_attn"),
        (ALL, (9, 0), 64, torch.bfloat16, 20.0, "flash_attn"),
        (ALL, (8, 0), 64, torch.bfloat16, None, "flash_attn"),
        (ALL, (12, 0), 64, torch.bfloat16, None, "flash_attn"),
        (THREE, (10, 0), 64, torch.bfloat16, None, "varlen"),
        (THREE, (9, 0), 64, torch.bfloat16, 20.0, "flex"),
        (THREE, (9, 0), 64, torch.float32, None, "flex"),
        (BOTH, (9, 0), 12, torch.bfloat16, None, "flash_attn"),
        (BOTH, (9, 0), 264, torch.bfloat16, None, "flex"),
        (BOTH, (9, 0), 64, torch.float32, None, "flex"),
        (FOUR, (8, 0), 64, torch.bfloat16, None, "varlen"),
        (FOUR, (9, 0), 64, torch.bfloat16, 20.0, "flex"),
        (FOUR, (9, 0), 256, torch.bfloat16, None, "varlen"),
        (FOUR, (9, 0), 12, torch.bfloat16, None, "flex"),
    ],
)
def test_a_kernel_is_taken_for_what_it_can_do(
    machine: Any, packages: Any, capability: tuple[int, int], dim: int, dtype: torch.dtype, softcap: Any, want: str
) -> None:
    machine(packages, capability)
    query = on_gpu(dim, dtype)[0]
    package = module._flash_package(query, softcap)
    assert (package or module.backend_for(query, softcap)) == want
    assert (module.backend_for(query, softcap) == "flash") == (package is not None)
