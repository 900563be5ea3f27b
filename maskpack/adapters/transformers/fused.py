"""Own kernels for the parts of a model between its matrix products and its attention, in place.

part               found by                                        becomes
RMS norms          the end of the class name                       one launch
MLPs               the same, with a gate, an up and a down layer   these layers, and one launch between them
attention layers   apply_rotary_pos_emb, which they call           one launch for queries and keys

Parts and functions whose code is neither torch's nor transformers' nor of the package of the model, such as the kernels
of Liger, are left as they are. While the model replays, each part has a `forward` of its own; modules, parameters and
hooks stay as they are. The original attention of the self-check runs with the original parts.

The first call of a part on a GPU compares the kernel with the forward of its class, on a few random rows and weights.
A part of which no variant of the kernel is the same function keeps its forward, as all do on the CPU.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maskpack.adapters.transformers import passes
from maskpack.adapters.transformers.forwards import Forward
from maskpack.adapters.transformers.refusals import Refusal, may_refuse
from maskpack.core.backends import interpreted, uses_triton
from maskpack.errors import MaskpackWarning

_PART = re.compile("(Norm|MLP|Mlp)$")
ROTARY = "apply_rotary_pos_emb"
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Relative differences of one rounding, or of a sum in another order. Other dtypes have no kernel."""

Trial = tuple[Callable[[], Any], Callable[[Any], Any], Iterable[Any]]
"""The forward of the class, the kernel for a variant, both of random numbers, and the variants."""


def _parts_of(model: nn.Module, base: Any) -> Iterator[tuple[str, Any, str | None]]:
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


class FusedParts:
    """Parts of a model by own kernels, with the `forward` that each of them has while the model replays.

    Raises ReplayError if the model has no such part."""

    def __init__(self, model: nn.Module, base: Any) -> None:
        self._base: nn.Module = base
        self._told = False
        self._parts: dict[str, tuple[nn.Module, FusedForward]] = {}
        for name, part, end in _parts_of(model, base):
            make = _KINDS.get(end)
            if make is not None and "forward" not in vars(part) and part._compiled_call_impl is None:
                # each part has a trial of its own: what it computes may depend on functions and dicts that it holds
                self._parts[name] = part, make(type(part).forward)
        if not self._parts:
            raise Refusal.NO_PARTS(model=type(model).__name__)
        self._number = next(_numbers)

    def install(self) -> None:
        if _installed.get(self._base) != self._number:
            restore_parts(self._base)
            _installed[self._base] = self._number
        for part, forward in self._parts.values():
            forward.install(part)

    def ways(self) -> dict[str, str]:
        """How each part ran, by its name: "kernel", "own forward", or "not run yet"."""
        ways = {None: "not run yet", True: "kernel", False: "own forward"}
        return {name: ways[forward.fused] for name, (_, forward) in self._parts.items()}

    def check_run(self, who: str, device: torch.device) -> None:
        """Warns once if no part ran by a kernel where there are kernels."""
        if not self._told and (uses_triton(device) or interpreted()):
            self._told = True
            if not any(forward.fused for _, forward in self._parts.values()):
                warnings.warn(
                    f"replayable(fused=True): no part of {who} runs by a kernel: none computes what the kernels do, in "
                    "float32, bfloat16 or float16. replay.fused_parts names them; leave fused out.",
                    MaskpackWarning,
                    stacklevel=2,
                )


_numbers = itertools.count()
_installed: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
"""Base models that may have such parts, and whose. To look for these takes long in a model with many parts."""


def restore_parts(base: nn.Module) -> None:
    if _installed.pop(base, None) is not None:
        PartForward.restore(base)


