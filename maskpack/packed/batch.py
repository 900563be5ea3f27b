"""PackedBatch: a batch encoded field by field, ready to be sent.

    compress(padded or nested) -> PackedBatch -> take, slices, split, chunk, cat -> decompress(padded or nested)
                                     |  ^
                       pickle, to_bytes, save  from_bytes, load

A PackedBatch is never changed, and the tensors decoded from it are copies.
"""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from maskpack.core import index
from maskpack.core.arguments import flag, list_of, named, said, whole
from maskpack.core.index import IntArray, even_sizes, no_single_row, part_sizes, row_index
from maskpack.core.keys import path_of, plain
from maskpack.core.objects import Objects
from maskpack.core.tensors import device_here
from maskpack.core.tree import entry_at, select_entries, unflatten
from maskpack.errors import LayoutError
from maskpack.fields.options import Options, Registry
from maskpack.fields.registry import Key, Path, show
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.axes import has_masks
from maskpack.nesting.check import need_none, off_axis, uncovered, warn_uncovered
from maskpack.nesting.nest import rows_only
from maskpack.nesting.nested import layouts_entry, read_nested
from maskpack.nesting.read import Opened
from maskpack.nesting.schema import LAYOUTS, FieldForm, Schema
from maskpack.packed.arrow import arrow_table
from maskpack.packed.cuda.decode import decode_on_device, pinned_memory
from maskpack.packed.decode import MAX_BYTES, decoded_nbytes, dims_above, entries_of, on, pads_of, shape_in, trimmed
from maskpack.packed.encode import encoded_batch
from maskpack.packed.file.codec import check_codec
from maskpack.packed.file.container import Pieces, file_bytes, read_message
from maskpack.packed.file.read import read_batch
from maskpack.packed.file.write import write_message
from maskpack.packed.join import check_named, check_uids, joined, narrowed, restricted, table_of_rows, tokens_taken
from maskpack.packed.pickling import from_parts, to_parts
from maskpack.packed.rows import Rows, TokenSpans, numbers_of
from maskpack.packed.table import Table

Target = Literal["padded", "nested"]
Widths = Literal["padded", "trim"]
File = str | os.PathLike[str] | BinaryIO


