"""The response axis for losses: fields at the padded response width, and model outputs at the response tokens.

    packed row      p p p r r r r        p prompt, r response tokens
    model output    . . o o o o .        the output at a token scores the next token
    response        o o o o              response token k is scored by the output one position before it

    packed row      p p r r p p r        a response with holes: the tokens of a loss mask over the whole sequence
    model output    . o o . . o .

The one-token shift is written once, in `scoring`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import whole
from maskpack.core.index import IntArray, ranges
from maskpack.core.keys import Key, Path, path_of, show
from maskpack.core.pads import PAD_TOKEN_ID, Pad, Pads, PadValue, holds
from maskpack.core.tensors import need_gradients, need_tensor
from maskpack.core.tree import Node, flatten, has, need_batch, number_at, select_entries
from maskpack.errors import LayoutError
from maskpack.fields.options import Registry, registry_of
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import GAPS, Jagged, host_offsets, jagged, values_of
from maskpack.layout.row_layout import RowLayout, host_spans
from maskpack.nesting.axes import Axes
from maskpack.nesting.nested import NOTHING, Nested, pads_of, read_nested
from maskpack.nesting.read import fitting_pad
from maskpack.nesting.schema import LAYOUTS
from maskpack.nesting.write import PackedField, write
from maskpack.ops import pack_torch

RESPONSE = "response"
SEQUENCE = "sequence"


def select_and_pad_to_response(
    batch: TensorDictBase, *fields: Key, width: int | None = None, registry: Registry = RL_FIELDS
) -> TensorDict:
    """Pads fields to the response width R of the batch, which is the same in all its parts and micro-batches.

    Args:
        batch: nested or padded. Jagged fields may be on the response or the sequence layout; from fields on the
            sequence axis, padded or jagged, the response columns are taken. Fields of one dim are unchanged.
        fields: the fields to return, in this order; by default all on the response axis.
        width: the width to pad to, at least that of the longest response. By default it is R, or a larger number that
            the batch has under a name by which the registry splits the axis (`max_response_length`), so that batches of
            one run agree.
        registry: gives the axes `response` and `sequence`, and the pads of jagged fields added after nesting.

    Returns:
        TensorDict of [B, width, *F] tensors, padded with the pad of each field; columns beyond R repeat what is under
        the mask at the end of a row. Tokens keep their positions, and dtypes are unchanged.

    Raises:
        LayoutError: there is no response axis, a field is not on it, a row is longer than R or `width`, or the pad of
            further columns is not known.

    On CUDA, a padded field with several pads in its spec is copied to the host if `width` is larger than R and a row
    has no padding, to see which pad the others have.
    """
    call = "select_and_pad_to_response"
    registry = registry_of(registry, call)
    axis = ResponseAxis.of(batch, registry, call)
    if width is None:
        named = (number_at(batch, path_of(name)) for way in registry.ways(RESPONSE) for name in way.tail)
        width = max(axis.response.width, *(number for number in named if number is not None), 0)
    else:
        width = whole(width, "width", 0, call)
        axis.check_width(width, call)
    entries = dict(flatten(batch, without=LAYOUTS))
    wanted = [
        path for path, value in select_entries(list(entries.items()), fields, call) if not isinstance(value, Node)
    ]
    for path in wanted if fields else ():
        if not isinstance(entries[path], Tensor):
            raise LayoutError(
                f'{call}: field "{show(path)}" is a Python object; expected a tensor. Read it from the batch itself.'
            )
    if fields:
        names = [path_of(field) for field in fields]
        wanted.sort(key=lambda path: next(at for at, name in enumerate(names) if path[: len(name)] == name))
    else:
        tensors = [path for path in wanted if isinstance(entries[path], Tensor)]
        wanted = [path for path in tensors if axis.holds(path, entries[path], registry)]
    out = TensorDict({}, batch_size=[axis.response.num_rows], device=batch.device)
    for path in wanted:
        out.set(path, axis.padded(path, entries[path], width, registry, call))
    return out


def extract_response(batch: TensorDictBase, values: Tensor, *, registry: Registry = RL_FIELDS) -> Tensor:
    """Selects the model outputs that score the response tokens: entry k of a row scores response token k.

    Args:
        batch: the nested or padded batch that the model was run on.
        values: the outputs of the model at all tokens of the sequence axis: jagged [B, j, *F], packed [T, *F] or
            [1, T, *F], or padded [B, S, *F].

    Returns:
        Jagged [B, j, *F] on the response layout for jagged and packed values; [B, R, *F], padded with 0, for padded
        ones. Differentiable.

    Raises:
        LayoutError: a row has a response but no prompt, so that its first token is not scored; values have another
            shape; or the batch has no sequence or response axis.
    """
    call = "extract_response"
    need_tensor(values, "values", call)
    axis = ResponseAxis.of(batch, registry_of(registry, call), call)
    index = torch.from_numpy(axis.predict_index(call))
    packed, padded = _packed_values(values, axis.need_sequence(call), call)
    need_gradients(packed, "values", call, nested=not padded)
    scored = packed.index_select(0, index.to(packed.device, non_blocking=True))
    response = axis.response.to(packed.device)
    return pack_torch.unpack(scored, response, 0) if padded else jagged(scored, response)


def scoring(tokens: IntArray) -> IntArray:
    """The packed indices of the outputs that score these tokens: the one-token shift."""
    return tokens - 1


def _no_axis(name: str, call: str) -> LayoutError:
    return LayoutError(
        f'{call}: the batch gives no {name} axis; expected the layout "{name}" of a nested or packed batch, or the '
        f'fields that the registry computes its axis "{name}" from (RL_FIELDS: attention_mask, or jagged input_ids '
        "and responses). Pass registry= for names of your own; else keep them in the batch, or nest before they are "
        "dropped. A packed or nested batch has the axes that its fields are on: pack it with a registry in which the "
        "mask has a MaskNestingSpec of its own axis."
    )


def _columns_of(layout: RowLayout, row: int) -> str:
    table = host_spans(layout)
    spans = slice(*table.splits[row : row + 2])
    starts, counts = table.starts[spans].tolist(), table.counts[spans].tolist()
    shown = [f"{start}:{start + count}" for start, count in zip(starts, counts, strict=True)]
    return " and ".join([*shown[:4], "more"] if len(shown) > 4 else shown) or "none"


def _pad_of(value: Tensor, dim: int, layout: RowLayout, pads: Sequence[PadValue]) -> PadValue:
    """The pad that a padded field has, or the first one of its spec."""
    tried = [pad for pad in pads if pad is not PAD_TOKEN_ID and holds(pad, value.dtype)] if len(pads) > 1 else []
    found = fitting_pad(value.detach().movedim(dim, 1).cpu(), layout.to("cpu"), tried) if tried else None
    return pads[0] if found is None else found


def _packed_values(values: Tensor, sequence: RowLayout, call: str) -> tuple[Tensor, bool]:
    if values.is_nested and Jagged.of(values) is not None:
        packed = values_of(values)
        if packed.shape[0] == sequence.num_tokens and np.array_equal(
            host_offsets(values, sequence), sequence.row_offsets
        ):
            return packed, False
        seen = f"jagged with {packed.shape[0]} tokens"
    elif values.is_nested:
        seen = "nested, with gaps between its rows or the strided layout"
    elif tuple(values.shape[:2]) == (sequence.num_rows, sequence.width):
        return pack_torch.pack(values, sequence.to(values.device)), True
    elif values.dim() >= 1 and values.shape[0] == sequence.num_tokens:
        return values, False
    elif values.dim() >= 2 and values.shape[0] == 1 and values.shape[1] == sequence.num_tokens:
        return values[0], False
    else:
        seen = str(tuple(values.shape))
    raise LayoutError(
        f"{call}: values are {seen}; expected jagged or packed with {sequence.num_tokens} tokens, or padded "
        f"({sequence.num_rows}, {sequence.width}, ...). Pass the model's output for every token of this batch."
    )


@dataclass(frozen=True)
class ResponseAxis:
    """The response layout of a batch, its sequence layout if it has one, and what is known of its nested fields.

    The response may be any tokens of a row: its columns are the last ones of the sequence, or all of them.

    Attributes:
        ends: whether it is the last tokens of each row by the registry, which a layout of another registry may break.
        counted: whether its layout tells lengths alone; it is the last tokens of each row then.
        shift: how far its columns were moved from those of the tokens.
        on_rows: whether its columns are the places of tokens in their rows, not those of the padded sequence.
    """

    response: RowLayout
    sequence: RowLayout | None
    nested: Nested
    ends: bool = False
    counted: bool = False
    shift: int = 0
    on_rows: bool = False

    @classmethod
    def of(
        cls,
        batch: TensorDictBase,
        registry: MaskNestingRegistry,
        call: str,
        *,
        or_sequence: bool = False,
        line: RowLayout | None = None,
        in_row: bool = False,
        nested: Nested | None = None,
        padded: Collection[str] | None = None,
    ) -> ResponseAxis:
        """With `or_sequence`, all tokens are the response of a batch that gives no response axis; `line` is the
        sequence of one that gives none, or only one of fields [T], where its tokens are `in_row` [1, T]. `nested` is
        what is known of the batch beside its entries, and `padded` are those of its layouts that have a padded width,
        None for all."""
        need_batch(batch, call)
        if nested is None:
            nested = read_nested(batch, call) if has(batch, LAYOUTS) else NOTHING
        axes = Axes(batch, registry, nested.layouts, {}, call)
        response, sequence = axes.find(RESPONSE, (RESPONSE,)), axes.find(SEQUENCE, (SEQUENCE,))
        if in_row and sequence is not None and sequence.tokens is not None:
            sequence = None
        line = None if response is not None and response.counted else line  # where it ends is not known
        whole = line if sequence is None else sequence.layout
        if response is None and or_sequence and whole is not None:
            return cls(whole, whole, nested)
        if response is None:
            raise _no_axis(RESPONSE, call)
        on_rows = response.source.way == "marks"
        if on_rows and whole is not None:
            rows = axes.layout_of(axes.rows_of(response.source))
            if not np.array_equal(rows.row_offsets, whole.row_offsets):
                raise LayoutError(
                    f'{call}: mask field "{show(response.source.key)}" has {rows.num_tokens} entries in '
                    f'{rows.num_rows} rows; the axis "{SEQUENCE}" has {whole.num_tokens} tokens in {whole.num_rows}, '
                    "or the rows differ in length; expected one entry for each token. Give the mask of whole rows; one "
                    'of the responses alone is the axis by MaskAxis("loss_mask", form="jagged") in the registry.'
                )
        ways, sources = registry.axes.get(RESPONSE, ()), {way.source for way in registry.axes.get(SEQUENCE, ())}
        counting = [way.form != "mask" or way.part == "prefix" for way in ways]
        tails = [way.part == "tail" and way.source in sources for way in ways]
        ends = bool(ways) and all(map(any, zip(counting, tails, strict=True)))
        counted = response.counted
        if RESPONSE in nested.layouts:  # a stored layout does not say where it is from
            counted = (bool(ways) and all(counting)) or (padded is not None and RESPONSE not in padded)
        shift = ways[0].shift if ways else 0
        return cls(response.layout, whole, nested, ends and not on_rows, counted, shift, on_rows)

    def need_sequence(self, call: str) -> RowLayout:
        """The sequence layout. Raises LayoutError if there is none."""
        if self.sequence is None:
            raise _no_axis(SEQUENCE, call)
        return self.sequence

    def tokens(self, call: str) -> IntArray:
        """int64 [response tokens]: the packed index in the sequence of each response token.

        Raises LayoutError for a response token that is no valid token of the sequence.
        """
        sequence = self.need_sequence(call)
        if self.response.num_rows != sequence.num_rows:
            raise LayoutError(
                f'{call}: the axis "{RESPONSE}" has {self.response.num_rows} rows; expected the {sequence.num_rows} of '
                f'"{SEQUENCE}". Fix the producer.'
            )
        lengths = self.response.lengths
        tail = ranges(sequence.row_offsets[1:] - lengths, lengths)
        if self.counted:
            odd, spans = lengths > sequence.lengths, host_spans(self.response)
            odd[np.repeat(np.arange(odd.size), np.diff(spans.splits))[spans.starts > 0]] = True
            found = int(odd.argmax()) if odd.any() else tail
        else:
            found = self._by_columns(sequence)
            if self.ends and not isinstance(found, int) and not np.array_equal(found, tail):
                found = int(self.row_of_token[found != tail][0])
        if isinstance(found, int):
            where = "the last valid tokens of its row" if self.ends else "valid tokens of its row"
            moved = f", whose entries speak of the column {-self.shift:+}" if self.shift else ""
            columns = _columns_of(sequence, found)
            raise LayoutError(
                f'{call}: row {found} of the axis "{RESPONSE}" is at columns {_columns_of(self.response, found)}, of '
                f'{self.response.width}{moved}; the row of the axis "{SEQUENCE}" is at {columns}, of '
                f"{sequence.width}. Expected {where}, as the registry says, in the last {self.response.width} columns. "
                "Multiply a mask by that of valid tokens if it is true where none is; or pass the registry that the "
                "batch was made with. An axis that tells only how many tokens at the end of a row are the response "
                'needs part="prefix" or form="lengths".'
            )
        return found

    def _by_columns(self, sequence: RowLayout) -> IntArray | int:
        """`tokens` of a response axis whose columns are the last ones of the sequence; or the first row with a response
        token that is no valid token there."""
        response, shift = self.response, sequence.width - self.response.width - self.shift
        if response.__dict__.get("part_of") == (sequence, shift):
            return ranges(sequence.row_offsets[1:] - response.lengths, response.lengths)
        if self.on_rows:
            sequence, shift = RowLayout.from_lengths(sequence.lengths, max(sequence.width, response.width)), -self.shift
        own, spans = host_spans(response), host_spans(sequence)
        numbers = np.arange(response.num_rows)
        rows, starts = np.repeat(numbers, np.diff(own.splits)), own.starts + shift
        keys = np.repeat(numbers, np.diff(spans.splits)) * sequence.width + spans.starts
        at = np.searchsorted(keys, rows * sequence.width + starts, side="right") - 1  # the span that holds the start
        if not keys.size:
            return int(rows[0]) if rows.size else own.starts
        before = starts - spans.starts[at]
        odd = (starts < 0) | (at < spans.splits[rows]) | (before + own.counts > spans.counts[at])
        if odd.any():
            return int(rows[odd][0])
        return ranges((np.cumsum(spans.counts) - spans.counts)[at] + before, own.counts)

    def predict_index(self, call: str) -> IntArray:
        """int64 [response tokens]: the packed index of the output that scores each response token."""
        tokens = self.tokens(call)
        first = self.first_tokens(tokens)
        if first.any():
            raise LayoutError(
                f"{call}: rows {self.row_of_token[first][:8].tolist()} have a response but no prompt token; expected "
                "at least one prompt token, whose output scores the first response token. Drop these rows or give them "
                "a prompt."
            )
        return scoring(tokens)

    def first_tokens(self, tokens: IntArray) -> npt.NDArray[np.bool_]:
        """Which of the response `tokens` are the first of their row: no output scores them."""
        assert self.sequence is not None
        return tokens == self.sequence.row_offsets[:-1][self.row_of_token]

    @property
    def row_of_token(self) -> IntArray:
        """int64 [response tokens]: the row of each response token."""
        return np.repeat(np.arange(self.response.num_rows), self.response.lengths)

    def holds(self, path: Path, value: Tensor, registry: MaskNestingRegistry) -> bool:
        """Whether a field is on the response axis; used if no fields are named."""
        form = self.nested.forms.get(path)
        if form is not None and form.kind in ("padded", "flat"):
            return form.kind == "padded" and form.layout == RESPONSE
        if value.is_nested:
            own = Jagged.of(value)
            return own is not None and np.array_equal(
                host_offsets(value, self.response, self.sequence), self.response.row_offsets
            )
        spec = registry.find(path)
        if spec is None or RESPONSE not in spec.masks:
            return False
        dim, shape = spec.dim_of(value), (self.response.num_rows, self.response.width)
        return 1 <= dim < value.dim() and (value.shape[0], value.shape[dim]) == shape

    def padded(self, path: Path, value: Tensor, width: int, registry: MaskNestingRegistry, call: str) -> Tensor:
        """The response columns of a field, at a width."""
        spec, form = registry.find(path), self.nested.forms.get(path)
        if form is None and spec is not None and spec.masks and not {RESPONSE, SEQUENCE} & {*spec.masks}:
            raise LayoutError(
                f'{call}: field "{show(path)}" is under mask "{show(spec.masks[0])}"; expected a field on the '
                "response or the sequence axis. Name one of these."
            )
        if not value.is_nested:
            dim, pads = (1, (0,)) if spec is None else (spec.dim_of(value), spec.pads)
            axis = form.layout if form is not None else next(iter(spec.masks), None) if spec is not None else None
            return self._at_width(path, value, dim, width, pads, call, whole=axis == SEQUENCE)
        own = Jagged.of(value)
        if own is None:
            raise LayoutError(f'{call}: field "{show(path)}" {GAPS}')
        need_gradients(value, f'field "{show(path)}"', call)
        values, known = values_of(value), path in self.nested.pads
        dim = own.dim if own.dim != 1 or spec is None else spec.dim_of(value)
        name, dim = (form.layout, form.ragged_dim) if known and form is not None else (self._axis_of_new(values), dim)
        offsets = host_offsets(value, self.response, self.sequence)
        layout = self.sequence if name == SEQUENCE and self.sequence is not None else self.response
        lengths = np.diff(offsets)
        long = np.flatnonzero(lengths > layout.width)
        if long.size:
            raise LayoutError(
                f'{call}: field "{show(path)}" has {int(lengths[long[0]])} tokens in row {int(long[0])}; the padded '
                f"{name} width is {layout.width}. Cut the row, or nest the batch with a wider axis."
            )
        if name not in (SEQUENCE, RESPONSE) or not np.array_equal(offsets, layout.row_offsets):
            raise LayoutError(
                f'{call}: field "{show(path)}" has {int(offsets[-1])} tokens in {lengths.size} rows under layout '
                f'"{name}"; the responses have {self.response.num_tokens} in {self.response.num_rows}. Name '
                "fields on the response or the sequence axis."
            )
        if known:
            pads = pads_of(self.nested, path, values, layout, call)
        else:
            pads = self._pads_of_new(path, value.dtype, registry, call)
        (padded,) = write([PackedField(values, pads, layout, dim)])
        return self._at_width(path, padded, dim, width, pads, call, whole=name == SEQUENCE)

    def _columns(self, path: Path, value: Tensor, dim: int, call: str, *, whole: bool) -> tuple[Tensor, RowLayout]:
        """The response columns of a padded field with its width in dim `dim`, on the sequence axis if `whole`; and the
        layout of the field, which ends with these columns."""
        rows, width = self.response.num_rows, self.response.width
        own = self.sequence if whole and self.sequence is not None else self.response
        if value.dim() <= 1:
            return value, own
        if value.shape[0] == rows and dim < value.dim():
            if value.shape[dim] == width and not (whole and self.counted and self.sequence is not None):
                return value, own
            if self.sequence is not None and value.shape[dim] == self.sequence.width:
                if self.counted and not np.array_equal(self._by_columns(self.sequence), self.tokens(call)):
                    raise LayoutError(
                        f'{call}: field "{show(path)}" is on the sequence axis, whose last {width} columns are not '
                        "the response axis, which tells only lengths. Name fields on the response axis."
                    )
                return value.narrow(dim, self.sequence.width - width, width), self.sequence
        raise LayoutError(
            f'{call}: field "{show(path)}" is {tuple(value.shape)}; the response axis is ({rows}, {width}). '
            "Name fields on the response or the sequence axis."
        )

    def _axis_of_new(self, values: Tensor) -> str:
        """Of a jagged field that was added after nesting: the axis that has as many tokens."""
        whole = self.sequence is not None and len(values) == self.sequence.num_tokens != self.response.num_tokens
        return SEQUENCE if whole else RESPONSE

    def _pads_of_new(self, path: Path, dtype: torch.dtype, registry: MaskNestingRegistry, call: str) -> Pads:
        spec = registry.find(path)
        pad = spec.pads[0] if spec is not None and spec.pads else 0
        if isinstance(pad, Pad):
            raise LayoutError(
                f'{call}: field "{show(path)}" was added after nesting, or never padded; its pad {pad!r} is not known. '
                "Nest the batch again with pad_token_id, which gives new fields their pad; or give it a number in the "
                'registry: registry | {"responses": ("response", 0)}.'
            )
        return Pads.of(pad, dtype)

    def check_width(self, width: int, call: str) -> None:
        """Raises LayoutError for a width that the longest response does not fit into."""
        table = host_spans(self.response)
        longest = int((table.starts + table.counts).max(initial=0))
        if width < longest:
            raise LayoutError(
                f"{call}: width is {width}; the longest response ends at column {longest}. Pass at least {longest}."
            )

    def _at_width(
        self,
        path: Path,
        value: Tensor,
        dim: int,
        width: int,
        pads: Sequence[PadValue] | Pads,
        call: str,
        *,
        whole: bool,
    ) -> Tensor:
        """The response columns of a padded field cut or padded to a width. A row whose last column is no token goes on
        with its value, which is the pad; others go on with the pad of the field."""
        columns, layout = self._columns(path, value, dim, call, whole=whole)
        if columns.dim() <= 1:
            return columns
        if width <= columns.shape[dim]:
            return columns.narrow(dim, 0, width)
        table, rows = host_spans(layout), np.arange(layout.num_rows)
        ends = table.starts + table.counts == layout.width
        full = np.isin(rows, np.repeat(rows, np.diff(table.splits))[ends]) | (value.shape[dim] == 0)
        shape = [*columns.shape[:dim], width - columns.shape[dim], *columns.shape[dim + 1 :]]
        last = value.narrow(dim, -1, 1).expand(shape) if value.shape[dim] else columns.new_zeros(shape)
        if full.any() and not isinstance(pads, Pads):
            pad = _pad_of(value, dim, layout, pads)
            if pad is PAD_TOKEN_ID and not full.all():
                pad = last[int(full.argmin())].flatten()[0].item()
            if pad is PAD_TOKEN_ID or not holds(pad, columns.dtype):
                raise LayoutError(
                    f'{call}: field "{show(path)}" has pad {pad!r}, whose value is not known; expected it, because '
                    f"{width} columns were asked for and the batch has {columns.shape[dim]}. Nest the batch with "
                    "pad_token_id, or give the field a pad that its dtype holds."
                )
            pads = Pads.of(pad, columns.dtype)
        full &= ~pads.edges if isinstance(pads, Pads) else False
        if not full.any() or not isinstance(pads, Pads):
            return torch.cat([columns, last], dim)
        by_row = [torch.from_numpy(full), pads.words(columns.dtype)]
        fills, constants = (x.view(-1, *[1] * (len(shape) - 1)).to(columns.device, non_blocking=True) for x in by_row)
        return torch.cat([columns, torch.where(fills, constants, last)], dim)
