"""Launches of Triton kernels that were launched before with arguments of the same kind.

`kernel[grid](...)` looks at every argument to find its compiled kernel, which takes longer than small kernels run. A
Launch remembers the compiled kernel; its caller vouches that the arguments are of one kind.
"""

# A launch takes whatever its kernel takes.
# pyright: basic

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

_HERE = nullcontext()


class Launch:
    """A kernel for arguments of one kind: on one device, with pointers of equal types that are aligned or not in the
    same places, and equal numbers except those that the kernel does not specialise."""

    __slots__ = ("_kernel", "_options", "_remembered")

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel = kernel
        self._options = options
        self._remembered: Callable[[int, Sequence[Any]], None] | None = None

    def again(self, programs: int, arguments: Sequence[Any]) -> bool:
        """Runs `programs` programs of the compiled kernel; pointers are integers. False if there is none yet."""
        if self._remembered is None:
            return False
        try:
            self._remembered(programs, arguments)
        except TypeError:  # before the launch, from a version of Triton that takes other arguments
            self._remembered = None
            return False
        return True

    def first(self, programs: int, arguments: Sequence[Any], *, remember: bool = True) -> None:
        """Runs `programs` programs with arguments as Triton takes them, and may remember the compiled kernel."""
        compiled = self._kernel[(programs,)](*arguments, **self._options)
        if remember and isinstance(compiled, CompiledKernel):  # the interpreter has none
            self._remembered = _remembered(compiled)


def _remembered(compiled: Any) -> Callable[[int, Sequence[Any]], None]:
    """What a compiled kernel that has run does when it runs again, without its look-ups and hooks."""
    active = cast("Any", driver).active
    device, stream = active.get_current_device, active.get_current_stream
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata

    def again(programs: int, arguments: Sequence[Any]) -> None:
        run(programs, 1, 1, stream(device()), function, packed, None, None, None, *arguments)

    return again


def aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of 16 bytes, as memory fresh from the allocator is."""
    return not any(address & 15 for address in addresses)


def addresses_of(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Their addresses; None for None."""
    return [None if x is None else x.data_ptr() for x in tensors]


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which the device of `x` is the current one, on which Triton launches."""
    here = not x.is_cuda or x.get_device() == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device_of(x)
