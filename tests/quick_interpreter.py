"""Makes Triton's interpreter faster; it computes the same. It refuses `~` of unsigned words, which Triton up to 3.8
cannot interpret with NumPy 2.

Most of its time goes to the bookkeeping of each operation:

    functions of the language     replaced anew in each launch                     -> once
    dtypes of arrays              looked up in a table that each look-up makes     -> remembered
    shapes                        wrapped and checked for each tensor              -> once for each shape
    sums and products of ints     again in 64 bits, for a check that is not made   -> not
    operands                      promoted and broadcast                           -> ints once, equal types not at all
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from needs import is_installed


def is_there() -> bool:
    """Whether the interpreter of a Triton that kernels are tested with is installed."""
    return is_installed("triton") and tuple(map(int, version("triton").split(".")[:2])) >= (3, 6)


def load() -> None:
    """Imports every kernel of maskpack. They are interpreted if TRITON_INTERPRET is "1", and was when torch
    imported Triton."""
    package = find_spec("maskpack")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent
    for file in [*root.rglob("*_triton.py"), *root.rglob("*kernel.py")]:
        importlib.import_module(".".join(("maskpack", *file.relative_to(root).with_suffix("").parts)))
    hasten()


def hasten() -> None:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    lang: Any = core
    own: Any = interpreter
    _language(lang, own)
    _types(lang)
    of_scalar, found = functools.cache(own._get_np_dtype), own._get_np_dtype
    own._get_np_dtype = lambda dtype: found(dtype) if dtype.scalar.is_ptr() else of_scalar(dtype.scalar)
    options = own.interpreter_builder.options
    assert not options.debug  # or else sums and products are checked
    own.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    own.interpreter_builder.get_all_ones_value = _signed_ones(own.interpreter_builder.get_all_ones_value)
    general = semantic.TritonSemantic.binary_op_type_checking_impl
    semantic.TritonSemantic.binary_op_type_checking_impl = _operands(general, lang.tensor)


def _language(lang: Any, own: Any) -> None:
    """The modules of the language that kernels see stay as the interpreter has them."""
    patch, done, kept = own._patch_lang, set[frozenset[int]](), SimpleNamespace(restore=lambda: None)

    @functools.cache
    def seen_by(fn: Any) -> frozenset[int]:
        return frozenset(id(value) for value in fn.__globals__.values() if value is own.tl or value is lang)

    def patched_once(fn: Any) -> Any:
        if seen_by(fn) not in done:
            done.add(seen_by(fn))
            patch(fn)
            # that of Triton 3.6 is refused by NumPy 2.4
            lang.tensor.__index__ = lambda self: int(self.handle.data.squeeze())
        return kept

    def patch_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        call = getattr(member, "__wrapped__", member)  # without what asks for _semantic

        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = own.interpreter_semantic
            return call(*args, **named)

        scope.set_attr(obj, name, called)

    own._patch_lang, own._patch_attr = patched_once, patch_builtin


def _types(lang: Any) -> None:
    unwrap, equal = lang._unwrap_if_constexpr, lang.dtype.__eq__
    plain = {lang.tensor, lang.dtype, lang.block_type, lang.pointer_type, int, bool, float, str, type(None)}

    @functools.cache
    def wrapped(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return lang.tuple([lang.constexpr(size) for size in shape]), lang.constexpr(math.prod(shape))

    @functools.cache
    def checked(shape: tuple[int, ...]) -> tuple[Any, int]:
        if not shape:
            raise TypeError("0d block_type is forbidden")
        return lang.tuple(shape), lang.validate_block_shape(shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped(tuple(type.shape.values) if type.is_block() else ())

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        self.element_ty = element_ty
        self.shape, self.numel = checked(tuple(lang._unwrap_shape(shape)))

    lang.tensor.__init__, lang.block_type.__init__ = tensor, block_type
    lang.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    lang._unwrap_if_constexpr = lambda x: x if type(x) in plain else unwrap(x)
    lang.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _signed_ones(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def ones(type: Any) -> Any:
        assert type.scalar.is_int1() or not type.scalar.is_int_unsigned(), f"~ of {type}: write it with ^ and &"
        return found(type)

    return ones


def _operands(general: Callable[..., Any], tensor: type) -> Callable[..., Any]:
    ints: dict[Any, Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
        if type(lhs) is tensor and type(rhs) is int:
            key = rhs, lhs.dtype.name, id(lhs.shape), more, *named.items()
            if key not in ints:
                left, right = general(self, lhs, rhs, *more, **named)
                if left is not lhs:  # of another type, too
                    return left, right
                ints[key] = right
            return lhs, ints[key]
        divides = len(more) == 4 or named.get("div_or_mod")  # low floats become float32
        same = type(lhs) is type(rhs) is tensor and lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
        if same and not divides and not lhs.dtype.is_ptr():
            return lhs, rhs
        return general(self, lhs, rhs, *more, **named)

    return operands
