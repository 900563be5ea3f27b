"""Replay: packed rows through a model, and what it says of their response tokens. Nothing is padded.

    rows          p p r r r | p r | p p p r r        p prompt, r response tokens: input_ids [1, T]
    position_ids  0 1 2 3 4 | 0 1 | 0 1 2 3 4        begin anew in every row
    cu_seqlens    0          5     7           12    attention takes its bounds from here alone
    predict         ^ ^ ^     ^         ^ ^          the places whose outputs score response tokens: one before each

A tail that rounds T up is a row of its own, so no token sees it, and no place of `predict` is in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.core.keys import need_key
from maskpack.core.tensors import device_here, need_batch
from maskpack.core.tree import entry_at
from maskpack.errors import ReplayError
from maskpack.fields.options import Registry, registry_of
from maskpack.fields.registry import Key, MaskNestingRegistry, Path, path_of, show
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import host_offsets, jagged
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.response import ResponseAxis
from maskpack.ops import pack_torch as plain
from maskpack.ops import packed_log_probs
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.planning.plan import MicroBatchPlan

NoPrompt = Literal["error", "skip"]


_NOT_TEXT = ("pixel_values", "pixel_values_videos", "input_features", "image_grid_thw", "video_grid_thw")
"""Fields that a model of more than text is given beside its ids."""


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """What a model needs to run packed rows, all on one device.

    Attributes:
        input_ids: int64 [1, T].
        position_ids: int64 [1, T]; [n, 1, T] for M-RoPE.
        cu_seqlens: int32 [rows + 1]; rows without tokens are left out, a tail counts as a row.
        max_seqlen: tokens of the longest row.
        predict: int64 [scored response tokens]: places in T whose outputs score them.
        targets: int64 [scored response tokens]: their ids.
        scored: where these lie among all response tokens, int64; None if all are scored.
        response: the response layout of the rows.
        bounds: int64 [rows + 1] on the host: those of `cu_seqlens`, without the tail.
        num_tokens: T without the tail.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    predict: Tensor
    targets: Tensor
    scored: Tensor | None
    response: RowLayout
    bounds: IntArray
    num_tokens: int

    @classmethod
    def of(
        cls,
        batch: TensorDictBase | PackedBatch,
        *,
        input_ids: Key = "input_ids",
        registry: Registry = RL_FIELDS,
        multiple_of: int = 1,
        no_prompt: NoPrompt = "error",
        device: torch.device | str | None = None,
    ) -> PackedInputs:
        """The rows of a batch.

        Args:
            batch: token ids and what gives the sequence and the response axis (`attention_mask` and `responses`, or
                the layouts of a nested or packed batch); `position_ids` if there are any, else they count the real
                tokens of each row. Padded on the left, on the right or on both sides.
            input_ids: the field with the token ids.
            registry: its axes `sequence` and `response` say which fields are the masks.
            multiple_of: T is rounded up to a multiple, by a tail. A batch without tokens becomes a tail alone, because
                models do not run without any.
            no_prompt: what to do with a row whose response has no token before it: its first response token is scored
                by nothing. "error", or "skip" that token.
            device: where the inputs lie; that of the batch by default. Only they move, not the batch.

        Raises:
            ReplayError: no token ids, fields of another shape, responses without prompt, or options that cannot be.
            LayoutError: a batch without sequence and response axes.
        """
        call = "PackedInputs.of"
        registry = registry_of(registry, call)
        need_key(input_ids, "input_ids", call, ReplayError)
        places = {"input_ids": path_of(input_ids), "position_ids": ("position_ids",)}
        device = None if device is None else device_here(device, call)
        if not isinstance(batch, PackedBatch):
            need_batch(batch, call)
        for name in _NOT_TEXT:
            if (name,) in batch.forms if isinstance(batch, PackedBatch) else entry_at(batch, (name,)) is not None:
                raise ReplayError(
                    f'{call}: the batch has a field "{name}"; expected text alone, which is all that the model is '
                    "given. Replay these rows by the model's own forward; without images, drop the field."
                )
        whole = isinstance(multiple_of, int | np.integer) and not isinstance(multiple_of, bool)
        if not (whole and 1 <= multiple_of < 1 << 31):
            raise ReplayError(
                f"{call}: multiple_of is {said(multiple_of)}; expected a whole number from 1, below 2^31. Choose one."
            )
        if isinstance(batch, PackedBatch):
            axis, fields = _decoded(batch, places, device, registry, call)
        else:
            axis = ResponseAxis.of(batch, registry, call)
            found = {name: entry_at(batch, path) for name, path in places.items()}
            fields = {name: _Field(places[name], value) for name, value in found.items() if isinstance(value, Tensor)}
        sequence = axis.need_sequence(call)
        ids = _packed(fields, "input_ids", sequence, call)
        if ids is None:
            raise ReplayError(
                f'{call}: the batch has no field "{show(input_ids)}"; expected token ids. Keep it in the batch. If '
                'they have another name, pass it: input_ids="tokens".'
            )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise ReplayError(
                f'{call}: field "{show(input_ids)}" is {ids.dtype}; expected integers. Fix the producer, or name the '
                "field that has the token ids."
            )
        where = ids.device if device is None else torch.device(device)
        ids = _sent(ids, where).long()
        tail = -sequence.num_tokens % multiple_of or (0 if sequence.num_tokens else multiple_of)
        predict, scored = _predict(axis, sequence, no_prompt, call)
        here = _sent(torch.from_numpy(predict), where)
        rows = np.unique(sequence.row_offsets)  # of those with tokens
        bounds = np.append(rows, sequence.num_tokens + tail).astype(np.int32) if tail else rows.astype(np.int32)
        positions = _packed(fields, "position_ids", sequence, call)
        if positions is None:
            starts = np.repeat(sequence.row_offsets[:-1], sequence.lengths)
            positions = torch.from_numpy(np.arange(sequence.num_tokens) - starts)
        elif positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
            raise ReplayError(
                f'{call}: field "position_ids" is {positions.dtype}; expected integers. Fix the producer, or drop it.'
            )
        positions = _sent(positions, where)
        extra = torch.arange(tail, device=where).view(-1, *[1] * (positions.dim() - 1))
        positions = torch.cat([positions, extra.expand(tail, *positions.shape[1:])])
        return cls(
            input_ids=torch.cat([ids, ids.new_zeros(tail)])[None],
            position_ids=positions[None] if positions.dim() == 1 else positions.T[:, None],
            cu_seqlens=_sent(torch.from_numpy(bounds), where),
            max_seqlen=int(np.diff(bounds).max(initial=0)),
            predict=here,
            targets=ids.index_select(0, here + 1),
            scored=None if scored is None else _sent(torch.from_numpy(scored), where),
            response=axis.response.to(where),
            bounds=rows,
            num_tokens=sequence.num_tokens,
        )


