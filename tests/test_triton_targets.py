"""Every Triton kernel of the package, compiled ahead of time for GPUs that are not there: gfx942 of AMD, down to its
machine code, and sm_90 of NVIDIA.

The functions that launch kernels run with tensors on the host, where a launch compiles and does nothing else. So
arguments, constants and options are those that are really used. They run in a process in which Triton does not
interpret.
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import is_installed

import maskpack
from maskpack.layout.row_layout import device_spans
from maskpack.ops.log_probs import SLICE, Reduction, Slopes
from maskpack.ops.logits import Curve
from maskpack.ops.sampling_mask import SamplingMask
from maskpack.ops.split_head import Parts

pytestmark = pytest.mark.skipif(not is_installed("triton"), reason="needs Triton")
TARGETS = {"gfx942": ("hip", "gfx942", 64, "hsaco"), "sm_90": ("cuda", 90, 32, "ptx")}
HALF = (torch.bfloat16, torch.float16)


def log_probs() -> None:
    kernels = importlib.import_module("maskpack.ops.log_probs_triton")
    rows, columns = 3, 20_000
    logits, ids = torch.zeros(rows, columns), torch.zeros(rows, dtype=torch.int64)
    numbers = list(torch.zeros(5, rows))
    plain, capped = Curve(1.0, None), Curve(1.0, 0.1)
    shift = torch.zeros(columns // SLICE + 1, rows).t()
    mask = SamplingMask(ids, torch.zeros(rows + 1, dtype=torch.int64), torch.zeros(1 << 17, dtype=torch.int8))
    for kept in (logits[:0], *(torch.zeros(2, columns, dtype=dtype) for dtype in HALF)):
        for wanted, of in (((False, False), None), ((True, False), None), ((True, True), None), ((True, True), mask)):
            parts = Parts.of(rows, columns, wanted, torch.float32, logits.device, SLICE)
            kernels.reduce_rows(logits, Reduction(ids, plain, parts, kept, of), 0, 0)
            if kept.dtype == torch.float32:
                kernels.reduce_rows(logits, Reduction(ids, capped, parts, kept, of), 0, 0)
        for slopes in ((numbers[1], None, None), (None, numbers[2], None), (*numbers[1:3], None), (*numbers[1:4],)):
            given = Slopes(ids, *numbers[:4], *slopes, shift, None, plain)
            if kept.dtype == torch.float32:
                for grad in (logits, *(torch.zeros(rows, columns, dtype=dtype) for dtype in HALF)):
                    kernels.differentiate(logits, grad, 0, given)
                    kernels.differentiate(logits, grad, 0, given._replace(mask=mask, curve=capped))
            else:
                kernels.differentiate(kept, kept, 0, given._replace(lse=None))


def fused_log_probs() -> None:
    kernels = importlib.import_module("maskpack.ops.log_probs_fused_triton")
    tokens, columns = 130, 600
    ids, numbers = torch.zeros(tokens, dtype=torch.int64), list(torch.zeros(7, tokens))
    for dtype in HALF:
        hidden, weight = torch.zeros(tokens, 64, dtype=dtype), torch.zeros(columns, 64, dtype=dtype)
        grad = torch.zeros(tokens, 768, dtype=dtype)
        assert kernels.fits(hidden, weight)
        for curve, wanted, kept in ((Curve(1.0, 0.1), (True, True), None), (Curve(1.0, None), (False, False), grad)):
            parts = Parts.of(tokens, columns, wanted, torch.float32, hidden.device, kernels.TILE)
            kernels.reduce_rows(hidden, weight, ids, curve, parts, kept)
            given = Slopes(ids, *numbers, None, None, curve, kernels.TILE)
            kernels.differentiate(hidden, weight, grad[:, :columns], 0, given)


def prefix_attention() -> None:
    kernels = importlib.import_module("maskpack.ops.prefix_attention_triton")
    for dtype in (*HALF, torch.float32):
        out, other = torch.zeros(5, 4, 64, dtype=dtype), torch.zeros(3, 4, 64, dtype=HALF[0])
        index = torch.tensor([0, 2, 4])
        kernels.merge(out, torch.zeros(4, 5), index, other, torch.zeros(4, 3))
        kernels.add_rows(out, index, other)


def fused() -> None:
    kernels = importlib.import_module("maskpack.ops.fused_triton")
    for dtype in (*HALF, torch.float32):
        x, heads, table = (
            torch.zeros(2, 3, 40, dtype=dtype),
            torch.zeros(1, 2, 3, 16, dtype=dtype),
            torch.zeros(1, 3, 16),
        )
        weight = torch.zeros(40, dtype=dtype).requires_grad_()
        for choice in (False, True):
            kernels.normalize(x, weight, 1e-6, float(choice), choice).sum().backward()
            kernels.gate(x.requires_grad_(), x, choice).sum().backward()
        turned = kernels.rotate(heads.requires_grad_(), heads, table.to(dtype), table.to(dtype))
        (turned[0] + turned[1]).sum().backward()


def pack_and_unpack() -> None:
    scans = importlib.import_module("maskpack.layout.scan_triton")
    kernels = importlib.import_module("maskpack.ops.pack_triton")
    for dtype in (torch.bool, torch.int64, torch.uint8, torch.float32, torch.bfloat16):
        for width in (64, 63):
            mask = torch.ones(4, width).to(dtype)
            for tokens in (None, 5):
                scan = scans.scan_rows(mask, 5, tokens)
            scans.list_spans(mask, scan, 5, 4)
    for lengths in ([[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 0, 1, 0], [1, 1, 1, 0]]):
        layout = maskpack.RowLayout.from_mask(torch.tensor(lengths))
        index, tokens = device_spans(layout), layout.num_tokens
        for size in ((), (3,), (1024,)):
            for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.uint8):
                x = torch.zeros(2, 4, *size, dtype=dtype)
                kernels.pack([x, x], index, tokens)
                kernels.pack([x], index, tokens)
                values = torch.zeros(tokens, *size, dtype=dtype)
                word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
                for pad in (0, 7):
                    kernels.unpack([values], index, 2, 4, [pad])
                kernels.unpack([values], index, 2, 4, [maskpack.EDGE])
                kernels.unpack([values], index, 2, 4, [torch.zeros(2, dtype=word)])
                kernels.unpack([values, values], index, 2, 4, [0, maskpack.EDGE])


def decode() -> None:
    kernels = importlib.import_module("maskpack.packed.cuda.kernel")
    kernels.launch(torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.int64), 5, 1, 1)


def encode() -> None:
    kernels = importlib.import_module("maskpack.packed.cuda.encode_kernel")
    line = torch.zeros(64, dtype=torch.int64)
    kernels.measure(line, line, line, 1, 1)
    kernels.write(line, line, line, torch.zeros(64, dtype=torch.uint8), 1, 1, 5)


def read() -> None:
    kernels = importlib.import_module("maskpack.nesting.read_triton")
    kernels.launch(torch.zeros(64, dtype=torch.int64), 1, 1)


CASES: tuple[Callable[[], None], ...] = (
    log_probs,
    fused_log_probs,
    prefix_attention,
    fused,
    pack_and_unpack,
    decode,
    encode,
    read,
)


class Target:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, name: str) -> None:
        compiler: Any = importlib.import_module("triton.backends.compiler")
        self._target, self._name = compiler.GPUTarget(*TARGETS[name][:3]), name

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return self._name  # kernels are remembered by device

    def get_current_stream(self, _device: Any) -> int:
        return 0


@contextmanager
def compiled(target: str) -> Iterator[dict[Any, set[str]]]:
    """The kernels that were launched, with the forms to which all their versions were compiled."""
    jit: Any = importlib.import_module("triton.runtime.jit")
    driver: Any = importlib.import_module("triton.runtime.driver").driver
    forms: dict[Any, set[str]] = {}
    run = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **more)
        forms[self] = forms.get(self, set(kernel.asm)) & set(kernel.asm)
        return kernel

    launches: Any = importlib.import_module("maskpack.layout.launch_triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "run", compile_only)
        patch.setattr(driver, "_active", Target(target))
        patch.setattr(launches.Launch, "again", lambda self, programs, arguments: False)
        patch.setattr(launches, "_remembered", lambda compiled: None)
        yield forms


def kernels_of_the_package() -> dict[str, Any]:
    """By module and name: all functions for a GPU that no other one calls."""
    jit: Any = importlib.import_module("triton.runtime.jit")
    modules = [
        importlib.import_module(part.name)
        for part in pkgutil.walk_packages(maskpack.__path__, "maskpack.")
        if part.name.endswith(("_triton", "kernel"))
    ]
    functions = {
        f"{module.__name__}.{name}": thing
        for module in modules
        for name, thing in vars(module).items()
        if isinstance(thing, jit.JITFunction) and thing.fn.__module__ == module.__name__
    }
    called = {id(thing.fn.__globals__.get(name)) for thing in functions.values() for name in thing.fn.__code__.co_names}
    return {name: thing for name, thing in functions.items() if id(thing) not in called}


def compile_all(target: str) -> None:
    with compiled(target) as forms:
        for case in CASES:
            case()
    kernels = kernels_of_the_package()
    assert len(kernels) >= 10
    assert [name for name, kernel in kernels.items() if kernel not in forms] == [], "add them to a case"
    assert [name for name, kernel in kernels.items() if TARGETS[target][3] not in forms[kernel]] == []


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str) -> None:
    backends: Any = importlib.import_module("triton.backends").backends
    if {"hip": "amd", "cuda": "nvidia"}[TARGETS[target][0]] not in backends:
        pytest.skip("this Triton has no backend for it")
    done = subprocess.run([sys.executable, __file__, target], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_are_in_the_modules_that_are_searched() -> None:
    for part in pkgutil.walk_packages(maskpack.__path__, "maskpack."):
        spec = find_spec(part.name)
        source = Path(spec.origin).read_text() if spec and spec.origin and spec.origin.endswith(".py") else ""
        assert ("triton.jit" not in source) or part.name.endswith(("_triton", "kernel")), part.name


if __name__ == "__main__":
    compile_all(sys.argv[1])
