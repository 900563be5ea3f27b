"""Triton kernels of pack and unpack. Several fields share a launch, which computes positions once for all of them.

    pack    programs over packed elements; the span of a token is searched between two entries of `SpanIndex.blocks`
    unpack  programs over padded elements; each is written once, with its value or the pad
    wide    pack of elements of many bytes: one program for each element or for a part of it

An element is moved as `items` words of 1, 2, 4 or 8 bytes. Fields with the same items and strides share a launch. What
a launch needs are its arguments, and nothing is copied from the host, so a CUDA graph may capture it: not so the kernel
of nesting/read_triton.py, which reads the same elements and their padding, of all layouts, by a table of jobs.
Shape letters: B rows, S the padded width, T valid tokens in all, F trailing dims.
"""

# Kernels have no Python types, and a launch takes more than the kernel has.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import triton
import triton.language as tl
from torch import Tensor

from maskpack.core.latest import Latest
from maskpack.core.pads import Pad
from maskpack.layout.launch_triton import Launch, addresses_of, aligned, device_of
from maskpack.layout.span_index import BLOCK, MOST_TOKENS, SpanIndex
from maskpack.ops.pack_words import Words, copied, repeated, words_of

_CONSTANT, _EDGE, _PER_ROW = range(3)
BY_EDGE, BY_ROW = tl.constexpr(_EDGE), tl.constexpr(_PER_ROW)
_AT_ONCE = 16
"""The largest number of fields in one launch; more would need too many registers."""
_PACKED, _PADDED = 256, 512
"""The number of elements of one program."""
_WIDE, _CHUNK_BYTES = 1024, 8192
"""Elements of at least this many bytes are packed by their own programs, each of which moves at most _CHUNK_BYTES."""


@triton.jit
def _span_at(begins, token, low, high):
    """The last span in low..high that begins at or before each token. Span `low` does."""
    left = high - low
    first = token * 0 + low
    last = token * 0 + high
    while left > 0:
        middle = (first + last + 1) // 2
        before = tl.load(begins + middle) <= token
        first = tl.where(before, middle, first)
        last = tl.where(before, last, middle - 1)
        left = left // 2
    return first


@triton.jit
def _source(
    starts, begins, blocks, of_rows, places, token, first, last, inside, width, row_stride, col_stride,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Offsets of the padded elements of tokens, which lie between tokens `first` and `last`."""
    if places is None:
        low = tl.load(blocks + first // BLOCK)
        high = tl.load(blocks + last // BLOCK + 1)
        span = _span_at(begins, token, low, high)
        row = span if of_rows is None else tl.load(of_rows + span)
        col = tl.load(starts + span) + token - tl.load(begins + span)
    else:
        place = tl.load(places + token, mask=inside, other=0)
        row = place // width
        col = place - row * width
    return row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride


_INDEX = ["starts", "begins", "blocks", "of_rows", "places", "cu_seqlens", "bits", "before"]
"""Views of few tensors, of any alignment."""


@triton.jit(do_not_specialize=["num_tokens", "spans"], do_not_specialize_on_alignment=_INDEX[:5])
def _pack(
    outs, ins, starts, begins, blocks, of_rows, places, num_tokens, spans, width, row_stride, col_stride, item_stride,
    ITEMS: tl.constexpr, BLOCK: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * ELEMENTS
    at = begin + tl.arange(0, ELEMENTS)
    stop = tl.minimum(num_tokens, tl.load(begins + spans)).to(tl.int64)  # fewer than T if T is a wrong hint
    inside = at < num_tokens.to(tl.int64) * ITEMS
    token = (at // ITEMS).to(tl.int32)
    first = (begin // ITEMS).to(tl.int32)
    last = tl.minimum((begin + ELEMENTS - 1) // ITEMS, num_tokens - 1).to(tl.int32)
    place = _source(
        starts, begins, blocks, of_rows, places, token, first, last, inside, width, row_stride, col_stride, BLOCK
    )
    if ITEMS > 1:
        place += (at % ITEMS) * item_stride
    valid = at < stop * ITEMS
    words = ()
    for field in tl.static_range(len(ins)):
        words = words + (tl.load(ins[field] + place, mask=valid, other=0),)  # noqa: RUF005  # kernels cannot unpack
    for field in tl.static_range(len(ins)):
        tl.store(outs[field] + at, words[field], mask=inside)


@triton.jit
def _token(starts, begins, cu_seqlens, bits, before, row, col, width):
    """Whether positions of a row are valid, their packed token or the nearest one, and the number of tokens of the
    row."""
    if bits is None:
        start, first = tl.load(starts + row), tl.load(begins + row)
        count = tl.load(begins + row + 1) - first
        valid = (col >= start) & (col < start + count)
        nearest = first + tl.minimum(tl.maximum(col - start, 0), count - 1)
    else:
        first = tl.load(cu_seqlens + row)
        count = tl.load(cu_seqlens + row + 1) - first
        valid, rank = by_bits(bits, before, row.to(tl.int64), col, width, col < width)
        nearest = tl.maximum(rank + valid.to(tl.int32) - 1, first)
    return valid, nearest, count


@triton.jit
def by_bits(bits, before, row, col, width, inside):
    """Whether positions of a row are valid, and the number of packed tokens before each: from `SpanIndex.bits`."""
    word = row * ((width + 31) // 32) + col // 32
    lane = col % 32
    ones = tl.load(bits + word, mask=inside, other=0)
    return ((ones >> lane) & 1) == 1, tl.load(before + word, mask=inside, other=0) + _ones(ones & ((1 << lane) - 1))


@triton.jit
def _ones(words):
    """The number of bits of int32 words that are 1."""
    words = words.to(tl.uint32, bitcast=True)
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _pad(pad, row, mode: tl.constexpr, kind: tl.constexpr):
    """The raw bits of a row's pad, as a scalar."""
    return tl.load(pad + row).to(kind) if mode == BY_ROW else tl.cast(pad, kind)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=[*_INDEX[:2], *_INDEX[5:]])
