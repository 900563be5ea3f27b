"""TransferQueue: samples of a packed batch, as columns that it stores and fetches one by one.

    PackedBatch [B] --to_samples--> TensorDict of jagged uint8 --put--> queue, one entry a sample and column
    PackedBatch [n] <-from_samples- TensorDict of jagged uint8 <--get-- any samples, in any order, any columns

An entry is one row of the fields of its column: a manifest as in docs/wire-format.md, deflated, and its arrays. It
needs no other entry, so that samples and columns come and go by themselves.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.arguments import flag, said
from maskpack.core.bits import Words
from maskpack.core.tree import has
from maskpack.errors import FieldError, LayoutError
from maskpack.packed.batch import PackedBatch
from maskpack.packed.file import container as wire
from maskpack.packed.file import read as reading
from maskpack.packed.file import write as manifest
from maskpack.packed.join import joined
from maskpack.views.view import BatchView

_HEAD = struct.Struct("<4sHHI")
"""Magic, index of the column in its batch, number of arrays, bytes of the deflated manifest."""
_ARRAY = struct.Struct("<BI")
"""The dtype of an array (a code of `_CODES`), and its number of items."""
_MAGIC = b"mpq1"
_CODES = {np.dtype(f"<{kind}{size}"): size + 16 * (kind == "i") for kind in "iu" for size in (1, 2, 4, 8)}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_MOST_RATIO, _FREE = 1 << 6, 1 << 16
"""Limits of a manifest: bytes for each deflated byte, and bytes that are always allowed."""
_SHORT = 1 << 10
"""The largest deflated manifest, in bytes, that is cached."""
_USUAL = (
    b'"shape":[3,4],"hints":["bitmap"]{"json":"pickle":[{"rows":1,"root":{"dims":[],"device":null},"axes":["prompt",'
    b'"response","sequence"],"layouts":["sequence","prompt"],"fields":[{"path":["attention_mask"],"kind":"dense",'
    b'"dtype":"bool","dtype":"float32","kind":"padded","dtype":"int64","device":"cpu","shape":[],"layout":"sequence",'
    b'"dim":1,"pad":{"pad":"EDGE"},"hints":["columns","arange"],"hints":["dictionary"],"hints":["rle","bitmap"]},'
    b'"hints":["concat:prompts,responses"]},"hints":["near:old_log_probs"]}],"body":1}{"rows":1,"root":{"dims":[],'
    b'"device":null},"axes":["response"],"layouts":["response"],"fields":[{"path":["token_level_scores"],"kind":'
    b'"padded","dtype":"float32","device":"cpu","shape":[],"layout":"response","dim":1,"pad":0,"hints":["rle"]}],"body":1}'
)
"""The zlib dictionary of manifests, which are short and similar."""
_REMEDY = "Fetch columns that were put as to_samples made them, and name only these."


_MOST_COLUMNS = 1 << 16


def to_samples(
    packed: PackedBatch,
    *,
    columns: Mapping[str, Sequence[str]] | None = None,
    after: int = 0,
    allow_pickle: bool = False,
) -> TensorDict:
    """Splits a packed batch into samples for TransferQueue.

    Args:
        packed: B rows, B > 0; it is not changed.
        columns: the entries of the batch in each column; each entry is in one column. By default each entry is a column
            of its own name. Fewer columns take fewer bytes, but are fetched whole.
        after: the number of columns that the samples already have; new ones come after them.
        allow_pickle: as for `PackedBatch.to_bytes`.

    Returns:
        A TensorDict [B] with one jagged uint8 tensor for each column.

    Raises:
        LayoutError: there are no rows, or an entry is in no column or in two.
        FieldError: `columns` names an unknown entry.
        MaskpackError: as `PackedBatch.to_bytes`.
    """
    call = "to_samples"
    if not isinstance(packed, PackedBatch):
        raise LayoutError(f"{call}: got {said(packed)}; expected a PackedBatch. Compress the batch first.")
    if len(packed) == 0:
        raise LayoutError(f"{call}: the batch has no rows; expected at least one. Put nothing where nothing is.")
    flag(allow_pickle, "allow_pickle", call)
    entries = list(dict.fromkeys(form.path[0] for form in packed.schema.forms))
    columns = {name: [name] for name in entries} if columns is None else columns
    _check_columns(columns, entries, call)
    if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after < _MOST_COLUMNS - len(columns):
        raise LayoutError(
            f"{call}: after is {after!r} with {len(columns)} columns; expected a whole number from 0, below "
            f"{_MOST_COLUMNS:,} with them. Pass the number of columns that the samples have."
        )
    out: dict[str, Tensor] = {}
    for place, (name, members) in enumerate(columns.items(), after):
        part = _part(packed, members)
        out[name] = _jagged([_entry(part[row : row + 1], place, allow_pickle) for row in range(len(packed))])
    return TensorDict(out, batch_size=[len(packed)])


def from_samples(samples: TensorDictBase, *columns: str, allow_pickle: bool = False) -> PackedBatch:
    """Joins samples that were fetched from TransferQueue into one packed batch, in their order.

    Args:
        samples: [n], columns of `to_samples`, in any order.
        columns: the columns to read; by default all. Columns are in the order in which they were put, and the entries
            of a column in the order of the batch.
        allow_pickle: as for `PackedBatch.from_bytes`.

    Raises:
        LayoutError: there are no samples, a column was not made by `to_samples`, or the rows of columns do not match.
        FieldError: a column is missing.
        WireFormatError: an entry is damaged, or is a pickle and `allow_pickle` is false.
    """
    call = "from_samples"
    if not isinstance(samples, TensorDictBase) or not samples.batch_dims or not samples.batch_size[0]:
        seen = f"batch_size {list(samples.batch_size)}" if isinstance(samples, TensorDictBase) else said(samples)
        raise LayoutError(f"{call}: got {seen}; expected a TensorDict of at least one sample. Fetch some first.")
    flag(allow_pickle, "allow_pickle", call)
    names = list(columns) or [str(name) for name, _ in samples.items()]
    for name in names:
        if not isinstance(name, str):
            raise LayoutError(f"{call}: a column is {said(name)}; expected a name. Give names one by one.")
        if not has(samples, name):
            known = [str(known) for known, _ in samples.items()]
            raise FieldError(f'{call}: no column "{name}" in the samples; they have {known}. {_REMEDY}')
    parts: list[tuple[int, str, PackedBatch]] = []
    for name in names:
        place, part = _column(samples.get(name, None), f'{call}: column "{name}"', allow_pickle)
        parts.append((place, name, part))
    if not parts:
        raise LayoutError(f"{call}: the samples have no columns; expected some. {_REMEDY}")
    parts.sort(key=lambda part: part[:2])
    view = BatchView.of(parts[0][2])
    for _, _, part in parts[1:]:
        view = view.with_fields(part)
    return view.to_packed()


# -------------------------------------------------------------------- columns


def _check_columns(columns: Mapping[str, Sequence[str]], entries: Sequence[str], call: str) -> None:
    lists: list[Any] = list(columns.values()) if isinstance(columns, Mapping) else [None]
    known = all(isinstance(members, list | tuple) for members in lists)
    named: list[Any] = [entry for members in lists for entry in members] if known else []
    if not known or not all(isinstance(name, str) for name in [*named, *columns]):
        raise LayoutError(
            f"{call}: columns are {repr(columns)[:80]}; expected a dict of lists of names. Write "
            '{"tokens": ["input_ids", "attention_mask"]}.'
        )
    if sorted(named) != sorted(entries) or not all(columns.values()):
        odd = sorted({entry for entry in [*named, *entries] if named.count(entry) != 1 or entry not in entries})
        unknown = [entry for entry in odd if entry not in entries]
        if unknown:
            raise FieldError(f"{call}: no entries {unknown} in the batch; it has {list(entries)}. Name these.")
        raise LayoutError(
            f"{call}: columns name {odd or 'no entries'} never, twice, or without that the batch has them; expected "
            f"each of {list(entries)} once. Leave out of the batch what is not to be put."
        )


def _part(packed: PackedBatch, entries: Iterable[str]) -> PackedBatch:
    """The batch with some of its top-level entries and their layouts."""
    part = packed.select(*entries)
    used = {form.layout for form in part.schema.forms}
    axes = tuple(axis for axis in part.schema.axes if axis[0] in used)
    table = part.table.with_layouts({name for name in used if name} | part.table.layouts_in_use())
    return replace(part, schema=replace(part.schema, axes=axes), table=table)


def _column(held: Any, call: str, allow_pickle: bool) -> tuple[int, PackedBatch]:
    """The index of a column, and its rows as one batch."""
    rows = _rows(held)
    if rows is None:
        seen = "missing" if held is None else f"{said(held)}"
        raise LayoutError(f"{call} is {seen}; expected jagged uint8, one entry a sample. {_REMEDY}")
    read = [_read(row, call, allow_pickle) for row in rows]
    return read[0][0], joined([part for _, part in read], call)


def _rows(held: Any) -> list[Words] | None:
    """The bytes of each sample; None unless it is a column of bytes."""
    if not isinstance(held, Tensor) or held.dtype != torch.uint8 or held.dim() != 2:
        return None
    return [row.contiguous().cpu().numpy() for row in held.unbind()]


def _jagged(entries: Sequence[bytes]) -> Tensor:
    offsets = torch.zeros(len(entries) + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(torch.tensor([len(entry) for entry in entries], device="cpu"), 0, out=offsets[1:])
    values = torch.frombuffer(bytearray().join(entries), dtype=torch.uint8)
    return torch.nested.nested_tensor_from_jagged(values, offsets)


# -------------------------------------------------------------------- one row


def _entry(row: PackedBatch, place: int, allow_pickle: bool) -> bytes:
    message, _ = manifest.write(row, allow_pickle)
    text = _deflated(json.dumps(message.manifest, separators=(",", ":"), allow_nan=False))
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    if arrays[0].dtype == np.int64:  # the table, unless a codec has taken it: small numbers, in int8 once deflated
        arrays[0] = np.frombuffer(_squeezed(arrays[0].tobytes(), 1), np.int8)
    table = [_ARRAY.pack(_CODES[array.dtype], array.size) for array in arrays]
    head = _HEAD.pack(_MAGIC, place, len(arrays), len(text))
    return b"".join([head, *table, text, *[array.tobytes() for array in arrays]])


def _read(row: Words, call: str, allow_pickle: bool) -> tuple[int, PackedBatch]:
    data = row.data
    if len(data) < _HEAD.size or bytes(data[:4]) != _MAGIC:
        raise LayoutError(f"{call} holds other bytes than to_samples writes. {_REMEDY}")
    _, place, count, size = _HEAD.unpack_from(data)
    begin = _HEAD.size + count * _ARRAY.size
    if begin + size > len(data):
        wire.fail(call, f"an entry of {len(data)} bytes", f"at least {begin + size}")
    text = bytes(data[begin : begin + size])
    arrays: list[Words] = []
    end = begin + size
    for code, items in _ARRAY.iter_unpack(data[_HEAD.size : begin]):
        dtype = _DTYPES.get(code)
        if dtype is None or end + items * dtype.itemsize > len(data):
            wire.fail(call, f"an array of code {code} and {items} items", "one that the entry holds")
        arrays.append(np.array(row[end : end + items * dtype.itemsize]).view(dtype))
        end += items * dtype.itemsize
    if end != len(data):
        wire.fail(call, f"an entry of {len(data)} bytes", f"{end}")
    if arrays and arrays[0].dtype == np.int8:
        line = _expanded(arrays[0].tobytes(), call, "table")
        if len(line) % 8:
            wire.fail(call, f"a table of {len(line)} bytes", "int64 numbers")
        arrays[0] = np.frombuffer(line, np.int64)
    return place, reading.read(PackedBatch, wire.Message(_manifest(text, call), arrays), call, allow_pickle)


@lru_cache(maxsize=64)
def _deflated(text: str) -> bytes:
    line = text.encode("utf-8", "surrogatepass")
    small = _squeezed(line, 9)
    return small if len(line) <= _most(small) else _squeezed(line, 0)


def _squeezed(line: bytes, level: int) -> bytes:
    squeezer = zlib.compressobj(level, zdict=_USUAL)
    return squeezer.compress(line) + squeezer.flush()


def _most(text: bytes) -> int:
    """The largest size of a manifest, by its deflated size: a few bytes must not make a reader parse many."""
    return min(wire.MAX_HEADER, _FREE + _MOST_RATIO * len(text))


def _manifest(text: bytes, call: str) -> dict[str, Any]:
    """Parses a manifest. Rows of a column usually share one, so short ones are cached; long ones have Python objects of
    a single row."""
    return _known(text, call) if len(text) <= _SHORT else _inflated(text, call)


@lru_cache(maxsize=64)
def _known(text: bytes, call: str) -> dict[str, Any]:
    return _inflated(text, call)


def _inflated(text: bytes, call: str) -> dict[str, Any]:
    told = _expanded(text, call, "manifest")
    return wire.loads(told, call)


def _expanded(text: bytes, call: str, what: str) -> bytes:
    reader = zlib.decompressobj(zdict=_USUAL)
    try:
        line = reader.decompress(text, _most(text))
    except zlib.error as error:
        wire.fail(call, f"a {what} that cannot be inflated ({error})", "one that to_samples wrote")
    if not reader.eof or reader.unused_data:
        wire.fail(call, f"a {what} that does not end where it should", f"one of at most {_most(text)} bytes")
    return line