class PartForward(Forward):
    """What `part.forward(...)` calls: `_replaying`, or in the self-check `_own`."""

    _own: Callable[..., Any]
    _replaying: Callable[..., Any]

    def __call__(self, part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = passes.current()
        forward = self._own if running is not None and running.own else self._replaying
        return forward(part, *args, **kwargs)


class FusedForward(PartForward):
    """For one part. Remembers which variant of the kernel is the forward of its class."""

    fused: bool | None = None
    """Whether the last call used the kernel."""

    def __init__(self, own: Any) -> None:
        self._own, self._replaying = own, self._run
        self._variants: dict[Any, Any] = {}

    def _run(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _variant(self, part: Any, like: Tensor, key: Any, trial: Callable[[], Trial]) -> Any:
        """The first variant with which the kernel gives what the forward of the class gives, or None. With another
        number among its attributes, such as a limit or the mode, or another object, a part is another function. A trial
        sees dropout even if it drops nothing, because it scales what it leaves."""
        held = {} if part is None else cast("dict[str, Any]", vars(part))
        given = tuple(x if isinstance(x, int | float | str) else id(x) for name, x in held.items() if name != "forward")
        key = like.device, like.dtype, key, given
        if key not in self._variants:
            own, kernel, variants = trial()
            # a trial draws nothing that the model would have drawn
            with torch.no_grad(), torch.random.fork_rng([like.device] if like.is_cuda else []):
                try:
                    wanted = own()
                except Exception as error:
                    if not may_refuse(error, AttributeError, KeyError, IndexError):
                        raise
                    wanted, variants = None, ()
                self._variants[key] = next((one for one in variants if _same(kernel(one), wanted)), None)
        return self._variants[key]


class _Norm(FusedForward):
    def _run(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        weight: Any = getattr(part, "weight", None)
        eps: Any = getattr(part, "variance_epsilon", getattr(part, "eps", None))
        alone = all(x is None or name == "weight" for name, x in (part._parameters | part._buffers).items())
        if not kwargs and len(args) == 1 and alone and isinstance(eps, float) and _fit(args[0], weight):
            x, width, kernels = args[0], args[0].shape[-1], _kernels()

            def trial() -> Trial:
                rows, other = _random(x, 16, width), _random(x, width)
                rows *= torch.logspace(-3, 0, 16, device=x.device)[:, None]  # of which eps matters to some
                twin = _twin(part, _parameters={**part._parameters, "weight": other})
                variants = itertools.product((0.0, 1.0), (True, False))
                return lambda: self._own(twin, rows), lambda how: kernels.normalize(rows, other, eps, *how), variants

            if weight.shape == (width,) and width <= kernels.WIDEST:
                how = self._variant(part, x, width, trial)
                if how is not None:
                    self.fused = True
                    return kernels.normalize(x, weight, eps, *how)
        self.fused = False
        return self._own(part, *args, **kwargs)


class _Mlp(FusedForward):
    def _run(self, part: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and _fit(args[0]):
            x, kernels = args[0], _kernels()

            def trial() -> Trial:
                # small numbers, and some beyond the limits that classes clamp at
                pairs = [_random(x, 2, 3, 64).float().mul_(scale).unbind() for scale in (4, 4e3)]

                def own(gate: Tensor, up: Tensor) -> Tensor:
                    layers: dict[str, Callable[[Tensor], Tensor]]
                    layers = {"gate_proj": lambda _: gate, "up_proj": lambda _: up, "down_proj": lambda x: x}
                    return self._own(_twin(part, _modules={**part._modules, **layers}), gate)

                def kernel(gelu: bool) -> tuple[Tensor, ...]:
                    return tuple(kernels.gate(*pair, gelu) for pair in pairs)

                return lambda: tuple(own(*pair) for pair in pairs), kernel, (False, True)

            gelu = self._variant(part, x, None, trial)
            if gelu is not None:
                self.fused = True
                gate, up = part.gate_proj(x), part.up_proj(x)
                if _fit(gate, up) and gate.shape == up.shape:
                    return part.down_proj(kernels.gate(gate, up, gelu))
                self.fused = False
                return part.down_proj((F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up)
        self.fused = False
        return self._own(part, *args, **kwargs)


class _Attention(FusedForward):
    """Its forward calls the rotation by another name."""

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self._rotate: Callable[..., Any] = inspect.unwrap(own).__globals__[ROTARY]
        self._replaying = _rotating(own, self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 4 and _fit(*args):  # of the function that rotates, not of the layer
            (q, k, cos, sin), kernels = args, _kernels()

            def trial() -> Trial:
                few = _random(q, 1, 2, 5, width), _random(q, 2, 1, 1, 5, width)[1], *_random(q, 2, 1, 5, width)
                return lambda: self._rotate(*few), lambda _: kernels.rotate(*few), (True,)

            width, table = q.shape[-1], (1, q.shape[-2], q.shape[-1])
            heads = q.dim() == k.dim() == 4 and q.shape[0] == k.shape[0] == 1 and q.shape[2:] == k.shape[2:]
            tables = cos.shape == sin.shape == table and not (cos.requires_grad or sin.requires_grad)
            if heads and tables and width % 2 == 0 and self._variant(None, q, width, trial):
                self.fused = True
                return kernels.rotate(q, k, cos, sin)
        self.fused = False
        return self._rotate(*args, **kwargs)


_KINDS: dict[str | None, Callable[[Any], FusedForward]] = {"Norm": _Norm, "MLP": _Mlp, "Mlp": _Mlp, None: _Attention}


def _kernels() -> Any:
    return importlib.import_module("maskpack.ops.fused_triton")


def _fit(*tensors: Any) -> bool:
    """Whether kernels take the tensors: plain ones of one dtype, where kernels run."""
    first: Any = tensors[0]
    return all(type(x) in (Tensor, nn.Parameter) and x.dtype == first.dtype and x.numel() for x in tensors) and (
        first.dtype in _CLOSE and (uses_triton(first.device) or interpreted())
    )


def _random(like: Tensor, *shape: int) -> Tensor:
    source = torch.Generator("cpu").manual_seed(sum(shape))
    return torch.randn(shape, generator=source, device="cpu").to(like.device, like.dtype)


def _twin(part: Any, **other: Any) -> Any:
    """The part with other attributes, and the same class."""
    twin: Any = object.__new__(cast("Any", type(part)))
    vars(twin).update(vars(part), **other)
    return twin


def _same(seen: Any, wanted: Any) -> bool:
    """Within rounding; in half precision few may differ at all."""
    if isinstance(seen, tuple):
        return all(map(_same, cast("Any", seen), wanted))
    if not isinstance(wanted, Tensor) or (seen.dtype, seen.shape) != (wanted.dtype, wanted.shape):
        return False
    x, y = seen.float(), wanted.float()
    near = bool(((x - y).abs() <= _CLOSE[seen.dtype] * (y.abs() + y.abs().mean())).all())
    return near and (seen.dtype == torch.float32 or float((x != y).float().mean()) < 0.02)


def _rotating(forward: Any, rotate: Callable[..., Any]) -> Any:
    """The forward of an attention layer that calls `rotate` for `ROTARY`."""
    inner: Any = inspect.unwrap(forward)
    copy = FunctionType(
        inner.__code__, {**inner.__globals__, ROTARY: rotate}, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copy.__kwdefaults__ = inner.__kwdefaults__
    return copy
