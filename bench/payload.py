"""Bytes on the wire, and the time to encode and decode, for every variant of the workload.

Bytes are those of a pickle (protocol 5), out-of-band buffers included. The rivals: the padded TensorDict, and the
mask-nested one with response_mask as jagged int64 or as a run table. Every variant must come back bit for bit, or the
case raises. Times stand beside one read and one write of the padded bytes and a copy of the nested ones, measured in
the same rounds. The reference workload is measured again with eight times as many rows, and for the memory that
compress takes.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from dataclasses import replace

from tensordict import TensorDict

import maskpack
from bench import baselines
from bench.measure import bits, interleaved, peak_bytes, progress, require_same, tensors, wire_bytes
from bench.report import Row
from bench.workloads import PAD_ID, PROMPT_WIDTH, RESPONSE_WIDTH, VARIANTS, make_batch
from maskpack.packed.sizes import figures

_SMALLER = {"reference": ">= 47", "multi-turn": ">= 42"}  # padded / maskpack
_SMALLER_WITH_CODEC = {"reference": ">= 58"}
_FILL = 0.084
_MORE_ROWS = 8


def run(
    rows: int = 256,
    rounds: int = 9,
    *,
    prompt_width: int = PROMPT_WIDTH,
    response_width: int = RESPONSE_WIDTH,
    variants: Sequence[str] = VARIANTS,
) -> list[Row]:
    """The rows of the report. Raises NotExact if a variant does not come back as it was."""
    report: list[Row] = []
    for variant in variants:
        progress(f"payload {variant}: {rows} rows")
        batch = make_batch(variant, rows, prompt_width=prompt_width, response_width=response_width)
        case = f"payload {variant}"
        with warnings.catch_warnings():
            # that fields travel dense is a row of the report
            warnings.simplefilter("ignore", maskpack.errors.MaskpackWarning)
            packed = maskpack.compress(batch, pad_token_id=PAD_ID)
            check_round_trip(case, batch, packed)
            squeezed = replace(packed, codec="zstd")
            check_round_trip(f"{case}, zstd", batch, squeezed)
            report += _sizes(case, variant, batch, packed, squeezed)
            report += _times(case, batch, packed, rounds)
            if variant == "reference":
                report += _memory(case, batch)
                del batch, packed, squeezed
                more = make_batch(variant, rows * _MORE_ROWS, prompt_width=prompt_width, response_width=response_width)
                report += _scaling(case, report, more, rows, rounds)
                del more
    return report


def check_round_trip(case: str, batch: TensorDict, packed: maskpack.PackedBatch) -> None:
    """Raises NotExact unless `packed`, sent and received, gives back the batch: padded, and nested then unnested."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(stream, buffers=buffers)
    require_same(f"{case}, decompress", maskpack.decompress(arrived), batch)
    nested = maskpack.decompress(arrived, format="nested")
    require_same(f"{case}, decompress nested, unnest", maskpack.unnest(nested), batch)


def _sizes(
    case: str, variant: str, batch: TensorDict, packed: maskpack.PackedBatch, squeezed: maskpack.PackedBatch
) -> list[Row]:
    rows = batch.batch_size[0]
    padded = wire_bytes(batch) / rows
    jagged = wire_bytes(baselines.nest(batch)) / rows
    runs = wire_bytes(baselines.nest_all_masks_as_runs(batch)) / rows
    ours, small = wire_bytes(packed) / rows, wire_bytes(squeezed) / rows
    dense = maskpack.dense_fields(batch, maskpack.RL_FIELDS, pad_token_id=PAD_ID)
    report = [
        Row(case, "tensors, padded", sum(tensor.nbytes for tensor in tensors(batch)) / rows, "bytes/row"),
        Row(case, "wire, padded", padded, "bytes/row"),
        Row(case, "wire, mask-nested jagged", jagged, "bytes/row"),
        Row(case, "wire, mask-nested jagged, all masks as runs", runs, "bytes/row"),
        Row(case, "wire, maskpack", ours, "bytes/row"),
        Row(case, "wire, maskpack with zstd", small, "bytes/row"),
        Row(case, "fields that maskpack leaves dense", len(dense), "fields"),
        Row(case, "padded / mask-nested jagged", padded / jagged, "x"),
        Row(case, "padded / mask-nested jagged, all masks as runs", padded / runs, "x"),
        Row(case, "padded / maskpack", padded / ours, "x", _SMALLER.get(variant)),
        Row(case, "padded / maskpack with zstd", padded / small, "x", _SMALLER_WITH_CODEC.get(variant)),
        Row(case, "mask-nested jagged / maskpack", jagged / ours, "x"),
    ]
    if "routed_experts" in batch.keys():  # noqa: SIM118
        sizes = figures(packed, left=False).fields
        field = next(one.wire_bytes for one in sizes if one.path == ("routed_experts",))
        report.append(
            Row(case, "routed_experts alone", batch["routed_experts"].nbytes / field, "x", f">= {1 / _FILL:.2f}")
        )
    return report


