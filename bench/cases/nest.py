"""Time to nest a padded batch and to restore it, on the reference workload.

Whole public calls are timed: scan of the masks, planning, gather, jagged tensors, TensorDict. The usual code checks no
pad, so verify=False is what stands against it; verify=True stands against one read of the padded bytes. memcpy
copies exactly the bytes that nesting returns (the values of all jagged fields), into newly allocated memory.

Everything runs in one thread. The usual code is timed whole and in its two parts. Whole over parts is about 1 on a
quiet machine; where it is far from 1, other processes held up this one, and no ratio of that run counts.
"""

from __future__ import annotations

import maskpack
from bench.harness import floors
from bench.harness.measure import bits, interleaved, progress, require_same, require_same_tensor, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, times
from bench.rivals import nesting
from bench.workloads import PAD_ID, batch_of

_NEVER, _ALWAYS = "nest, verify=False", "nest, verify=True"
_USUAL, _FIELDS, _TABLES = "nest, usual code", "nest, usual code, fields alone", "nest, usual code, run tables alone"
_UNNEST, _SCATTER = "unnest", "unnest, full and boolean scatter"

_RATIOS = (
    (_USUAL, _NEVER, ">= 15"),
    (_NEVER, floors.COPY, "<= 2.7"),
    (_ALWAYS, floors.READ, "<= 1.35"),
    (_SCATTER, _UNNEST, None),
    (_UNNEST, floors.WRITE, None),
)


@case("nest", help="time to nest a padded batch and to restore it", on="cpu", tiny={"rows": 5, "scale": 0.016})
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if ours and the usual code give other values, or not the batch again."""
    progress(f"nest: {rows} rows")
    batch = batch_of("reference", rows, scale=scale)
    order = tuple(batch.keys())
    masks = nesting.masks_of(batch)
    padded = [bits(field) for field in batch.values()]
    usual = nesting.nest(batch)
    ours = maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify=False)
    for name in order:
        if name != "attention_mask":
            require_same_tensor(f'nest: field "{name}"', ours[name], usual[name])
    require_same("unnest", maskpack.unnest_batch_by_mask(ours), batch)
    require_same("unnest, usual code", nesting.unnest(usual, masks, order), batch)
    values = [ours[name].values() for name in order]

    works = {
        _NEVER: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID, verify=False),
        _ALWAYS: lambda: maskpack.nest_batch_by_mask(batch, pad_token_id=PAD_ID),
        _USUAL: lambda: nesting.nest(batch),
        _FIELDS: lambda: nesting.nest_fields(batch, masks),
        _TABLES: lambda: nesting.span_tables(masks),
        floors.COPY: lambda: floors.copy(values),
        _UNNEST: lambda: maskpack.unnest_batch_by_mask(ours),
        _SCATTER: lambda: nesting.unnest(usual, masks, order),
        floors.READ: lambda: floors.read(padded),
        floors.WRITE: lambda: floors.write(padded),
    }
    with torch_threads(1):
        ms = interleaved(works, rounds)
    name = "nest reference"
    yield [
        Row(name, "tensors, padded", sum(field.nbytes for field in padded), "bytes"),
        Row(name, "tensors, nested", sum(value.nbytes for value in values), "bytes"),
        Row(name, "nest, usual code / its parts", ms[_USUAL] / (ms[_FIELDS] + ms[_TABLES]), "x"),
        *times(name, ms, _RATIOS),
    ]