def _unpack(
    outs, ins, pads, starts, begins, cu_seqlens, bits, before, num_tokens, width, parts,
    MODES: tl.constexpr, EDGES: tl.constexpr, ITEMS: tl.constexpr, ELEMENTS: tl.constexpr, PLACE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) // parts
    line = tl.cast(width, PLACE) * ITEMS
    at = tl.cast(tl.program_id(0) % parts, PLACE) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < line
    col = (at // ITEMS).to(tl.int32)
    valid, token, count = _token(starts, begins, cu_seqlens, bits, before, row, col, width)
    valid = valid & inside
    out = row.to(tl.int64) * line + at
    if EDGES or tl.max(valid.to(tl.int32)) > 0:
        there = inside & (token < tl.where(count > 0, num_tokens, -1))  # -1 in an empty row at the front
        place = token.to(tl.int64)
        if ITEMS > 1:
            place = place * ITEMS + at % ITEMS
        for field in tl.static_range(len(ins)):
            taken = there if MODES[field] == BY_EDGE else there & valid
            words = tl.load(ins[field] + place, mask=taken, other=0)
            if MODES[field] != BY_EDGE:
                words = tl.where(valid, words, _pad(pads[field], row, MODES[field], words.dtype))
            tl.store(outs[field] + out, words, mask=inside)
    else:
        for field in tl.static_range(len(ins)):
            padding = _pad(pads[field], row, MODES[field], outs[field].dtype.element_ty)
            tl.store(outs[field] + out, tl.zeros((ELEMENTS,), padding.dtype) + padding, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "spans"], do_not_specialize_on_alignment=_INDEX[:5])
def _pack_wide(
    out, source, starts, begins, blocks, of_rows, places, num_tokens, spans, width, row_stride, col_stride, items,
    parts, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0) // parts
    at = (tl.program_id(0) % parts) * CHUNK + tl.arange(0, CHUNK)
    place = _source(
        starts, begins, blocks, of_rows, places, token, token, token, True, width, row_stride, col_stride, BLOCK
    )
    stop = tl.where(token < tl.load(begins + spans), items, 0)  # none beyond the last span if T is a wrong hint
    words = tl.load(source + place + at, mask=at < stop, other=0)
    tl.store(out + token.to(tl.int64) * items + at, words, mask=at < items)


_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