@dataclass(frozen=True, eq=False, repr=False)
class PackedBatch:
    """A batch whose fields are encoded. Build one with `compress`.

    Attributes:
        num_rows: B.
        schema: the forms of the fields, in key order.
        rows: the encoded tensors, as rows of bodies.
        objects: the Python objects.
        codec: the codec that compresses the bytes when the batch is pickled or saved; None for none.
    """

    num_rows: int
    schema: Schema
    rows: Rows
    objects: Mapping[Path, Objects]
    codec: str | None = None

    def __len__(self) -> int:
        return self.num_rows

    def __repr__(self) -> str:
        return f"PackedBatch(rows={self.num_rows}, fields={len(self.numbers)}, nbytes={self.nbytes:,})"

    @cached_property
    def table(self) -> Table:
        """The encoded tensors of these rows alone, in the order of the schema. Some rows, or fields in another order,
        are cut from their tables, or encoded again."""
        whole, own = self.rows.whole, self.rows.columns[0]
        return whole if whole is not None and own.paths == tuple(self.numbers) else table_of_rows(self)

    @property
    def frames(self) -> Mapping[str, tuple[int, int]]:
        """The width and the anchor of each layout."""
        return self.rows.frames

    @property
    def layouts(self) -> dict[str, RowLayout]:
        """The RowLayouts of the fields, a dict by name, on the host."""
        return self.rows.layouts

    @property
    def nbytes(self) -> int:
        """The size in bytes of the encoded tensors, the tensors inside Python objects and the layouts, before any
        codec. Rows that were selected have the share of the bytes that an equal division gives them."""
        return self.rows.nbytes + sum(array.nbytes for entry in self.objects.values() for array in entry.arrays())

    @cached_property
    def forms(self) -> dict[Path, FieldForm]:
        """The form of each entry, by its path."""
        return {form.path: form for form in self.schema.forms}

    def keys(self) -> tuple[Key, ...]:
        """The keys of the fields, in key order: a name, or a tuple of names for a field of a sub-batch."""
        return tuple(self.fields)

    @property
    def fields(self) -> dict[Key, FieldForm]:
        """What is known of each field without decoding it, by its key. A FieldForm has `kind` (padded: [B, S, *shape]
        under `layout`; flat or jagged: the tokens of a nested tensor; dense: a tensor without a mask; object), `dtype`,
        `shape` (of an element), `device`, and `reason`: why a tensor stays padded, or None."""
        return {plain(form.path): form for form in self.schema.forms if form.node is None}

    @cached_property
    def tensors(self) -> tuple[FieldForm, ...]:
        """The forms of the tensors, in the order of the table."""
        return tuple(form for form in self.schema.forms if form.dtype is not None)

    @property
    def numbers(self) -> Mapping[Path, int]:
        """The number of each tensor in the table."""
        return numbers_of(self.schema)

    def words_nbytes(self, path: Path) -> int:
        """Bytes of the words of a field, decoded."""
        return math.prod(shape_in(self, form := self.forms[path], True)) * (form.dtype.itemsize if form.dtype else 0)

    def lengths(self, layout: str) -> IntArray:
        """The row lengths of a layout, int64 [B], for planning."""
        return named(self.layouts, layout, "PackedBatch.lengths").lengths + 0

    # ---------------------------------------------------------------- rows

    def take(self, rows: index.Rows) -> PackedBatch:
        """Selects rows by a slice, indices (repeated or negative ones too), or a bool mask [B], in the order given.

        No value is copied: the rows are numbers, and share the memory of this batch, which lives as long as they do.
        `own` cuts them loose. Their bytes are made when they are pickled or saved.
        """
        self._need_rows("take")
        if isinstance(rows, slice) and rows.step is None:
            part: slice[Any] = rows
            if type(part.start) is type(part.stop) is int and 0 <= part.start <= part.stop <= self.num_rows:
                return self._rows_at(part, part.stop - part.start)
        index = row_index(rows, self.num_rows, "PackedBatch.take")
        return self._rows_at(index, index.size)

    def __getitem__(self, rows: index.Rows) -> PackedBatch:
        no_single_row(rows, self.num_rows, "PackedBatch")
        return self.take(rows)

    def split(self, sizes: int | Sequence[int]) -> tuple[PackedBatch, ...]:
        """Splits the rows into consecutive parts: `sizes` is a list that sums to B, or one size (the last part may be
        smaller)."""
        self._need_rows("split")
        sizes = part_sizes(sizes, self.num_rows, "PackedBatch.split")
        ends = np.cumsum(sizes, dtype=np.int64).tolist()
        return tuple(self._rows_at(slice(end - size, end), size) for end, size in zip(ends, sizes, strict=True))

    def chunk(self, parts: int) -> tuple[PackedBatch, ...]:
        """Splits the rows into `parts` consecutive parts whose sizes differ by at most one; parts beyond the rows are
        empty."""
        return self.split(even_sizes(self.num_rows, parts, "PackedBatch.chunk"))

    @staticmethod
    def cat(batches: Sequence[PackedBatch]) -> PackedBatch:
        """Concatenates the rows of several batches with the same fields.

        Batches of different padded widths become as wide as the widest: the padding of prompts grows on the left, the
        padding of responses on the right; each row keeps its own pad, and one without padding goes on with the first
        pad of its spec. A field that stays padded in one of the batches stays padded in the result. No value is copied:
        the result has the rows of all of them by number. Raises LayoutError if fields, dtypes or the shapes of their
        elements differ, or the widths of a field that stays padded.
        """
        batches = list_of(batches, PackedBatch, "PackedBatch.cat", "Compress what is not packed.")
        for batch in batches:
            batch._need_rows("cat")
        return batches[0] if len(batches) == 1 else joined(batches, "PackedBatch.cat")

    def take_tokens(self, spans: Any, layout: str | None = None) -> PackedBatch:
        """Makes a row of each span of tokens, such as a turn of a trajectory. The fields of `layout` are jagged, as if
        they had been so when they were packed.

        No value is copied before the rows are decoded or sent, as for `take`. Fields without a layout, and Python
        objects, are those of the row.

        Args:
            spans: integers [N, 3]: a row, its first token and the token behind its last, which count valid tokens. Rows
                may repeat, and spans overlap.
            layout: the layout whose tokens are counted; None for `sequence`, or the only one.

        Raises:
            LayoutError: a span that is not in the batch; a field with another layout, to be left out by `select`.
            FieldError: the batch has no such layout.
        """
        call = "PackedBatch.take_tokens"
        self._need_rows("take_tokens")
        return tokens_taken(self, TokenSpans.of(spans, layout, self.layouts, call), call)

    def _rows_at(self, index: IntArray | slice, count: int) -> PackedBatch:
        rows = range(index.start, index.stop) if isinstance(index, slice) else index.tolist() if self.objects else ()
        objects = {path: entry.take(rows) for path, entry in self.objects.items()}
        return replace(self, num_rows=count, rows=self.rows.take(index), objects=objects)

    def own(self) -> PackedBatch:
        """Returns the rows with bytes of their own, which keep no memory of other rows alive."""
        return replace(self, rows=Rows.of(self.table.own(), self.schema))

    def _need_rows(self, call: str) -> None:
        if self.schema.root.more_dims is None:
            raise LayoutError(
                f"PackedBatch.{call}: the batch was packed from a TensorDict with batch_size [], so its rows are not a "
                "batch dim. Give the TensorDict batch_size=[rows] before packing."
            )

    # ---------------------------------------------------------------- fields

    def select(self, *fields: Key) -> PackedBatch:
        """Selects fields, still encoded, with all rows, in the order of the batch.

        The name of a sub-batch stands for all that is in it, a tuple of names for one entry in it. Layouts of the axes
        stay, so that `lengths` and `compress(..., like=)` work as before. Nothing is decoded.

        Raises FieldError for a field that is not in the batch, and LayoutError if none is named.
        """
        check_named(fields, "PackedBatch.select")
        return restricted(self, {form.path for form in _forms_of(self, fields, "PackedBatch.select")})

    def narrow(self, field: Key, start: int, length: int, *, dim: int | None = None) -> PackedBatch:
        """Keeps a part of the elements of one field, like `torch.narrow`, with all rows and the other fields.

        For example, a pipeline stage keeps its layers of `routed_experts` [B, S, layers, k].

        A field in columns stays encoded, and its other columns are never decoded: `routed_experts` of RL_FIELDS has a
        column for each layer, unless the batch is so small that they would take more bytes. Another field, or another
        dim, is decoded and encoded again, and the other fields are copied.

        Args:
            field: a tensor.
            start: the first index that is kept; a negative one counts from the end.
            length: how many are kept.
            dim: a dim of the tensor in its padded form, of [B, j, *F] if it was jagged: not the rows, and not the
                width. None for the first one of an element, F[0], of a field that has a width.

        Raises:
            FieldError: the field is not in the batch.
            LayoutError: the field is no tensor, or has no such dim, or fewer elements in it.
        """
        call = "PackedBatch.narrow"
        form = _forms_of(self, [field], call)[-1]
        if form.dtype is None or form.path != path_of(field):
            raise LayoutError(
                f'{call}: field "{show(field)}" is not a tensor; expected a tensor. Narrow the tensors in it.'
            )
        at, size = _dim_of_element(self, form, dim, call)
        start, length = whole(start, "start", -size, call, size), whole(length, "length", 0, call)
        start += size if start < 0 else 0
        if start + length > size:
            raise LayoutError(
                f'{call}: field "{show(form.path)}" from {start} on, {length} of them; expected at most {size} in all. '
                "Narrow to indices that the dim has."
            )
        return self if length == size else narrowed(self, form, at, start, length)

    # ---------------------------------------------------------------- memory

    def pin_memory(self) -> PackedBatch:
        """Returns the batch with its encoded values in pinned memory, which a GPU reads directly.

        `decompress` then needs no other copy on the host, for rows taken from the result neither, unless they are
        encoded first (docs/gpu.md, Decoding).

        Raises LayoutError if this process has no CUDA device.
        """
        if not torch.cuda.is_available():
            raise LayoutError(
                "PackedBatch.pin_memory: this process has no CUDA device; expected one. Decode the batch as it is."
            )
        table = self.table.own()
        body = pinned_memory(table.body.nbytes)
        body[...] = table.body
        return replace(self, rows=Rows.of(table.like(body=body), self.schema))

    # ---------------------------------------------------------------- bytes

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The schema, the table and its body, which protocol 5 sends out of band, and the Python objects."""
        schema, table, records, body = to_parts(self)
        held: Any = pickle.PickleBuffer(body.data) if protocol >= 5 else body.tobytes()
        return _unpickled, (schema, table, records, held, self.objects, self.codec)

    def to_bytes(self, *, allow_pickle: bool = False, checksum: bool = False) -> bytes:
        """Returns the batch as the bytes of a valid safetensors file (docs/format.md).

        Args:
            allow_pickle: pickle Python objects that are more than plain data, instead of raising MaskpackError. The
                reader must allow it, too.
            checksum: add a checksum, which `from_bytes` verifies.
        """
        return self._pieces(allow_pickle, checksum, "PackedBatch.to_bytes").joined()

    def save(self, file: File, *, allow_pickle: bool = False, checksum: bool = False) -> None:
        """Writes `to_bytes` to a file.

        Args:
            file: a path, whose old file is replaced only when the new one is complete on the disk; a URL of fsspec, as
                `s3://bucket/rollouts.maskpack`; or an open binary file, to which the bytes are appended.
        """
        target = _file(file, "PackedBatch.save", "write")
        pieces = self._pieces(allow_pickle, checksum, "PackedBatch.save")
        if isinstance(target, str):
            pieces.save(target, "PackedBatch.save")
        else:
            pieces.write(target)

    @classmethod
    def from_bytes(cls, data: Any, *, allow_pickle: bool = False, max_bytes: int | None = MAX_BYTES) -> PackedBatch:
        """Reads a batch from bytes, or from another object with a buffer.

        The batch keeps reading from this memory, so the memory must not be changed afterwards. Nothing in it is
        executed unless `allow_pickle` is true.

        Args:
            max_bytes: the most bytes that the whole padded batch may take; None for no limit. A few bytes can describe
                a huge batch: its size is added up before memory is reserved for it.

        Raises WireFormatError for bytes that `to_bytes` does not write, and for a batch larger than `max_bytes`.
        """
        call = "PackedBatch.from_bytes"
        flag(allow_pickle, "allow_pickle", call)
        _check_limit(max_bytes, call)
        return read_batch(cls, read_message(data, call), call, allow_pickle, max_bytes)

    @classmethod
    def load(
        cls, file: File, *, allow_pickle: bool = False, mmap: bool = True, max_bytes: int | None = MAX_BYTES
    ) -> PackedBatch:
        """Reads a batch that `save` wrote.

        Args:
            file: a path, a URL of fsspec, or an open binary file, which is read to its end.
            mmap: map the file of a path into memory: rows are read when they are decoded. If the file is later
                truncated, reading a lost part ends the process with SIGBUS, which no error handler catches; if it is
                written to in place, values may be wrong, but no memory outside of the file is touched. `save` never
                changes a file in place. False reads the whole file first.
            max_bytes: as for `from_bytes`.

        Raises WireFormatError as `from_bytes`.
        """
        source = _file(file, "PackedBatch.load", "read")
        flag(allow_pickle, "allow_pickle", "PackedBatch.load")
        flag(mmap, "mmap", "PackedBatch.load")
        _check_limit(max_bytes, "PackedBatch.load")
        call = f"PackedBatch.load({source!r})" if isinstance(source, str) else "PackedBatch.load"
        data = file_bytes(source, mmap, "PackedBatch.load") if isinstance(source, str) else source.read()
        return read_batch(cls, read_message(data, call), call, allow_pickle, max_bytes)

    def to_arrow(self, *fields: Key) -> Any:
        """Decodes fields to a `pyarrow.Table` with one row for each row of the batch (needs maskpack[arrow]).

        A field of tokens is a column of lists with the valid values alone, so rows differ in length as their tokens do;
        other tensors are columns of numbers, or of lists of fixed size. bfloat16 and float8 become float32. Columns of
        sub-batches are named `sub/field`.

        Args:
            fields: the keys of the fields to decode, a tuple for one of a sub-batch; all if none is named. Columns come
                in the order of these keys.

        Raises:
            LayoutError: a field that is not in the batch, or that Arrow has no type for, as complex numbers.
            MaskpackError: pyarrow is missing.
        """
        self._need_rows("to_arrow")
        call = "PackedBatch.to_arrow"
        chosen = {form.path for form in _forms_of(self, fields, call)}
        nested, asked = decompress(self, *fields, format="nested", device="cpu"), [path_of(key) for key in fields]
        paths = [path for key in self.keys() if (path := path_of(key)) in chosen]
        paths.sort(key=lambda path: next((at for at, own in enumerate(asked) if path[: len(own)] == own), 0))
        return arrow_table({show(path): entry_at(nested, path) for path in paths}, self.num_rows, call)

    def _pieces(self, allow_pickle: bool, checksum: bool, call: str) -> Pieces:
        flag(allow_pickle, "allow_pickle", call)
        flag(checksum, "checksum", call)
        return Pieces(*write_message(self, allow_pickle), checksum=checksum)


def _forms_of(packed: PackedBatch, fields: Sequence[Key], call: str) -> list[FieldForm]:
    """The forms of some fields, of what is in them, and of the sub-batches that they are in; all if none is named."""
    return [form for _, form in select_entries([*packed.forms.items()], fields, call)]


def _dim_of_element(packed: PackedBatch, form: FieldForm, dim: Any, call: str) -> tuple[int, int]:
    """The dim of an element that `dim` of a field is, and its size. Raises LayoutError if there is none."""
    rows = 0 if form.layout is None and packed.schema.root.more_dims is None else 1
    width = form.ragged_dim if form.kind in ("padded", "jagged") else None
    dims = rows + len(form.shape) + (width is not None)
    places = [place for place in range(rows, dims) if place != width]
    shared = max(len(dims_above(packed, form.path)) - 1, 0)
    free = [place for place in places if place > shared or not rows]
    if dim is None and form.axis is not None:
        raise LayoutError(
            f'{call}: field "{show(form.path)}" stayed padded, because {form.reason}; its width is '
            "now a dim of its elements; expected dim=, the dim to narrow. Pass dim=2 for the layers of [B, S, layers, "
            "k]."
        )
    given = next(iter(free), dims) if dim is None else whole(dim, "dim", -dims, call)
    given += dims if given < 0 else 0
    if given not in free:
        expected = " or ".join(map(str, free)) or "a field whose elements have dims"
        raise LayoutError(
            f'{call}: dim is {said(dim)} of field "{show(form.path)}", whose elements are {form.shape}; expected '
            f'{expected}. Rows are taken with take, and widths trimmed by decompress(widths="trim").'
        )
    at = places.index(given)
    return at, form.shape[at]


def _check_limit(max_bytes: Any, call: str) -> None:
    if max_bytes is not None:
        whole(max_bytes, "max_bytes", 0, call)


def _file(file: Any, call: str, method: Literal["read", "write"]) -> Any:
    """A path or a URL as text, or an open file."""
    if not isinstance(file, str | os.PathLike):
        if callable(getattr(file, method, None)) and not isinstance(file, io.TextIOBase):
            return file
        raise LayoutError(
            f"{call}: file is {said(file)}; expected a path, a URL, or an open binary file. Pass one; from_bytes and "
            "to_bytes take bytes."
        )
    path = os.fspath(cast("str", file))
    if not isinstance(path, str) or "\0" in path or not os.path.basename(path):
        raise LayoutError(f"{call}: file is {path!r}; expected a path that ends in a name. Name a file.")
    return path


def _unpickled(*parts: Any) -> PackedBatch:
    return PackedBatch(*from_parts(*parts))


# -------------------------------------------------------------------- in and out


def compress(
    batch: TensorDictBase,
    *,
    registry: Registry = RL_FIELDS,
    pad_token_id: int | None = None,
    strict_mask_nesting: bool = False,
    verify: bool = True,
    like: PackedBatch | TensorDictBase | None = None,
    codec: str | None = None,
) -> PackedBatch:
    """Encodes a padded, nested or mixed batch without its padding, as a PackedBatch.

    Args:
        batch: as for `nest_batch_by_mask`, as are the other arguments; it is not changed.
        like: a packed or nested batch with the same rows. Its layouts replace masks that `batch` lacks, as the outputs
            of a worker do. If `batch` has no mask at all, and both have a field `uid`, this is compared.
        codec: `zstd` compresses the bytes when the batch is pickled, saved or turned into bytes, for slow networks
            (docs/benchmarks.md shows when it helps); needs maskpack[zstd]. Operations on rows use uncompressed bytes.

    Raises:
        CoverageError, LossyPadError, LayoutError, RegistryError: as `nest_batch_by_mask`.
        MaskpackError: the codec is unknown, or its package is missing.

    On CUDA with Triton, batches of a kind that was compressed before are encoded on the device, into pinned memory. Two
    synchronisations for padded fields whose rows have at most one span.
    """
    if isinstance(batch, PackedBatch):
        raise LayoutError(
            "compress: the batch is a PackedBatch; expected a TensorDict. Use it as it is, or decompress it first."
        )
    check_codec(codec, "compress")
    options = Options.of("compress", registry, pad_token_id, strict_mask_nesting, verify).of_this_process()
    stand_in = _layouts_of(like)
    opened = Opened.of(batch, options, stand_in)
    if like is not None and not has_masks(opened.batch, options.registry):
        check_uids(opened.batch, like, "compress")
    table, schema = encoded_batch(opened)
    off = off_axis(opened, table.layouts) if opened.plan.declared else []
    if options.strict:
        need_none(options.call, uncovered(opened, schema.forms, off))
    entries = opened.seen.entries
    objects = {f.path: Objects.of(entries[f.path]).stowed() for f in schema.forms if f.kind == "object"}
    packed = PackedBatch(table.rows, schema, Rows.of(table, schema), objects, codec)
    warn_uncovered(opened, schema.forms, off, lambda: packed.nbytes, 2)
    return packed


def decompress(
    packed: PackedBatch,
    *fields: Key,
    format: Target = "padded",
    device: torch.device | str | None = None,
    widths: Widths = "padded",
    max_bytes: int | None = MAX_BYTES,
) -> TensorDict:
    """Decodes a PackedBatch to a padded or nested TensorDict, bit for bit the batch that was packed.

    Args:
        packed: is not changed; the tensors returned share no memory with it.
        fields: the fields to decode; all if none is named.
        format: `padded`, or `nested`, as `nest_batch_by_mask` returns it.
        device: the device of the result; None for the device that each field came from. On CUDA with Triton one kernel
            decodes on the device: only encoded bytes are copied to it, and nothing synchronises (`pin_memory` saves a
            copy on the host). Otherwise the fields are decoded on the host.
        widths: `padded`, the padded widths of the batch that was packed; or `trim`, the columns of each axis from
            the first to the last with a valid token in any of these rows, for padded micro-batches. Fields that stay
            padded keep their widths.
        max_bytes: the most bytes that these fields may take decoded; None for no limit. Nothing is decoded if they take
            more.

    Raises:
        LayoutError: a field that is not in the batch, an unknown format, a device that this process does not have,
            widths="trim" of a batch with batch dims behind its rows, more than `max_bytes`, or the capture
            of a CUDA graph.
        WireFormatError: a mapped file was written to since it was loaded (found on CUDA only).
    """
    if not isinstance(packed, PackedBatch):
        raise LayoutError(
            f"decompress: got {said(packed)}; expected a PackedBatch. Pass what compress returned; "
            "unnest_batch_by_mask restores a nested TensorDict, and materialize decodes a BatchView."
        )
    if format not in ("padded", "nested"):
        raise LayoutError(f'decompress: format is {said(format)}; expected "padded" or "nested". Choose one of these.')
    if widths not in ("padded", "trim"):
        raise LayoutError(f'decompress: widths is {said(widths)}; expected "padded" or "trim". Choose one of these.')
    forms = _forms_of(packed, fields, "decompress")
    stored = packed
    if widths == "trim":
        packed = trimmed(packed, forms, "decompress")
        forms = [packed.forms[form.path] for form in forms]
    _check_limit(max_bytes, "decompress")
    size = decoded_nbytes(packed, forms, format == "nested")
    if max_bytes is not None and size > max_bytes:
        raise LayoutError(
            f"decompress: these fields take {size} bytes {format}; expected at most {max_bytes}. Decode fewer rows or "
            f"fields, or pass max_bytes={size}."
        )
    check_devices({form.device or "cpu" for form in forms} if device is None else [device], "decompress")
    nested, root = format == "nested", packed.schema.root
    entries = entries_of(packed, forms, nested, device, decode_on_device(packed, stored, forms, nested, device))
    if not nested:
        return unflatten(on(root, device), entries, packed.num_rows)
    out = unflatten(on(rows_only(root), device), entries, packed.num_rows)
    schema = replace(packed.schema, root=on(root, device), forms=tuple(forms))
    pads = {form.path: pads_of(packed, form) for form in forms if form.kind == "padded"}
    flat = {form.path for form in forms if not form.shape}
    home = torch.device(device or "cpu")
    return out.set(LAYOUTS, layouts_entry(schema, packed.layouts, pads, flat, packed.num_rows, home))


def _layouts_of(like: Any) -> dict[str, RowLayout]:
    if like is None:
        return {}
    if isinstance(like, PackedBatch):
        return {name: like.layouts[name] for name, _, _ in like.schema.axes}  # others have no padded width
    if not isinstance(like, TensorDictBase):
        raise LayoutError(
            f"compress: like is {said(like)}; expected a PackedBatch or a nested TensorDict. Pass the batch that has "
            "the layouts; for a BatchView, pass view.layouts_alone()."
        )
    return dict(read_nested(like, "compress: like").layouts)


def check_devices(devices: Iterable[torch.device | str], call: str) -> None:
    """Raises LayoutError for a device that this process does not have, or that is "meta"."""
    for device in devices:
        if device_here(device, call).type == "meta":
            raise LayoutError(
                f'{call}: device is "meta", which holds no values; expected one that does. Pass device="cpu".'
            )
