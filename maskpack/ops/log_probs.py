"""packed_log_probs: log-probs of given tokens from hidden states, without storing all logits.

    forward   a chunk of rows at a time            logits [chunk, V] -> log-prob, log-sum-exp, entropy of each row
    backward  a slice of the vocabulary at a time  logits [block, slice] -> their gradient -> both matrix products,
              and in it a block of tokens          summed in float32

              slice    slice    of kept tokens, the forward pass stores all probabilities [K, V] in the dtype of hidden
    block     kept     kept     (`stored`); the logits of the other tokens are computed again, in float32
    block     again    again

One float32 buffer is reused for the logits of all chunks, another for those of all slices. The gradient of the logits
is rounded to the dtype of the weight before the products. Each row of the weight's gradient is one sum over all tokens,
rounded once. Between the products, logits are processed by a Triton kernel or by the plain torch below, which specifies
it. A bias and LoRA are one more product, of two thin float32 matrices (`_Thin`), that is added to each chunk of logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from maskpack.core.arguments import flag, said
from maskpack.core.backends import Backend, uses_triton
from maskpack.errors import LayoutError, MaskpackError
from maskpack.ops import split_head
from maskpack.ops.logits import Curve, Logits, check_logits
from maskpack.ops.split_head import Split

_CHUNK_BYTES = 3 << 27  # logits of a chunk
_SLICE_BYTES = 1 << 28  # logits of a block, their rounded gradient, and the sums of the weight's gradient
_BLOCK_TOKENS = 8192  # of a block; twice as many are still one block
_TILE, _ALIGN = 128, 256  # of a tile of a matrix product; the row stride of a buffer is a multiple of _ALIGN
_PROCESSORS = 132  # that compute a tile each, on Hopper
UNIT = 2.0**15  # stored probabilities are multiplied by it, because float16 has no small ones
LIKELY, SURE = -0.7, -1e-7  # log-probs between them are stored themselves
_COLDEST = 1 / 3e38  # float32 overflows at the inverse of a lower temperature
_HALF = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALF, torch.float32, torch.float64)


if TYPE_CHECKING:
    from typing_extensions import Unpack

    class _Options(TypedDict, total=False):
        """The options of `packed_log_probs` beside `entropy`."""

        temperature: float
        keep: int | None
        backend: Backend
        group: ProcessGroup | None
        logits: Logits | None


@overload
def packed_log_probs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    entropy: Literal[False] = False,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def packed_log_probs(
    hidden: Tensor, lm_head_weight: Tensor, token_ids: Tensor, *, entropy: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def packed_log_probs(
    hidden: Tensor, lm_head_weight: Tensor, token_ids: Tensor, *, entropy: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
@torch.compiler.disable
def packed_log_probs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    temperature: float = 1.0,
    keep: int | None = None,
    entropy: bool = False,
    backend: Backend = "auto",
    group: ProcessGroup | None = None,
    logits: Logits | None = None,
) -> Any:
    """Computes the log-prob of one token for each hidden state, and optionally the entropy, without storing all logits.

        log_p = (hidden.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)        # [T, V], not stored
        log_probs[t] = log_p[t, token_ids[t]]
        entropy[t]   = -(log_p[t].exp() * log_p[t]).sum()

    With `logits`, the output layer is more than this product: a bias, LoRA, a scale, a soft cap (`ops.Logits`).

    Logits are accumulated and reduced in float32, so the result is more exact than plain torch in half precision. The
    backward pass rounds their gradient to the dtype of `hidden` once; it is exact for tokens with a probability near 1,
    too. It computes logits again in float32, except those of the tokens that fit into `keep`: three matrix products
    instead of four for these. Besides its results and the kept bytes, the forward pass allocates the logits of one
    chunk (about 0.4 GiB), the backward pass 0.25 GiB and a float32 [T, H]. Under torch.compile the call is a graph
    break.

    With `group`, the head is split by rows over the ranks of the group, as in vocabulary-parallel layers. All ranks
    call with the same hidden states and ids, each with its own slice of the weight, and all get the same results. They
    run the same loss and call backward; the gradients are those of one such loss, not of the sum over ranks: that of
    `hidden` is whole and the same on all ranks, that of the weight belongs to the slice. No rank holds more than its
    slice, and the logits of a chunk take 1 / ranks of the bytes. The forward pass takes three all-reduces: of 15
    numbers a rank, for which the host waits; of [T] maxima; of [2, T] sums ([3, T] with entropy). The backward pass
    takes one, of the gradient of `hidden` in float32, and one of that of `lora_a`.

    Args:
        hidden: [T, H] float16, bfloat16, float32 or float64, any strides; packed hidden states.
        lm_head_weight: [V, H] in the dtype of `hidden`, V >= 1. With `group`, the rows [V_r, H] of this rank,
            V_r >= 0: in the order of the ranks they make up the head, and they may differ in number. Or a DTensor
            [V, H], Shard(0) over a mesh of one dim with the ranks of `group`; its gradient is such a DTensor.
        token_ids: [T] int64 or int32, in [0, V): the token that each hidden state scores. For a causal model it is the
            next token; this function does not shift.
        temperature: the logits are divided by it; above 0.
        keep: bytes that the forward pass may keep for the backward pass, in which the distributions [K, V] of the first
            K tokens are stored in the dtype of `hidden`. By default as many as the weight has, so that up to H tokens
            are all kept; 0 keeps nothing. Nothing is kept without gradients, nor in float32 and float64, whose
            gradients would lose digits.
        entropy: whether to return the entropy too.
        backend: "auto" uses Triton kernels on a GPU and torch elsewhere; or "torch", or "triton".
        group: the ranks over which the vocabulary is split; None if `lm_head_weight` is the whole head.
        logits: what makes logits beside the weight; None for the product alone. With `group`, `bias` and `lora_b` have
            the rows of this rank, everything else is the same on all ranks, and so is the gradient of `lora_a`. With a
            soft cap nothing is kept: a rounded probability says too little about the slope of the cap.

    Returns:
        log_probs [T], or (log_probs [T], entropy [T]): float32, or float64 for float64 inputs; differentiable with
        respect to `hidden`, `lm_head_weight` and the tensors of `logits`. On a GPU, ids outside [0, V) are not checked,
        which would synchronise: their log-prob is NaN, and their entropy is correct.

    Raises:
        LayoutError: shapes, dtypes or devices that do not match; on the CPU, an id outside [0, V); an invalid
            temperature, keep, backend, group or logits; a DTensor without `group`. With `group`, on all ranks if
            it is raised on one, or if ranks differ in what must be the same. Ranks are numbered as in the default
            group.
        MaskpackError: in the backward pass with create_graph=True.
    """
    options = temperature, keep, entropy, backend
    if group is None:
        weight, split = split_head.whole_head(lm_head_weight), None
        layer, curve, kernels = _checked(hidden, weight, token_ids, logits, *options)
    else:
        split_head.need_group(group)
        try:
            weight = split_head.slice_of_head(lm_head_weight, group)
            layer, curve, kernels = _checked(hidden, weight, token_ids, logits, *options, split=True)
            split_head.need_backend(hidden.device, group)
            message = split_head.message_of(hidden, weight, token_ids, temperature, entropy, layer)
        except Exception:
            split_head.tell_failure(group)
            raise
        split = split_head.agree(message, group)
    vocabulary = weight.shape[0] if split is None else split.vocabulary
    _check_ids(token_ids, vocabulary)
    ids = token_ids.long().contiguous()
    ids = ids if split is None else ids - split.first
    factors = hidden, weight, *layer.tensors
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in factors)
    kept = _kept_tokens(hidden, weight, keep) if differentiable and curve.inner is None else 0
    how = _How(curve, float(layer.lora_scale), _chunk_rows(hidden, vocabulary), kept, bool(entropy), kernels, split)
    apply = cast(Callable[..., Any], _LogProbs.apply)
    return apply(*factors, ids, how)


class _How(NamedTuple):
    """The arguments of `_LogProbs` beside tensors."""

    curve: Curve
    lora_scale: float
    chunk: int
    kept_tokens: int
    entropy: bool
    kernels: bool
    split: Split | None


class _Layer(NamedTuple):
    """The tensors that logits are made of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def _checked(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logits: Any,
    temperature: float,
    keep: int | None,
    entropy: bool,
    backend: Backend,
    *,
    split: bool = False,
) -> tuple[Logits, Curve, bool]:
    """The logits, their curve, and whether kernels are used. Checks everything but the bounds of the ids, which are
    those of all slices."""
    _check_tensors(hidden, weight, ids, split)
    _check_options(temperature, keep)
    flag(entropy, "entropy", "packed_log_probs")
    kernels = uses_triton(hidden.device, backend, "packed_log_probs")
    is_double = hidden.dtype == torch.float64
    if is_double and backend == "triton":
        raise LayoutError(
            'packed_log_probs: backend is "triton", but hidden is torch.float64; its kernels compute in float32. '
            'Use backend="auto".'
        )
    layer = check_logits(logits, weight)
    return layer, Curve.of(layer, float(temperature)), kernels and not is_double


