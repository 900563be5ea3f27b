"""Where the bytes of a packed batch go: figures of every field, for a logger, a table and JSON.

    packed --figures--> padded, real and wire bytes of each field, and what else travels
                          |-- report   a flat dict for a logger
                          '-- to_json  what `maskpack inspect` shows (tools/inspector.py)

Wire bytes are those of the arrays behind each field, as they travel: compressed, where the batch has a codec. With the
layouts, the Python objects and the header they are all that a worker is sent.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, cast

import cloudpickle
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.tree import dense_at, entry_at
from maskpack.errors import LayoutError
from maskpack.fields.registry import Path, show
from maskpack.nesting.schema import FieldForm
from maskpack.packed.batch import PackedBatch
from maskpack.packed.contents import word_dtype_of
from maskpack.packed.file import container as wire
from maskpack.packed.file import write as manifest
from maskpack.packed.references import KINDS, kind_of


@dataclass(frozen=True)
class FieldReport:
    """The bytes of one tensor of a packed batch.

    Attributes:
        path: its place in the batch.
        dtype: of its elements.
        kind: as in `FieldForm`: `padded`, `flat`, `jagged` or `dense`.
        shape: of the field as `decompress` restores it; [T, *F] for one that was jagged before it was packed.
        padded_bytes: of that shape.
        real_bytes: of its real values, plain.
        encoding: how they are stored, with the encodings inside: `repeated narrow`.
        wire_bytes: of its arrays as they travel; 0 for a field that follows from others.
        reason: why a dense field is dense; None where that is by design.
        left: bytes that `codec="zstd"` would still take off; None where zstandard is not installed, or not asked for.
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
        codec: of the batch.
        fields: its tensors, in key order.
        layouts, objects, header: bytes of the layouts, of the pickled Python objects and of the header, as they
            travel.
    """

    rows: int
    codec: str | None
    fields: tuple[FieldReport, ...]
    layouts: int
    objects: int
    header: int

    @property
    def padded_bytes(self) -> int:
        """Of the padded fields, and of the objects, which travel with them either way."""
        return sum(field.padded_bytes for field in self.fields) + self.objects

    @property
    def real_bytes(self) -> int:
        """Of the real values, and of the objects."""
        return sum(field.real_bytes for field in self.fields) + self.objects

    @property
    def wire_bytes(self) -> int:
        """Of all that travels."""
        return sum(field.wire_bytes for field in self.fields) + self.layouts + self.objects + self.header

    @property
    def left(self) -> int | None:
        """Of the fields; None where it was not asked for."""
        known = [field.left for field in self.fields if field.left is not None]
        return sum(known) if len(known) == len(self.fields) else None

    @property
    def ratio(self) -> float:
        """Padded bytes for one byte on the wire."""
        return self.padded_bytes / self.wire_bytes

    @property
    def fill(self) -> float:
        """Share of real bytes in the fields that lie under a mask; 1.0 where they have none."""
        masked = [field for field in self.fields if field.kind == "padded"]
        padded = sum(field.padded_bytes for field in masked)
        return sum(field.real_bytes for field in masked) / padded if padded else 1.0


# -------------------------------------------------------------------- figures


def report(batch: TensorDictBase | None, packed: PackedBatch) -> dict[str, float | int]:
    """Where the bytes of a packed batch go, as a flat dict for a logger.

    Args:
        batch: the padded or nested batch that was packed: the padded bytes of a field are those of its tensor. Where
            it is None, or a field of it is jagged, they come from the widths of the layouts.
        packed: what `compress` gave. With a codec, this compresses it once.

    Returns:
        `maskpack/rows`, `maskpack/padded_bytes`, `maskpack/real_bytes`, `maskpack/wire_bytes`, `maskpack/ratio`
        (padded / wire), `maskpack/fill` (real share of the fields under a mask), `maskpack/layouts_bytes`,
        `maskpack/objects_bytes`, `maskpack/header_bytes`, and for each field
        `maskpack/field/<path>/padded_bytes`, `real_bytes` and `wire_bytes`. Wire bytes of the fields, layouts, objects
        and header sum to the whole; objects count in the padded and the real bytes too.

    Raises:
        LayoutError: `packed` is no PackedBatch, or `batch` has other rows or lacks one of its fields.
    """
    found = figures(packed, batch, left=False)
    out: dict[str, float | int] = {
        "maskpack/rows": found.rows,
        "maskpack/padded_bytes": found.padded_bytes,
        "maskpack/real_bytes": found.real_bytes,
        "maskpack/wire_bytes": found.wire_bytes,
        "maskpack/ratio": found.ratio,
        "maskpack/fill": found.fill,
        "maskpack/layouts_bytes": found.layouts,
        "maskpack/objects_bytes": found.objects,
        "maskpack/header_bytes": found.header,
    }
    for field in found.fields:
        for name in ("padded_bytes", "real_bytes", "wire_bytes"):
            key = f"maskpack/field/{show(field.path)}/{name}"
            out[key] = out.get(key, 0) + getattr(field, name)  # ("a", "b") and ("a/b",) have one name
    return out


def fields(packed: PackedBatch) -> list[FieldReport]:
    """The bytes of every tensor of a packed batch, in key order. Compresses the batch once to see what is `left`."""
    return list(figures(packed).fields)


def figures(packed: PackedBatch, batch: TensorDictBase | None = None, *, left: bool = True) -> Figures:
    """The figures that `report` and `fields` give; without `left`, nothing is compressed to know what is left."""
    if not isinstance(packed, PackedBatch):
        raise LayoutError(
            f"report: packed is {said(packed)}; expected a PackedBatch. Call report(batch, packed) with "
            "what compress returned."
        )
    if batch is not None:
        _check(batch, packed)
    message, names = manifest.write(packed, True, with_objects=False)
    own, layouts = _wire_bytes(message)
    gain: dict[Path, int] | None = None
    if left and packed.codec is not None:
        gain = dict.fromkeys(own, 0)
    elif left and importlib.util.find_spec("zstandard") is not None:
        small, _ = _wire_bytes(manifest.write(replace(packed, codec="zstd"), True, with_objects=False)[0])
        gain = {path: own[path] - small[path] for path in own}
    return Figures(
        packed.num_rows,
        packed.codec,
        tuple(_field(packed, form, batch, own, gain) for form in packed.schema.forms if form.path in packed.fields),
        layouts,
        _pickled_bytes(packed.objects) if packed.objects else 0,
        len(wire.Pieces(message, names).header),
    )


def _field(
    packed: PackedBatch,
    form: FieldForm,
    batch: TensorDictBase | None,
    own: Mapping[Path, int],
    gain: Mapping[Path, int] | None,
) -> FieldReport:
    assert form.dtype is not None
    shape = _shape(packed, form)
    given = None if batch is None else dense_at(batch, form.path)
    return FieldReport(
        form.path,
        form.dtype,
        form.kind,
        shape,
        math.prod(shape) * form.dtype.itemsize if given is None else given.numel() * given.element_size(),
        int(packed.bounds(form.path)[-1]) * word_dtype_of(form).itemsize,
        kind_of(packed.fields[form.path]),
        own[form.path],
        form.reason,
        None if gain is None else gain[form.path],
    )


def _shape(packed: PackedBatch, form: FieldForm) -> tuple[int, ...]:
    if form.layout is None:
        return form.shape if packed.schema.root.more_dims is None else (packed.num_rows, *form.shape)
    layout = packed.layouts[form.layout]
    if form.kind != "padded":
        return layout.num_tokens, *form.shape
    shape = [layout.num_rows, *form.shape]
    shape.insert(form.ragged_dim, layout.width)
    return tuple(shape)


def _wire_bytes(message: wire.Message) -> tuple[dict[Path, int], int]:
    """Bytes of the arrays of each field, and of those of all layouts. An array counts where it comes first."""
    sizes = {number: array.nbytes for number, array in enumerate(message.arrays)}

    def taken(numbers: Iterable[int]) -> int:
        return sum(sizes.pop(number, 0) for number in numbers)

    layouts = sum(taken(layout.get("runs", [layout.get("bits")])) for layout in message.manifest["layouts"])
    own: dict[Path, int] = {}
    for entry in message.manifest["fields"]:
        if "encoding" in entry:
            pads = [entry["row_pads"]] if "row_pads" in entry else []
            own[tuple(entry["path"])] = taken([*pads, *_numbers(entry["encoding"])])
    return own, layouts + sum(sizes.values())  # what is left was added for rows that take no bytes (wire.FREE_ROWS)


def _numbers(encoding: Mapping[str, Any]) -> Iterator[int]:
    """The arrays that an encoding names in the manifest, with those of the encodings inside it."""
    for field in fields_of(KINDS[encoding["kind"]]):
        value = encoding[field.name]
        if field.type == "Words":
            yield value
        elif isinstance(value, dict):
            yield from _numbers(cast("dict[str, Any]", value))
        elif isinstance(value, list) and field.type != "Path":
            for part in cast("list[dict[str, Any]]", value):
                yield from _numbers(part)


def _pickled_bytes(objects: Any) -> int:
    buffers: list[pickle.PickleBuffer] = []
    stream = cloudpickle.dumps(objects, protocol=5, buffer_callback=buffers.append)
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
    for path in packed.fields:
        if not isinstance(entry_at(batch, path), Tensor):
            raise LayoutError(
                f'report: the batch has no tensor "{show(path)}", and the packed one has. Pass the batch that was '
                "packed, or None."
            )


# -------------------------------------------------------------------- what is shown


def to_json(found: Figures) -> dict[str, Any]:
    """The figures in what JSON can say."""
    totals = ("padded_bytes", "real_bytes", "wire_bytes", "left", "ratio", "fill")
    return {
        "rows": found.rows,
        "codec": found.codec,
        "fields": [
            {
                **{part.name: getattr(field, part.name) for part in fields_of(field)},
                "path": list(field.path),
                "shape": list(field.shape),
                "dtype": dtype_name(field),
            }
            for field in found.fields
        ],
        "layouts_bytes": found.layouts,
        "objects_bytes": found.objects,
        "header_bytes": found.header,
        **{name: getattr(found, name) for name in totals},
    }


def dtype_name(field: FieldReport) -> str:
    """Its dtype as tables say it."""
    return str(field.dtype).removeprefix("torch.")


def printable(text: str) -> str:
    """Names come from files; what a terminal or XML would not take as text is spelt out."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
