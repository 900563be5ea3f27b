"""Time from a padded batch on the driver to usable tensors in a Ray actor, on one machine and over a link.

The forms and what "usable" means are in `forms`, the link in `link`, model and chart in `model`. The rival to beat on
one machine is the padded batch under Ray's zero-copy flag, where shared memory makes padding cheap.

End to end is wall time on the driver: encode, put, the call of the actor, its get, its restoring, and its small answer.
The phases are timed where they happen; what they lack of the whole is Ray's call. Before anything is timed, the actor
hashes every field of every form, over the padded bits, and the hashes must be those of the batch.

Pages of the object store are slow when they are first touched (40 ms for 24 MB). So the store is only a few times
larger than the padded batch, and some rounds go before the first that counts. Pages of a heap are slow too. glibc is
left as it comes, here and in the actor, for all forms alike, because that is what trainers run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from bench.cases.dispatch import link, model
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
from bench.harness.report import Row, RowGroups, ratios, without_targets
from bench.workloads import batch_of

CASE = "dispatch reference"
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
    help="time to a Ray actor, on one machine and over a link",
    on="cpu",
    workloads=True,
    plots="times against the link",
    keeps_memory=False,
    tiny={"rows": 33, "scale": 0.016, "speeds": (10,)},
)
def run(
    rows: int,
    rounds: int,
    *,
    workload: str = "reference",
    scale: float = 1.0,
    speeds: Sequence[int] = link.SPEEDS,
    plot: Path | None = None,
) -> RowGroups:
    """Raises NotExact if a form loses a bit. `speeds` are those of the link, in Gbit/s; with none there is only the
    model."""
    groups = _measured(rows, rounds, workload, scale, speeds, plot)
    if workload == "reference":
        return groups
    cases = {CASE: f"dispatch {workload}"}
    return (
        [replace(row, case=cases.get(row.case, f"{row.case}, {workload}")) for row in without_targets(group)]
        for group in groups
    )


def _measured(
    rows: int, rounds: int, workload: str, scale: float, speeds: Sequence[int], plot: Path | None
) -> RowGroups:
    progress(f"dispatch {workload}: {rows} rows")
    batch = batch_of(workload, rows, scale=scale)
    with local_ray(batch), closing(Sender(batch)) as sender:
        check(sender)
        sizes = {name: sender.stored_bytes(name) for name in FORMS}
        report, local = _end_to_end(sender, rounds)
        yield report
    yield [
        *(Row(CASE, f"object store, {name}", size, "bytes") for name, size in sizes.items()),
        Row(CASE, f"object store, {PADDED} / maskpack", sizes[PADDED] / sizes[VERIFIED], "x", ">= 40"),
    ]
    crossings: list[link.Crossing] = []
    for crossing in link.measure(workload, rows, rounds, speeds, scale=scale):
        crossings.append(crossing)
        yield link.report(crossing)
    line = model.Model(local, sizes)
    yield model.report(line)
    if plot is not None:
        plot.write_text(model.chart(line, crossings, rows, workload))


def check(sender: Sender) -> None:
    """Raises NotExact unless the actor sees the bits of the batch in every form."""
    expected = digest(sender.batch)
    for name in FORMS:
        progress(f"  bits of {name}")
        sender.check(name, expected)


def _end_to_end(sender: Sender, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Rows of every form with its phases, and the end-to-end milliseconds of each."""
    progress("dispatch: end to end")
    ms = medians({name: lambda name=name: sender.send(name) for name in FORMS}, rounds)
    local = {name: phases["end to end"] for name, phases in ms.items()}
    report = [
        Row(CASE, f"{phase}, {name}", ms[name][phase], "ms")
        for phase in ("end to end", "encode", "put", "get", "restore")
        for name in FORMS
    ]
    return report + ratios(CASE, local, _RATIOS, "end to end, "), local
