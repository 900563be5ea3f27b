"""TorchRL: replay buffers of packed rows.

    extend, add --compress--> segments of packed rows <--slot table-- samplers, writers     PackedStorage
    sample <--decompress-- the rows of the slots, at their padded widths, padded or nested

With a RolloutLog, the rows are on a disk, and their slots are tags. Samples are bit for bit those of a storage of
padded tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict import lazy_stack as lazy_stack  # type: ignore[reportUnknownVariableType]
from torch import Tensor

from maskpack.core.arguments import flag, said
from maskpack.core.index import IntArray, row_index
from maskpack.core.keys import need_keys
from maskpack.core.tensors import device_here, host_array
from maskpack.errors import LayoutError, StorageError
from maskpack.packed.batch import PackedBatch, Target, compress, decompress
from maskpack.packed.join import with_stacks
from maskpack.store.log import RolloutLog
from maskpack.views.view import BatchView

_ListStorage: Any = import_module("torchrl.data.replay_buffers").LazyStackStorage
_Checkpointer: Any = import_module("torchrl.data.replay_buffers.checkpointers").StorageCheckpointerBase

_FEW = 64
"""Segments with fewer rows than this are joined once there are this many of them."""
_FILE = "rows.safetensors"
_SLOT = "slot"
"""The tag of a row in a log that names its slot."""


class PackedCheckpointer(_Checkpointer):
    """Writes the rows of a PackedStorage to one file, and memory-maps it again."""

    def dumps(self, storage: PackedStorage, path: Any) -> None:
        """Writes `rows.safetensors` into the folder `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if len(storage):
            storage.rows.to_packed().save(folder / _FILE, allow_pickle=storage.allow_pickle)
        else:
            (folder / _FILE).unlink(missing_ok=True)

    def loads(self, storage: PackedStorage, path: Any) -> None:
        """Maps the file; rows are read when they are sampled. An empty storage has no file."""
        file = Path(path) / _FILE
        if not Path(path).is_dir():
            raise LayoutError(
                f"PackedStorage.loads: {path} is not a folder; expected a folder that dumps wrote. Check the path."
            )
        packed = PackedBatch.load(file, allow_pickle=storage.allow_pickle, max_bytes=None) if file.is_file() else None
        storage.restore(packed)


class PackedStorage(_ListStorage):
    """A storage for TorchRL replay buffers that keeps its rows packed.

    Args:
        max_size: the number of slots.
        format: of samples, "padded" or "nested".
        fields: the fields of samples; by default all.
        device: of samples; by default the original device of each field.
        log: keeps the rows on a disk, across processes. It has to be empty, or one that a PackedStorage wrote, whose
            slots are there again. None keeps the rows in memory.
        allow_pickle: for `state_dict`, `dumps` and their inverses, as for `PackedBatch.to_bytes`.
        options: options of `compress`.

    Rows are added as TensorDicts, padded or nested, or as a PackedBatch. All must have the same fields and dtypes; rows
    with different padded widths are sampled at the largest. A row that does not fit raises LayoutError, and nothing is
    stored.
    """

    _default_checkpointer = PackedCheckpointer

    def __init__(
        self,
        max_size: int,
        *,
        format: Target = "padded",
        fields: Sequence[Any] = (),
        device: torch.device | str | None = None,
        log: RolloutLog | None = None,
        allow_pickle: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(max_size)
        compress(TensorDict({}, batch_size=[0]), **options)  # wrong options raise here instead of in the first batch
        if format not in ("padded", "nested"):
            raise LayoutError(f'PackedStorage: format is {format!r}; expected "padded" or "nested". Choose one.')
        self.allow_pickle = flag(allow_pickle, "allow_pickle", "PackedStorage")
        self._format: Target = format
        self._fields = need_keys(fields, "fields", "PackedStorage", LayoutError)
        self._to = None if device is None else device_here(device, "PackedStorage")
        self._options = options
        self._rows: BatchView | None = None
        if log is not None and not isinstance(log, RolloutLog):
            raise LayoutError(f"PackedStorage: log is {said(log)}; expected a RolloutLog, or None. Open one.")
        self._logged = None if log is None else _LoggedRows(log, self.max_size)

    @property
    def rows(self) -> BatchView:
        """The packed rows of all slots. Raises LayoutError if there are none."""
        if not len(self):
            raise LayoutError("PackedStorage: there are no rows; expected some. Extend the buffer first.")
        return cast("BatchView", self._rows) if self._logged is None else BatchView.of(self._logged.take(slice(None)))

    @property
    def nbytes(self) -> int:
        """The number of encoded bytes in memory, or of the log, including overwritten rows that were not freed."""
        if self._logged is not None:
            return self._logged.log.nbytes
        sources = [] if self._rows is None else [source for group in self._rows.groups for source in group.parts]
        return sum(source.held.nbytes for source in sources)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Stores rows in slots. A slot that is named twice gets the later row.

        Raises:
            LayoutError: a slot is beyond `max_size`, or leaves others empty; or as `compress` and, if rows do not fit
                the stored ones, `PackedBatch.cat`.
        """
        slots = np.arange(int(self.max_size))[cursor] if isinstance(cursor, slice) else _numbers(cursor)
        try:
            self._put(slots, data)
        except Exception:
            for buffer in self._attached_entities:  # whose writers advance before they store
                writer: Any = getattr(buffer, "_writer", None)
                if slots.size and hasattr(writer, "_cursor"):
                    writer._cursor = int(slots[0])
            raise
        if slots.size:
            if set_cursor:
                self._set_last_cursor(cursor)
            self._bump_mutation_revision()

    def _put(self, slots: IntArray, data: Any) -> None:
        packed = self._packed(data)
        if len(packed) != slots.size:
            raise LayoutError(
                f"PackedStorage.set: {len(packed)} rows for {slots.size} slots; expected one for each. Give a "
                "TensorDict with batch_size [rows], or one row for one slot."
            )
        if not slots.size:
            return
        before = len(self)
        table = np.full(max(before, int(slots.max()) + 1), -1, np.int64)
        table[:before] = np.arange(before)
        valid = slots.dtype.kind in "iu" and int(slots.min()) >= 0
        if valid:
            table[slots] = before + np.arange(slots.size)
        if not valid or table.size > self.max_size or int(table.min()) < 0:
            raise LayoutError(
                f"PackedStorage.set: slots are {slots[:8].tolist()} with {before} in use; expected whole numbers from "
                f"0, below {self.max_size}, that leave none empty. Let the writer choose them."
            )
        stored = self._logged.head if self._logged is not None else None if self._rows is None else self._rows.head
        if before and stored is not None:
            own, known = ({form.path[0]: None for form in one.schema.forms} for one in (packed, stored))
            more, less = (
                [f'"{name}"' for name in one if name not in other] for one, other in ((own, known), (known, own))
            )
            if more or less:
                seen = [f"also {', '.join(more)}"] * bool(more) + [f"no {', '.join(less)}"] * bool(less)
                raise LayoutError(
                    f"PackedStorage.set: the rows have {' and '.join(seen)}; expected the fields of the rows that are "
                    "stored. Write the same fields in every row, or empty the storage first."
                )
        if self._logged is not None:
            self._logged.put(slots, packed, table)
            return
        rows = BatchView.of(packed) if self._rows is None else _appended(self._rows, packed)
        self._rows = _tidied(rows.take(table))

    def get(self, index: Any) -> Any:
        """The rows of slots as a TensorDict [n]; for an integer index, one row without the batch dim."""
        one = isinstance(index, int | np.integer) or (isinstance(index, Tensor | np.ndarray) and index.ndim == 0)
        if self._logged is not None and len(self):
            packed = self._logged.take(self._index(index))
            packed = packed.select(*self._fields) if self._fields else packed
            made = decompress(packed, format=self._format, device=self._to)
        else:
            picked = self.rows.take(self._index(index))
            made = picked.materialize(*self._fields, format=self._format, device=self._to)
        return made[0] if one else made

    def resume(self, buffer: Any) -> None:
        """Lets a new buffer go on with the rows of the log: its writer behind the newest row, and its sampler with
        default priorities. Call it once the buffer is made."""
        if self._logged is not None:
            buffer.writer.load_state_dict(buffer.writer.state_dict() | {"_cursor": self._logged.next_slot})
            buffer.sampler.extend(torch.arange(len(self), device="cpu"))

    def __len__(self) -> int:
        if self._logged is not None:
            return self._logged.numbers.size
        return 0 if self._rows is None else len(self._rows)

    def __repr__(self) -> str:
        return f"PackedStorage(rows={len(self)}, max_size={self.max_size}, nbytes={self.nbytes:,})"

    def contains(self, item: Any) -> Any:
        """Whether slots are in use: a bool, or a bool tensor of the shape of `item`."""
        if isinstance(item, Tensor):
            return ((item >= -len(self)) & (item < len(self))).bool()
        if not isinstance(item, int | np.integer):
            raise LayoutError(f"PackedStorage.contains: got {said(item)}; expected slots. Give a number, or a tensor.")
        return -len(self) <= int(cast("Any", item)) < len(self)

    def state_dict(self) -> dict[str, Any]:
        """The rows as bytes: `packed`, a uint8 tensor, or None without rows."""
        if not len(self):
            return {"packed": None}
        data = self.rows.to_packed().to_bytes(allow_pickle=self.allow_pickle)
        return {"packed": torch.frombuffer(bytearray(data), dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replaces all rows. Raises WireFormatError if the bytes are damaged."""
        held: Any = state_dict
        data: Any = cast("dict[str, Any]", held).get("packed", held) if isinstance(held, dict) else 0
        if data is not None and not isinstance(data, Tensor):
            raise LayoutError(
                f"PackedStorage.load_state_dict: got {said(held)} without rows; expected the result of state_dict. "
                "Pass that."
            )
        packed = None
        if data is not None:
            line = data.cpu().numpy().tobytes()
            packed = PackedBatch.from_bytes(line, allow_pickle=self.allow_pickle, max_bytes=None)
        self.restore(packed)

    def restore(self, packed: PackedBatch | None) -> None:
        """Replaces all rows, in the log, too. Raises LayoutError if there are more rows than slots."""
        if packed is not None and not isinstance(packed, PackedBatch):
            raise LayoutError(
                f"PackedStorage.restore: got {said(packed)}; expected a PackedBatch, or None. Compress the rows first."
            )
        if packed is not None and len(packed) > self.max_size:
            raise LayoutError(
                f"PackedStorage: {len(packed)} rows for {self.max_size} slots; expected no more rows than slots. Give "
                "the storage the max_size that it was saved with."
            )
        if self._logged is not None:
            self._logged.replace(packed)
        else:
            self._rows = None if packed is None else BatchView.of(packed)
        self._bump_mutation_revision()

    def _empty(self) -> None:
        self.restore(None)

    # ---------------------------------------------------------------- rows and slots

    def _packed(self, data: Any) -> PackedBatch:
        if isinstance(data, PackedBatch):
            return data
        rows: list[Any] = cast("list[Any]", data) if type(data) is list else [None]
        batch: Any = lazy_stack(rows) if all(isinstance(row, TensorDictBase) for row in rows) else cast("Any", data)
        if not isinstance(batch, TensorDictBase):
            raise LayoutError(
                f"PackedStorage.set: got {said(batch)}; expected a TensorDict or a PackedBatch. Put "
                "tensors into a TensorDict."
            )
        return compress(batch if batch.batch_dims else batch.unsqueeze(0), **self._options)

    def _index(self, index: Any) -> Any:
        parts = cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
        if len(parts) != 1:
            raise LayoutError(
                f"PackedStorage.get: the index has {len(parts)} parts; expected one, of rows. Index the sample further."
            )
        return parts[0] if type(parts[0]) is slice else _numbers(parts[0])


class _LoggedRows:
    """The rows of a storage in a log: row `numbers[slot]`, whose tag names its slot.

    A row that overwrites another is appended before the other is deleted. If the process dies in between, both have
    the same slot: the newer one is in it.

    Attributes:
        log: the log.
        numbers: int64 [slots], the number of the row in each slot.
    """

    def __init__(self, log: RolloutLog, max_size: int) -> None:
        self.log = log
        self._max_size = max_size
        self.head: PackedBatch | None = None
        """The fields and the largest widths, without rows."""
        rows = log.rows
        slots: list[Any] = log.tags(rows).get(_SLOT, [None] * rows.size)
        fits = all(type(slot) is int and 0 <= slot < max_size for slot in slots)
        self.numbers = np.full(max(slots, default=-1) + 1 if fits else 0, -1, np.int64)
        if fits:
            self.numbers[np.array(slots, np.int64)] = rows  # the last one stays, which is the newest
        if not fits or bool((self.numbers < 0).any()):
            raise LayoutError(
                f'PackedStorage: {log!r} has rows without the tag "{_SLOT}", or without a row for each slot below '
                f"{max_size}; expected what a PackedStorage wrote. Give the storage a log of its own, and the max_size "
                "that the log was written with."
            )
        self.head = self._widest([log.take(own[:1]) for own in log.chunks()])
        with suppress(StorageError):  # of a reader
            log.delete(np.setdiff1d(rows, self.numbers))

    @property
    def next_slot(self) -> int:
        """The slot behind the newest row."""
        size = self.numbers.size
        return size if size < self._max_size else (int(self.numbers.argmax()) + 1) % size

    def put(self, slots: IntArray, packed: PackedBatch, table: IntArray) -> None:
        """Appends the rows of slots. `table` names for each slot an earlier one, or one of the rows behind these."""
        head = self._widest([packed])
        before, new = self.numbers, np.array(self.log.append(packed, {_SLOT: slots}))
        self.head = head
        self.numbers = np.concatenate([before, new])[table]
        gone = [before[slots[slots < before.size]], new[self.numbers[slots] != new]]
        with suppress(StorageError):  # they are deleted when the log is opened again
            self.log.delete(np.concatenate(gone))

    def replace(self, packed: PackedBatch | None) -> None:
        """Deletes all rows, and appends others."""
        self.log.delete(self.numbers)
        self.numbers, self.head = self.numbers[:0], None
        if packed is not None and len(packed):
            self.put(np.arange(len(packed)), packed, np.arange(len(packed)))

    def take(self, index: Any) -> PackedBatch:
        """The rows of slots, at the largest widths that there were."""
        numbers = self.numbers[row_index(index, self.numbers.size, "PackedStorage.get")]
        assert self.head is not None
        return PackedBatch.cat(with_stacks([self.head, self.log.take(numbers)]))

    def _widest(self, batches: Sequence[PackedBatch]) -> PackedBatch | None:
        """The head, as wide as some batches. Raises LayoutError for batches that do not fit it."""
        heads = [batch.take([]) for batch in ([] if self.head is None else [self.head]) + list(batches)]
        return BatchView.cat([BatchView.of(head) for head in with_stacks(heads)]).head.own() if heads else None


def _numbers(index: Any) -> IntArray:
    """Integers or a bool mask, in any form, as a 1-D array."""
    return np.atleast_1d(host_array(list(index) if isinstance(index, range) else index, "slots", "PackedStorage"))


def _appended(rows: BatchView, packed: PackedBatch) -> BatchView:
    """Appends rows. Once rows of a sub-batch differ in shape, all rows of it are stored as objects."""
    head, new = with_stacks([rows.head, packed])
    if head is not rows.head:
        rows = BatchView.of(with_stacks([rows.to_packed(), new])[0])
    return BatchView.cat([rows, BatchView.of(new)])


def _tidied(rows: BatchView) -> BatchView:
    """The same rows; those of mostly overwritten segments, and of many small ones, are moved into one new segment."""
    (group,) = rows.groups
    source, _ = group.rows.by_row()
    used = np.bincount(source, minlength=len(group.parts))
    held = np.array([source.meta.num_rows for source in group.parts])
    small = held < _FEW
    again = (2 * used < held) | (small & (np.count_nonzero(small) >= _FEW))
    moved = np.flatnonzero(again[source])
    if not moved.size:
        return rows
    table = np.arange(len(rows))
    table[moved] = len(rows) + np.arange(moved.size)
    packed = rows.take(moved).to_packed()
    own = packed.own()  # so that the memory of the segments can be freed
    return BatchView.cat([rows, BatchView.of(own)]).take(table)
