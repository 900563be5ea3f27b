"""PackedBatch: a batch encoded field by field, ready for the wire; rows move without being decoded.

    compress(padded or nested) -> PackedBatch -> select, slices, split, chunk, cat -> decompress(padded or nested)

All of its bytes lie in numpy arrays, which pickle (protocol 5) and Ray carry out of band; a slice of rows is a view
and carries its own bytes only. Nothing of a PackedBatch is ever changed, and what it gives out is a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack import encodings
from maskpack.encodings import Encoding, Plain
from maskpack.errors import LayoutError
from maskpack.jagged import jagged
from maskpack.joining import join_layouts, join_objects, joined_form
from maskpack.layout import RowLayout
from maskpack.nesting import rows_only, to_padded
from maskpack.options import OnLoss, Options, Registry, Verify
from maskpack.registry import PER_ROW, RL_FIELDS, Key, Pad, Path, show
from maskpack.rows import IntArray, Rows, row_index
from maskpack.schema import LAYOUTS, FieldForm, Schema, read_layouts, write_layouts
from maskpack.survey import Survey, survey
from maskpack.tree import Node, Objects, build, chosen
from maskpack.words import Words, from_words, host_words, pad_tensor, words

Target = Literal["padded", "nested"]


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """Encoded rows. Build one with `compress`.

    Attributes:
        num_rows: B.
        schema: the forms of the fields, in key order.
        layouts: by name, on the host.
        fields: the encoded values of every tensor.
        objects: the Python objects.
        row_pads: words [B], of the fields whose pad is PER_ROW.
    """

    num_rows: int
    schema: Schema
    layouts: Mapping[str, RowLayout]
    fields: Mapping[Path, Encoding]
    objects: Mapping[Path, Objects]
    row_pads: Mapping[Path, Words]

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"PackedBatch(rows={self.num_rows}, fields={len(self.fields)}, nbytes={self.nbytes:,})"

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensors and of the layouts; Python objects are not counted."""
        tables = sum(part.nbytes for layout in self.layouts.values() for part in layout.compact())
        pads = sum(pad.nbytes for pad in self.row_pads.values())
        return tables + pads + sum(field.nbytes for field in self.fields.values())

    def lengths(self, layout: str) -> IntArray:
        """int64 [B]: row lengths of one of the layouts, for planning."""
        if layout not in self.layouts:
            raise LayoutError(
                f'PackedBatch.lengths: no layout "{layout}"; the batch has {sorted(self.layouts)}. Name one of these.'
            )
        return self.layouts[layout].lengths + 0

    # ---------------------------------------------------------------- rows

    def select(self, rows: Rows) -> PackedBatch:
        """Some rows, in the order given: a slice, indices (repeats allowed, negative from the end), or a bool mask [B].

        Rows that follow each other are views of this batch; others are copied, still encoded.
        """
        index = row_index(rows, self.num_rows, "PackedBatch.select")
        self._need_rows("select")
        if index.size == 0 or bool((np.diff(index) == 1).all()):
            start = int(index[0]) if index.size else 0
            return self._slice(start, start + index.size)
        layouts = {name: layout.select(index) for name, layout in self.layouts.items()}
        fields = {path: field.take(index, self._offsets(path)) for path, field in self.fields.items()}
        objects = {path: entry.select(index.tolist()) for path, entry in self.objects.items()}
        row_pads = {path: pads[index] for path, pads in self.row_pads.items()}
        return PackedBatch(index.size, self.schema, layouts, fields, objects, row_pads)

    def __getitem__(self, rows: Rows) -> PackedBatch:
        if isinstance(rows, int | np.integer):
            raise LayoutError(
                f"PackedBatch: the index is the whole number {rows}; expected rows. Take one row as a slice: "
                f"packed[{rows} : {rows} + 1]."
            )
        if isinstance(rows, str):
            raise LayoutError(
                f'PackedBatch: the index is the name "{rows}"; expected rows. Decode a field by '
                f'decompress(packed, "{rows}").'
            )
        return self.select(rows)

    def split(self, sizes: int | Sequence[int]) -> tuple[PackedBatch, ...]:
        """Consecutive parts of `sizes` rows: a list that sums to B, or one size (the last part may be smaller)."""
        if isinstance(sizes, int):
            if sizes < 1:
                raise LayoutError(f"PackedBatch.split: size is {sizes}; expected at least 1. Give a positive size.")
            sizes = [min(sizes, self.num_rows - start) for start in range(0, self.num_rows, sizes)]
        if sum(sizes) != self.num_rows or min(sizes, default=0) < 0:
            raise LayoutError(
                f"PackedBatch.split: sizes {list(sizes)} sum to {sum(sizes)}; the batch has {self.num_rows} rows. "
                "Give sizes that sum to the rows."
            )
        self._need_rows("split")
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        return tuple(self._slice(end - size, end) for end, size in zip(ends, sizes, strict=True))

    def chunk(self, parts: int) -> tuple[PackedBatch, ...]:
        """`parts` consecutive parts whose sizes differ by one at most; parts beyond the rows are empty."""
        if parts < 1:
            raise LayoutError(f"PackedBatch.chunk: parts is {parts}; expected at least 1. Give a positive number.")
        least, more = divmod(self.num_rows, parts)
        return self.split([least + (part < more) for part in range(parts)])

    @staticmethod
    def cat(batches: Sequence[PackedBatch]) -> PackedBatch:
        """The rows of several batches with the same fields and widths, one after the other.

        A field that is encoded under a layout in one batch and dense in another is dense in the result. Raises
        LayoutError if fields, dtypes or widths differ.
        """
        if not batches:
            raise LayoutError("PackedBatch.cat: no batches; expected at least one. Pass a list of packed batches.")
        for batch in batches:
            batch._need_rows("cat")
        return batches[0] if len(batches) == 1 else _cat(batches)

    def _slice(self, start: int, stop: int) -> PackedBatch:
        rows = slice(start, stop)
        return replace(
            self,
            num_rows=stop - start,
            layouts={name: layout.select(rows) for name, layout in self.layouts.items()},
            fields={path: field.slice(start, stop, self._offsets(path)) for path, field in self.fields.items()},
            objects={path: entry.select(range(start, stop)) for path, entry in self.objects.items()},
            row_pads={path: pads[rows] for path, pads in self.row_pads.items()},
        )

    def _need_rows(self, call: str) -> None:
        if self.schema.root.more_dims is None:
            raise LayoutError(
                f"PackedBatch.{call}: the batch was packed from a TensorDict with batch_size [], whose rows are no "
                "batch dim. Give the TensorDict batch_size=[rows] before packing."
            )

    def _offsets(self, path: Path) -> IntArray | None:
        layout = self._forms[path].layout
        return None if layout is None else self.layouts[layout].row_offsets

    @property
    def _forms(self) -> dict[Path, FieldForm]:
        return {form.path: form for form in self.schema.forms}


