"""What output layers are made of, and what models do to their logits.

    Layer   of modules    nn.Linear: weight, bias; LoRA of PEFT around it: the active pairs of lora_A and lora_B;
                          nn.Linear with another forward: the same product in float32, found by running it
    curve   of forward    scale and soft cap, found by running the model's own forward on given logits

A model applies its scale and cap in its forward pass, by options with names of its own: `logits_scaling` divides in one
and multiplies in another. So nothing is read from options. The forward pass runs once, on a copy of the outer modules
whose base model and output layer are replaced: the one gives no states, the other a few given logits for all tokens.

    z -> forward -> z * scale                            no cap
    z -> forward -> softcap * tanh(scale * z / softcap)  a cap
    z -> forward -> anything else                        refused
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from maskpack.adapters.transformers.refusals import Refusal, may_refuse
from maskpack.ops import Logits

_LORA = ("lora_A", "lora_B", "lora_dropout", "scaling", "active_adapters", "disable_adapters", "merged")
"""What LoRA around a layer has in PEFT, beside base_layer."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layer(NamedTuple):
    """The tensors of an output layer: weight [V, H], bias [V], and of each active adapter A [r, H], B [V, r] and
    its factor."""

    weight: Tensor
    bias: Tensor | None
    adapters: tuple[tuple[Tensor, Tensor, float], ...] = ()

    @staticmethod
    def of(output: Any) -> Layer:
        """Of a layer that `check_layer` accepts."""
        linear = output.base_layer if _is_lora(output) else output
        pairs = [(output.lora_A[name].weight, output.lora_B[name].weight, output.scaling[name]) for name in _on(output)]
        return Layer(linear.weight, linear.bias, tuple(pairs))

    def is_sharded(self, *, weight: bool) -> bool:
        """Whether a tensor is a shard of FSDP2; without `weight`, one of the others."""
        thin = [self.bias, *(x for low, high, _ in self.adapters for x in (low, high))]
        return any(isinstance(x, DTensor) for x in [*thin, *([self.weight] if weight else [])])

    def copied(self, *, weight: bool) -> Layer:
        """Copies without gradients; without `weight`, that one stays."""
        pairs = [(a.detach().clone(), b.detach().clone(), factor) for a, b, factor in self.adapters]
        bias = None if self.bias is None else self.bias.detach().clone()
        return Layer(self.weight.detach().clone() if weight else self.weight, bias, tuple(pairs))

    def logits(self, scale: float, softcap: float | None) -> Logits:
        """Several adapters are one whose ranks are joined, each with its factor, in float32."""
        low = [a.to(torch.promote_types(a.dtype, torch.float32)) * factor for a, _, factor in self.adapters]
        high = [b for _, b, _ in self.adapters]
        return Logits(
            bias=self.bias,
            lora_a=torch.cat(low) if low else None,
            lora_b=torch.cat(high, 1) if high else None,
            scale=scale,
            softcap=softcap,
        )


# -------------------------------------------------------------------- modules


def check_layer(model: Any, output: Any, known: Any = None) -> Any:
    """Raises ReplayError unless `Layer.of` says all that an output layer does. Adapters can be added later, so every
    call checks. Returns the forward of a layer that multiplies in float32, to be `known` in later calls, or None."""
    who, kind = type(model).__name__, cast("Any", type(output))
    sharded = FSDPModule in kind.__mro__
    if FSDPModule not in type(model).__mro__ and (sharded or isinstance(getattr(output, "weight", None), DTensor)):
        raise Refusal.SHARDED_HEAD(model=who)
    if _is_lora(output):
        _check_lora(who, output)
        return None
    return wide_forward(who, output, known, hooks=False)


def wide_forward(who: str, output: Any, known: Any, *, hooks: bool) -> Any:
    """The forward of a layer that multiplies in float32; None of one that has nn.Linear's. Raises ReplayError for
    others, and, unless it may have them, for hooks."""
    if isinstance(output, nn.Linear) and (hooks or not _hooked(output)):
        if _is_linear(output):
            return None
        forward = getattr(output.forward, "__func__", output.forward)
        if forward is known or _is_wide(output):
            return forward
    kind = cast("Any", type(output))
    raise Refusal.HEAD(model=who, kind=f"{kind.__module__}.{kind.__name__}")


def _is_lora(output: Any) -> bool:
    return hasattr(output, "base_layer") and all(hasattr(output, name) for name in _LORA)


def _on(output: Any) -> list[str]:
    """The adapters that an output layer adds to its base layer."""
    if not _is_lora(output) or output.disable_adapters or output.merged:
        return []
    return [name for name in output.active_adapters if name in output.lora_A]


