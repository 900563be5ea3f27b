"""Log-probs, entropies and values of response tokens, from one forward pass of a model over packed rows.

batch -> PackedInputs -> hidden states [T, H] -> those at `predict` [N, H] -> log-probs and values, jagged [B, j]
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, cast, overload

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from maskpack.core.arguments import flag, said
from maskpack.errors import ReplayError
from maskpack.layout.jagged import jagged
from maskpack.layout.row_layout import RowLayout
from maskpack.ops import pack_torch as plain
from maskpack.ops import packed_log_probs
from maskpack.ops.prefix_attention import gather_rows
from maskpack.packed.batch import PackedBatch
from maskpack.planning.plan import MicroBatchPlan
from maskpack.replay.context import tell_failure
from maskpack.replay.inputs import PackedInputs, axis_of
from maskpack.replay.options import DEFAULT, ReplayOptions, need_options


class ReplayModel(Protocol):
    """The interface that replay needs of a causal language model. `adapters.transformers.replayable` returns one.

    These attributes are optional, and declare what else the model supports:

    - `shares_prefixes = True`: `PackedInputs.tree`, by `packed_attention(tree=)`.
    - `context_parallel = True`: `PackedInputs.context`, by `packed_attention(group=)`.
    - `takes_media = True`: `PackedInputs.media`, also in `dense_hidden(media=)`.
    - `replays_routes = True`: `PackedInputs.routed_experts`, also in `dense_hidden(routed_experts=)`.
    - `head_group`: the ranks over which `head` is split, as `group` of `ops.packed_log_probs`.
    - `head_logits`: a bias, LoRA, a scale or a soft cap, as `logits` of `ops.packed_log_probs`.
    - `invariant = True`: hidden states of a row have the same bits in every packing. Log-probs then have, too.
    """

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs, to which each batch or each micro-batch of a plan is sent."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, H]: the weight of the output layer. Only log-probs need it. If it is float32, hidden states are cast."""
        ...

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """[T, H]: hidden states of packed rows, by varlen attention with their bounds; of a shard, those of its
        tokens."""
        ...

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S, H]: hidden states of padded rows, by the attention of the model."""
        ...

    def self_check(self, inputs: PackedInputs, hidden: Tensor, again: bool) -> None:
        """Compares one packed row with the forward pass of that row alone: the first time, or `again`. Raises
        ReplayError."""
        ...


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Arguments(TypedDict, total=False):
        """The arguments of `response_log_probs` beside `entropy`."""

        temperature: float
        plan: MicroBatchPlan | None
        self_check: bool | None
        context_group: ProcessGroup | None
        options: ReplayOptions


_Batch = TensorDictBase | PackedBatch
_MULTIPLE = 128  # of the rows that the head of an invariant model scores at once
_Head = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ResponseOutputs:
    """What `response_outputs` returns: jagged tensors [B, j] on the response layout, differentiable.

    Attributes:
        log_probs, entropy: float32; None unless they were asked for.
        heads: of each head by its name, float32, or float64 if the head returns it.
    """

    log_probs: Tensor | None
    entropy: Tensor | None
    heads: dict[str, Tensor]


def response_outputs(
    model: ReplayModel,
    batch: TensorDictBase | PackedBatch,
    *,
    log_probs: bool = True,
    entropy: bool = False,
    heads: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    temperature: float = 1.0,
    plan: MicroBatchPlan | None = None,
    self_check: bool | None = None,
    context_group: ProcessGroup | None = None,
    options: ReplayOptions = DEFAULT,
) -> ResponseOutputs:
    """Computes log-probs, entropies and values of response tokens in one forward pass over packed rows.

    A policy with a value head runs its layers once, forward and backward.

    Args:
        log_probs: whether to return log-probs. Without them the model needs no output layer.
        entropy: whether to return entropies, too; only with log-probs.
        heads: callables, by names of your own, as `value_head` of `response_values`. All get the same hidden states.
        plan: the micro-batches of the rows, run one after the other without gradients. To train, call this for each
            micro-batch of `plan.apply(batch)`.
        model, batch, temperature, self_check, context_group, options: as for `response_log_probs`.

    Returns:
        The parts that were asked for, on the device of the model.

    Raises:
        ReplayError: as `response_log_probs` and `response_values`; or nothing is asked for.
    """
    call = "response_outputs"
    scores = flag(log_probs, "log_probs", call, ReplayError)
    if flag(entropy, "entropy", call, ReplayError) and not scores:
        raise ReplayError(f"{call}: entropy without log_probs; expected both. Pass log_probs=True.")
    heads = {} if heads is None else heads
    if not isinstance(cast("Any", heads), Mapping):
        raise ReplayError(
            f'{call}: heads are {said(heads)}; expected callables by their names. Pass {{"value": head}}.'
        )
    if not (log_probs or heads):
        raise ReplayError(f"{call}: neither log_probs nor heads are asked for; expected one of them. Ask for it.")
    ask = _Ask(log_probs, entropy, {f"heads[{name!r}]": head for name, head in heads.items()}, temperature)
    out = _outputs(call, model, batch, ask, plan, self_check, context_group, options)
    values = out[log_probs + entropy :]
    return ResponseOutputs(
        out[0] if log_probs else None, out[1] if entropy else None, dict(zip(heads, values, strict=True))
    )


@overload
def response_log_probs(
    model: ReplayModel, batch: _Batch, *, entropy: Literal[False] = False, **more: Unpack[_Arguments]
) -> Tensor: ...
@overload
def response_log_probs(
    model: ReplayModel, batch: _Batch, *, entropy: Literal[True], **more: Unpack[_Arguments]
) -> tuple[Tensor, Tensor]: ...
@overload
def response_log_probs(
    model: ReplayModel, batch: _Batch, *, entropy: bool, **more: Unpack[_Arguments]
) -> Tensor | tuple[Tensor, Tensor]: ...
def response_log_probs(
    model: ReplayModel,
    batch: TensorDictBase | PackedBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    plan: MicroBatchPlan | None = None,
    self_check: bool | None = None,
    context_group: ProcessGroup | None = None,
    options: ReplayOptions = DEFAULT,
) -> Any:
    """Computes the log-probs of response tokens in a forward pass over packed rows, without padding.

    Args:
        model: the result of `adapters.transformers.replayable`, or any other ReplayModel.
        batch: as for `PackedInputs.of`, on any device. The fields that the model needs are sent to its device, one
            micro-batch of a plan at a time.
        temperature, entropy: as for `ops.packed_log_probs`.
        plan: the micro-batches of the rows, run one after the other without gradients. A training loop iterates over
            the micro-batches itself.
        self_check: whether to compare a packed row with the forward pass of that row alone. True: always; False: never;
            None: the first time for each model.
        context_group: ranks with the same rows that share the work: each runs a shard of the tokens
            (`PackedInputs.shard`). Every rank must call. All get the same result; gradients are those of one process
            when they are averaged over the ranks, as by FSDP. A batch takes two small all-reduces for which the host
            waits, to compare rows and options and to fail together.
        options: shared prefixes, recorded experts, names of fields and more.

    Returns:
        float32 jagged [B, j] on the response layout; with `entropy`, a pair of these. Both are differentiable and on
        the device of the model.

    With MASKPACK_PACKED_REPLAY=0 in the environment, rows are padded to the longest and run with the attention of the
    model.

    Raises:
        ReplayError: the model cannot replay packed rows, or the self-check failed.
    """
    ask = _Ask(True, entropy, {}, temperature)
    out = _outputs("response_log_probs", model, batch, ask, plan, self_check, context_group, options)
    return out if entropy else out[0]


def response_values(
    model: ReplayModel,
    batch: TensorDictBase | PackedBatch,
    value_head: Callable[[Tensor], Tensor],
    *,
    plan: MicroBatchPlan | None = None,
    self_check: bool | None = None,
    context_group: ProcessGroup | None = None,
    options: ReplayOptions = DEFAULT,
) -> Tensor:
    """Computes the values of a critic for response tokens in a forward pass over packed rows, without padding.

    The value of a token is read at the same position as its log-prob, which is the position before the token. For
    log-probs of the same model, too, call `response_outputs`.

    Args:
        model: as for `response_log_probs`; it needs no output layer.
        value_head: a callable, such as a linear layer, of hidden states [N, H] that returns values [N] or [N, 1]. It is
            on the device of the hidden states.
        batch, plan, self_check, context_group, options: as for `response_log_probs`.

    Returns:
        float32 (float64 if the head returns it) jagged [B, j] on the response layout, differentiable, on the device of
        the model.

    Raises:
        ReplayError: as `response_log_probs`; or the head returns another shape.
    """
    ask = _Ask(False, False, {"value_head": value_head})
    return _outputs("response_values", model, batch, ask, plan, self_check, context_group, options)[0]


class _Ask(NamedTuple):
    """What a pass returns, in this order: log-probs, entropies, and what each head makes, named as messages show it."""

    log_probs: bool
    entropy: bool
    heads: Mapping[str, _Head]
    temperature: float | None = None


def _outputs(
    call: str,
    model: ReplayModel,
    batch: _Batch,
    ask: _Ask,
    plan: MicroBatchPlan | None,
    self_check: bool | None,
    group: ProcessGroup | None,
    options: ReplayOptions,
) -> tuple[Tensor, ...]:
    """The parts of an answer, jagged [B, j] each."""
    for name, head in ask.heads.items():
        if not callable(head):
            raise ReplayError(
                f"{call}: {name} is {said(head)}; expected a callable. Pass a layer that takes hidden states."
            )
    if plan is not None:
        again = partial(_outputs, call, model, ask=ask, plan=None, self_check=self_check, group=group, options=options)
        outs = _of_each(call, plan, batch, again)
        with torch.no_grad():  # a batch without rows has no micro-batches
            return _joined(call, plan, outs, batch, options) if outs else again(batch)
    same = {name: getattr(ask, name) for name in ("temperature", "log_probs", "entropy")}
    inputs = _inputs(call, model, batch, options, group, {**same, "heads": len(ask.heads), "self_check": self_check})
    rows = _scoring_rows(call, model, inputs, self_check)
    parts: list[Tensor] = []
    if ask.log_probs:
        head = model.head
        scored: Any = packed_log_probs(
            in_dtype(rows, head),
            head,
            pad(inputs.targets, (0, rows.shape[0] - inputs.targets.shape[0])),
            temperature=cast("float", ask.temperature),
            keep=options.keep,
            entropy=ask.entropy,
            group=getattr(model, "head_group", None),
            logits=getattr(model, "head_logits", None),
        )
        parts += scored if ask.entropy else [scored]
    parts += [_of_head(call, name, head, rows) for name, head in ask.heads.items()]
    return tuple(_nested(part, inputs, _is_invariant(model)) for part in parts)


def _of_head(call: str, name: str, head: _Head, rows: Tensor) -> Tensor:
    """[N]: what a head makes of hidden states [N, H]."""
    values: Any = head(rows)
    if not isinstance(values, Tensor):
        raise ReplayError(f"{call}: {name} made {said(values)}; expected a tensor. Return one value for each row.")
    if tuple(values.shape) not in ((rows.shape[0],), (rows.shape[0], 1)):
        raise ReplayError(
            f"{call}: {name} made {tuple(values.shape)} of hidden states {tuple(rows.shape)}; expected "
            f"({rows.shape[0]},) or ({rows.shape[0]}, 1). Give a head with one output."
        )
    values = values.reshape(-1)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _is_invariant(model: ReplayModel) -> bool:
    return getattr(model, "invariant", False) is True


def _inputs(
    call: str,
    model: Any,
    batch: TensorDictBase | PackedBatch,
    options: ReplayOptions,
    group: ProcessGroup | None,
    same: Mapping[str, Any],
) -> PackedInputs:
    """The PackedInputs of a batch, on the device of the model. If packing is off, rows share nothing, and each rank of
    a context group runs them all. `same` are the arguments that its ranks compare."""
    missing = [name for name in ("hidden", "dense_hidden", "self_check") if not callable(getattr(model, name, None))]
    device = None if missing else getattr(model, "device", None)
    if device is None:
        raise ReplayError(
            f"{call}: model is {said(model)}; expected a ReplayModel. Pass what "
            "maskpack.adapters.transformers.replayable(model) returns."
        )
    need_options(options, call)
    asked = {
        "shares_prefixes": options.share_prefixes,
        "context_parallel": group is not None,
        "replays_routes": options.routed_experts,
    }
    for declared, needed in asked.items():
        _need_declared(call, model, declared, needed)
    if not packing_is_on(call):
        group, options = None, replace(options, share_prefixes=False)
    try:
        if isinstance(group, ProcessGroup):
            options = replace(options, multiple_of=options.multiple_of * group.size())  # each shard is a multiple
        inputs = PackedInputs.of(batch, device=device, options=options)
        _need_declared(call, model, "takes_media", inputs.media is not None)
    except Exception:
        tell_failure(group)
        raise
    return inputs if group is None else inputs._shard(group, same)  # pyright: ignore[reportPrivateUsage]


_DECLARED = {
    "shares_prefixes": ("share_prefixes", "tree", "attends by packed_attention(tree=)"),
    "context_parallel": ("context_group", "shard", "attends by packed_attention(group=)"),
    "replays_routes": ("routed_experts", "routed_experts", "gives them to its routers"),
    "takes_media": ("a batch with images or videos", "media", "gives them to its vision tower"),
}
"""What a ReplayModel declares: what needs it, the part of PackedInputs, and what the model does with that."""


def _need_declared(call: str, model: Any, declared: str, needed: bool) -> None:
    if needed and getattr(model, declared, None) is not True:
        asked, part, does = _DECLARED[declared]
        raise ReplayError(
            f"{call}: {asked} with {said(model)}, which does not declare support for PackedInputs.{part}; expected a "
            f"model that {does} and has {declared} = True. Use maskpack.adapters.transformers.replayable(model), or "
            f"leave {asked} out."
        )


def _of_each(call: str, plan: Any, batch: TensorDictBase | PackedBatch, replay: Callable[[Any], Any]) -> list[Any]:
    """What `replay` returns for each micro-batch, one after the other, without gradients."""
    if not isinstance(plan, MicroBatchPlan):
        raise ReplayError(f"{call}: plan is {said(plan)}; expected a MicroBatchPlan. Make one with plan_micro_batches.")
    out: list[Any] = []
    with torch.no_grad():
        for rows, part in zip(plan.micro_batches, plan.apply(batch), strict=True):
            try:
                out.append(replay(part))
            except ReplayError as error:
                named = f"{rows[:8]}{' and more' if len(rows) > 8 else ''}"
                raise ReplayError(f"in the micro-batch of rows {named} of the batch: {error}") from error
    return out


def _joined(
    call: str, plan: MicroBatchPlan, parts: list[Any], batch: Any, options: ReplayOptions
) -> tuple[Tensor, ...]:
    """Joins tuples of jagged tensors, one for each micro-batch, in the order of the rows."""
    response = axis_of(batch, options, call).response
    lengths = response.lengths
    restored = [plan.restore([one.values() for one in which], lengths=lengths) for which in zip(*parts, strict=True)]
    response = response.to(restored[0].device)
    return tuple(jagged(one, response) for one in restored)


def _scoring_rows(call: str, model: ReplayModel, inputs: PackedInputs, self_check: bool | None) -> Tensor:
    """[N, H]: the hidden states that score response tokens, by a packed or, if packing is off, a padded forward
    pass. Those of an invariant model have rows of zeros after them: products of few rows may have other bits."""
    hidden = model.hidden(inputs) if packing_is_on(call) else _dense(model, inputs)
    if self_check is not False:
        model.self_check(inputs, hidden, self_check is True)
    invariant = _is_invariant(model)
    if inputs.tree is None:
        rows = hidden.index_select(0, inputs.predict)
    else:  # the last token of a prompt scores a token of each response
        rows = gather_rows(hidden, inputs.predict, invariant)
    return padded_rows(rows) if invariant else rows


def padded_rows(rows: Tensor) -> Tensor:
    """[N, H] with rows of zeros after them, so that N is a multiple whose products have the bits of all others."""
    return pad(rows, (0, 0, 0, -rows.shape[0] % _MULTIPLE))


def in_dtype(rows: Tensor, head: Tensor) -> Tensor:
    """Hidden states in the dtype of a head that is float32, as one that casts its input has it."""
    return rows.to(head.dtype) if head.dtype == torch.float32 else rows


def packing_is_on(call: str) -> bool:
    packing = os.environ.get("MASKPACK_PACKED_REPLAY", "1")
    if packing not in ("0", "1"):
        raise ReplayError(f"{call}: MASKPACK_PACKED_REPLAY is {packing!r}; expected 0 or 1. Unset it.")
    return packing == "1"


def _nested(values: Tensor, inputs: PackedInputs, ordered: bool) -> Tensor:
    values = values[: inputs.targets.shape[0]]  # without those of added rows
    if inputs.context is not None:
        values = inputs.context.gathered(values)
    if inputs.copies is not None:
        values = gather_rows(values, inputs.copies, ordered)
    if inputs.scored is not None:
        values = values.new_zeros(inputs.response.num_tokens).index_copy(0, inputs.scored, values)
    return jagged(values, inputs.response)


def _dense(model: ReplayModel, inputs: PackedInputs) -> Tensor:
    """[T, H]: hidden states of the same tokens, by a forward pass over rows padded on the right to the longest."""
    bounds = inputs.bounds if inputs.num_tokens else np.array([0, inputs.input_ids.shape[1]])  # the tail, if alone
    layout = RowLayout.from_lengths(np.diff(bounds).tolist(), device=inputs.input_ids.device)
    real = layout.num_tokens
    ids = plain.unpack(inputs.input_ids[0, :real], layout, 0)
    places = inputs.position_ids[..., :real].movedim(-1, 0).reshape(real, -1)
    positions = plain.unpack(places, layout, 0).movedim(-1, 0)
    mask = layout.to_mask(torch.int64)
    more: dict[str, Any] = {} if inputs.media is None else {"media": inputs.media}
    routes = inputs.routed_experts
    if routes is not None:
        padded = plain.unpack(routes.ids[:real], layout, -1)
        more["routed_experts"] = replace(routes, ids=padded.flatten(0, 1))
    hidden = model.dense_hidden(ids, mask, positions[0] if positions.shape[0] == 1 else positions, **more)
    return plain.pack(hidden, layout)
