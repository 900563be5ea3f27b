"""verl: packed dispatch for its trainers, its fields, and the functions of the mask-nesting proposal.

protocol.py   compress, decompress: a DataProto or TensorDict in packed form, and back bit for bit
dispatch.py   mask_nesting_dispatch, packed_endpoint: packed batches to the workers of verl and back
metrics.py    take_metrics, log_metrics: bytes and times of packed calls
engine.py     verl's FSDP2 engine with replay in it; `external_lib` of verl's configuration imports it
here          nesting of a DataProto or TensorDict; pickles
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tensordict import TensorDict, TensorDictBase

from maskpack.adapters.verl.dispatch import (
    MaskNestingConfig,
    PackedFuture,
    configure,
    mask_nesting_dispatch,
    packed_endpoint,
)
from maskpack.adapters.verl.metrics import log_metrics, take_metrics
from maskpack.adapters.verl.protocol import (
    VERL_FIELDS,
    DataProto,
    PackedProto,
    compress,
    decompress,
    one_strict,
    renewed,
    tensors_of,
    wrong_kind,
)
from maskpack.fields.options import Registry
from maskpack.fields.registry import Key, MaskNestingRegistry, MaskNestingSpec
from maskpack.nesting import nest, response
from maskpack.packed.carried import pickle_as

__all__ = [
    "VERL_FIELDS",
    "MaskNestingConfig",
    "MaskNestingSpec",
    "PackedFuture",
    "PackedProto",
    "compress",
    "configure",
    "decompress",
    "log_metrics",
    "mask_nesting_dispatch",
    "nest_batch_by_mask",
    "packed_endpoint",
    "pickle_data_protos",
    "select_and_pad_to_response",
    "take_metrics",
    "unnest_batch_by_mask",
]

# -------------------------------------------------------------------- nesting


def nest_batch_by_mask(
    data: Any,
    registry: Registry = VERL_FIELDS,
    *,
    strict_mask_nesting: bool | None = None,
    strict: bool | None = None,
    **options: Any,
) -> Any:
    """`maskpack.nest_batch_by_mask` of a TensorDict, or of the `batch` of a DataProto. `data` is not changed. `strict`
    is the name of `strict_mask_nesting` in the mask-nesting proposal."""
    call = "nest_batch_by_mask"
    options["strict_mask_nesting"] = one_strict(call, strict_mask_nesting, strict)
    _batch_of(data, call)
    return renewed(data, lambda batch: nest.nest_batch_by_mask(batch, registry, **options))


def unnest_batch_by_mask(data: Any, *fields: Key) -> Any:
    """`maskpack.unnest_batch_by_mask` of a TensorDict, or of the `batch` of a DataProto. `data` is not changed."""
    _batch_of(data, "unnest_batch_by_mask")
    return renewed(data, lambda batch: nest.unnest_batch_by_mask(batch, *fields))


def select_and_pad_to_response(data: Any, *fields: Key, registry: MaskNestingRegistry = VERL_FIELDS) -> TensorDict:
    """`maskpack.select_and_pad_to_response` of a TensorDict, or of the `batch` of a DataProto: a TensorDict of
    [B, R, *F] fields."""
    return response.select_and_pad_to_response(
        _batch_of(data, "select_and_pad_to_response"), *fields, registry=registry
    )


def _batch_of(data: Any, call: str) -> TensorDictBase:
    batch = tensors_of(data)
    if not isinstance(batch, TensorDictBase):
        raise wrong_kind(call, data)
    return batch


# -------------------------------------------------------------------- pickles


def pickle_data_protos(**options: Any) -> Callable[[], None]:
    """Makes this process pickle every DataProto in packed form, for Ray and for files.

    A DataProto is restored bit for bit. The reading process needs maskpack installed, but no call. Subclasses are
    pickled as before.

    Args:
        options: options of `compress`.

    Returns:
        A function that undoes this.
    """
    compress(TensorDict({}, batch_size=[0]), **options)  # wrong options raise here instead of in the first pickle

    def reduced(data: Any) -> tuple[Any, ...]:
        return decompress, (compress(data, **options),)

    return pickle_as((DataProto,), reduced)
