"""torch.compile of the parts of a model between its matrix products and its attention, in place.

part                            found by                                          compiled
norms, MLPs, rotary embeddings  the ends of class names: RMSNorm, LayerNorm, MLP  their forward
attention layers                apply_rotary_pos_emb, which their forward calls   that function alone, for this model

Parts and functions whose code is neither torch's nor transformers' nor of the package of the model, such as the kernels
of Liger, are left as they are: torch.compile may not be able to trace them.

While the model replays, each part has a `forward` of its own; modules, parameters and hooks stay as they are, and hooks
run outside of what is compiled. Parts of one kind and shape share the compiled code, which is compiled for any number
of tokens. The original attention of the self-check runs with the original parts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from traceback import walk_tb
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from maskpack.adapters.transformers import passes
from maskpack.adapters.transformers.forwards import Forward
from maskpack.adapters.transformers.refusals import Refusal
from maskpack.core.tensors import out_of_memory
from maskpack.errors import ReplayError

_PART = re.compile("(Norm|MLP|Mlp|RotaryEmbedding)$")
ROTARY = "apply_rotary_pos_emb"
_TRACER = "torch._dynamo.convert_frame"
"""The module of the frames in which torch.compile traces. Some errors leave it as they are."""
_OPTIONS: dict[str, Any] = {"fullgraph": True}
"""Options of torch.compile. Without `fullgraph`, it would silently run uncompiled what it does not support."""


def parts_of(model: nn.Module, base: Any) -> Iterator[tuple[str, Any, str | None]]:
    """The names and parts, with the ends of the names of their classes; attention layers that call `ROTARY` have none.
    Parts whose code, or whose rotation, is of another package are left out."""
    kinds = cast("tuple[Any, ...]", (*type(model).__mro__, *type(base).__mro__))
    homes = {kind.__module__.partition(".")[0] for kind in kinds}
    parts: list[tuple[str, Any]] = list(base.named_modules())
    for name, part in parts:
        kind = cast("Any", type(part))
        end = _PART.search(kind.__name__)
        inner = inspect.unwrap(kind.forward)
        if not end and not (ROTARY in getattr(inner, "__globals__", {}) and ROTARY in inner.__code__.co_names):
            continue
        runs: list[Any] = [vars(part).get("forward", kind.forward)]
        runs += [] if end else [inner.__globals__[ROTARY]]
        # the package whose code it is, within its wrappers
        if homes.issuperset(str(getattr(inspect.unwrap(run), "__module__", "")).partition(".")[0] for run in runs):
            yield name, part, end and end[1]


class Parts:
    """Parts of a model, with the `forward` that each of them has while the model replays.

    Attributes:
        whole: those whose forward is compiled as a whole, not one function in it.
    """

    def __init__(self, model: nn.Module, base: Any, option: str) -> None:
        self._base: nn.Module = base
        self._forwards: list[tuple[nn.Module, PartForward]] = []
        self.whole: list[nn.Module] = []
        self._find(model, base)
        if not self._forwards:
            raise Refusal.NO_PARTS(option=option, model=type(model).__name__)
        self._number = next(_numbers)

    def _find(self, model: nn.Module, base: Any) -> None:
        raise NotImplementedError

    def need_outside(self, names: Sequence[str]) -> None:
        """Raises ReplayError for parts of the base model, by name, that replay cannot reach within these."""

    def install(self) -> None:
        if _installed.get(self._base) != self._number:
            restore_parts(self._base)
            _installed[self._base] = self._number
        for part, forward in self._forwards:
            forward.install(part)


_numbers = itertools.count()
_installed: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Base models that may have such parts, and whose. To look for these takes long in a model with many parts."""


def restore_parts(base: nn.Module) -> None:
    if _installed.pop(base, None) is not None:
        PartForward.restore(base)