class _Field(NamedTuple):
    """A field, its place in the batch, and the bounds of its rows where the host knows them."""

    path: Path
    value: Tensor
    offsets: IntArray | None = None


def _decoded(
    packed: PackedBatch,
    places: Mapping[str, Path],
    device: torch.device | str | None,
    registry: MaskNestingRegistry,
    call: str,
) -> tuple[ResponseAxis, dict[str, _Field]]:
    """The axes of a packed batch, which the host knows, and its ids and positions on a device."""
    there = {name: path for name, path in places.items() if path in packed.fields}
    nested = decompress(packed, *there.values(), format="nested", device=device) if there else TensorDict()
    fields: dict[str, _Field] = {}
    for name, path in there.items():
        layout = packed.forms[path].layout
        offsets = None if layout is None else packed.layouts[layout].row_offsets
        fields[name] = _Field(path, entry_at(nested, path), offsets)
    return ResponseAxis.among(packed.layouts, registry, call), fields


def _packed(fields: Mapping[str, _Field], name: str, sequence: RowLayout, call: str) -> Tensor | None:
    """A field of the sequence axis as packed tokens [T], or [T, n] with n rows of positions; None without it."""
    if name not in fields:
        return None
    path, value, offsets = fields[name]
    if value.is_nested:
        packed = value.values()
        offsets = host_offsets(value, sequence) if offsets is None else offsets
        if not np.array_equal(offsets, sequence.row_offsets):
            raise ReplayError(
                f'{call}: field "{show(path)}" has {packed.shape[0]} tokens in rows of other lengths than the sequence '
                f"axis, which has {sequence.num_tokens} tokens. Nest it under the sequence axis."
            )
    else:
        if value.dim() == 3 and value.shape[2] == sequence.width:  # M-RoPE, [B, n, S]
            value = value.movedim(2, 1)
        if tuple(value.shape[:2]) != (sequence.num_rows, sequence.width):
            raise ReplayError(
                f'{call}: field "{show(path)}" is {tuple(value.shape)}; the sequence axis is ({sequence.num_rows}, '
                f"{sequence.width}). Fix the producer."
            )
        packed = plain.pack(value, sequence.to(value.device))
    if packed.dim() > (1 if name == "input_ids" else 2):
        raise ReplayError(
            f'{call}: field "{show(path)}" is {tuple(packed.shape)} packed; expected one number for each token, or of '
            "position ids a few. Fix the producer."
        )
    return packed


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """On a device. The host does not wait for what it sends, only for what comes to it."""
    return x.to(device, non_blocking=x.device.type == "cpu")


