"""Time from a padded batch on the driver to usable tensors in a Ray actor of the same machine.

The forms and what "usable" means are in `forms`. The rival to beat is the padded batch under Ray's zero-copy flag:
shared memory makes padding cheap.

End to end is wall time on the driver: encode, put, the call of the actor, its get, its restoring, and its small answer.
The phases are timed where they happen; what they lack of the whole is Ray's call. Before anything is timed, the actor
hashes every field of every form, over the padded bits, and the hashes must be those of the batch.

Pages of the object store are slow when they are first touched (40 ms for 24 MB). So the store is only a few times
larger than the padded batch, and some rounds go before the first that counts. Pages of a heap are slow too. glibc is
left as it comes, here and in the actor, for all forms alike, because that is what trainers run.
"""

from __future__ import annotations

from contextlib import closing

from bench.cases.dispatch.forms import (
    FORMS,
    JAGGED,
    JAGGED_PADDED,
    PADDED,
    TRUSTED,
    TRUSTED_PADDED,
    VERIFIED,
    VERIFIED_PADDED,
    ZERO_COPY,
    Sender,
    digest,
)
from bench.harness.local_ray import local_ray, medians
from bench.harness.measure import progress
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios
from bench.workloads import batch_of

_RATIOS = (
    (PADDED, VERIFIED, ">= 16"),
    (JAGGED, VERIFIED, ">= 4.5"),
    (ZERO_COPY, VERIFIED, ">= 2"),
    (PADDED, VERIFIED_PADDED, ">= 9"),
    (JAGGED_PADDED, VERIFIED_PADDED, ">= 3"),
    (ZERO_COPY, VERIFIED_PADDED, ">= 1.1"),
    (PADDED, TRUSTED, ">= 25"),
    (JAGGED, TRUSTED, ">= 7"),
    (ZERO_COPY, TRUSTED, ">= 2"),
    (PADDED, TRUSTED_PADDED, ">= 12"),
    (JAGGED_PADDED, TRUSTED_PADDED, ">= 4"),
    (ZERO_COPY, TRUSTED_PADDED, ">= 1"),
)


@case(
    "dispatch",
    help="time to a Ray actor of this machine",
    on="cpu",
    workloads=True,
    keeps_memory=False,
    tiny={"rows": 33, "scale": 0.016},
)
def run(rows: int, rounds: int, *, workload: str = "reference", scale: float = 1.0) -> RowGroups:
    """Raises NotExact if a form loses a bit."""
    case, batch = f"dispatch {workload}", batch_of(workload, rows, scale=scale)
    progress(f"{case}: {rows} rows")
    with local_ray(batch), closing(Sender(batch)) as sender:
        check(sender)
        sizes = {name: sender.stored_bytes(name) for name in FORMS}
        yield _end_to_end(case, sender, rounds)
    yield [
        *(Row(case, f"object store, {name}", size, "bytes") for name, size in sizes.items()),
        Row(case, f"object store, {PADDED} / maskpack", sizes[PADDED] / sizes[VERIFIED], "x", ">= 40"),
    ]


def check(sender: Sender) -> None:
    """Raises NotExact unless the actor sees the bits of the batch in every form."""
    expected = digest(sender.batch)
    for name in FORMS:
        progress(f"  bits of {name}")
        sender.check(name, expected)


def _end_to_end(case: str, sender: Sender, rounds: int) -> list[Row]:
    """Rows of every form with its phases."""
    progress("dispatch: end to end")
    ms = medians({name: lambda name=name: sender.send(name) for name in FORMS}, rounds)
    report = [
        Row(case, f"{phase}, {name}", ms[name][phase], "ms")
        for phase in ("end to end", "encode", "put", "get", "restore")
        for name in FORMS
    ]
    whole = {name: phases["end to end"] for name, phases in ms.items()}
    return report + ratios(case, whole, _RATIOS, "end to end, ")
