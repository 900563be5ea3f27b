"""packed_log_probs: log-probs of given tokens from hidden states, without storing all logits.

    forward   a piece of logits at a time          logits [M, N] -> sums over each row and slice (`Parts`), which
                                                   `split_head.combined` makes log-probs and entropies of
    backward  a range of the vocabulary at a time  pieces of logits -> their gradient [block, range] -> both matrix
              and in it a block of tokens          products, summed in float32

A piece is a tile in the registers of the kernel that multiplies (log_probs_fused_triton.py), or it is written to one
float32 buffer that stays in the cache of a GPU, where the next kernel reads it (log_probs_triton.py; in plain torch
below, which specifies it). Slices of the vocabulary are the same for all calls, and products have whole tiles of rows,
so a token has the same bits wherever it stands. The gradient of the logits is rounded to the dtype of the weight before
the products. Each row of the weight's gradient is one sum over all tokens, rounded once. If memory is given to `keep`
all tokens, the forward pass stores the probabilities [T, V] within each slice in the dtype of hidden (`stored`), and
their gradient replaces them; otherwise the logits are computed again. A bias and LoRA are one more product, of two thin
float32 matrices (`_Thin`), that is added to each piece.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, cast, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor

from maskpack.core.arguments import flag, said, whole
from maskpack.core.backends import Backend, uses_triton
from maskpack.errors import LayoutError, MaskpackError
from maskpack.ops import split_head
from maskpack.ops.logits import Curve, Logits, check_logits, is_positive
from maskpack.ops.sampling_mask import SamplingMask, check_sampling_mask
from maskpack.ops.split_head import Parts, Split

SLICE = 4096  # entries of the vocabulary whose logits are summed at once; a power of 2
_PIECE_ROWS, _PIECE_COLUMNS = 2048, 4096  # of logits in float32, which fit into the cache; fewer rows are wider
_STEPS = {"cuda": 128}  # rows of a product are a multiple, with which the bits of a row do not depend on the others
_STEP = 16  # on other devices
_RANGE_BYTES = 1 << 28  # logits of a piece, the gradient of a block and a range, the sums of the weight's gradient
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
        """The options of `packed_log_probs` beside `entropy` and `statistics`."""

        temperature: float
        keep: int | None
        backend: Backend
        group: ProcessGroup | None
        logits: Logits | None
        sampling_mask: Tensor | tuple[Tensor, Tensor] | None


class TokenStatistics(NamedTuple):
    """What `packed_log_probs` returns with `statistics`, of the distribution p of each token, [T] each.

    Attributes:
        log_probs, entropy: as without `statistics`.
        sum_p2: the sum of p^2, differentiable; 1 / sum_p2 is a number of likely ids.
        is_top1: bool, whether no id has a larger logit than the token.
    """

    log_probs: Tensor
    entropy: Tensor
    sum_p2: Tensor
    is_top1: Tensor


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
@overload
def packed_log_probs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    token_ids: Tensor,
    *,
    statistics: Literal[True],
    **options: Unpack[_Options],
) -> TokenStatistics: ...
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
    sampling_mask: Tensor | tuple[Tensor, Tensor] | None = None,
    statistics: bool = False,
) -> Any:
    """Computes the log-prob of one token for each hidden state, and optionally the entropy, without storing all logits.

        log_p = (hidden.float() @ lm_head_weight.float().T / temperature).log_softmax(-1)        # [T, V], not stored
        log_probs[t] = log_p[t, token_ids[t]]
        entropy[t]   = -(log_p[t].exp() * log_p[t]).sum()

    With `logits`, the output layer is more than this product: a bias, LoRA, a scale, a soft cap (`ops.Logits`).

    Logits are accumulated and reduced in float32, so the result is more exact than plain torch in half precision. The
    backward pass rounds their gradient to the dtype of `hidden` once; it is exact for tokens with a probability near 1,
    too. It computes logits again in float32, unless all tokens fit into `keep`: four matrix products, or three. Besides
    its results and the kept bytes, the forward pass allocates about 0.2 GiB for 32,768 tokens, the backward pass 0.25
    GiB and a float32 [T, H]; with all tokens kept on a GPU, it works in their memory. Under torch.compile the call is a
    graph break.

    With `group`, the head is split by rows over the ranks of the group, as in vocabulary-parallel layers. All ranks
    call with the same hidden states and ids, each with its own slice of the weight, and all get the same results. They
    run the same loss and call backward; the gradients are those of one such loss, not of the sum over ranks: that of
    `hidden` is whole and the same on all ranks, that of the weight belongs to the slice. No rank holds more than its
    slice. The forward pass takes three all-reduces: of 15 numbers a rank, for which the host waits; of [T] maxima; of
    [2, T] sums ([3, T] with entropy). The backward pass takes one, of the gradient of `hidden` in float32, and one of
    that of `lora_a`.

    Args:
        hidden: [T, H] float16, bfloat16, float32 or float64, any strides; packed hidden states.
        lm_head_weight: [V, H] in the dtype of `hidden`, V >= 1. With `group`, the rows [V_r, H] of this rank,
            V_r >= 0: in the order of the ranks they make up the head, and they may differ in number. Or a DTensor
            [V, H], Shard(0) over a mesh of one dim with the ranks of `group`; its gradient is such a DTensor.
        token_ids: [T] int64 or int32, in [0, V): the token that each hidden state scores. For a causal model it is the
            next token; this function does not shift.
        temperature: the logits are divided by it; above 0.
        keep: bytes that the forward pass may keep for the backward pass. If they hold the distributions [T, V] of all
            tokens in the dtype of `hidden`, these are kept, otherwise nothing. By default as many as the weight has, so
            that up to H tokens are kept. Nothing is kept without gradients, nor in float32 and float64, whose gradients
            would lose digits.
        entropy: whether to return the entropy too.
        backend: "auto" uses Triton kernels on a GPU and torch elsewhere; or "torch", or "triton".
        group: the ranks over which the vocabulary is split; None if `lm_head_weight` is the whole head.
        logits: what makes logits beside the weight; None for the product alone. With `group`, `bias` and `lora_b` have
            the rows of this rank, everything else is the same on all ranks, and so is the gradient of `lora_a`. With a
            soft cap nothing is kept: a rounded probability says too little about the slope of the cap.
        sampling_mask: the ids that the sampler could have drawn, with top-p or top-k, for each token: a jagged tensor
            [T, j], or ids [K] and offsets [T + 1], int64 or int32. Everything returned is of the distribution over
            these ids: a softmax of their logits alone. A token without ids has no restriction. A token outside its own
            ids has log-prob -inf. Not with `group`. On a GPU, offsets are not checked.
        statistics: whether to return TokenStatistics. Not with `group`.

    Returns:
        log_probs [T], or (log_probs [T], entropy [T]), or TokenStatistics: float32, or float64 for float64 inputs;
        differentiable with respect to `hidden`, `lm_head_weight` and the tensors of `logits`. On a GPU, ids outside
        [0, V) are not checked, which would synchronise: their log-prob is NaN, and their entropy is correct.

    Raises:
        LayoutError: shapes, dtypes or devices that do not match; on the CPU, an id outside [0, V); an invalid
            temperature, keep, backend, group or logits; a DTensor without `group`. With `group`, on all ranks if
            it is raised on one, or if ranks differ in what must be the same. Ranks are numbered as in the default
            group.
        MaskpackError: in the backward pass with create_graph=True.
    """
    message = None
    with split_head.telling(group):
        weight = split_head.own_rows(lm_head_weight, group)
        _check_tensors(hidden, weight, token_ids, group is not None)
        _check_options(temperature, keep, entropy, statistics)
        kernels = _uses_kernels(hidden, backend)
        layer = check_logits(logits, weight)
        curve = Curve.of(layer, float(temperature))
        if group is not None:
            given = {"sampling_mask": sampling_mask is not None, "statistics": statistics}
            if refused := " and ".join(name for name, wanted in given.items() if wanted):
                raise LayoutError(
                    f"packed_log_probs: {refused} with group; expected a whole head. Leave one of them out."
                )
            message = split_head.message_of(hidden, weight, token_ids, temperature, entropy, layer, group)
    split = None if message is None or group is None else split_head.agree(message, group)
    vocabulary = weight.shape[0] if split is None else split.vocabulary
    _check_ids(token_ids, vocabulary)
    ids = token_ids.long().contiguous()
    ids = ids if split is None else ids - split.first
    factors = hidden, weight, *layer.tensors
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in factors)
    kept = _kept_tokens(hidden, weight, keep) if differentiable and curve.inner is None else 0
    plain = sampling_mask is None and not any(x is not None for x in layer.tensors)
    fused = kernels and plain and _fused().fits(hidden, weight)
    how = _How(
        curve, float(layer.lora_scale), kept, bool(entropy or statistics), bool(statistics), kernels, fused, split
    )
    allowed = check_sampling_mask(sampling_mask, len(ids), vocabulary, hidden.device) or (None, None)
    out = cast(Callable[..., Any], _LogProbs.apply)(*factors, ids, *allowed, how)
    return TokenStatistics(*out) if statistics else out


class _How(NamedTuple):
    """The arguments of `_LogProbs` beside tensors."""

    curve: Curve
    lora_scale: float
    kept_tokens: int
    entropy: bool
    statistics: bool
    kernels: bool
    fused: bool
    split: Split | None

    @property
    def width(self) -> int:
        """The entries of the vocabulary in a slice."""
        return _fused().TILE if self.fused else SLICE


class _Layer(NamedTuple):
    """The tensors that logits are made of."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_a: Tensor | None
    lora_b: Tensor | None


