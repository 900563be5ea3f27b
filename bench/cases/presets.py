"""Bytes of the batches of other trainers: with the registry of the trainer, with the default one, and raw.

Bytes are those of a pickle (protocol 5). Every batch must come back bit for bit, or the case raises. A raw batch is
padded to its longest row; that of slime has jagged columns.
"""

from __future__ import annotations

import warnings

from bench.harness.measure import progress, require_same, wire_bytes
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from bench.workloads import PAD_ID
from bench.workloads.trainers import TRAINERS, trainer_batch
from maskpack import RL_FIELDS, compress, decompress
from maskpack.errors import LayoutError, MaskpackWarning
from maskpack.fields.presets import PRESETS
from maskpack.packed.table import forget

_RAW, _DEFAULT, _OWN = "raw", "RL_FIELDS", "own registry"


@case("presets", help="bytes of other trainers' batches", on="cpu", rows=64, tiny={"rows": 5, "scale": 0.016})
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if a batch does not come back as it was. `rounds` changes nothing: bytes are counted once."""
    for workload in ("reference", "tau"):
        for trainer in TRAINERS:
            name = f"presets {workload}, {trainer}"
            progress(name)
            batch = trainer_batch(trainer, workload, rows, scale)
            nbytes = {_RAW: wire_bytes(batch)}
            for by, registry in ((_OWN, PRESETS[trainer]), (_DEFAULT, RL_FIELDS)):
                forget()  # the choices for the batch before
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore" if by == _DEFAULT else "error", MaskpackWarning)
                        packed = compress(batch, registry=registry, pad_token_id=PAD_ID)
                except LayoutError:  # fields of OpenRLHF have other shapes than those of RL_FIELDS with these names
                    if by == _OWN:
                        raise
                    continue
                require_same(f"{name}, {by}", decompress(packed), batch)
                nbytes[by] = wire_bytes(packed)
            pairs = [(_RAW, by, None) for by in nbytes if by != _RAW]
            pairs += [(_DEFAULT, _OWN, None)] * (_DEFAULT in nbytes)
            yield [
                *(Row(name, f"bytes: {by}", count, "bytes") for by, count in nbytes.items()),
                *ratios(name, nbytes, pairs, "bytes: "),
            ]