# -------------------------------------------------------------------- in and out


def compress(
    batch: TensorDictBase,
    *,
    registry: Registry = RL_FIELDS,
    pad_token_id: int | None = None,
    strict_mask_nesting: bool = False,
    ignore_dense_fields: Iterable[Key] = (),
    verify: Verify = "always",
    on_loss: OnLoss = "keep",
    like: PackedBatch | TensorDictBase | None = None,
) -> PackedBatch:
    """Encodes a padded, nested or mixed batch.

    Args:
        batch: as for `nest_batch_by_mask`, as are the other arguments; it is not changed.
        strict_mask_nesting: `strict` of `nest_batch_by_mask`.
        like: a packed or nested batch with the same rows. Its layouts stand in for masks that `batch` has not, as
            with the outputs of a worker.

    Raises:
        CoverageError, LossyPadError, LayoutError, RegistryError: as `nest_batch_by_mask`.
    """
    options = Options.of("compress", registry, pad_token_id, strict_mask_nesting, ignore_dense_fields, verify, on_loss)
    return _encoded(survey(batch, options, _layouts_of(like)))


def decompress(
    packed: PackedBatch, *fields: Key, layout: Target = "padded", device: torch.device | str | None = None
) -> TensorDict:
    """The batch that was packed, bit for bit, with the rows it has now.

    Args:
        packed: it is not changed; the tensors returned share no memory with it.
        fields: the fields to decode; all if none is named.
        layout: `padded`, or `nested`, as `nest_batch_by_mask` would give it.
        device: where to; the device that each field came from where it is not given.

    Raises:
        LayoutError: a field that is not in the batch, an unknown layout, or a device that this process does not have.
    """
    if not isinstance(packed, PackedBatch):
        raise LayoutError(
            f"decompress: got a {type(packed).__name__}; expected a PackedBatch. Pass what compress returned; a nested "
            "TensorDict is restored by unnest."
        )
    if layout not in ("padded", "nested"):
        raise LayoutError(f'decompress: layout is {layout!r}; expected "padded" or "nested". Choose one of these.')
    _check_device(device)
    forms = [form for _, form in chosen([(form.path, form) for form in packed.schema.forms], fields, "decompress")]
    decoder = _Decoder(packed, layout == "nested", device)
    entries = [(form.path, decoder.entry(form)) for form in forms]
    root = packed.schema.root
    if not decoder.nested:
        return build(_on(root, device), entries, packed.num_rows)
    out = build(_on(rows_only(root), device), entries, packed.num_rows)
    schema = replace(packed.schema, forms=tuple(forms))
    pads = {form.path: pad for form in forms if (pad := decoder.row_pads(form)) is not None}
    return out.set(LAYOUTS, write_layouts(schema, decoder.table_layouts(), pads, packed.num_rows))