def _uses_kernels(hidden: Tensor, backend: Backend) -> bool:
    kernels = uses_triton(hidden.device, backend, "packed_log_probs")
    is_double = hidden.dtype == torch.float64
    if is_double and backend == "triton":
        raise LayoutError(
            'packed_log_probs: backend is "triton", but hidden is torch.float64; its kernels compute in float32. '
            'Use backend="auto".'
        )
    return kernels and not is_double


def _check_options(temperature: float, keep: int | None, entropy: bool, statistics: bool) -> None:
    if not is_positive(temperature) or float(temperature) <= _COLDEST:
        raise LayoutError(
            f"packed_log_probs: temperature is {temperature!r:.60}; expected a finite number above 0. "
            "For a temperature of 0, take the argmax."
        )
    if keep is not None:
        whole(keep, "keep", 0, "packed_log_probs")
    flag(entropy, "entropy", "packed_log_probs")
    flag(statistics, "statistics", "packed_log_probs")


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


def _form(x: Tensor) -> str:
    shape = "jagged" if x.is_nested else tuple(x.shape)
    return f"{shape} {str(x.dtype).removeprefix('torch.')} on {x.device}"


# -------------------------------------------------------------------- the loops


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        """Takes the tensors of a _Layer, ids, those and offsets of a sampling mask or None, and a _How."""
        layer, ids, how = _Layer(*given[:5]), cast(Tensor, given[5]), cast(_How, given[8])
        if how.kernels:
            layer = layer._replace(hidden=_even(layer.hidden), weight=_even(layer.weight))
        hidden, rows = layer.hidden, layer.weight.shape[0]
        kept = _buffer(how.kept_tokens, rows, hidden.dtype, hidden.device)
        thin = _Thin.of(layer, how.lora_scale)
        parts = _forward(layer, thin, ids, how, kept, _sampling_mask(*given[6:8]))
        log_probs, lse, entropy, sum_p2, is_top1, shift = split_head.combined(parts, ids, rows, how.split)
        ctx.set_materialize_grads(False)
        others = torch.expm1(log_probs).neg_() if any(ctx.needs_input_grad) else None
        if others is not None and given[6] is not None:  # a token that is not allowed has no gradient of its own
            others.masked_fill_(log_probs == -math.inf, 0)
        left, right = (None, None) if thin is None else thin
        kept, shift = (kept, shift) if len(kept) else (None, None)
        ctx.save_for_backward(*layer, left, right, *given[6:8], ids, others, lse, entropy, sum_p2, shift, kept)
        ctx.how, ctx.spent = how, False
        if how.statistics:
            ctx.mark_non_differentiable(is_top1)
            return log_probs, entropy, sum_p2, is_top1
        return log_probs if entropy is None else (log_probs, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        # once_differentiable would silently return a zero second derivative if the output's gradient is a constant.
        if torch.is_grad_enabled():
            raise MaskpackError(
                "packed_log_probs: backward ran with create_graph=True; it can be differentiated once. For second "
                "derivatives, use the plain program in its docstring."
            )
        *layer, left, right, allowed, offsets, ids, others, lse, entropy, sum_p2, shift, kept = ctx.saved_tensors
        kept = None if ctx.spent else kept
        first, second, third = (None if grad is None else grad.contiguous() for grad in (*grads, None, None)[:3])
        if first is None and second is None and third is None:
            return (None,) * 9
        how: _How = ctx.how
        ctx.spent = ctx.spent or _in_place(layer[0], kept)
        thin = None if left is None else _Thin(left, right)
        mask = _sampling_mask(allowed, offsets)
        of_logits = Slopes(ids, others, lse, entropy, sum_p2, first, second, third, shift, mask, how.curve, how.width)
        return *_backward(_Layer(*layer), thin, of_logits, kept, ctx.needs_input_grad[:5], how), None, None, None, None


def _sampling_mask(ids: Tensor | None, offsets: Tensor | None) -> SamplingMask | None:
    if ids is None or offsets is None:
        return None
    size = _PIECE_ROWS * max(_PIECE_COLUMNS, SLICE)
    return SamplingMask(ids, offsets, torch.empty(size, dtype=torch.int8, device=ids.device))


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
            for rows in _wide_rows(hidden.shape[0]):
                states = _padded(hidden[rows], _BLOCK_TOKENS // 4 if hidden.is_cuda else _STEP).to(wide)
                product = torch.empty((len(states), rank), dtype=wide, device=hidden.device)
                _product(states, given, product)
                left[rows, :rank] = product[: rows.stop - rows.start]
            left[:, :rank] *= lora_scale
        return _Thin(left, right)


class Slopes(NamedTuple):
    """The inputs of the gradient of the logits: tensors [T], and the curve. `others` is 1 - p, the probability of all
    tokens except the given one, computed without the cancellation of that difference. Without `lse`, probabilities
    within slices of `width` are given in place of logits, and `shift` [T, S] is the log of the probability of each."""

    ids: Tensor
    others: Tensor
    lse: Tensor | None
    entropy: Tensor | None
    sum_p2: Tensor | None
    grad_log_probs: Tensor | None
    grad_entropy: Tensor | None
    grad_sum_p2: Tensor | None
    shift: Tensor | None
    mask: SamplingMask | None
    curve: Curve
    width: int = SLICE

    def of(self, rows: slice, *, kept: bool = False) -> Slopes:
        parts: list[Any] = [
            x[rows] if isinstance(x, Tensor) else x.of(rows) if isinstance(x, SamplingMask) else x for x in self
        ]
        return Slopes(*parts)._replace(**{"lse": None} if kept else {})


def _fused() -> Any:
    from maskpack.ops import log_probs_fused_triton  # Triton is imported on first use

    return log_probs_fused_triton


class _Program(NamedTuple):
    """`reduce_rows` and `differentiate`, in Triton or torch."""

    reduce_rows: Callable[..., None]
    differentiate: Callable[..., None]


def _program(kernels: bool) -> _Program:
    if not kernels:
        return _Program(reduce_rows, differentiate)
    from maskpack.ops import log_probs_triton  # Triton is imported on first use

    return _Program(log_probs_triton.reduce_rows, log_probs_triton.differentiate)


class Reduction(NamedTuple):
    """What `reduce_rows` takes and writes, of all tokens: it fills the parts, and `kept` [K, V] for tokens below K."""

    ids: Tensor
    curve: Curve
    parts: Parts
    kept: Tensor
    mask: SamplingMask | None


def _forward(
    layer: _Layer, thin: _Thin | None, ids: Tensor, how: _How, kept: Tensor, mask: SamplingMask | None
) -> Parts:
    """The parts of all slices. Stores the probabilities in `kept` [T, V], if it has rows."""
    hidden, weight = _matrix(layer.hidden), _matrix(layer.weight)
    tokens, vocabulary, wide = hidden.shape[0], weight.shape[0], _wide(hidden.dtype)
    parts = Parts.of(tokens, vocabulary, (how.entropy, how.statistics), wide, hidden.device, how.width)
    if how.fused:
        _fused().reduce_rows(hidden, weight, ids, how.curve, parts, kept if len(kept) else None)
        return parts
    buffer = _piece_buffer(tokens, vocabulary, wide, hidden.device)
    reduce, of_all = _program(how.kernels).reduce_rows, Reduction(ids, how.curve, parts, kept, mask)
    for rows, columns, logits in _pieces(hidden, weight, thin, slice(0, tokens), slice(0, vocabulary), buffer):
        reduce(logits, of_all, rows.start, columns.start)
    return parts


def _pieces(
    hidden: Tensor, weight: Tensor, thin: _Thin | None, rows: slice, columns: slice, buffer: Tensor
) -> Iterator[tuple[slice, slice, Tensor]]:
    """The rows, columns and logits of each piece, all in one buffer."""
    step = _STEPS.get(hidden.device.type, _STEP)
    for begin in range(rows.start, rows.stop, _PIECE_ROWS):
        some = slice(begin, min(begin + _PIECE_ROWS, rows.stop))
        states = _padded(hidden[some], step)
        left = None if thin is None else _padded(thin.left[some], step)
        count, most = len(states), _piece_columns(len(states), hidden.device)
        for first in range(columns.start, columns.stop, most):
            part = slice(first, min(first + most, columns.stop))
            stride = _aligned(part.stop - first)
            logits = buffer[: count * stride].view(count, stride)[:, : part.stop - first]
            _product(states, weight[part].t(), logits)
            if thin is not None and left is not None:
                _product(left, thin.right[part].t(), logits, add=True)
            yield some, part, logits[: some.stop - begin]


def _piece_columns(count: int, device: torch.device) -> int:
    """The columns of a piece of so many rows. On a GPU, products have so many tiles that none is split along H."""
    rows = count if device.type in _STEPS else _PIECE_ROWS
    return max(_PIECE_ROWS * _PIECE_COLUMNS // (rows * SLICE), 1) * SLICE


def _piece_buffer(tokens: int, vocabulary: int, wide: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the logits of any piece of so many tokens."""
    step = _STEPS.get(device.type, _STEP)
    counts = [-(-count // step) * step for count in (min(tokens, _PIECE_ROWS), tokens % _PIECE_ROWS)]
    sizes = [count * min(_piece_columns(count, device), _aligned(vocabulary)) for count in counts if count]
    return torch.empty(max(sizes, default=0), dtype=wide, device=device)


def _backward(
    layer: _Layer, thin: _Thin | None, slopes: Slopes, kept: Tensor | None, needed: Sequence[bool], how: _How
) -> tuple[Tensor | None, ...]:
    """The gradients of the tensors of the layer, or None where not needed; those of hidden and lora_a of all slices."""
    hidden, weight = layer.hidden, layer.weight
    fresh = torch.empty if weight.shape[0] else torch.zeros
    in_place = _in_place(hidden, kept)
    # One product makes it, and with so many tokens none of its sums is split; otherwise parts are added in float32.
    rounded = in_place and thin is None and how.split is None and len(hidden) >= _BLOCK_TOKENS
    dtype = hidden.dtype if rounded else _wide(hidden.dtype)
    grad_hidden = fresh(hidden.shape, dtype=dtype, device=hidden.device) if needed[0] else None
    grad_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if needed[1] else None
    thin_grads = _ThinGrads.of(thin, layer, needed)
    matrices = layer._replace(hidden=_matrix(hidden), weight=_matrix(weight))
    blocks = _Blocks.of(hidden, weight, needed[1], in_place=in_place, fused=how.fused)
    run = _Backward(matrices, thin, slopes, kept, blocks, how)
    run.add_to(grad_hidden, grad_weight, thin_grads)
    del matrices, blocks, run  # before the rounded gradient is allocated
    grad_a = thin_grads.through(layer, how.lora_scale, grad_hidden, needed[3])
    for part in (grad_hidden, grad_a):
        if part is not None and how.split is not None:
            split_head.reduced(part, ReduceOp.SUM, how.split.group)
    of_bias, of_b = thin_grads.right_parts(layer, needed)
    wanted = (grad_hidden, grad_weight, of_bias, grad_a, of_b)
    return tuple(None if x is None or of is None else x.to(of.dtype) for x, of in zip(wanted, layer, strict=True))


class _Backward(NamedTuple):
    """What the gradient of the logits is computed from, and in."""

    layer: _Layer
    thin: _Thin | None
    slopes: Slopes
    kept: Tensor | None
    blocks: _Blocks
    how: _How

    def add_to(self, grad_hidden: Tensor | None, grad_weight: Tensor | None, thin_grads: _ThinGrads) -> None:
        """Computes the gradient of the logits, range by range and block by block, and adds both products of each."""
        (hidden, weight, *_), thin, blocks = self.layer, self.thin, self.blocks
        for first in range(0, weight.shape[0], blocks.columns):
            columns = slice(first, min(first + blocks.columns, weight.shape[0]))
            part, sums = weight[columns], None
            if grad_weight is not None:
                sums = grad_weight[columns] if blocks.sums is None else blocks.sums[: len(part)]
            for begin in range(0, max(len(hidden), 1), blocks.rows):
                rows = slice(begin, min(begin + blocks.rows, len(hidden)))
                grad = self.of_block(rows, columns)
                if sums is not None:
                    _product(grad.t(), hidden[rows], sums, add=begin > 0)
                if grad_hidden is not None:
                    _product(grad, part, grad_hidden[rows], add=first > 0)
                if thin is not None:
                    thin_grads.add(thin, grad, rows, columns)
            if grad_weight is not None and blocks.sums is not None and sums is not None:
                grad_weight[columns] = sums

    def of_block(self, rows: slice, columns: slice) -> Tensor:
        """The gradient of the logits of some tokens and columns: from what was kept, or from logits computed again."""
        (hidden, weight, *_), slopes, blocks = self.layer, self.slopes, self.blocks
        program = _program(self.how.kernels)
        if self.kept is not None:
            stored = self.kept.data[
                rows, columns
            ]  # a second backward pass, which would find it changed, does not use it
            grad = stored if blocks.grad is None else blocks.grad[: len(stored), : stored.shape[1]]
            program.differentiate(stored, grad, columns.start, slopes.of(rows, kept=True))
            return grad
        assert blocks.grad is not None
        grad = blocks.grad[: rows.stop - rows.start, : columns.stop - columns.start]
        if self.how.fused:
            _fused().differentiate(hidden[rows], weight[columns], grad, columns.start, slopes.of(rows))
            return grad
        assert blocks.logits is not None
        for some, part, logits in _pieces(hidden, weight, self.thin, rows, columns, blocks.logits):
            lines = grad[some.start - rows.start : some.stop - rows.start]
            out = lines[:, part.start - columns.start :][:, : logits.shape[1]]
            program.differentiate(logits, out, part.start, slopes.of(some))
        return grad


def _in_place(hidden: Tensor, kept: Tensor | None) -> bool:
    """Whether the gradient of the logits replaces what was kept. Then both products are one each."""
    return kept is not None and _has_wide_products(hidden)


class _Blocks(NamedTuple):
    """How the backward pass divides the logits, and its buffers: of the logits of a piece, of the gradient of a block,
    and of the sums of the weight's gradient, if these are rounded afterwards."""

    rows: int
    columns: int
    logits: Tensor | None
    grad: Tensor | None
    sums: Tensor | None

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, of_weight: bool, *, in_place: bool, fused: bool) -> _Blocks:
        (tokens, width), vocabulary, wide = hidden.shape, weight.shape[0], _wide(hidden.dtype)
        if in_place:
            return _Blocks(max(tokens, 1), vocabulary, None, None, None)
        dtype = hidden.dtype if _has_wide_products(hidden) else wide
        most = _BLOCK_TOKENS if of_weight else _BLOCK_TOKENS // 4  # sums of the weight's gradient want large blocks
        most *= 4 if fused and of_weight else 1  # no logits beside the gradient
        rows = max(tokens if tokens <= 2 * most else _piece(tokens, most, _TILE), 1)
        summed = of_weight and rows < tokens and weight.dtype != wide
        size = rows * dtype.itemsize + width * wide.itemsize * summed
        logits = None if fused else _piece_buffer(rows, vocabulary, wide, hidden.device)
        most = _RANGE_BYTES - (0 if logits is None else logits.nbytes)
        columns = _range_columns(vocabulary, most // size, rows, width)
        grad = _buffer(rows, min(columns, vocabulary), dtype, hidden.device)
        sums = torch.empty((min(columns, vocabulary), width), dtype=wide, device=hidden.device) if summed else None
        return _Blocks(rows, columns, logits, grad, sums)


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
        for rows in _wide_rows(len(layer.hidden)):
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
    """The number of tokens whose distributions are kept: all or none."""
    if hidden.dtype not in _HALF or weight.shape[0] == 0:
        return 0
    budget = weight.numel() * weight.itemsize if budget is None else int(budget)
    most = budget // (hidden.itemsize * _aligned(weight.shape[0]))
    return hidden.shape[0] if most >= hidden.shape[0] else 0


def _range_columns(vocabulary: int, most: int, block: int, width: int) -> int:
    """The columns of a range, about `most`, with which products of [block, columns] and [columns, width] leave few
    processors without a tile. Small results make few waves of tiles, of which the last may be nearly empty."""

    def waves(rows: int, columns: int) -> int:
        return -(-(-(-rows // _TILE) * -(-columns // _ALIGN)) // _PROCESSORS)

    def cost(columns: int) -> int:
        return -(-vocabulary // columns) * (waves(block, columns) * width + waves(columns, width) * block)

    step = max(_PIECE_COLUMNS // 2, _ALIGN) if most >= _PIECE_COLUMNS else _ALIGN  # of whole pieces
    even = _piece(vocabulary, most, step)
    return min(range(even, even // 2, -step), key=cost)


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


def _matrix(x: Tensor) -> Tensor:
    """`x`, made contiguous if each product would copy it."""
    return x if 1 in x.stride() else x.contiguous()


def _even(x: Tensor) -> Tensor:
    """`x` [N, H], copied unless H is innermost and rows begin at multiples of 16 bytes. Products of other operands are
    slow on a GPU, and the bits of a row depend on the number of rows."""
    step = 16 // x.itemsize
    if x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % step == 0 and x.data_ptr() % 16 == 0:
        return x
    return x.new_empty(len(x), -(-x.shape[1] // step) * step)[:, : x.shape[1]].copy_(x)


def _buffer(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty((rows, _aligned(columns)), dtype=dtype, device=device)[:, :columns]


def _padded(x: Tensor, step: int) -> Tensor:
    """The rows of `x`, and zeros up to a multiple of `step`."""
    missing = -len(x) % step
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x  # torch.cat would heed autocast


def _wide_rows(tokens: int) -> list[slice]:
    """Rows of which a wide copy is made at once."""
    size = _BLOCK_TOKENS // 4
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def _aligned(columns: int) -> int:
    return -(-columns // _ALIGN) * _ALIGN


def _piece(length: int, most: int, multiple: int) -> int:
    """The size of equal pieces of `length`: about `most`, and a positive multiple of `multiple`."""
    most = max(most // multiple, 1) * multiple
    pieces = max(-(-length // most), 1)
    return max(-(-length // (pieces * multiple)), 1) * multiple


# -------------------------------------------------------------------- the specification of the kernels


def reduce_rows(logits: Tensor, of_all: Reduction, row: int, column: int) -> None:
    """Writes the parts of a piece of logits [M, N], which begins at `row` and `column`, a multiple of SLICE, and the
    `stored` probabilities within each slice. Overwrites the logits. With a soft cap, tanh(logits * inner) is in place
    of the logits."""
    ids, curve, parts, kept, mask = of_all
    rows = slice(row, row + len(logits))
    if curve.inner is not None:
        logits.mul_(curve.inner).tanh_()
    logits.mul_(curve.scale)
    if mask is not None:
        logits.masked_fill_(mask.of(rows).forbidden(slice(column, column + logits.shape[1])), -math.inf)
    for first in range(0, logits.shape[1], SLICE):
        part, number = logits[:, first : first + SLICE], (column + first) // SLICE
        place = ids[rows] - (column + first)
        here = (place >= 0) & (place < part.shape[1])
        token = part.gather(1, place.where(here, 0).unsqueeze(1)).squeeze(1)
        parts.token[rows] = token.where(here, parts.token[rows])
        top = part.amax(1).clamp(min=torch.finfo(part.dtype).min)  # finite, so that differences are, too
        parts.top[number, rows] = top
        part.sub_(top.unsqueeze(1))  # differences of large logits are exact, differences of their sums are not
        power = part.exp()
        parts.total[number, rows] = total = power.sum(1)
        if parts.squares is not None:
            parts.squares[number, rows] = power.square().sum(1)
        if parts.weighted is not None:
            parts.weighted[number, rows] = power.mul_(part.where(power > 0, 0)).sum(1)
        if row < len(kept):
            some = kept[rows, column + first : column + first + part.shape[1]]
            log_sum = total.where(total != 0, 1).log()  # 0 where all are -inf
            some.copy_(stored(part[: len(some)].sub_(log_sum[: len(some)].unsqueeze(1))))


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

    scale * (grad_log_probs * ([token == id] - p) - grad_entropy * p * (log p + entropy)
             + grad_sum_p2 * 2 * p * (p - sum_p2)),  log p = logits * scale - lse

    where `others` is 1 - p of the id. Without `lse`, the logits are `stored` probabilities within slices, in half
    precision, and log p is theirs plus the `shift` of the slice; with it, p is 0 where `mask` forbids the entry. With a
    soft cap, which is not stored, x = tanh(logits * inner) is in place of the logits, and the gradient is that of the
    logits: times inner * (1 - x^2).
    """
    ids, others, lse, entropy, sum_p2, grad_log_probs, grad_entropy, grad_sum_p2, shift, mask, (scale, inner), width = (
        slopes
    )
    bend = None
    if lse is None:
        assert shift is not None
        below = shift[:, torch.arange(first, first + logits.shape[1], device=shift.device) // width]
        p, log_p = _restored(logits)
        p, log_p = p * below.exp(), log_p + below
    else:
        if inner is not None:
            logits, bend = _capped(logits * inner, inner)
        log_p = (logits * scale).sub_(lse.unsqueeze(1))
        p = log_p.exp()
        if mask is not None:
            p.masked_fill_(mask.forbidden(slice(first, first + p.shape[1])), 0)
    factor = log_p.zero_() if grad_entropy is None else log_p
    if grad_entropy is not None:
        assert entropy is not None
        factor.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1))
    if grad_sum_p2 is not None:
        assert sum_p2 is not None
        factor.sub_((p - sum_p2.unsqueeze(1)).mul_(2 * grad_sum_p2.unsqueeze(1)))
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