def _predict(
    axis: ResponseAxis, sequence: RowLayout, no_prompt: NoPrompt, call: str
) -> tuple[IntArray, IntArray | None]:
    """Places whose outputs score the response tokens; and which of these are scored, if not all."""
    if no_prompt not in ("error", "skip"):
        raise ReplayError(f'{call}: no_prompt is {said(no_prompt)}; expected "error" or "skip". Choose one.')
    tail = axis.tail(sequence)
    rows = np.repeat(np.arange(sequence.num_rows), axis.response.lengths)
    alone = tail <= sequence.row_offsets[rows]
    if not alone.any():
        return axis.predict_index(call).numpy(), None
    if no_prompt == "error":
        raise ReplayError(
            f"{call}: rows {rows[alone][:8].tolist()} have a response but no prompt token; expected at least one, "
            'whose output scores the first response token. Drop these rows, or pass no_prompt="skip".'
        )
    scored = np.flatnonzero(~alone)
    return tail[scored] - 1, scored


# -------------------------------------------------------------------- log-probs


class ReplayModel(Protocol):
    """A causal language model as replay knows it; `adapters.transformers.replayable` makes one."""

    @property
    def device(self) -> torch.device:
        """Where it takes its inputs: each batch, or each micro-batch of a plan, is sent there."""
        ...

    @property
    def head(self) -> Tensor:
        """[V, H]: the weight that makes logits of hidden states; only log-probs ask for it."""
        ...

    def hidden(self, inputs: PackedInputs) -> Tensor:
        """[T, H]: hidden states of packed rows, by an attention that is told their bounds."""
        ...

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        """[B, S, H]: hidden states of padded rows, by the model's own attention."""
        ...

    def trust(self, inputs: PackedInputs, hidden: Tensor, again: bool) -> None:
        """Compares a row with its own dense forward, the first time or `again`; raises ReplayError."""
        ...