def _layouts_of(like: Any) -> dict[str, RowLayout]:
    if like is None:
        return {}
    return dict(like.layouts) if isinstance(like, PackedBatch) else read_layouts(like, "compress")[1]


def _encoded(found: Survey) -> PackedBatch:
    tensors = {
        form.path: found.values.get(form.path, found.entries[form.path])
        for form in found.forms
        if form.kind not in ("object", "node")
    }
    for path, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise LayoutError(
                f'compress: field "{show(path)}" has the memory layout {tensor.layout}; expected strided or jagged. '
                "Convert it with to_dense(), or leave it out."
            )
    fresh = {
        path
        for path in found.values
        if not found.entries[path].is_nested and found.values[path] is not found.entries[path]
    }
    bits = host_words(tensors, fresh)
    layouts = {name: layout.to("cpu") for name, layout in found.layouts.items()}
    fields = {
        form.path: encodings.encode(
            bits[form.path], None if form.layout is None else layouts[form.layout].row_offsets, form.hints
        )
        for form in found.forms
        if form.path in bits
    }
    objects = {form.path: Objects.of(found.entries[form.path]) for form in found.forms if form.kind == "object"}
    forms = tuple(
        replace(form, device=str(tensors[form.path].device)) if form.path in tensors else form for form in found.forms
    )
    row_pads = host_words(found.row_pads, ())
    return PackedBatch(found.rows, replace(found.schema(), forms=forms), layouts, fields, objects, row_pads)


class _Decoder:
    """Decodes the fields of one packed batch to one device and layout; each layout goes there once."""

    def __init__(self, packed: PackedBatch, nested: bool, device: torch.device | str | None) -> None:
        self.nested = nested
        self._packed = packed
        self._device = device
        self._moved: dict[tuple[str, str], RowLayout] = {}

    def entry(self, form: FieldForm) -> Any:
        if form.node is not None:
            return _on(rows_only(form.node) if self.nested else form.node, self._device)
        if form.kind == "object":
            batch_size = self._node_above(form.path).batch_size(self._packed.num_rows)
            return self._packed.objects[form.path].entry(batch_size)
        values = self._values(form)
        if form.layout is None:
            return values
        layout = self._layout(form.layout, values.device)
        if form.kind == "jagged" or (self.nested and form.kind in ("padded", "flat")):
            return jagged(values, layout)
        return values if form.kind == "flat" else to_padded(values, form, layout, self.row_pads(form))

    def row_pads(self, form: FieldForm) -> Tensor | None:
        """[B], a copy, of a field whose pad is PER_ROW."""
        if form.path not in self._packed.row_pads:
            return None
        assert form.dtype is not None
        pads = from_words(self._packed.row_pads[form.path], form.dtype).clone()
        return pads.to(self._device or form.device or "cpu")

    def table_layouts(self) -> dict[str, RowLayout]:
        """Fresh layouts for the LAYOUTS entry; it shares nothing with the packed batch."""
        return {name: self._layout(name, torch.device(self._device or "cpu")) for name in self._packed.layouts}

    def _values(self, form: FieldForm) -> Tensor:
        """The values on their device. What stays on the host is a copy, unless it is the source of a padded form."""
        encoded = self._packed.fields[form.path]
        bits = encoded.decode(self._packed._offsets(form.path))  # type: ignore[reportPrivateUsage]
        device = torch.device(self._device or form.device or "cpu")
        assert form.dtype is not None
        tensor = from_words(bits, form.dtype)
        if device.type != "cpu":
            return tensor.to(device)
        padded_later = form.kind == "padded" and not self.nested
        return tensor.clone() if isinstance(encoded, Plain) and not padded_later else tensor

    def _layout(self, name: str, device: torch.device) -> RowLayout:
        place = name, str(device)
        if place not in self._moved:
            layout = self._packed.layouts[name]
            self._moved[place] = RowLayout.from_table(layout.width, layout.table, device)
        return self._moved[place]

    def _node_above(self, path: Path) -> Node:
        if len(path) == 1:
            return self._packed.schema.root
        node = self._packed._forms[path[:-1]].node  # type: ignore[reportPrivateUsage]
        assert node is not None
        return node


