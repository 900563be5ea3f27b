"""Bytes on the wire, and the time to encode and decode, for a workload.

Bytes are those of a pickle (protocol 5), out-of-band buffers included. The rivals: the padded TensorDict, and the
mask-nested one of the usual code. The batch must come back bit for bit, or the case raises. Times are processor time of
one thread, which other processes disturb less than the clock on the wall, beside one read and one write of the padded
bytes, a copy of the nested ones (harness.floors), and compressors over the padded buffers and over the valid values, in
the same rounds. To encode valid values includes trimming the batch, without a check of its padding.

The memory that compress takes is measured, and its time with two threads by the clock on the wall; of the reference
workload also with eight times as many rows, and in small batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from tensordict import TensorDict

import maskpack
from bench.cases.payload import small
from bench.harness import floors
from bench.harness.measure import (
    bits,
    interleaved,
    peak_bytes,
    pickled,
    progress,
    require_same,
    tensors,
    torch_threads,
    unpickled,
    wire_bytes,
)
from bench.harness.registry import case
from bench.harness.report import Ratio, Row, RowGroups, times
from bench.rivals import nesting
from bench.rivals.compressors import OF_PADDED, OF_VALUES, encode_checked
from bench.rivals.valid_values import padded_batch, valid_values
from bench.workloads import PAD_ID, batch_of

_SMALLER, _SMALLER_WITH_CODEC = ">= 59", ">= 66"  # padded / maskpack
_ZSTD = "zstd level 1 of the padded buffers"
_FASTER, _SMALLER_THAN = {_ZSTD: ">= 6"}, {_ZSTD: "<= 0.69"}  # rival / maskpack, and bytes over its
_MORE_ROWS = 8
_ALWAYS, _NEVER = "compress, verify=True", "compress, verify=False"
_PADDED, _NESTED = "decompress, padded", "decompress, nested"
_RATIOS = (
    (_ALWAYS, floors.READ, "<= 1.25"),
    (_NEVER, _ALWAYS, "<= 0.42"),
    (_NESTED, floors.COPY, "<= 1.4"),
    (_PADDED, floors.WRITE, "<= 0.9"),
)

Encoded = Mapping[str, list[bytes]]  # what each rival makes of the fields, or of their valid values


@case(
    "payload",
    help="bytes on the wire, time to pack and to unpack, beside compressors",
    on="cpu",
    workloads=True,
    tiny={"rows": 5, "scale": 0.016},
)
def run(rows: int, rounds: int, *, workload: str = "reference", scale: float = 1.0) -> RowGroups:
    """Raises NotExact if a batch does not come back as it was, from maskpack or from a compressor."""
    name = f"payload {workload}"
    progress(f"{name}: {rows} rows")
    batch = batch_of(workload, rows, scale=scale)
    with torch_threads(1):
        packed = maskpack.compress(batch, pad_token_id=PAD_ID)
        check_round_trip(name, batch, packed)
        check_round_trip(f"{name}, zstd", batch, replace(packed, codec="zstd"))
        encoded = _encoded(name, batch)
        yield _sizes(name, batch, packed, encoded)
        yield _times(name, batch, packed, encoded, rounds)
        yield _memory(name, batch)
        yield _beside_a_read(f"{name}, two threads", batch, rounds, "<= 1.2", threads=2)
        if workload != "reference":
            return
        del batch, packed, encoded
        batch = batch_of(workload, rows * _MORE_ROWS, scale=scale)
        name = f"{name}, {rows * _MORE_ROWS:,} rows"
        check_round_trip(name, batch, maskpack.compress(batch, pad_token_id=PAD_ID))
        yield _beside_a_read(name, batch, max(3, rounds // 2), "<= 1.12")
        del batch
        yield small.measured()


def check_round_trip(case: str, batch: TensorDict, packed: maskpack.PackedBatch) -> None:
    """Raises NotExact unless `packed`, sent and received, gives back the batch: padded, and nested then unnested."""
    arrived = unpickled(pickled(packed))
    require_same(f"{case}, decompress", maskpack.decompress(arrived), batch)
    nested = maskpack.decompress(arrived, format="nested")
    require_same(f"{case}, decompress nested, unnest", maskpack.unnest_batch_by_mask(nested), batch)


def _encoded(case: str, batch: TensorDict) -> Encoded:
    """Raises NotExact if a rival does not give back what it encodes, or the valid values do not give back the batch."""
    values = valid_values(batch)
    require_same(f"{case}, valid values, padded", padded_batch(values, batch), batch)
    return encode_checked(OF_PADDED, tensors(batch)) | encode_checked(OF_VALUES, list(values.values()))


def _sizes(case: str, batch: TensorDict, packed: maskpack.PackedBatch, encoded: Encoded) -> list[Row]:
    rows = batch.batch_size[0]
    padded = wire_bytes(batch) / rows
    jagged = wire_bytes(nesting.nest(batch)) / rows
    ours, small = wire_bytes(packed) / rows, wire_bytes(replace(packed, codec="zstd")) / rows
    report = [
        Row(case, "tensors, padded", sum(tensor.nbytes for tensor in tensors(batch)) / rows, "bytes/row"),
        Row(case, "wire, padded", padded, "bytes/row"),
        Row(case, "wire, mask-nested jagged", jagged, "bytes/row"),
        Row(case, "wire, maskpack", ours, "bytes/row"),
        Row(case, "wire, maskpack with zstd", small, "bytes/row"),
        Row(case, "padded / mask-nested jagged", padded / jagged, "x"),
        Row(case, "padded / maskpack", padded / ours, "x", _SMALLER),
        Row(case, "padded / maskpack with zstd", padded / small, "x", _SMALLER_WITH_CODEC),
        Row(case, "mask-nested jagged / maskpack", jagged / ours, "x"),
    ]
    for name, streams in encoded.items():
        rival = sum(map(len, streams)) / rows
        report += [
            Row(case, name, rival, "bytes/row"),
            Row(case, f"maskpack / {name}, bytes", ours / rival, "x", _SMALLER_THAN.get(name)),
        ]
    return report


def _times(case: str, batch: TensorDict, packed: maskpack.PackedBatch, encoded: Encoded, rounds: int) -> list[Row]:
    fields = tensors(batch)
    padded = [bits(field) for field in fields]
    nested = tensors(maskpack.decompress(packed, format="nested").exclude("_maskpack"))
    squeezed = replace(packed, codec="zstd")
    stream = squeezed.to_bytes()
    works: dict[str, Callable[[], object]] = {
        _ALWAYS: lambda: maskpack.compress(batch, pad_token_id=PAD_ID),
        _NEVER: lambda: maskpack.compress(batch, pad_token_id=PAD_ID, verify=False),
        _PADDED: lambda: maskpack.decompress(packed),
        _NESTED: lambda: maskpack.decompress(packed, format="nested"),
        "to_bytes with zstd": lambda: squeezed.to_bytes(),
        "from_bytes with zstd": lambda: maskpack.PackedBatch.from_bytes(stream),
        floors.READ: lambda: floors.read(padded),
        floors.WRITE: lambda: floors.write(padded),
        floors.COPY: lambda: floors.copy(nested),
    }
    ratios: list[Ratio] = list(_RATIOS)
    values = valid_values(batch)
    for name, streams in encoded.items():
        encode, decode, to_padded = f"{name}, encode", f"{name}, decode", f"{name}, decode to padded"
        if name in OF_PADDED:
            works[encode] = partial(OF_PADDED[name].encode_all, fields)
            works[decode] = partial(OF_PADDED[name].decode_all, streams, fields)
            ratios += [(encode, _ALWAYS, _FASTER.get(name)), (decode, _PADDED, _FASTER.get(name))]
        else:
            decoded = partial(OF_VALUES[name].decode_all, streams, list(values.values()))
            works[encode] = lambda rival=OF_VALUES[name]: rival.encode_all(list(valid_values(batch).values()))
            works[decode] = decoded
            works[to_padded] = lambda decoded=decoded: padded_batch(dict(zip(values, decoded(), strict=True)), batch)
            ratios += [(encode, _NEVER, None), (decode, _NESTED, None), (to_padded, _PADDED, None)]
    return times(case, interleaved(works, rounds, time.process_time), ratios)


def _beside_a_read(case: str, batch: TensorDict, rounds: int, target: str, threads: int = 1) -> list[Row]:
    """With two threads by the clock on the wall."""
    fields = tensors(batch)
    works = {
        _ALWAYS: lambda: maskpack.compress(batch, pad_token_id=PAD_ID),
        floors.READ: lambda: floors.read(fields, threads),
    }
    clock = time.process_time if threads == 1 else time.perf_counter
    with torch_threads(threads):
        return times(case, interleaved(works, rounds, clock), [(_ALWAYS, floors.READ, target)])


def _memory(case: str, batch: TensorDict) -> list[Row]:
    """Peak memory of compress beyond the packed batch, over the padded bytes."""
    padded = sum(tensor.nbytes for tensor in tensors(batch))
    packed = maskpack.compress(batch, pad_token_id=PAD_ID)
    extra = peak_bytes(lambda: maskpack.compress(batch, pad_token_id=PAD_ID)) - packed.nbytes
    return [Row(case, "peak memory of compress beyond the packed bytes / padded", extra / padded, "x", "<= 0.01")]