def _times(case: str, batch: TensorDict, packed: maskpack.PackedBatch, rounds: int) -> list[Row]:
    fields = [bits(tensor) for tensor in tensors(batch)]
    nested = tensors(maskpack.decompress(packed, format="nested").exclude(maskpack.LAYOUTS))
    squeezed = replace(packed, codec="zstd")
    stream = squeezed.to_bytes()
    works = {
        "compress, verify=always": lambda: maskpack.compress(batch, pad_token_id=PAD_ID),
        "compress, verify=never": lambda: maskpack.compress(batch, pad_token_id=PAD_ID, verify="never"),
        "decompress, padded": lambda: maskpack.decompress(packed),
        "decompress, nested": lambda: maskpack.decompress(packed, format="nested"),
        "to_bytes": lambda: packed.to_bytes(),
        "to_bytes with zstd": lambda: squeezed.to_bytes(),
        "from_bytes with zstd": lambda: maskpack.PackedBatch.from_bytes(stream),
        "one read of the padded bytes": lambda: baselines.read_all(fields),
        "one write of the padded bytes": lambda: baselines.write_all(fields),
        "memcpy of the nested values": lambda: baselines.copy_values(nested),
    }
    ms = interleaved(works, rounds)
    always, never = ms["compress, verify=always"], ms["compress, verify=never"]
    read, write = ms["one read of the padded bytes"], ms["one write of the padded bytes"]
    copy = ms["memcpy of the nested values"]
    ratios = [
        ("compress, verify=always / read", always / read, "<= 1.6"),
        ("compress, verify=never / verify=always", never / always, "<= 0.6"),
        ("decompress, nested / memcpy", ms["decompress, nested"] / copy, "<= 3"),
        ("decompress, padded / write", ms["decompress, padded"] / write, "<= 1.5"),
    ]
    wanted = case == "payload reference"
    return [
        *(Row(case, name, value, "ms") for name, value in ms.items()),
        *(Row(case, name, value, "x", target if wanted else None) for name, value, target in ratios),
    ]


def _scaling(case: str, report: Sequence[Row], more: TensorDict, rows: int, rounds: int) -> list[Row]:
    """Time a row with more rows over that with `rows`, which the report has already."""
    packed = maskpack.compress(more, pad_token_id=PAD_ID)
    check_round_trip(f"{case}, {more.batch_size[0]} rows", more, packed)
    works = {
        "compress, verify=always": lambda: maskpack.compress(more, pad_token_id=PAD_ID),
        "compress, verify=never": lambda: maskpack.compress(more, pad_token_id=PAD_ID, verify="never"),
        "decompress, nested": lambda: maskpack.decompress(packed, format="nested"),
        "one read of the padded bytes": lambda: baselines.read_all([bits(tensor) for tensor in tensors(more)]),
    }
    before = {row.name: row.value / rows for row in report if row.case == case and row.unit == "ms"}
    out: list[Row] = []
    for name, ms in interleaved(works, max(3, rounds // 2)).items():
        target = "<= 1.3" if name.startswith("compress") else None
        label = f"{name}, a row of {more.batch_size[0]} / of {rows}"
        out.append(Row(case, label, ms / more.batch_size[0] / before[name], "x", target))
    return out


def _memory(case: str, batch: TensorDict) -> list[Row]:
    """Peak memory of compress beyond the packed batch, over the padded bytes."""
    padded = sum(tensor.nbytes for tensor in tensors(batch))
    packed = maskpack.compress(batch, pad_token_id=PAD_ID)
    extra = peak_bytes(lambda: maskpack.compress(batch, pad_token_id=PAD_ID)) - packed.nbytes
    return [Row(case, "peak memory of compress beyond the packed bytes / padded", extra / padded, "x", "<= 0.15")]
