"""Routed experts of 48 layers (MoE router replay): bits an id, layers decoded by themselves, and how fast the field is.

The rival is one byte an id in the order of the tensor, [T, layers, k], and zstd behind it at the level of our codec. A
pipeline stage decodes 12 of the 48 layers. Rates are of the int16 values of valid tokens, beside a read of them in C.
Few rows are a few hundred compressions and decompressions of the field with its mask, medians.
"""

from __future__ import annotations

import gc
import statistics
from time import perf_counter

import torch
import zstandard
from tensordict import TensorDict

import maskpack
from bench import floors
from bench.measure import interleaved, require_same_tensor
from bench.report import Row
from bench.workloads import DEEP, PAD_ID, make_batch
from maskpack.packed.sizes import figures

_FIELD, _LEVEL = "routed_experts", 1
_BITS = {"routed-experts-deep": "<= 7.35"}  # 5 % above log2(128)
_SMALLER = {"routed-experts-skewed": ">= 1.5"}
_STAGE = slice(12, 24)
_SMALL, _CHAINS, _WARM_UP = ((1, 64, 128), (16, 64, 128), (1, 2048, 14_336)), 200, 20


def run(case: str, variant: str, batch: TensorDict, packed: maskpack.PackedBatch, rounds: int) -> list[Row]:
    """The rows of the report. Raises NotExact if the layers of a stage do not come back as they were."""
    report = [*_bits(case, variant, batch, packed), *_times(case, batch, packed, rounds)]
    if variant in _BITS:
        for sizes in _SMALL:
            report += _few_rows(case, variant, *sizes)
    return report


def _values(batch: TensorDict) -> torch.Tensor:
    return batch[_FIELD][batch["attention_mask"] != 0]


def _bits(case: str, variant: str, batch: TensorDict, packed: maskpack.PackedBatch) -> list[Row]:
    ids = _values(batch)
    rival = zstandard.ZstdCompressor(level=_LEVEL).compress(ids.to(torch.uint8).numpy().tobytes())
    plain, small = (
        next(one.wire_bytes for one in figures(own, left=False).fields if one.path == (_FIELD,))
        for own in (packed, packed_with_zstd(packed))
    )
    return [
        Row(case, f"{_FIELD}, maskpack", 8 * plain / ids.numel(), "bits/id", _BITS.get(variant)),
        Row(case, f"{_FIELD}, maskpack with zstd", 8 * small / ids.numel(), "bits/id"),
        Row(case, f"{_FIELD}, one byte an id with zstd", 8 * len(rival) / ids.numel(), "bits/id"),
        Row(case, "one byte an id with zstd / maskpack with zstd", len(rival) / small, "x", _SMALLER.get(variant)),
    ]


def packed_with_zstd(packed: maskpack.PackedBatch) -> maskpack.PackedBatch:
    return maskpack.PackedBatch(packed.num_rows, packed.schema, packed.table, packed.objects, "zstd")


def _times(case: str, batch: TensorDict, packed: maskpack.PackedBatch, rounds: int) -> list[Row]:
    count = _STAGE.stop - _STAGE.start
    stage = packed.narrow(_FIELD, _STAGE.start, count)
    require_same_tensor(case, maskpack.decompress(stage)[_FIELD], batch[_FIELD][:, :, _STAGE].contiguous())
    alone = batch.select("attention_mask", _FIELD)
    nested = maskpack.nest_batch_by_mask(alone, pad_token_id=PAD_ID)
    values = [nested[_FIELD].values()]
    layers = batch[_FIELD].shape[2]
    works = {
        f"{name}, {format}": lambda own=own, format=format: maskpack.decompress(own, _FIELD, format=format)
        for format in ("padded", "nested")
        for name, own in ((f"decompress {layers} layers", packed), (f"decompress {count} layers", stage))
    }
    works |= {
        f"narrow to {count} layers": lambda: packed.narrow(_FIELD, _STAGE.start, count),
        "compress the field, padded": lambda: maskpack.compress(alone, pad_token_id=PAD_ID),
        "compress the field, nested": lambda: maskpack.compress(nested),
        "one read of the padded field": lambda: floors.read([batch[_FIELD]]),
        "one read of the nested field": lambda: floors.read(values),
        "memcpy of the nested field": lambda: floors.copy(values),
    }
    ms = interleaved(works, rounds)
    report = [Row(case, name, value, "ms") for name, value in ms.items()]
    for format in ("padded", "nested"):
        part, whole = (f"decompress {number} layers, {format}" for number in (count, layers))
        report.append(Row(case, f"{part} / {whole}", ms[part] / ms[whole], "x", "<= 0.3"))
    for above, below in (("padded", "one read of the padded field"), ("nested", "one read of the nested field")):
        name = f"compress the field, {above}"
        report.append(Row(case, f"{name} / {below}", ms[name] / ms[below], "x"))
    for name in ("compress the field, nested", "one read of the nested field", f"decompress {layers} layers, nested"):
        report.append(Row(case, f"{name}, of its int16 values", 1e-6 * values[0].nbytes / ms[name], "GB/s"))
    return report


def _few_rows(case: str, variant: str, rows: int, prompt_width: int, response_width: int) -> list[Row]:
    """Microseconds to compress and to decompress few rows, beside the same batch with the ids in one column."""
    batch = make_batch(variant, rows, prompt_width=prompt_width, response_width=response_width)
    alone = batch.select("attention_mask", _FIELD)
    plain = maskpack.RL_FIELDS | {_FIELD: maskpack.MaskNestingSpec("sequence", [0, -1])}
    taken: dict[str, list[float]] = {name: [] for name in ("compress", "decompress", "one column")}
    gc.collect()
    gc.disable()
    try:
        for _ in range(_WARM_UP + _CHAINS):
            begin = perf_counter()
            packed = maskpack.compress(alone, pad_token_id=PAD_ID)
            middle = perf_counter()
            maskpack.decompress(packed)
            end = perf_counter()
            maskpack.decompress(maskpack.compress(alone, pad_token_id=PAD_ID, registry=plain))
            for own, seconds in zip(taken.values(), (middle - begin, end - middle, perf_counter() - end), strict=True):
                own.append(seconds)
    finally:
        gc.enable()
    us = {name: 1e6 * statistics.median(own[_WARM_UP:]) for name, own in taken.items()}
    name = f"{rows} rows of {prompt_width} + {response_width}, {DEEP[variant]} layers"
    ratio = (us["compress"] + us["decompress"]) / us["one column"]
    return [
        Row(case, f"{name}: compress", us["compress"], "us"),
        Row(case, f"{name}: decompress", us["decompress"], "us"),
        Row(case, f"{name}: both / the same in one column", ratio, "x"),
    ]