def _check_tensors(hidden: Tensor, weight: Tensor, ids: Tensor, split: bool) -> None:
    for name, x in (("hidden", hidden), ("lm_head_weight", weight), ("token_ids", ids)):
        if not isinstance(x, Tensor):
            raise LayoutError(f"packed_log_probs: {name} is {said(x)}; expected a tensor. Pass one.")
    seen = f"packed_log_probs: hidden is {_form(hidden)}; lm_head_weight is {_form(weight)}; token_ids are {_form(ids)}"
    if any(x.is_nested or x.layout != torch.strided for x in (hidden, weight, ids)):
        raise LayoutError(f"{seen}; expected strided tensors. Pass the values of jagged ones.")
    if isinstance(hidden, DTensor) or isinstance(ids, DTensor):
        raise LayoutError(f"{seen}, DTensors among them; expected plain hidden and token_ids. Pass full_tensor().")
    if (hidden.dim(), weight.dim(), ids.dim()) != (2, 2, 1):
        raise LayoutError(f"{seen}; expected [T, H], [V, H] and [T]. Pack the padded dims first (ops.pack).")
    empty = weight.shape[0] == 0 and not split
    if hidden.shape[1] != weight.shape[1] or hidden.shape[0] != ids.shape[0] or empty:
        rows = "this rank's rows of the head" if split else "the whole head"
        raise LayoutError(
            f"{seen}; expected [T, H], [V, H] and [T] with one H, one T and V >= {int(not split)}. "
            f"Pass {rows}, and one token id for each hidden state."
        )
    if hidden.dtype != weight.dtype or hidden.dtype not in _DTYPES:
        raise LayoutError(f"{seen}; expected hidden and lm_head_weight of one floating dtype. Cast one of them.")
    if ids.dtype not in (torch.int64, torch.int32):
        raise LayoutError(f"{seen}; expected token_ids of int64 or int32. Cast them.")
    if not hidden.device == weight.device == ids.device:
        raise LayoutError(f"{seen}; expected one device. Move them to the device of the weight.")