def response_log_probs(
    model: ReplayModel,
    batch: TensorDictBase | PackedBatch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk: int | None = None,
    plan: MicroBatchPlan | None = None,
    canary: bool | None = None,
    multiple_of: int = 1,
    no_prompt: NoPrompt = "error",
    input_ids: Key = "input_ids",
    registry: Registry = RL_FIELDS,
) -> Any:
    """Log-probs of the response tokens, from a forward pass over packed rows.

    Args:
        model: of `adapters.transformers.replayable`, or anything that does what a ReplayModel does.
        batch: as for `PackedInputs.of`, on any device: what the model needs of it is sent to the model's, a micro-batch
            of a plan at a time.
        temperature, entropy, chunk: as for `ops.packed_log_probs`: logits are reduced in float32, a chunk of tokens at
            a time, and never exist for all tokens.
        plan: micro-batches of the rows, run one after the other. Without gradients: a loop that trains takes the
            micro-batches itself.
        canary: compare a row with its dense forward before trusting the rest: True always, False never, None the first
            time for each model.
        multiple_of, no_prompt, input_ids, registry: as for `PackedInputs.of`.

    Returns:
        float32 jagged [B, j] on the response layout, or with `entropy` a pair of these; differentiable, on the model's
        device. The first token of a response without prompt is 0 with no_prompt="skip".

    With MASKPACK_PACKED_REPLAY=0 in the environment rows are padded to the longest, and run by the model's own
    attention.

    Raises:
        ReplayError: the model cannot replay packed rows, or does not give what it gives for a row alone.
    """
    if plan is not None:
        parts = _of_each(
            plan, batch, response_log_probs, model, temperature=temperature, entropy=entropy, chunk=chunk,
            canary=canary, multiple_of=multiple_of, no_prompt=no_prompt, input_ids=input_ids, registry=registry,
        )  # fmt: skip
        return _joined(plan, parts if entropy else [(part,) for part in parts], batch, registry, entropy)
    inputs = _inputs("response_log_probs", model, batch, input_ids, registry, multiple_of, no_prompt)
    rows = _scoring_rows("response_log_probs", model, inputs, canary)
    out: Any = packed_log_probs(rows, model.head, inputs.targets, temperature=temperature, chunk=chunk, entropy=entropy)
    return tuple(_nested(part, inputs) for part in out) if entropy else _nested(out, inputs)


def response_values(
    model: ReplayModel,
    batch: TensorDictBase | PackedBatch,
    value_head: Callable[[Tensor], Tensor],
    *,
    plan: MicroBatchPlan | None = None,
    canary: bool | None = None,
    multiple_of: int = 1,
    no_prompt: NoPrompt = "error",
    input_ids: Key = "input_ids",
    registry: Registry = RL_FIELDS,
) -> Any:
    """Values of the states in which response tokens were chosen, from a forward pass over packed rows.

    The value of a token is read where its log-prob is: at the place before it, which has seen all but the token.

    Args:
        model: as for `response_log_probs`; a model without an output layer will do.
        batch: as for `response_log_probs`.
        value_head: hidden states [N, H] -> values [N] or [N, 1]: a linear layer, or a module of several; on the device
            of the hidden states.
        plan, canary, multiple_of, no_prompt, input_ids, registry: as for `response_log_probs`.

    Returns:
        float32 (float64 if the head gives that) jagged [B, j] on the response layout, differentiable, on the model's
        device. The first token of a response without prompt is 0 with no_prompt="skip".

    Raises:
        ReplayError: as `response_log_probs`, and a head that gives another shape.
    """
    if plan is not None:
        options: dict[str, Any] = {
            "canary": canary, "multiple_of": multiple_of, "no_prompt": no_prompt, "input_ids": input_ids,
            "registry": registry,
        }  # fmt: skip
        parts = _of_each(plan, batch, response_values, model, value_head, **options)
        return _joined(plan, [(part,) for part in parts], batch, registry)
    if not callable(value_head):
        raise ReplayError(
            f"response_values: value_head is {said(value_head)}; expected a layer. Pass one that is called."
        )
    inputs = _inputs("response_values", model, batch, input_ids, registry, multiple_of, no_prompt)
    rows = _scoring_rows("response_values", model, inputs, canary)
    values = value_head(rows)
    if tuple(values.shape) not in ((rows.shape[0],), (rows.shape[0], 1)):
        raise ReplayError(
            f"response_values: value_head made {tuple(values.shape)} of hidden states {tuple(rows.shape)}; expected "
            f"({rows.shape[0]},) or ({rows.shape[0]}, 1). Give a head with one output."
        )
    values = values.reshape(-1)
    return _nested(values.to(torch.promote_types(values.dtype, torch.float32)), inputs)


