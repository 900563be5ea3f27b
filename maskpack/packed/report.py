"""Where the bytes of a packed batch go: padded, real and wire bytes of each field, and what else is sent.

    packed --report--> Report --str--> a table;  --metrics--> a flat dict for a logger;  --to_dict--> JSON

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

from maskpack.core.arguments import said
from maskpack.core.index import cumulated
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.nesting.response import SEQUENCE
from maskpack.nesting.schema import FieldForm
from maskpack.packed.batch import PackedBatch
from maskpack.packed.decode import decoded, shape_in
from maskpack.packed.file.codec import as_sent
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
        wire_bytes: bytes of its arrays and its pads as they are sent; those of its pads alone for a concat of other
            fields, and for a field that equals an earlier one.
        reason: why the field stays padded; None if it does so by design.
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


@dataclass(frozen=True)
class Report:
    """The bytes of a packed batch. `str` of it is a table.

    Attributes:
        rows: B.
        codec: the codec of the batch.
        fields: its tensors, in key order.
        layouts, objects, header: bytes of the layouts, of the pickled Python objects, and of all else: the header, the
            table, and what is between arrays.
        tokens: the tokens of the batch; None if it has no token ids on a sequence axis.
    """

    rows: int
    codec: str | None
    fields: tuple[FieldReport, ...]
    layouts: int
    objects: int
    header: int
    tokens: TokenCounts | None = None

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
        """The figures of the whole batch, by their names in `metrics`."""
        plain = ("rows", "padded_bytes", "real_bytes", "wire_bytes", "ratio", "fill")
        parts = ("layouts", "objects", "header")
        out = {name: getattr(self, name) for name in plain} | {f"{name}_bytes": getattr(self, name) for name in parts}
        return out | ({} if self.tokens is None else self.tokens._asdict())

    def metrics(self) -> dict[str, float | int]:
        """A flat dict for a logger.

        `maskpack/rows`, `maskpack/padded_bytes`, `maskpack/real_bytes`, `maskpack/wire_bytes`, `maskpack/ratio`
        (padded / wire), `maskpack/fill` (share of valid elements in the fields under a mask), `maskpack/layouts_bytes`,
        `maskpack/objects_bytes`, `maskpack/header_bytes`, and for each field
        `maskpack/field/<path>/padded_bytes`, `real_bytes` and `wire_bytes`. Wire bytes of the fields, layouts, objects
        and header add up to the total; objects count in the padded and the real bytes, too. `maskpack/tokens` and
        `maskpack/shared_tokens` are there if the batch has token ids: see `TokenCounts`.
        """
        out = {f"maskpack/{name}": value for name, value in self.totals().items()}
        for field in self.fields:
            for name in ("padded_bytes", "real_bytes", "wire_bytes"):
                key = f"maskpack/field/{show(field.path)}/{name}"
                out[key] = out.get(key, 0) + getattr(field, name)  # ("a", "b") and ("a/b",) have one name
        return out

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        fields: list[dict[str, Any]] = []
        for field in self.fields:
            own = {part.name: getattr(field, part.name) for part in fields_of(field)}
            fields.append(own | {"path": list(field.path), "shape": list(field.shape), "dtype": dtype_name(field)})
        return self.totals() | {"codec": self.codec, "fields": fields}

    def table(self) -> list[str]:
        """Aligned lines: one for each field, and the totals."""
        lines = [("field", "dtype", "encoding", "padded", "real", "wire", "padded/wire")]
        for field in self.fields:
            amounts = _amounts(field.padded_bytes, field.real_bytes, field.wire_bytes)
            lines.append((cell(show(field.path)), dtype_name(field), cell(field.encoding), *amounts))
        lines.append(("layouts", "", "", "", "", f"{self.layouts:,}", ""))
        lines.append(("objects", "", "", *_amounts(self.objects, self.objects, self.objects)))
        lines.append(("header", "", "", "", "", f"{self.header:,}", ""))
        lines.append(("total", "", "", *_amounts(self.padded_bytes, self.real_bytes, self.wire_bytes)))
        return aligned(lines, 3)

    def __str__(self) -> str:
        out, padded = self.table(), [field for field in self.fields if field.kind == "dense"]
        if padded:
            out += ["", "Fields that stay padded:"]
        for field in padded:
            name, reason = printable(show(field.path)), printable(field.reason or "by design")
            out.append(f"  {name} {field.shape} {dtype_name(field)}, {field.padded_bytes:,} bytes: {reason}")
        return "\n".join(out)


def report(packed: PackedBatch) -> Report:
    """Reports the bytes of a packed batch and of each of its fields.

    Args:
        packed: the result of `compress`. If it has a codec, this compresses it once. `input_ids` and `position_ids`
            are decoded; nothing else is.

    Raises:
        LayoutError: `packed` is not a PackedBatch.
    """
    if not isinstance(packed, PackedBatch):
        raise LayoutError(f"report: got {said(packed)}; expected a PackedBatch. Pass what compress returned.")
    message, names = write_message(packed, True, with_objects=False)
    pieces = Pieces(message, names)
    table = as_sent(packed.table, packed.codec)
    arrays = table.arrays()
    sent = [array.nbytes for array in (arrays if packed.codec is None else message.arrays[1:])][: len(arrays)]
    sizes, layouts = _sizes(table, sent)
    buffers: list[pickle.PickleBuffer] = []  # beside the stream, as Ray pickles objects
    stream = cloudpickle.dumps(packed.objects, 5, buffers.append) if packed.objects else b""
    return Report(
        packed.num_rows,
        packed.codec,
        tuple(_field(packed, form, size) for form, size in zip(packed.tensors, sizes, strict=True)),
        layouts,
        len(stream) + sum(buffer.raw().nbytes for buffer in buffers),
        len(pieces.header) + pieces.nbytes - layouts - sum(sizes),
        token_counts(packed),
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


def _sizes(table: Table, sent: Iterable[int]) -> tuple[list[int], int]:
    """Bytes of each field and of the layouts, of the bytes that are sent of each array of a compacted table. An array
    that several fields share counts for the first of them, the pads for each by its share."""
    sizes = {place[0]: nbytes for place, nbytes in zip(table.places(), sent, strict=True)}
    ends = cumulated(table.pads["size"] * table.pads["count"])
    shares = np.diff(ends * min(sizes.popitem()[1] if ends[-1] else 0, ends[-1]) // max(ends[-1], 1)).tolist()
    fields = [own + sum(sizes.pop(at, 0) for at in table.places_of(field)) for field, own in enumerate(shares)]
    return fields, sum(sizes.values())


def _field(packed: PackedBatch, form: FieldForm, wire_bytes: int) -> FieldReport:
    assert form.dtype is not None
    shape = shape_in(packed, form)
    return FieldReport(
        form.path,
        form.dtype,
        form.kind,
        shape,
        math.prod(shape) * form.dtype.itemsize,
        packed.words_nbytes(form.path),
        packed.table.kind(packed.numbers[form.path]),
        wire_bytes,
        form.reason,
    )


# -------------------------------------------------------------------- text

_LONGEST = 80


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


def cell(name: str) -> str:
    """A name in a column, which is as wide as the longest."""
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _amounts(padded: int, real: int, on_wire: int) -> tuple[str, str, str, str]:
    return f"{padded:,}", f"{real:,}", f"{on_wire:,}", f"{padded / on_wire:,.1f}" if on_wire else "-"