def _check_ids(ids: Tensor, vocabulary: int) -> None:
    if ids.device.type == "cpu" and ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise LayoutError(
                f"packed_log_probs: token_ids lie in [{low}, {high}]; expected [0, {vocabulary}), the rows of "
                "lm_head_weight, on all ranks together. Where no token is scored, pass 0 and mask the result."
            )


def _check_options(temperature: float, keep: int | None) -> None:
    is_number = isinstance(temperature, int | float | np.number) and not isinstance(temperature, bool | complex)
    if not is_number or not _COLDEST < float(temperature) < math.inf:
        raise LayoutError(
            f"packed_log_probs: temperature is {temperature!r:.60}; expected a finite number above 0. "
            "For a temperature of 0, take the argmax."
        )
    whole = isinstance(keep, int | np.integer) and not isinstance(keep, bool)
    if keep is not None and not (whole and keep >= 0):
        raise LayoutError(
            f"packed_log_probs: keep is {said(keep)}; expected a number of bytes, at least 0. Leave it out for the "
            "default."
        )


def _form(x: Tensor) -> str:
    shape = "jagged" if x.is_nested else tuple(x.shape)
    return f"{shape} {str(x.dtype).removeprefix('torch.')} on {x.device}"


# -------------------------------------------------------------------- the loops


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Takes the tensors of a _Layer, ids and a _How."""
        layer, ids, how = _Layer(*given[:5]), cast(Tensor, given[5]), cast(_How, given[6])
        hidden, rows = layer.hidden, layer.weight.shape[0]
        kept = _buffer(how.kept_tokens, rows, hidden.dtype, hidden.device) if how.kept_tokens else None
        thin = _Thin.of(layer, how.lora_scale)
        if how.split is None:
            (log_probs, lse, entropy), shift = _forward(layer, thin, ids, how, kept), None
        else:
            wide = _wide(hidden.dtype)
            top = torch.full(ids.shape, torch.finfo(wide).min, dtype=wide, device=ids.device)
            token, total, weighted = _forward(layer, thin, ids, how, kept, top)
            log_probs, lse, entropy, shift = split_head.combined(top, token, total, weighted, ids, rows, how.split)
        ctx.set_materialize_grads(False)
        others = torch.expm1(log_probs).neg_() if any(ctx.needs_input_grad) else None
        left, right = (None, None) if thin is None else thin
        shift = shift if kept is not None else None
        ctx.save_for_backward(*layer, left, right, ids, others, lse, entropy, shift, kept)
        ctx.how = how
        return log_probs if entropy is None else (log_probs, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # once_differentiable would silently return a zero second derivative if the output's gradient is a constant.
        if torch.is_grad_enabled():
            raise MaskpackError(
                "packed_log_probs: backward ran with create_graph=True; it can be differentiated once. For second "
                "derivatives, use the plain program in its docstring."
            )
        *layer, left, right, ids, others, lse, entropy, shift, kept = ctx.saved_tensors
        first, second = (None if grad is None else grad.contiguous() for grad in (*grads, None)[:2])
        if first is None and second is None:
            return (None,) * 7
        how: _How = ctx.how
        thin = None if left is None else _Thin(left, right)
        of_logits = Slopes(ids, others, lse, entropy, first, second, how.curve, shift)
        return *_backward(_Layer(*layer), thin, of_logits, kept, ctx.needs_input_grad[:5], how), None, None


class _Thin(NamedTuple):
    """The bias and LoRA: left [T, R] @ right.T [R, V] is added to the logits, in float32 (float64). LoRA is first."""

    left: Tensor
    right: Tensor

    @staticmethod
    def of(layer: _Layer, lora_scale: float) -> _Thin | None:
        hidden, _, bias, lora_a, lora_b = layer
        wide, columns = _wide(hidden.dtype), [] if lora_b is None else [lora_b]
        columns += [] if bias is None else [bias.unsqueeze(1)]
        if not columns:
            return None
        right = torch.cat([column.to(wide) for column in columns], 1)
        left = torch.ones((hidden.shape[0], right.shape[1]), dtype=wide, device=hidden.device)
        if lora_a is not None:
            rank, given = lora_a.shape[0], lora_a.to(wide).t()
            for rows in _pieces(hidden.shape[0]):
                _product(hidden[rows].to(wide), given, left[rows, :rank])
            left[:, :rank] *= lora_scale
        return _Thin(left, right)

    def add(self, rows: slice, columns: slice, logits: Tensor) -> None:
        _product(self.left[rows], self.right[columns].t(), logits, add=True)


class Slopes(NamedTuple):
    """The inputs of the gradient of the logits: tensors [T], and the curve. `others` is 1 - p, the probability of all
    tokens except the given one, computed without the cancellation of that difference. Without `lse`, stored
    probabilities are given in place of logits; `shift` is the log of the probability of all that are stored, or None
    for 0."""

    ids: Tensor
    others: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    grad_log_probs: Tensor | None
    grad_entropy: Tensor | None
    curve: Curve
    shift: Tensor | None = None

    def of(self, rows: slice, *, kept: bool = False) -> Slopes:
        parts: list[Any] = [x[rows] if isinstance(x, Tensor) else x for x in self]
        return Slopes(*parts)._replace(**{"lse": None} if kept else {})


class _Program(NamedTuple):
    """`reduce_rows` and `differentiate`, in Triton or torch."""

    reduce_rows: Callable[..., None]
    differentiate: Callable[..., None]


def _program(kernels: bool) -> _Program:
    if not kernels:
        return _Program(reduce_rows, differentiate)
    from maskpack.ops import log_probs_triton  # Triton is imported on first use

    return _Program(log_probs_triton.reduce_rows, log_probs_triton.differentiate)


def _forward(
    layer: _Layer, thin: _Thin | None, ids: Tensor, how: _How, kept: Tensor | None, top: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log_probs, log-sum-exp and entropy, [T] each. Stores the probabilities of the first tokens in `kept` [K, V].
    With `top` [T], what `reduce_rows` writes instead; zeros without a row of the weight, and `top` as it was."""
    hidden, weight = _matrix(layer.hidden), _matrix(layer.weight)
    tokens, vocabulary, wide = hidden.shape[0], weight.shape[0], _wide(hidden.dtype)
    fresh = torch.empty if vocabulary else torch.zeros
    log_probs, lse = (fresh(tokens, dtype=wide, device=hidden.device) for _ in range(2))
    entropy = fresh(tokens, dtype=wide, device=hidden.device) if how.entropy else None
    buffer = _buffer(min(how.chunk, tokens), vocabulary, wide, hidden.device)
    columns = _cast_columns(weight)
    for begin in range(0, tokens if vocabulary else 0, how.chunk):
        rows = slice(begin, min(begin + how.chunk, tokens))
        logits = buffer[: rows.stop - begin]
        for first in range(0, vocabulary, columns):
            part = slice(first, first + columns)
            _product(hidden[rows], weight[part].t(), logits[:, part])
        if thin is not None:
            thin.add(rows, slice(None), logits)
        some_kept = kept if kept is not None and begin < kept.shape[0] else None
        parts = [None if x is None else x[rows] for x in (log_probs, lse, entropy, some_kept, top)]
        _program(how.kernels).reduce_rows(logits, ids[rows], how.curve, *parts)
    return log_probs, lse, entropy


