"""Makes Triton's interpreter faster; it computes the same. Most of its time goes to the bookkeeping of each operation:

functions of the language     replaced anew in each launch                     -> once
dtypes of arrays              looked up in a table that each look-up makes     -> remembered
shapes                        wrapped and checked for each tensor              -> once for each shape
sums and products of ints     again in 64 bits, for a check that is not made   -> not
operands of one type          promoted and broadcast                           -> taken as they are
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any


def hasten() -> None:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    own: Any = interpreter
    patch, found = own._patch_lang, own._get_np_dtype
    patched: set[frozenset[int]] = set()
    kept = SimpleNamespace(restore=lambda: None)

    def patched_once(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules not in patched:
            patched.add(modules)
            patch(fn)
        return kept

    def modules_of(fn: Any) -> frozenset[int]:
        if id(fn.__globals__) not in known:
            known[id(fn.__globals__)] = frozenset(
                id(value) for value in fn.__globals__.values() if value is own.tl or value is core
            )
        return known[id(fn.__globals__)]

    known: dict[int, frozenset[int]] = {}
    of_scalar = functools.cache(found)
    own._patch_lang = patched_once
    own._get_np_dtype = lambda dtype: found(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)

    builder = own.interpreter_builder
    assert not builder.options.debug  # else what checks sums and products is in force
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape.values) if type.is_block() else ())

    core.tensor.__init__ = tensor

    @functools.cache
    def checked(shape: tuple[int, ...]) -> tuple[Any, int]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return core.tuple(shape), core.validate_block_shape(shape)

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = checked(tuple(core._unwrap_shape(shape)))

    core.block_type.__init__ = block_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")

    operands = semantic.TritonSemantic.binary_op_type_checking_impl

    def promoted(self: Any, lhs: Any, rhs: Any, *more: Any, **options: Any) -> Any:
        """Of one type, other than in a division: as they are."""
        if len(more) < 4 and not options.get("div_or_mod") and alike(lhs, rhs):
            return lhs, rhs
        return operands(self, lhs, rhs, *more, **options)

    def alike(lhs: Any, rhs: Any) -> bool:
        if type(lhs) is not core.tensor or type(rhs) is not core.tensor or lhs.dtype is not rhs.dtype:
            return False
        if lhs.dtype.is_ptr() or lhs.type.is_block() != rhs.type.is_block():
            return False
        return lhs.shape is rhs.shape

    semantic.TritonSemantic.binary_op_type_checking_impl = promoted
