"""Bytes and time of the arguments of a worker call, as verl sends them and packed, for 8 data-parallel ranks.

    verl       BatchData(data).chunk(8), each part pickled (a DataProto through torch.save) --> unpickled
    maskpack   compress(data), 8 slices, each pickled                                       --> unpickled, decompress

Pickles are of protocol 5, out-of-band buffers included; no Ray, no link. Three forms of the reference workload: a
DataProto; the TensorDict that verl's padded trainer makes of it, some fields jagged; and one with all fields jagged, as
the newer trainer holds them. Each must come back bit for bit, or the case raises. torch has one thread, as Ray gives to
a worker of one CPU; with more, all forms wait for threads when the machine is busy. Needs verl.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from verl import DataProto
from verl.protocol import BatchData
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from bench.harness.measure import (
    Pickled,
    interleaved,
    nbytes,
    pickled,
    progress,
    require_same,
    torch_threads,
    unpickled,
)
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.rivals.nesting import axis_of, masks_of
from bench.workloads import PAD_ID, batch_of
from maskpack.adapters.verl import compress, decompress

RANKS = 8
_FEWER = {"DataProto": ">= 12"}


@case(
    "verl",
    help="bytes and time of the arguments of a worker call of verl",
    on="cpu",
    tiny={"rows": 8, "scale": 0.016},
)
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """`rows` is made a multiple of the ranks. Raises NotExact if a form does not come back."""
    rows = -(-rows // RANKS) * RANKS
    batch = batch_of("reference", rows, scale=scale)
    uid = np.array([f"prompt-{row // 16}" for row in range(rows)], dtype=object)
    proto = DataProto(batch=batch, non_tensor_batch={"uid": uid}, meta_info={"temperature": 1.0})
    forms: dict[str, Callable[[], Any]] = {
        "DataProto": lambda: proto,
        "TensorDict, some jagged": lambda: left_right_2_no_padding(copy.copy(proto.to_tensordict())),
        "TensorDict, all jagged": lambda: _all_jagged(proto),
    }
    with torch_threads(1):
        for name, make in forms.items():
            progress(f"verl {name}: {rows} rows")
            yield _form(f"verl {name}", make(), rows, rounds, _FEWER.get(name))


def _all_jagged(proto: Any) -> Any:
    """Every field as the real tokens of its rows, on offsets of its own."""
    masks = masks_of(proto.batch)
    fields: dict[str, Any] = {}
    for name, value in proto.batch.items():
        mask = masks[axis_of(name)]
        offsets = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
        fields[name] = torch.nested.nested_tensor_from_jagged(value[mask], offsets)
    return tu.get_tensordict(fields | {"uid": proto.non_tensor_batch["uid"]}, proto.meta_info)


def _form(case: str, data: Any, rows: int, rounds: int, target: str | None) -> list[Row]:
    usual, ours = _usual(data), _ours(data)
    _check(case, _received([pickled(compress(data, pad_token_id=PAD_ID))])[0], data)
    works: dict[str, Callable[[], object]] = {
        "verl, to pickles": lambda: _usual(data),
        "verl, from pickles": lambda: [unpickled(part) for part in usual],
        "maskpack, to pickles": lambda: _ours(data),
        "maskpack, from pickles": lambda: _received(ours),
    }
    ms = interleaved(works, rounds)
    theirs, packed = (sum(map(nbytes, parts)) / rows for parts in (usual, ours))
    whole = ms["verl, to pickles"] + ms["verl, from pickles"]
    return [
        Row(case, "arguments, verl", theirs, "bytes/row"),
        Row(case, "arguments, maskpack", packed, "bytes/row"),
        Row(case, "arguments, verl / maskpack", theirs / packed, "x", target),
        *times(case, ms),
        Row(
            case, "both ways, verl / maskpack", whole / (ms["maskpack, to pickles"] + ms["maskpack, from pickles"]), "x"
        ),
    ]


def _usual(data: Any) -> list[Pickled]:
    return [pickled(part) for part in BatchData(data).chunk(chunks=RANKS)]


def _ours(data: Any) -> list[Pickled]:
    packed = compress(data, pad_token_id=PAD_ID)
    share = len(packed) // RANKS
    return [pickled(packed.take(slice(rank * share, (rank + 1) * share))) for rank in range(RANKS)]


def _received(parts: Sequence[Pickled]) -> list[Any]:
    return [decompress(unpickled(part)) for part in parts]


def _check(case: str, seen: Any, data: Any) -> None:
    left, right = (x.batch if isinstance(x, DataProto) else x for x in (seen, data))
    names = [name for name, value in right.items() if isinstance(value, torch.Tensor)]
    assert isinstance(left, TensorDictBase)
    require_same(case, left.select(*names), right.select(*names))