def _backward(
    layer: _Layer, thin: _Thin | None, slopes: Slopes, kept: Tensor | None, needed: Sequence[bool], how: _How
) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors of the layer, or None where not needed; those of hidden and lora_a of all slices."""
    hidden, weight = layer.hidden, layer.weight
    fresh = torch.empty if weight.shape[0] else torch.zeros
    grad_hidden = fresh(hidden.shape, dtype=_wide(hidden.dtype), device=hidden.device) if needed[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None
    thin_grads = _ThinGrads.of(thin, layer, needed)
    blocks = _Blocks.of(hidden, weight, needed[1], all_kept=kept is not None and len(kept) == len(hidden))
    _add_blocks(layer, thin, slopes, kept, blocks, how, (grad_hidden, grad_weight, thin_grads))
    del blocks  # before the rounded gradient is allocated
    grad_a = thin_grads.through(layer, how.lora_scale, grad_hidden, needed[3])
    for whole in (grad_hidden, grad_a):
        if whole is not None and how.split is not None:
            split_head.add_up(whole, how.split)
    of_bias, of_b = thin_grads.right_parts(layer, needed)
    wanted = (grad_hidden, grad_weight, of_bias, grad_a, of_b)
    return tuple(None if x is None or of is None else x.to(of.dtype) for x, of in zip(wanted, layer, strict=True))


def _add_blocks(
    layer: _Layer,
    thin: _Thin | None,
    slopes: Slopes,
    kept: Tensor | None,
    blocks: _Blocks,
    how: _How,
    grads: tuple[Tensor | None, Tensor | None, _ThinGrads],
) -> None:
    """Computes the gradient of the logits, slice by slice and block by block, and adds both products of each."""
    hidden, weight = _matrix(layer.hidden), _matrix(layer.weight)
    grad_hidden, grad_weight, thin_grads = grads
    for first in range(0, weight.shape[0], blocks.columns):
        columns = slice(first, min(first + blocks.columns, weight.shape[0]))
        part, sums = weight[columns], None
        if grad_weight is not None:
            sums = grad_weight[columns] if blocks.sums is None else blocks.sums[: len(part)]
        for begin in range(0, max(len(hidden), 1), blocks.rows):
            rows = slice(begin, min(begin + blocks.rows, len(hidden)))
            grad = _grad_of_block(hidden, part, thin, slopes, kept, blocks, rows, columns, _program(how.kernels))
            if sums is not None:
                _product(grad.t(), hidden[rows], sums, add=begin > 0)
            if grad_hidden is not None:
                _product(grad, part, grad_hidden[rows], add=first > 0)
            if thin is not None:
                thin_grads.add(thin, grad, rows, columns)
        if grad_weight is not None and blocks.sums is not None and sums is not None:
            grad_weight[columns] = sums


def _grad_of_block(
    hidden: Tensor,
    part: Tensor,
    thin: _Thin | None,
    slopes: Slopes,
    kept: Tensor | None,
    blocks: _Blocks,
    rows: slice,
    columns: slice,
    program: _Program,
) -> Tensor:
    """The gradient of the logits of some tokens and columns: from what was kept, or from logits computed again."""
    logits, grad = (buffer[: rows.stop - rows.start, : len(part)] for buffer in (blocks.logits, blocks.grad))
    middle = min(max(rows.start, 0 if kept is None else len(kept)), rows.stop)
    count = middle - rows.start
    if kept is not None and count:
        some = slice(rows.start, middle)
        program.differentiate(kept[some, columns], grad[:count], columns.start, slopes.of(some, kept=True))
    if middle < rows.stop:
        some = slice(middle, rows.stop)
        _product(hidden[some], part.t(), logits[count:])
        if thin is not None:
            thin.add(some, columns, logits[count:])
        program.differentiate(logits[count:], grad[count:], columns.start, slopes.of(some))
    return grad


class _Blocks(NamedTuple):
    """How the backward pass divides the logits, and its buffers: of logits, of their gradient, which may be the same
    memory, and of the sums of the weight's gradient, if these are rounded afterwards."""

    rows: int
    columns: int
    logits: Tensor
    grad: Tensor
    sums: Tensor | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, of_weight: bool, *, all_kept: bool) -> _Blocks:
        (tokens, width), vocabulary, wide = hidden.shape, weight.shape[0], _wide(hidden.dtype)
        rounded = _has_wide_products(hidden) and hidden.dtype != wide
        dtypes = [wide, hidden.dtype] if rounded else [wide]
        if rounded and all_kept:
            del dtypes[0]
        most = _BLOCK_TOKENS if of_weight else _BLOCK_TOKENS // 4  # sums of the weight's gradient want large blocks
        rows = max(tokens if tokens <= 2 * most else _piece(tokens, most, _TILE), 1)
        summed = of_weight and rows < tokens and weight.dtype != wide
        size = rows * sum(dtype.itemsize for dtype in dtypes) + width * wide.itemsize * summed
        columns = _slice_columns(vocabulary, _SLICE_BYTES // size, rows, width)
        buffers = [_buffer(rows, min(columns, vocabulary), dtype, hidden.device) for dtype in dtypes]
        sums = torch.empty((min(columns, vocabulary), width), dtype=wide, device=hidden.device) if summed else None
        return _Blocks(rows, columns, buffers[0], buffers[-1], sums)


class _ThinGrads(NamedTuple):
    """The sums of the gradients of both thin matrices, or None where they are not needed."""

    left: Tensor | None
    right: Tensor | None

    @staticmethod
    def of(thin: _Thin | None, layer: _Layer, needed: Sequence[bool]) -> _ThinGrads:
        if thin is None:
            return _ThinGrads(None, None)
        through = layer.lora_a is not None and (needed[0] or needed[3])
        left = torch.zeros_like(thin.left) if through else None
        return _ThinGrads(left, torch.zeros_like(thin.right) if needed[2] or needed[4] else None)

    def add(self, thin: _Thin, grad: Tensor, rows: slice, columns: slice) -> None:
        """Adds what the gradient of a block of logits says. Factors take its dtype, which the logits' own has too."""
        if self.left is not None:
            _product(grad, thin.right[columns].to(grad.dtype), self.left[rows], add=True)
        if self.right is not None:
            _product(grad.t(), thin.left[rows].to(grad.dtype), self.right[columns], add=True)

    def through(self, layer: _Layer, lora_scale: float, grad_hidden: Tensor | None, needs_a: bool) -> Tensor | None:
        """The gradient of lora_a in float32 (float64), or None. Adds that of hidden by way of lora_a."""
        if self.left is None or layer.lora_a is None:
            return None
        wide = self.left.dtype
        given = layer.lora_a.to(wide)
        grad_a = torch.zeros_like(given) if needs_a else None
        for rows in _pieces(len(layer.hidden)):
            slope = self.left[rows, : given.shape[0]] * lora_scale
            if grad_hidden is not None:
                _product(slope, given, grad_hidden[rows], add=True)
            if grad_a is not None:
                _product(slope.t(), layer.hidden[rows].to(wide), grad_a, add=True)
        return grad_a

    def right_parts(self, layer: _Layer, needed: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of bias and lora_b in float32 (float64)."""
        if self.right is None:
            return None, None
        of_bias = self.right[:, -1] if layer.bias is not None and needed[2] else None
        of_b = self.right[:, : layer.lora_b.shape[1]] if layer.lora_b is not None and needed[4] else None
        return of_bias, of_b


def _kept_tokens(hidden: Tensor, weight: Tensor, budget: int | None) -> int:
    """The number of tokens whose distributions are kept: whole tiles, or all."""
    if hidden.dtype not in _HALF or weight.shape[0] == 0:
        return 0
    budget = weight.numel() * weight.itemsize if budget is None else int(budget)
    most = budget // (hidden.itemsize * _aligned(weight.shape[0]))
    return hidden.shape[0] if most >= hidden.shape[0] else most // _TILE * _TILE


def _chunk_rows(hidden: Tensor, vocabulary: int) -> int:
    """The rows of a chunk, whose logits of this vocabulary fit into _CHUNK_BYTES."""
    return _piece(hidden.shape[0], _CHUNK_BYTES // (_wide(hidden.dtype).itemsize * _aligned(vocabulary)), _TILE)


def _slice_columns(vocabulary: int, most: int, block: int, width: int) -> int:
    """The columns of a slice, about `most`, with which products of [block, columns] and [columns, width] leave few
    processors without a tile. Small results make few waves of tiles, of which the last may be nearly empty."""

    def waves(rows: int, columns: int) -> int:
        return -(-(-(-rows // _TILE) * -(-columns // _ALIGN)) // _PROCESSORS)

    def cost(columns: int) -> int:
        return -(-vocabulary // columns) * (waves(block, columns) * width + waves(columns, width) * block)

    even = _piece(vocabulary, most, _ALIGN)
    return min(range(even, even // 2, -_ALIGN), key=cost)


# -------------------------------------------------------------------- products and their buffers


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False) -> None:
    """Writes a @ b to `out`, accumulated in float32 (float64) and rounded once. With `add`, adds it to `out`, which
    must be wide, because a GPU rounds the product before the sum. `out=` is not affected by autocast."""
    wide = _wide(a.dtype)
    assert not add or out.dtype == wide
    if not _has_wide_products(a):
        a, b = a.to(wide), b.to(wide)
        if out.dtype != wide:
            out.copy_(torch.mm(a, b, out=torch.empty(out.shape, dtype=wide, device=out.device)))
            return
    more: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, **more, out=out)
    else:
        torch.mm(a, b, **more, out=out)


def _has_wide_products(x: Tensor) -> bool:
    """Whether half-precision products can return float32; if not, their factors are cast."""
    return x.device.type == "cuda" and torch.version.hip is None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _cast_columns(weight: Tensor) -> int:
    """Rows of the weight in one product of the forward pass: all, or as many as are cast at once."""
    wide = _wide(weight.dtype)
    if weight.dtype == wide or _has_wide_products(weight):
        return weight.shape[0]
    return _piece(weight.shape[0], _SLICE_BYTES // (wide.itemsize * max(weight.shape[1], 1)), _ALIGN)


def _matrix(x: Tensor) -> Tensor:
    """`x`, made contiguous if each product would copy it."""
    return x if 1 in x.stride() else x.contiguous()


def _buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((rows, _aligned(columns)), dtype=dtype, device=device)[:, :columns]


def _pieces(tokens: int) -> list[slice]:
    """Rows of which a wide copy is made at once."""
    return [slice(begin, begin + _BLOCK_TOKENS // 4) for begin in range(0, tokens, _BLOCK_TOKENS // 4)]


def _aligned(columns: int) -> int:
    return -(-columns // _ALIGN) * _ALIGN


def _piece(length: int, most: int, multiple: int) -> int:
    """The size of equal pieces of `length`: about `most`, and a positive multiple of `multiple`."""
    most = max(most // multiple, 1) * multiple
    pieces = max(-(-length // most), 1)
    return max(-(-length // (pieces * multiple)), 1) * multiple


# -------------------------------------------------------------------- the specification of the kernels


def reduce_rows(
    logits: Tensor,
    ids: Tensor,
    curve: Curve,
    log_probs: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    kept: Tensor | None,
    top: Tensor | None = None,
) -> None:
    """Writes log_probs, log-sum-exp and entropy [N] of softmax(logits * scale), and the `stored` probabilities of
    the first rows to `kept` [K, V]. Overwrites the logits [N, V]. The log-prob of an id outside [0, V) is NaN. With
    a soft cap, tanh(logits * inner) is in place of the logits.

    With `top` [N], writes what ranks make these of, who have a slice of the vocabulary each:

        top        the largest logit * scale
        log_probs  logit * scale of the id, NaN outside the slice
        lse        sum of exp(logit * scale - top)
        entropy    sum of exp(logit * scale - top) * (logit * scale - top)
    """
    known = (ids >= 0) & (ids < logits.shape[1])
    if curve.inner is not None:
        logits.mul_(curve.inner).tanh_()
    logits.mul_(curve.scale)
    highest = logits.amax(1, keepdim=True)
    place = ids.where(known, 0).unsqueeze(1)
    if top is not None:
        top.copy_(highest.squeeze(1))
        log_probs.copy_(logits.gather(1, place).squeeze(1).where(known, math.nan))
    logits.sub_(highest)  # differences of large logits are exact, differences of their sums are not
    token = logits.gather(1, place).squeeze(1)
    powers = logits.exp_() if entropy is None and kept is None else logits.exp()
    total = powers.sum(1)
    log_sum = total.log()
    if top is None:
        log_probs.copy_((token - log_sum).where(known, math.nan))
    lse.copy_(log_sum + highest.squeeze(1) if top is None else total)
    if entropy is not None:
        weighted = powers.mul_(logits).sum(1)
        entropy.copy_(log_sum - weighted / total if top is None else weighted)
    if kept is not None:
        rows = kept.shape[0]
        kept.copy_(stored(logits[:rows].sub_(log_sum[:rows].unsqueeze(1))))


def stored(log_p: Tensor) -> Tensor:
    """Numbers that can be rounded to half precision: p, or log p < 0 where p is above one half. Then the relative error
    of p is that of the dtype for all p, and log p is precise where it is near 0. Both stay so if p is the
    probability within a slice of the vocabulary, and the log of that of the slice is added to log p."""
    return log_p.where((log_p > LIKELY) & (log_p < SURE), log_p.exp() * UNIT)


def _restored(x: Tensor) -> tuple[Tensor, Tensor]:
    """p and log p of stored numbers; log p is 0 where p is 0."""
    x = x.to(_wide(x.dtype))
    p = x.exp().where(x < 0, x / UNIT)
    return p, x.where(x < 0, p.where(p > 0, 1).log())


def differentiate(logits: Tensor, grad: Tensor, first: int, slopes: Slopes) -> None:
    """Writes the gradient of the logits [T, N] of vocabulary entries `first` to `first + N - 1` to `grad`, of any
    dtype, which may share the memory of the logits:

    scale * (grad_log_probs * ([token == id] - p) - grad_entropy * p * (log p + entropy)),  log p = logits * scale - lse

    where `others` is 1 - p of the id. Without `lse`, the logits are `stored` probabilities, in half precision,
    and log p is theirs, plus `shift` [T] if it is given. With a soft cap, which is not stored, x =
    tanh(logits * inner) is in place of the logits, and the gradient is that of the logits: times inner * (1 - x^2).
    """
    ids, others, lse, entropy, grad_log_probs, grad_entropy, (scale, inner), shift = slopes
    bend = None
    if lse is None:
        p, log_p = _restored(logits)
        if shift is not None:
            p, log_p = p * shift.exp().unsqueeze(1), log_p + shift.unsqueeze(1)
    else:
        if inner is not None:
            logits, bend = _capped(logits * inner, inner)
        log_p = (logits * scale).sub_(lse.unsqueeze(1))
        p = log_p.exp()
    factor = log_p.zero_() if grad_entropy is None else log_p
    if grad_entropy is not None:
        assert entropy is not None
        factor.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
    if grad_log_probs is None:
        factor.mul_(p).mul_(-scale)
        grad.copy_(factor if bend is None else factor.mul_(bend))
        return
    place = ids - first
    here = (place >= 0) & (place < logits.shape[1])
    column, slope = place.where(here, 0).unsqueeze(1), grad_log_probs.where(here, 0).unsqueeze(1)
    factor.add_(grad_log_probs.unsqueeze(1)).scatter_add_(1, column, -slope).mul_(p).neg_()
    factor.scatter_add_(1, column, slope * others.where(here, 0).unsqueeze(1))
    factor.mul_(scale)
    grad.copy_(factor if bend is None else factor.mul_(bend))


def _capped(x: Tensor, inner: float) -> tuple[Tensor, Tensor]:
    """tanh(x), and inner * (1 - tanh(x)^2) without the cancellation of that difference."""
    power = x.abs().mul_(-2).exp_()
    return x.tanh(), power.mul(4 * inner).div_(power.add_(1).square_())