class _Group(NamedTuple):
    """Fields that share a launch.

    Attributes:
        pick: takes the entries of these fields from a list with one entry for each field of the plan.
        scale: the number of programs for `per` tokens (pack) or rows (unpack).
        numbers: the arguments of the kernel that are the same in every launch.
    """

    launch: Launch
    pick: Callable[[Sequence[Any]], Any]
    scale: int
    per: int
    numbers: tuple[Any, ...]


class _Plan(NamedTuple):
    """How fields of given dtypes, shapes, strides and alignments are moved.

    Attributes:
        sizes: the bytes of a word of each field.
        tails: the trailing dims of each field.
        groups: the launches.
        pads: of unpack, the word of each constant pad.
        copied: the numbers of the fields that have to be copied first; then there is nothing else.
    """

    sizes: list[int]
    tails: list[tuple[int, ...]]
    groups: list[_Group]
    pads: list[int]
    copied: list[int]


_packs: Latest[_Plan] = Latest(256)
_unpacks: Latest[_Plan] = Latest(256)


def pack(fields: Sequence[Tensor], index: SpanIndex, num_tokens: int) -> list[Tensor]:
    """`fields` [B, S, *F], any dtypes and strides -> [T, *F]."""
    starts, begins, blocks, of_rows, _, _, _, _, places = index
    sources = [x.data_ptr() for x in fields]
    kinds = [
        (x.dtype, x.shape, x.stride(), source & 15, x.is_neg(), x.is_conj())
        for x, source in zip(fields, sources, strict=True)
    ]
    key = (starts.device, of_rows is None, places is None, *kinds)
    plan = _packs.get(key) or _packs.keep(key, _plan_pack(fields))
    if plan.copied:
        return pack(_all_copied(fields, plan), index, num_tokens)
    # sizes as arguments of their own: torch takes half as long to read them as to read a tuple
    outs = [x.new_empty(num_tokens, *tail) for x, tail in zip(fields, plan.tails, strict=True)]
    if num_tokens:
        parts = starts, begins, blocks, of_rows, places
        _run(plan, num_tokens, [outs, fields], [addresses_of(outs), sources], parts, (num_tokens, starts.shape[0]))
    return outs


def unpack(
    values: Sequence[Tensor], index: SpanIndex, rows: int, width: int, pads: Sequence[int | Tensor | Pad]
) -> list[Tensor]:
    """`values` [T, *F] of at most 8 bytes per item -> [B, S, *F]. A pad is the raw bits of an item, a tensor [B] of
    these, or EDGE."""
    starts, begins, _, _, _, cu_seqlens, bits, before, _ = index
    values = [x if x.is_contiguous() else x.contiguous() for x in values]
    sources = [x.data_ptr() for x in values]
    kinds = [
        (x.dtype, x.shape[1:] if x.dim() > 1 else (), source & 15, x.is_neg(), x.is_conj())
        for x, source in zip(values, sources, strict=True)
    ]
    of_rows = [pad.data_ptr() if isinstance(pad, Tensor) else None for pad in pads]
    alike = [pad if at is None else (at & 15,) for pad, at in zip(pads, of_rows, strict=True)]
    key = (starts.device, bits is None, rows, width, *kinds, *alike)
    plan = _unpacks.get(key) or _unpacks.keep(key, _plan_unpack(values, rows, width, pads))
    if plan.copied:
        return unpack(_all_copied(values, plan), index, rows, width, pads)
    outs = [x.new_empty(rows, width, *tail) for x, tail in zip(values, plan.tails, strict=True)]
    if plan.groups:
        paddings = [pad if isinstance(pad, Tensor) else word for pad, word in zip(pads, plan.pads, strict=True)]
        words = [word if at is None else at for at, word in zip(of_rows, plan.pads, strict=True)]
        tensors, addresses = [outs, values, paddings], [addresses_of(outs), sources, words]
        parts = starts, begins, cu_seqlens, bits, before
        _run(plan, rows, tensors, addresses, parts, (values[0].shape[0],))
    return outs


def _all_copied(fields: Sequence[Tensor], plan: _Plan) -> list[Tensor]:
    return [copied(x) if at in plan.copied else x for at, x in enumerate(fields)]


