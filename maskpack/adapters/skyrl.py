"""SkyRL: its TensorBatch and TrainingInputBatch, pickled in packed form."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from maskpack import fields
from maskpack.fields.options import Registry
from maskpack.layout.jagged import jagged_from
from maskpack.packed.carried import Carried, check_options, pickle_as

__all__ = ["pickle_tensor_batches"]


def _module() -> Any:
    try:
        return importlib.import_module("skyrl.backends.skyrl_train.training_batch")
    except ModuleNotFoundError as missing:
        if missing.name != "skyrl":
            raise
        return importlib.import_module("skyrl_train.training_batch")  # as its first releases are called


_batches: Any = _module()
_LIST: Any = getattr(_batches, "TensorList", ())  # skyrl_train has neither of the two
_PACKED: Any = getattr(_batches, "PackedTensor", ())


def pickle_tensor_batches(*, registry: Registry = fields.skyrl, **options: Any) -> Callable[[], None]:
    """Makes this process pickle every TensorBatch and TrainingInputBatch in packed form, for Ray and for files.

    A batch is restored bit for bit, with its metadata, entries that are None, TensorLists and PackedTensors. The
    reading process needs maskpack installed, but no call. Other subclasses, such as the TrainingOutputBatch of results,
    which has no mask, and batches on a GPU, which SkyRL refuses, are pickled as before. `copy.copy` of a batch copies
    its tensors, too, as in SkyRL.

    Args:
        registry, options: of `maskpack.compress`.

    Returns:
        A function that undoes this.
    """
    check_options(registry=registry, **options)

    def reduced(batch: Any) -> tuple[Any, ...]:
        if batch.device not in (None, torch.device("cpu")):
            return batch.__reduce_ex__(4)
        lists = [key for key, value in batch.items() if isinstance(value, _LIST)]
        entries = {(key,): _plain(value) for key, value in batch.items()}
        carried = Carried.of(entries, batch.batch_size or 0, registry=registry, **options)
        packed = {key: value.cu_seqlens.dtype for key, value in batch.items() if isinstance(value, _PACKED)}
        return _restored, (type(batch), carried, lists, packed, vars(batch))

    return pickle_as((_batches.TensorBatch, _batches.TrainingInputBatch), reduced)


def _plain(value: Any) -> Any:
    """The tensors of a TensorList, and a PackedTensor as a jagged tensor."""
    if isinstance(value, _LIST):
        return value.tensors
    if not isinstance(value, _PACKED):
        return value
    offsets: Any = value.cu_seqlens.to(torch.int64)
    lengths = offsets.diff().tolist()
    return jagged_from(value.values.contiguous(), offsets, min(lengths, default=0), max(lengths, default=0))


def _restored(
    kind: Any, carried: Carried, lists: list[str], packed: dict[str, torch.dtype], attributes: dict[str, Any]
) -> Any:
    batch: Any = kind.__new__(kind)
    for (key,), value in carried.entries().items():
        if key in lists:
            value = _LIST(value)
        elif key in packed:
            value = _PACKED(value.values(), value.offsets().to(packed[key]))
        batch[key] = value
    vars(batch).update(attributes)
    return batch
