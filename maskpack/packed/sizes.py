"""Where the bytes of a packed batch go: figures of every field, for a logger, a table and JSON.

    packed --figures--> padded, real and wire bytes of each field, and what else travels
                          |-- report   a flat dict for a logger
                          '-- to_json  what `maskpack inspect` shows (tools/inspector.py)
    packed --token_counts--> valid tokens, and how many of them rows share

The wire bytes of a field are the bytes of its arrays as they are sent: compressed, if the batch has a codec. Together
with the layouts, the Python objects and the header they are everything that a worker receives.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.backends import is_installed
from maskpack.core.tree import dense_at, entry_at
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.nesting.response import SEQUENCE
from maskpack.nesting.schema import FieldForm
from maskpack.packed.batch import PackedBatch
from maskpack.packed.decode import decoded, shape_in
from maskpack.packed.file.codec import CODECS, as_sent, compressed_arrays
from maskpack.packed.file.container import Pieces
from maskpack.packed.file.write import write_message
from maskpack.packed.table import Table

_INTEGERS = {getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)}


@dataclass(frozen=True)
class FieldReport:
    """The bytes of one tensor of a packed batch.

    Attributes:
        path: the place of the tensor in the batch.
        dtype: the dtype of its elements.
        kind: as in `FieldForm`: `padded`, `flat`, `jagged` or `dense`.
        shape: the shape that `decompress` restores; [T, *F] for a field that was jagged before it was packed.
        padded_bytes: bytes of a tensor of that shape.
        real_bytes: bytes of its valid elements, not encoded.
        encoding: the name of its encoding, with the encodings inside: `dictionary blocks`.
        wire_bytes: bytes of its arrays as they are sent; 0 for a concat of other fields, and for a field that equals an
            earlier one.
        reason: why the field stays padded; None if it does so by design.
        left: bytes that `codec="zstd"` would save in addition; None if zstandard is not installed, or `left` was not
            asked for.
    """

    path: Path
    dtype: torch.dtype
    kind: str
    shape: tuple[int, ...]
    padded_bytes: int
    real_bytes: int
    encoding: str
    wire_bytes: int
    reason: str | None
    left: int | None


@dataclass(frozen=True)
class Figures:
    """The bytes of a packed batch.

    Attributes:
        rows: B.
        codec: the codec of the batch.
        fields: its tensors, in key order.
        layouts, objects, header: bytes of the layouts, of the pickled Python objects, and of all else: the header, the
            table, and what is between arrays.
    """

    rows: int
    codec: str | None
    fields: tuple[FieldReport, ...]
    layouts: int
    objects: int
    header: int

    @property
    def padded_bytes(self) -> int:
        """Bytes of the padded fields, and of the objects, which are sent either way."""
        return sum(field.padded_bytes for field in self.fields) + self.objects

    @property
    def real_bytes(self) -> int:
        """Bytes of the valid elements, and of the objects."""
        return sum(field.real_bytes for field in self.fields) + self.objects

    @property
    def wire_bytes(self) -> int:
        """Bytes of everything that is sent."""
        return sum(field.wire_bytes for field in self.fields) + self.layouts + self.objects + self.header

    @property
    def left(self) -> int | None:
        """The sum of `left` of all fields; None if it was not asked for."""
        known = [field.left for field in self.fields if field.left is not None]
        return sum(known) if len(known) == len(self.fields) else None

    @property
    def ratio(self) -> float:
        """Padded bytes for each byte on the wire."""
        return self.padded_bytes / self.wire_bytes

    @property
    def fill(self) -> float:
        """Share of valid elements, in bytes, in the fields under a mask; 1.0 if there are none."""
        masked = [field for field in self.fields if field.kind == "padded"]
        padded = sum(field.padded_bytes for field in masked)
        return sum(field.real_bytes for field in masked) / padded if padded else 1.0

    def totals(self) -> dict[str, float | int]:
        """The figures of the whole batch but `left`, by their names in reports."""
        plain = ("rows", "padded_bytes", "real_bytes", "wire_bytes", "ratio", "fill")
        parts = ("layouts", "objects", "header")
        return {name: getattr(self, name) for name in plain} | {f"{name}_bytes": getattr(self, name) for name in parts}


# -------------------------------------------------------------------- figures


def report(batch: TensorDictBase | None, packed: PackedBatch) -> dict[str, float | int]:
    """Reports the bytes of each field of a packed batch, as a flat dict for a logger.

    Args:
        batch: the padded or nested batch that was packed: the padded bytes of a field are the bytes of its tensor. If
            it is None, or a field of it is jagged, they are computed from the widths of the layouts.
        packed: the result of `compress`. If it has a codec, this compresses it once.

    Returns:
        `maskpack/rows`, `maskpack/padded_bytes`, `maskpack/real_bytes`, `maskpack/wire_bytes`, `maskpack/ratio`
        (padded / wire), `maskpack/fill` (share of valid elements in the fields under a mask), `maskpack/layouts_bytes`,
        `maskpack/objects_bytes`, `maskpack/header_bytes`, and for each field
        `maskpack/field/<path>/padded_bytes`, `real_bytes` and `wire_bytes`. Wire bytes of the fields, layouts, objects
        and header add up to the total; objects count in the padded and the real bytes, too. `maskpack/tokens` and
        `maskpack/shared_tokens` are there if the batch has token ids: see `token_counts`.

    Raises:
        LayoutError: `packed` is not a PackedBatch, or `batch` has other rows or lacks one of its fields.
    """
    whole = figures(packed, batch, left=False)
    out = {f"maskpack/{name}": value for name, value in whole.totals().items()}
    for field in whole.fields:
        for name in ("padded_bytes", "real_bytes", "wire_bytes"):
            key = f"maskpack/field/{show(field.path)}/{name}"
            out[key] = out.get(key, 0) + getattr(field, name)  # ("a", "b") and ("a/b",) have one name
    counts = token_counts(packed)
    return out if counts is None else out | {f"maskpack/{name}": count for name, count in counts._asdict().items()}


def fields(packed: PackedBatch) -> list[FieldReport]:
    """The bytes of every tensor of a packed batch, in key order. Compresses the batch once to see what is `left`."""
    return list(figures(packed).fields)


def figures(packed: PackedBatch, batch: TensorDictBase | None = None, *, left: bool = True) -> Figures:
    """The bytes of a packed batch and of each of its tensors. `left`: compress it once to see what is left."""
    if not isinstance(packed, PackedBatch):
        raise LayoutError(
            f"report: packed is {said(packed)}; expected a PackedBatch. Call report(batch, packed) with "
            "what compress returned."
        )
    if batch is not None:
        _check(batch, packed)
    message, names = write_message(packed, True, with_objects=False)
    pieces = Pieces(message, names)
    table = as_sent(packed.table, packed.codec)
    arrays = table.arrays()
    sent = [array.nbytes for array in (arrays if packed.codec is None else message.arrays[1:])][: len(arrays)]
    sizes = _sizes(table, sent)
    gain: list[int] | None = None
    if left and packed.codec is not None:
        gain = [0] * len(packed.tensors)
    elif left and is_installed("zstandard"):
        loose = as_sent(table, CODECS[0])
        small = _sizes(loose, [array.nbytes for array in compressed_arrays(loose.arrays())[0]])
        gain = [own - other for own, other in zip(sizes.fields, small.fields, strict=True)]
    return Figures(
        packed.num_rows,
        packed.codec,
        tuple(
            _field(packed, form, batch, sizes.fields[number], None if gain is None else gain[number])
            for number, form in enumerate(packed.tensors)
        ),
        sizes.layouts,
        pickled_bytes(*pickled(packed.objects)) if packed.objects else 0,
        len(pieces.header) + pieces.nbytes - sizes.layouts - sum(sizes.fields),
    )


class TokenCounts(NamedTuple):
    """The tokens of a packed batch.

    Attributes:
        tokens: valid tokens of the sequence axis.
        shared_tokens: tokens of prefixes that another row has, too, which a forward over the `PrefixTree` of all rows
            does not compute again.
    """

    tokens: int
    shared_tokens: int


def token_counts(packed: PackedBatch) -> TokenCounts | None:
    """The tokens of a packed batch, from `input_ids` and, if the batch has them, `position_ids`, which are decoded on
    the host.

    None if the batch has no sequence axis or no `input_ids`, or if the rows of either field are not the rows of that
    axis, one integer a token; of position ids there may be several.
    """
    if SEQUENCE not in packed.layouts or ("input_ids",) not in packed.numbers:
        return None
    bounds = packed.layouts[SEQUENCE].row_offsets
    forms = [packed.forms[path] for path in (("input_ids",), ("position_ids",)) if path in packed.numbers]
    for form, most_dims in zip(forms, (0, 1), strict=False):
        on_axis = form.layout is not None and np.array_equal(packed.layouts[form.layout].row_offsets, bounds)
        if not on_axis or form.dtype not in _INTEGERS or len(form.shape) > most_dims:
            return None
    ids, *positions = decoded(packed, forms, True).values()
    tree = PrefixTree.from_ids(ids, bounds, *positions)
    return TokenCounts(int(bounds[-1]), int(bounds[-1]) - tree.num_tokens)


class _Sizes(NamedTuple):
    """Bytes of the arrays of each field, and of the layouts."""

    fields: list[int]
    layouts: int


def _sizes(table: Table, sent: Iterable[int]) -> _Sizes:
    """Of the bytes that are sent of each array of a compacted table. An array that several fields share counts for the
    first of them."""
    sizes = dict(zip(table.places(), sent, strict=True))

    def taken(places: Iterable[int]) -> int:
        return sum(sizes.pop(place, 0) for place in places)

    fields = [taken(table.places_of(field)) for field in range(len(table.fields))]
    return _Sizes(fields, sum(sizes.values()))


def _field(
    packed: PackedBatch, form: FieldForm, batch: TensorDictBase | None, wire_bytes: int, left: int | None
) -> FieldReport:
    assert form.dtype is not None
    shape = shape_in(packed, form)
    given = None if batch is None else dense_at(batch, form.path)
    return FieldReport(
        form.path,
        form.dtype,
        form.kind,
        shape,
        math.prod(shape) * form.dtype.itemsize if given is None else given.numel() * given.element_size(),
        packed.words_nbytes(form.path),
        packed.table.kind(packed.numbers[form.path]),
        wire_bytes,
        form.reason,
        left,
    )


def pickled(value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """A value as Ray pickles it: the stream, and its buffers beside it."""
    buffers: list[pickle.PickleBuffer] = []
    return cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append), buffers


def pickled_bytes(stream: bytes, buffers: Sequence[pickle.PickleBuffer]) -> int:
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def _check(batch: Any, packed: PackedBatch) -> None:
    if not isinstance(batch, TensorDictBase):
        raise LayoutError(
            f"report: the batch is {said(batch)}; expected the TensorDict that was packed, or None. Call "
            "report(batch, packed)."
        )
    if batch.batch_dims and batch.batch_size[0] != packed.num_rows:
        raise LayoutError(
            f"report: the batch has {batch.batch_size[0]} rows; the packed one has {packed.num_rows}. Pass the batch "
            "that was packed, or None."
        )
    for path in packed.numbers:
        if not isinstance(entry_at(batch, path), Tensor):
            raise LayoutError(
                f'report: the batch has no tensor "{show(path)}", and the packed one has. Pass the batch that was '
                "packed, or None."
            )


# -------------------------------------------------------------------- JSON and text


def to_json(found: Figures) -> dict[str, Any]:
    """The figures as a dict for JSON."""
    return found.totals() | {
        "codec": found.codec,
        "left": found.left,
        "fields": [
            {
                **{part.name: getattr(field, part.name) for part in fields_of(field)},
                "path": list(field.path),
                "shape": list(field.shape),
                "dtype": dtype_name(field),
            }
            for field in found.fields
        ],
    }


def dtype_name(field: Any) -> str:
    """The dtype of a field without the prefix "torch."."""
    return str(field.dtype).removeprefix("torch.")


def aligned(lines: Sequence[Sequence[str]], names: int) -> list[str]:
    """Lines of cells in columns, with a rule below the first and above the last; the first `names` columns begin at the
    left, numbers end at the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    out = [
        "  ".join(
            cell.ljust(width) if column < names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    return [*out[:1], rule, *out[1:-1], rule, *out[-1:]]


def printable(text: str) -> str:
    """Text with escapes for characters that a terminal or XML does not take; names come from files."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