def _run(
    plan: _Plan,
    amount: int,
    tensors: Sequence[Sequence[Any]],
    addresses: Sequence[Sequence[Any]],
    parts: Sequence[Tensor | None],
    sizes: tuple[int, ...],
) -> None:
    """Launches a plan for `amount` tokens or rows: of each field the output, the input, and the pad if there is one, as
    tensors and as addresses; the parts of the index; and the sizes that kernels do not specialise."""
    at = addresses_of(parts)
    remember = aligned(addresses[0])
    with device_of(cast("Tensor", parts[0])):
        for launch, pick, scale, per, numbers in plan.groups:
            programs = -(-amount * scale // per)
            if remember and launch.again(programs, [*map(pick, addresses), *at, *sizes, *numbers]):
                continue
            outs, ins, *pads = tensors
            words = [[_pointer(x, size) for x, size in zip(line, plan.sizes, strict=True)] for line in (outs, ins)]
            launch.first(programs, [*map(pick, [*words, *pads]), *parts, *sizes, *numbers], remember=remember)


def _plan_pack(fields: Sequence[Tensor]) -> _Plan:
    forms = [words_of(x, 2) for x in fields]
    if copied := [at for at, form in enumerate(forms) if form is None]:
        return _Plan([], [], [], [], copied)
    forms = cast("list[Words]", forms)
    groups: list[_Group] = []
    narrow: dict[tuple[int, ...], list[int]] = {}
    for at, (x, form) in enumerate(zip(fields, forms, strict=True)):
        if not x.numel():
            continue
        if form.items * form.size < _WIDE or form.item != 1:
            narrow.setdefault(form[1:], []).append(at)
            continue
        chunk = min(_CHUNK_BYTES // form.size, triton.next_power_of_2(form.items))
        parts = -(-form.items // chunk)
        numbers = x.shape[1], form.row, form.col, form.items, parts, BLOCK, chunk
        groups.append(_Group(Launch(_pack_wide), itemgetter(at), parts, 1, numbers))
    for (items, row, col, item), places in narrow.items():
        numbers = fields[0].shape[1], row, col, item, items, BLOCK, _PACKED
        for pick in _picks(places):
            groups.append(_Group(Launch(_pack, num_warps=8), pick, items, _PACKED, numbers))
    return _Plan([form.size for form in forms], [tuple(x.shape[2:]) for x in fields], groups, [], [])


def _plan_unpack(values: Sequence[Tensor], rows: int, width: int, pads: Sequence[Pad | int | Tensor]) -> _Plan:
    modes = [_CONSTANT if isinstance(pad, int) else _PER_ROW if isinstance(pad, Tensor) else _EDGE for pad in pads]
    forms = [words_of(x, 1, 1 if mode == _PER_ROW else 8) for x, mode in zip(values, modes, strict=True)]
    if copied := [at for at, form in enumerate(forms) if form is None]:
        return _Plan([], [], [], [], copied)
    forms = cast("list[Words]", forms)
    groups: list[_Group] = []
    together: dict[int, list[int]] = {}
    for at, (x, form) in enumerate(zip(values, forms, strict=True)):
        if rows * width * x.shape[1:].numel():
            together.setdefault(form.items, []).append(at)
    for items, places in together.items():
        parts = -(-width * items // _PADDED)
        place = tl.int32 if parts * _PADDED <= MOST_TOKENS else tl.int64
        for pick in _picks(places):
            kinds = pick(modes)
            numbers = width, parts, kinds, _EDGE in kinds, items, _PADDED, place
            groups.append(_Group(Launch(_unpack), pick, parts, 1, numbers))
    words = [
        repeated(pad, x.dtype.itemsize, form.size) if isinstance(pad, int) else 0
        for x, pad, form in zip(values, pads, forms, strict=True)
    ]
    return _Plan([form.size for form in forms], [tuple(x.shape[1:]) for x in values], groups, words, [])


def _picks(places: Sequence[int]) -> list[Callable[[Sequence[Any]], tuple[Any, ...]]]:
    """Functions that take the entries `places` of a list as tuples, _AT_ONCE at a time."""
    chunks = [places[begin : begin + _AT_ONCE] for begin in range(0, len(places), _AT_ONCE)]
    return [itemgetter(*chunk) if len(chunk) > 1 else lambda line, at=chunk[0]: (line[at],) for chunk in chunks]


def _pointer(x: Tensor, size: int) -> Any:
    """A tensor as words of `size` bytes."""
    return triton.reinterpret(x, _WORDS[size])