def _inputs(
    call: str,
    model: Any,
    batch: TensorDictBase | PackedBatch,
    input_ids: Key,
    registry: Registry,
    multiple_of: int,
    no_prompt: NoPrompt,
) -> PackedInputs:
    """Those of a batch, on the device of the model."""
    missing = [name for name in ("hidden", "dense_hidden", "trust") if not callable(getattr(model, name, None))]
    device = None if missing else getattr(model, "device", None)
    if device is None:
        raise ReplayError(
            f"{call}: model is {said(model)}; expected a ReplayModel. Pass what "
            "maskpack.adapters.transformers.model(model) returns."
        )
    return PackedInputs.of(
        batch, input_ids=input_ids, registry=registry, multiple_of=multiple_of, no_prompt=no_prompt, device=device
    )


def _of_each(
    plan: MicroBatchPlan,
    batch: TensorDictBase | PackedBatch,
    call: Callable[..., Any],
    model: ReplayModel,
    *more: Any,
    **options: Any,
) -> list[Any]:
    """`call(model, part, *more, **options)` for each micro-batch, one after the other, without gradients."""
    if not isinstance(plan, MicroBatchPlan):
        raise ReplayError(
            f"{call.__name__}: plan is {said(plan)}; expected a MicroBatchPlan. Make one with plan_micro_batches."
        )
    out: list[Any] = []
    with torch.no_grad():
        for rows, part in zip(plan.micro_batches, plan.apply(batch), strict=True):
            try:
                out.append(call(model, part, *more, **options))
            except ReplayError as error:
                named = f"{rows[:8]}{' and more' if len(rows) > 8 else ''}"
                raise ReplayError(f"in the micro-batch of rows {named} of the batch: {error}") from error
    return out


def _joined(plan: MicroBatchPlan, parts: list[Any], batch: Any, registry: Registry, several: bool = False) -> Any:
    """Tuples of jagged tensors of micro-batches, in the order of rows; on the offsets of the batch if it lies there."""
    call = "response_log_probs"
    registry, packed = registry_of(registry, call), isinstance(batch, PackedBatch)
    axis = ResponseAxis.among(batch.layouts, registry, call) if packed else ResponseAxis.of(batch, registry, call)
    lengths = axis.response.lengths
    restored = [plan.restore([one.values() for one in which], lengths=lengths) for which in zip(*parts, strict=True)]
    response = axis.response.to(restored[0].device)
    out = tuple(jagged(one, response) for one in restored)
    return out if several else out[0]


def _scoring_rows(call: str, model: ReplayModel, inputs: PackedInputs, canary: bool | None) -> Tensor:
    """[scored response tokens, H]: the hidden states that score them, packed or, if packing is off, padded."""
    packing = os.environ.get("MASKPACK_PACKED_REPLAY", "1")
    if packing not in ("0", "1"):
        raise ReplayError(f"{call}: MASKPACK_PACKED_REPLAY is {packing!r}; expected 0 or 1. Unset it.")
    hidden = model.hidden(inputs) if packing == "1" else _dense(model, inputs)
    if canary is not False:
        model.trust(inputs, hidden, canary is True)
    return hidden.index_select(0, inputs.predict)


def _nested(values: Tensor, inputs: PackedInputs) -> Tensor:
    if inputs.scored is not None:
        values = values.new_zeros(inputs.response.num_tokens).index_copy(0, inputs.scored, values)
    return jagged(values, inputs.response)


def _dense(model: ReplayModel, inputs: PackedInputs) -> Tensor:
    """[T, H]: hidden states of the same tokens, from rows padded on the right to the longest."""
    bounds = inputs.bounds if inputs.num_tokens else np.array([0, inputs.input_ids.shape[1]])  # the tail, if alone
    layout = RowLayout.from_lengths(np.diff(bounds).tolist(), device=inputs.input_ids.device)
    real = layout.num_tokens
    ids = plain.unpack(inputs.input_ids[0, :real], layout, 0)
    places = inputs.position_ids[..., :real].movedim(-1, 0).reshape(real, -1)
    positions = plain.unpack(places, layout, 0).movedim(-1, 0)
    mask = layout.to_mask(torch.int64)
    hidden = model.dense_hidden(ids, mask, positions[0] if positions.shape[0] == 1 else positions)
    return plain.pack(hidden, layout)
