"""Bytes on the wire, and the time to encode and decode, for every variant of the workload.

Bytes are those of a pickle (protocol 5), out-of-band buffers included. The rivals: the padded TensorDict, and the
mask-nested one with response_mask as jagged int64 or as a run table. Every variant must come back bit for bit, or the
case raises. Times stand beside one read and one write of the padded bytes, measured in the same rounds.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence

from tensordict import TensorDict

import maskpack
from bench import baselines
from bench.measure import bits, interleaved, progress, require_same, tensors, wire_bytes
from bench.report import Row
from bench.workloads import PAD_ID, PROMPT_WIDTH, RESPONSE_WIDTH, VARIANTS, make_batch

_TARGET = ">= 15"  # padded / maskpack, on the reference workload


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
            warnings.simplefilter("ignore", maskpack.MaskpackWarning)
            packed = maskpack.compress(batch, pad_token_id=PAD_ID)
            check_round_trip(case, batch, packed)
            report += _sizes(case, batch, packed, _TARGET if variant == "reference" else None)
            report += _times(case, batch, packed, rounds)
    return report


def check_round_trip(case: str, batch: TensorDict, packed: maskpack.PackedBatch) -> None:
    """Raises NotExact unless `packed`, sent and received, gives back the batch: padded, and nested then unnested."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(stream, buffers=buffers)
    require_same(f"{case}, decompress", maskpack.decompress(arrived), batch)
    nested = maskpack.decompress(arrived, layout="nested")
    require_same(f"{case}, decompress nested, unnest", maskpack.unnest(nested), batch)


def _sizes(case: str, batch: TensorDict, packed: maskpack.PackedBatch, target: str | None) -> list[Row]:
    rows = batch.batch_size[0]
    padded = wire_bytes(batch) / rows
    jagged = wire_bytes(baselines.nest(batch)) / rows
    runs = wire_bytes(baselines.nest_all_masks_as_runs(batch)) / rows
    ours = wire_bytes(packed) / rows
    dense = maskpack.dense_fields(batch, maskpack.RL_FIELDS, pad_token_id=PAD_ID)
    return [
        Row(case, "tensors, padded", sum(tensor.nbytes for tensor in tensors(batch)) / rows, "bytes/row"),
        Row(case, "wire, padded", padded, "bytes/row"),
        Row(case, "wire, mask-nested jagged", jagged, "bytes/row"),
        Row(case, "wire, mask-nested jagged, all masks as runs", runs, "bytes/row"),
        Row(case, "wire, maskpack", ours, "bytes/row"),
        Row(case, "fields that maskpack leaves dense", len(dense), "fields"),
        Row(case, "padded / mask-nested jagged", padded / jagged, "x"),
        Row(case, "padded / mask-nested jagged, all masks as runs", padded / runs, "x"),
        Row(case, "padded / maskpack", padded / ours, "x", target),
        Row(case, "mask-nested jagged / maskpack", jagged / ours, "x"),
    ]


def _times(case: str, batch: TensorDict, packed: maskpack.PackedBatch, rounds: int) -> list[Row]:
    fields = [bits(tensor) for tensor in tensors(batch)]
    works = {
        "compress, verify=always": lambda: maskpack.compress(batch, pad_token_id=PAD_ID),
        "compress, verify=never": lambda: maskpack.compress(batch, pad_token_id=PAD_ID, verify="never"),
        "decompress, padded": lambda: maskpack.decompress(packed),
        "decompress, nested": lambda: maskpack.decompress(packed, layout="nested"),
        "one read of the padded bytes": lambda: baselines.read_all(fields),
        "one write of the padded bytes": lambda: baselines.write_all(fields),
    }
    ms = interleaved(works, rounds)
    read, write = ms["one read of the padded bytes"], ms["one write of the padded bytes"]
    return [
        *(Row(case, name, value, "ms") for name, value in ms.items()),
        Row(case, "compress, verify=always / read", ms["compress, verify=always"] / read, "x"),
        Row(case, "compress, verify=never / read", ms["compress, verify=never"] / read, "x"),
        Row(case, "decompress, padded / write", ms["decompress, padded"] / write, "x"),
    ]