class CompiledParts(Parts):
    """Parts under torch.compile.

    Raises:
        ReplayError: the model has no such part, or one with a replaced `forward`.
    """

    def __init__(self, model: nn.Module, base: Any, changing: bool) -> None:
        """`changing` leaves rotary embeddings out, because they depend on the longest row."""
        self._changing = changing
        super().__init__(model, base, "compile")

    def _find(self, model: nn.Module, base: Any) -> None:
        who = type(model).__name__
        if any(isinstance(part, FullyShardedDataParallel) for part in model.modules()):
            raise Refusal.COMPILED_FSDP(model=who)
        shared: dict[Any, PartForward] = {}
        for name, part, end in parts_of(model, base):
            kind = cast("Any", type(part))
            if self._changing and end == "RotaryEmbedding":
                continue
            if "forward" in vars(part) or part._compiled_call_impl is not None:
                raise Refusal.REPLACED(part=f"{name} ({kind.__name__}) of {who}", remedy="Leave compile out")
            weights: dict[str, Tensor] = dict(part.named_parameters())
            key = kind.forward, *((key, tuple(weight.shape)) for key, weight in weights.items())
            if key not in shared:
                shared[key] = CompiledForward(kind, len(shared), rotates=not end)
            self._forwards.append((part, shared[key]))
            self.whole += [part] if end else []

    def need_outside(self, names: Sequence[str]) -> None:
        compiled = {id(inner) for part, _ in self._forwards for inner in part.modules()}
        within = [name for name in names if id(self._base.get_submodule(name)) in compiled]
        if within:
            raise Refusal.COMPILED_ROUTER(part=within[0])


class PartForward(Forward):
    """What `part.forward(...)` calls, for all parts of one kind: `_replaying`, or in the self-check `_own`."""

    _own: Callable[..., Any]
    _replaying: Callable[..., Any]

    def __call__(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = passes.current()
        forward = self._own if running is not None and running.own else self._replaying
        return forward(part, *args, **kwargs)


def rotating(forward: Any, rotate: Callable[..., Any]) -> Any:
    """The forward of an attention layer that calls `rotate` for `ROTARY`."""
    inner: Any = inspect.unwrap(forward)
    return _copied(inner, inner.__code__, {**inner.__globals__, ROTARY: rotate})


class CompiledForward(PartForward):
    """For all parts of one kind and shape."""

    def __init__(self, kind: Any, number: int, *, rotates: bool) -> None:
        self._own, self._who = kind.forward, kind.__name__
        if rotates:
            plain = inspect.unwrap(self._own).__globals__[ROTARY]
            rotate = functools.partial(self._run, self._compiled(plain, f"{ROTARY}_{number}"))
            self._replaying = rotating(self._own, rotate)
        else:
            compiled = self._compiled(self._own, f"{self._who}_{number}")
            self._replaying = functools.partial(self._run, compiled)

    def _compiled(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return plain(*args, **kwargs)

        # torch.compile counts recompilations by code object: each kind and shape has its own.
        own = _copied(call, call.__code__.replace(co_name=name), call.__globals__)
        try:
            return cast("Any", torch.compile(own, **_OPTIONS))
        except RuntimeError as error:  # such as a version of Python that it does not support
            raise self._failure(error) from error

    def _run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor):  # [..., T, ..., width], or positions [..., T]
                sizes = x.dim() - 1 if x.is_floating_point() else x.dim()
                _dynamo().maybe_mark_dynamic(x, list(range(sizes)))
        try:
            return compiled(*args, **kwargs)
        except Exception as error:
            lacking = out_of_memory(error)
            if lacking is not None:
                raise lacking  # noqa: B904 (it may be the error itself)
            known = _dynamo().exc.TorchDynamoException | _dynamo().exc.FailOnRecompileLimitHit
            tracing = any(frame.f_globals.get("__name__") == _TRACER for frame, _ in walk_tb(error.__traceback__))
            if not tracing and not isinstance(error, known):
                raise
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ReplayError:
        cause = getattr(error, "inner_exception", error)
        said = str(cause).strip().partition("\n")[0][:300]
        return Refusal.COMPILER(part=self._who, error=f"{type(cause).__name__}: {said}")


@functools.cache
def _dynamo() -> Any:
    return importlib.import_module("torch._dynamo")  # takes a second


def _copied(function: Any, code: Any, names: dict[str, Any]) -> Any:
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