def _check_lora(who: str, output: Any) -> None:
    """LoRA adds scaling * lora_B(lora_A(dropout(x))) for each active adapter, and no more."""
    if output.disable_adapters and output.merged:
        raise Refusal.LORA(model=who, seen="merged adapters that are disabled", remedy="Call unmerge_adapter() first")
    if _hooked(output) or "forward" in vars(output) or not _is_plain(output.base_layer):
        kind = cast("Any", type(output.base_layer))
        seen, remedy = f"a base layer {kind.__module__}.{kind.__name__}, or hooks", "Use torch.nn.Linear without hooks"
        raise Refusal.LORA(model=who, seen=seen, remedy=remedy)
    variants: dict[str, Any] = getattr(output, "lora_variant", {})
    for name in _on(output):
        dropout, pair = output.lora_dropout[name], (output.lora_A[name], output.lora_B[name])
        if name in variants or getattr(output, "use_dora", {}).get(name):
            seen = f"a variant of its own ({type(variants[name]).__name__ if name in variants else 'DoRA'})"
        elif not isinstance(dropout, nn.Identity) and getattr(dropout, "p", 1) and output.training:
            seen = f"dropout {getattr(dropout, 'p', '')} in train mode"
        elif not all(_is_plain(part) and part.bias is None for part in pair):
            seen = "a bias, hooks or other layers than torch.nn.Linear"
        else:
            continue
        remedy = "Merge the adapter, or leave the output layer without one"
        raise Refusal.LORA(model=who, seen=f"{seen} in the adapter {name}", remedy=remedy)


def _is_plain(layer: Any) -> bool:
    """Whether a layer is x @ weight.T + bias."""
    return _is_linear(layer) and not _hooked(layer)


def _is_linear(layer: Any) -> bool:
    """Whether a layer has the forward of nn.Linear."""
    return isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def _is_wide(layer: Any) -> bool:
    """Whether a linear layer multiplies its input and its weight in float32, whatever their dtypes, and adds its bias:
    a trial has these bits. The trial has another weight, [V, 2], because that of the layer may be sharded; the second
    row has logits that a cap would change."""
    own: dict[str, Any] = layer._parameters
    weight, bias = own.get("weight"), own.get("bias")
    if weight is None or not weight.is_floating_point():
        return False
    given = torch.tensor([[0.3, -1.7], [3e5, -1e6]], dtype=torch.bfloat16, device="cpu")
    points = torch.linspace(-3, 3, 3 * weight.shape[0], dtype=weight.dtype, device="cpu").view(3, -1)
    small = {"weight": points[:2].T} | ({} if bias is None else {"bias": points[2].to(bias.dtype)})
    vars(layer)["_parameters"] = own | small
    try:
        with torch.no_grad():
            seen: Any = layer.forward(given)
    except Exception as error:
        if not may_refuse(error):
            raise
        return False
    finally:
        vars(layer)["_parameters"] = own
    want = F.linear(given.float(), *(x.float() for x in small.values()))
    return isinstance(seen, Tensor) and seen.dtype == want.dtype and torch.equal(seen, want)


def _hooked(layer: Any) -> bool:
    """Whether a layer has hooks beside those of FSDP."""
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    homes = [type(getattr(hook, "__self__", None)).__module__ for hook in hooks]
    gathers = isinstance(layer, FSDPModule) and all(home.startswith("torch.distributed.fsdp.") for home in homes)
    return bool(hooks) and not gathers


@contextmanager
def other_forward(layer: Any, forward: Callable[..., Any]) -> Generator[None]:
    """Gives a layer another forward, and then the one that it had."""
    before = cast("dict[str, Any]", vars(layer)).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


# -------------------------------------------------------------------- the forward pass after the output layer