def _check_device(device: torch.device | str | None) -> None:
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise LayoutError(f'decompress: device is "{device}"; this process has no CUDA device. Pass device="cpu".')


def _on(node: Node, device: torch.device | str | None) -> Node:
    return node if device is None else Node(node.more_dims, str(device))


# -------------------------------------------------------------------- cat


def _cat(batches: Sequence[PackedBatch]) -> PackedBatch:
    first = batches[0].schema
    paths = [form.path for form in first.forms]
    for batch in batches[1:]:
        other = [form.path for form in batch.schema.forms]
        if set(other) != set(paths):
            odd = sorted(show(path) for path in set(other) ^ set(paths))
            raise LayoutError(
                f"PackedBatch.cat: fields {odd} are not in every batch; expected the same fields. Pack the same "
                "fields, or decode and drop the others."
            )
    columns = [[batch._forms[path] for batch in batches] for path in paths]  # type: ignore[reportPrivateUsage]
    return _joined(batches, columns)


def _joined(batches: Sequence[PackedBatch], columns: Sequence[Sequence[FieldForm]]) -> PackedBatch:
    forms: list[FieldForm] = []
    fields: dict[Path, Encoding] = {}
    objects: dict[Path, Objects] = {}
    row_pads: dict[Path, Words] = {}
    for column in columns:
        form = column[0]
        path = form.path
        if any(other.dtype != form.dtype for other in column):
            dtypes = [str(other.dtype).removeprefix("torch.") for other in column]
            raise LayoutError(
                f'PackedBatch.cat: field "{show(path)}" has dtypes {dtypes}; expected one. Cast before packing.'
            )
        if form.kind == "object":
            objects[path] = join_objects([batch.objects[path] for batch in batches], [len(batch) for batch in batches])
        elif form.kind != "node":
            form = joined_form(column)
            fields[path] = _cat_whole(batches, form) if form.kind == "dense" else _cat_packed(batches, path)
            if form.pads == (PER_ROW,):
                row_pads[path] = np.concatenate([_row_pads(batch, path) for batch in batches])
        forms.append(form)
    axes = [name for name, _ in batches[0].schema.widths if all(name in batch.layouts for batch in batches)]
    names = dict.fromkeys([*axes, *(form.layout for form in forms if form.layout is not None)])
    layouts = {name: join_layouts(name, [batch.layouts[name] for batch in batches]) for name in names}
    schema = Schema(batches[0].schema.root, tuple(forms), tuple((name, layouts[name].width) for name in axes))
    return PackedBatch(sum(map(len, batches)), schema, layouts, fields, objects, row_pads)


def _cat_packed(batches: Sequence[PackedBatch], path: Path) -> Encoding:
    parts = [batch.fields[path] for batch in batches]
    shapes = [part.row_shape for part in parts]
    if len(set(shapes)) > 1:
        raise LayoutError(
            f'PackedBatch.cat: field "{show(path)}" has {shapes} elements at each position; expected one shape. '
            "Bring the batches to one shape before packing."
        )
    return encodings.join(parts, [batch._offsets(path) for batch in batches])  # type: ignore[reportPrivateUsage]


def _cat_whole(batches: Sequence[PackedBatch], form: FieldForm) -> Encoding:
    parts = [cast("Tensor", decompress(batch, form.path, device="cpu").get(form.path)) for batch in batches]
    if any(part.is_nested or part.shape[1:] != parts[0].shape[1:] for part in parts):
        seen = ["jagged" if part.is_nested else tuple(part.shape) for part in parts]
        raise LayoutError(
            f'PackedBatch.cat: field "{show(form.path)}" is {seen}; expected one width. Bring it to one width.'
        )
    return Plain(words(torch.cat(parts)).numpy())


def _row_pads(batch: PackedBatch, path: Path) -> Words:
    if path in batch.row_pads:
        return batch.row_pads[path]
    form = batch._forms[path]  # type: ignore[reportPrivateUsage]
    pad = form.pads[0]
    held = None if isinstance(pad, Pad) or form.dtype is None else pad_tensor(pad, form.dtype)
    assert held is not None
    return words(held.repeat(len(batch))).numpy()
