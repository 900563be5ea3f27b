"""Objects of a trainer's own class, pickled in packed form: what the adapters share that do this through `copyreg`.

entries of an object --of--> Carried: tensors [B, ...] as a PackedBatch, the rest as it is --entries--> the same
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from maskpack.core.keys import Path
from maskpack.core.objects import Objects
from maskpack.packed.batch import PackedBatch, compress, decompress


def pickle_as(kinds: Iterable[type], reduced: Callable[[Any], tuple[Any, ...]]) -> Callable[[], None]:
    """Makes this process pickle the instances of some classes, not of subclasses, by `reduced`; returns a function that
    undoes this."""
    before = {kind: copyreg.dispatch_table.get(kind) for kind in kinds}

    def undo() -> None:
        for kind, other in before.items():
            if other is None:
                copyreg.dispatch_table.pop(kind, None)
            else:
                copyreg.dispatch_table[kind] = other

    for kind in before:
        copyreg.pickle(kind, reduced)
    return undo


def check_options(**options: Any) -> None:
    """Raises for wrong options of `compress` now instead of in the first pickle."""
    compress(TensorDict({}, batch_size=[0]), **options)


def device_here(rows: PackedBatch) -> str | None:
    """The device to decode to: the host if a field came from a device that this process lacks, else None."""
    away = any((form.device or "cpu") != "cpu" for form in rows.schema.forms)
    return "cpu" if away and not torch.cuda.is_available() else None


@dataclass(frozen=True, eq=False)
class Carried:
    """The entries of an object: plain tensors with one row for each sample are packed; everything else is kept.

    Attributes:
        paths: all entries, in their order.
        rows: the packed tensors.
        rest: the other entries; tensors in their lists and dicts are stored once if they are equal.
    """

    paths: tuple[Path, ...]
    rows: PackedBatch
    rest: Objects

    @classmethod
    def of(cls, entries: Mapping[Path, Any], rows: int, **options: Any) -> Carried:
        """`options` are those of `compress`. Nothing of `entries` is changed."""
        batch = TensorDict({}, batch_size=[rows])
        for path, value in entries.items():
            if _has_rows(value, rows):
                batch.set(path, value)
        rest = {path: value for path, value in entries.items() if not _has_rows(value, rows)}
        return cls((*entries,), compress(batch, **options), Objects(rest, 0).stowed())

    def entries(self) -> dict[Path, Any]:
        batch = decompress(self.rows, device=device_here(self.rows), max_bytes=None)
        rest = self.rest.restored()
        return {path: rest[path] if path in rest else batch.get(path) for path in self.paths}


def _has_rows(value: Any, rows: int) -> bool:
    if not isinstance(value, Tensor) or value.requires_grad or value.dim() == 0 or value.size(0) != rows:
        return False
    return value.is_nested or (type(value) is Tensor and value.layout == torch.strided)