class _Through(torch.autograd.Function):
    """The states, of which the logits were made; the backward pass goes through both, with zeros for the logits."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, logits: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.like = logits.shape, logits.dtype
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        shape, dtype = ctx.like
        return grad, None if grad is None else grad.new_zeros(shape, dtype=dtype)


def states_of(model: Any, output: Any, given: dict[str, Any]) -> Tensor:
    """The states that reach the output layer in a forward pass of the model, which would scale and cap them if the
    layer returned them. The backward pass begins at the outputs of the model, where FSDP gathers weights for it."""
    seen: list[Tensor] = []

    def note(states: Tensor) -> Tensor:
        seen.append(states)
        return states

    with other_forward(output, note):
        logits = model(**given).logits
    return cast("Callable[..., Any]", _Through.apply)(seen[0], logits)


_SMALL, _LARGE = 2.0**-20, 1e30
_POINTS = (_SMALL, -3.0, 3.0, 40.0, _LARGE, 0.0)


def curve_of(model: Any, base: Any, output: Any) -> tuple[float, float | None]:
    """The scale and the soft cap that a model applies to its logits.

    Raises ReplayError if it does anything else to them.
    """
    seen = _outputs(model, base, output)
    small, large = seen[0] / _SMALL, seen[_POINTS.index(_LARGE)]
    linear = math.isclose(small, large / _LARGE, rel_tol=1e-6)
    softcap = None if linear else large
    scale = 1.0 if math.isclose(small, 1, rel_tol=1e-6) else small  # float32 in between rounds
    if scale > 0 and (softcap is None or softcap > 0):
        want = [scale * z if softcap is None else softcap * math.tanh(scale * z / softcap) for z in _POINTS]
        if all(math.isclose(x, y, rel_tol=1e-5, abs_tol=1e-9) for x, y in zip(seen, want, strict=True)):
            return scale, softcap
    raise Refusal.CURVE(model=type(model).__name__, seen=[float(f"{x:.4g}") for x in seen], given=[*_POINTS])


def _outputs(model: Any, base: Any, output: Any) -> list[float]:
    """What the forward of a model makes of the logits `_POINTS`, one for each token."""
    who, weight = type(model).__name__, getattr(output, "weight", None)
    rows = model.config.get_text_config().vocab_size if weight is None else weight.shape[0]
    device = torch.device("cpu") if weight is None or weight.is_meta else weight.device
    points = torch.tensor(_POINTS, dtype=torch.float64, device=device)
    given = points[:, None].expand(-1, rows)[None].clone()
    hidden = torch.arange(4.0 * len(_POINTS), dtype=torch.float64, device=device).view(1, -1, 4) / 8 - 1  # any dtype
    asked: list[bool] = []  # a forward may call a part of the base model instead, whose states are its own
    reached: list[Any] = []

    def given_states(*_: Any, **__: Any) -> _States:
        asked.append(True)
        return states

    def layer(*got: Any, **_: Any) -> Tensor:
        reached.extend(got)
        return given

    states = _States(hidden.clone())
    ids = torch.zeros(1, len(_POINTS), dtype=torch.int64, device=device)
    parts = {id(base): _copy(base, given_states), id(output): _copy(output, layer)}
    outer = _outer(model, parts)
    try:
        with torch.no_grad():
            logits = cast("Tensor", outer.forward(input_ids=ids, use_cache=False, return_dict=True).logits)
    except Exception as error:
        if not may_refuse(error, AttributeError, LookupError):
            raise
        raise Refusal.FORWARD(model=who, does=f"failed on given logits with {type(error).__name__}: {error}") from error
    if asked and (len(reached) != 1 or not torch.equal(reached[0].double().reshape(-1), hidden.reshape(-1))):
        raise Refusal.FORWARD(model=who, does="changes hidden states before its output layer")
    if logits.shape != given.shape:
        does = f"makes logits {tuple(logits.shape)} of the output layer's {tuple(given.shape)}"
        raise Refusal.FORWARD(model=who, does=does)
    found = logits[0].double()
    if not torch.equal(found, found[:, :1].expand_as(found)):
        raise Refusal.FORWARD(model=who, does="changes the logits of some tokens and not of others")
    return cast("list[float]", found[:, 0].tolist())


class _States:
    """The outputs of a base model: these states, and None for everything else."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, at: Any) -> Any:
        everything: Any = (self.last_hidden_state,)
        return everything[at]


def _outer(module: Any, parts: dict[int, Any]) -> Any:
    """A copy of a module in which some parts are replaced. Weights and other parts are shared."""
    if id(module) in parts:
        return parts[id(module)]
    if not any(id(part) in parts for part in module.modules()):
        return module
    copied = _copy(module)
    for name, child in module._modules.items():
        copied._modules[name] = None if child is None else _outer(child, parts)
    return copied


def _copy(module: Any, forward: Callable[..., Any] | None = None) -> Any:
    """A shallow copy without hooks, of the class that FSDP2 found, with the forward of that class or the given one."""
    kinds = cast("tuple[Any, ...]", type(module).__mro__)
    kind = next(kind for kind in kinds if not issubclass(kind, FSDPModule))
    copied = kind.__new__(kind)
    vars(copied).update(vars(module))
    vars(copied).update({name: OrderedDict() for name in _HOOKS}, _modules=dict(module._modules))
    vars(copied).pop("forward", None)
    if forward is not None:
        vars(copied)["forward"] = forward
    return copied
