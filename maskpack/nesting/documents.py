"""Rows that hold several documents: where in a row another one begins.

    position_ids     0 1 2 0 1     a position that goes back, or 0 after 0, begins a document; of M-RoPE, zeros alone
    attention_mask   1 1 1 2 2     so does another number of the mask
    cu_seqlens       0     3   5   so do the bounds of a batch of one row; seq_lens gives the lengths, 3 and 2
    documents        a a a b b

Documents are kept apart as rows are: no token attends to another document, and no output scores the first token of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from maskpack.core.index import IntArray, SpanTable, cumulated
from maskpack.errors import ReplayError
from maskpack.layout.row_layout import RowLayout, host_spans

BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens")
LENGTHS = ("seq_lens", "seq_lengths", "sequence_lengths")
"""Fields of a batch of one row that say where its documents are."""


def documents_of(
    sequence: RowLayout,
    positions: Tensor | None,
    numbers: Sequence[Tensor],
    given: Mapping[str, Tensor],
    call: str,
) -> IntArray:
    """int64 [documents + 1]: where documents begin among the packed tokens, and T. If each row is one document, these
    are the row offsets.

    Args:
        positions: integers [T], or [T, n] for M-RoPE; None if the batch has none.
        numbers: packed masks [T].
        given: fields of BOUNDS and LENGTHS.

    One synchronisation if positions or masks are on CUDA, and more if a row holds several documents.

    Raises:
        ReplayError: positions of a row neither count on nor begin anew, or bounds that are not those of its tokens.
    """
    starts = [sequence.row_offsets]
    if sequence.num_rows == 1:
        starts += [_joined(sequence, name, field, call) for name, field in given.items()]
    begins, odd = begins_of(sequence, positions, numbers)
    if begins is not None and odd is not None:
        some, strange = cast("list[bool]", torch.stack([begins.any(), odd.any()]).tolist())
        if some:
            starts.append(begins.nonzero().squeeze(1).cpu().numpy() + 1)
        if strange:
            assert positions is not None
            _need_steps(sequence, positions, odd.nonzero().squeeze(1).cpu().numpy(), starts, call)
    if len(starts) == 1:
        return sequence.row_offsets
    return np.unique(np.concatenate(starts))


def row_of_document(documents: IntArray, sequence: RowLayout) -> int | None:
    """The first row that holds several documents; None if there is none."""
    if documents is sequence.row_offsets:
        return None
    inside: IntArray = np.setdiff1d(documents, sequence.row_offsets)
    return _row_of(int(inside[0]), sequence) if inside.size else None


def _row_of(token: int, sequence: RowLayout) -> int:
    return int((sequence.row_offsets <= token).sum()) - 1


def begins_of(
    sequence: RowLayout, positions: Tensor | None, numbers: Sequence[Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """For all packed tokens but the first, bools [T - 1]: whether it begins a document by the positions or a mask but
    not the row, and whether its position does not follow the one before. None without positions and masks."""
    begins = odd = None
    if positions is not None:
        wide = positions.long()
        if wide.dim() == 1:
            step = wide[1:] - wide[:-1]
            begins = (step < 0) | ((wide[1:] == 0) & (step == 0))
            odd = step != 1
        else:  # sections of images and videos stay, go back and jump, but they begin with zeros
            begins = (wide[1:] == 0).all(1)
    for number in numbers:
        changes = number[1:] != number[:-1]
        begins = changes if begins is None else begins | changes.to(begins.device)
    if begins is None:
        return None, None
    odd = torch.zeros_like(begins) if odd is None else odd & ~begins
    inner = torch.from_numpy(np.unique(sequence.row_offsets)[1:-1] - 1).to(begins.device, non_blocking=True)
    return begins.index_fill_(0, inner, False), odd.index_fill_(0, inner, False)


def rows_that_count_again(x: Tensor) -> IntArray:
    """The rows of a field [B, S] that counts from 0, as positions do, and starts again; none of another field. Padding
    that repeats a number, or is 0, starts nothing."""
    whole = not (x.is_nested or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
    if not whole or x.layout != torch.strided or x.dim() != 2 or x.shape[1] < 3 or not len(x):
        return np.empty(0, np.int64)
    x = x.long()
    step = x.diff()
    counts = ((step == 1) | (step == 0) | (x[:, 1:] == 0)).all(1)
    again = (x[:, :-2] > 0) & (x[:, 1:-1] == 0) & (x[:, 2:] == 1)
    return (counts & again.any(1) & (x.max() > 1)).cpu().numpy().nonzero()[0]


def _need_steps(sequence: RowLayout, positions: Tensor, odd: IntArray, starts: Sequence[IntArray], call: str) -> None:
    """Raises ReplayError unless positions step over masked columns, or where a document begins, at these places."""
    wrong = wrong_steps(sequence, positions, odd[~np.isin(odd + 1, np.concatenate(starts))])
    if wrong.size:
        at = wrong[:1]
        (low,), (high,) = positions.cpu().numpy()[at].tolist(), positions.cpu().numpy()[at + 1].tolist()
        one, other = (int(_columns(host_spans(sequence), at + place)[0]) for place in (0, 1))
        raise ReplayError(
            f'{call}: field "position_ids" goes from {low} to {high} in row {_row_of(int(at[0]), sequence)}, from '
            f"column {one} to {other}; expected steps of 1, over masked columns too, or 0 where another document "
            "begins. Let each document count from 0 (of M-RoPE, give all sections), or drop the field: positions then "
            "count the valid tokens of each row."
        )


def wrong_steps(sequence: RowLayout, positions: Tensor, odd: IntArray) -> IntArray:
    """Those of some packed tokens whose next one has another position than its column says. `odd` are tokens where
    the positions [T] make no step of 1."""
    spans, numbers = host_spans(sequence), positions.cpu().numpy().astype(np.int64)
    steps = _columns(spans, odd + 1) - _columns(spans, odd)
    return odd[numbers[odd + 1] - numbers[odd] != steps]


def _columns(spans: SpanTable, tokens: IntArray) -> IntArray:
    """The columns of packed tokens."""
    before = np.cumsum(spans.counts) - spans.counts
    span = np.searchsorted(before, tokens, side="right") - 1
    return spans.starts[span] + tokens - before[span]


def _joined(sequence: RowLayout, name: str, field: Tensor, call: str) -> IntArray:
    """Where the documents of a batch of one row begin among its packed tokens, by one of its fields: counted over its
    tokens, or over its columns."""
    line = field.reshape(-1)
    whole = not (line.is_floating_point() or line.is_complex() or line.dtype == torch.bool)
    numbers = line.cpu().numpy().astype(np.int64) if whole else np.empty(0, np.int64)
    bounds = cumulated(numbers) if name in LENGTHS and whole else numbers
    total = int(bounds[-1]) if bounds.size else -1
    wrong = not bounds.size or bool(bounds[0]) or bool((np.diff(bounds) < 0).any())
    if wrong or total not in (sequence.num_tokens, sequence.width):
        kind = "lengths" if name in LENGTHS else "bounds"
        raise ReplayError(
            f'{call}: field "{name}" is {line.tolist()[:8]}; expected the {kind} of the documents of the row, which '
            f"has {sequence.num_tokens} valid tokens and {sequence.width} columns. Fix the producer, or drop the field "
            "if the row is one document."
        )
    if total == sequence.num_tokens:
        return bounds
    return cumulated(sequence.to("cpu").to_mask(torch.int64)[0].numpy())[bounds]
