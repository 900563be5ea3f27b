"""Time from a padded batch on the driver to usable tensors in a Ray actor, on one machine and over a link.

The forms and what "usable" means are in `dispatch_forms`, the link in `link`, model and chart in `dispatch_model`. The
rival to beat on one machine is the padded batch under Ray's zero-copy flag, where shared memory makes padding cheap.

End to end is wall time on the driver: encode, put, the call of the actor, its get, its restoring, and its small answer.
The phases are timed where they happen; what they lack of the whole is Ray's call. Before anything is timed, the actor
hashes every field of every form, over the padded bits, and the hashes must be those of the batch.

Pages of the object store are slow when they are first touched (40 ms for 24 MB). So the store is only a few times
larger than the padded batch, and WARM rounds go before the first that counts. Pages of a heap are slow too. glibc is
left as it comes, here and in the actor, for all forms alike, because that is what trainers run; the figures "kept
memory" are of a driver and an actor that tell it to keep what is freed, which is kind to forms that allocate much.

Eight ranks: chunks of the rivals are made beforehand as tensors of their own. As slices, which is what `chunk` gives,
each would carry the whole storage through Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from tensordict import TensorDict

import maskpack
from bench import baselines, dispatch_model, link
from bench.dispatch_forms import (
    FLOOR,
    FORMS,
    JAGGED,
    JAGGED_PADDED,
    JAGGED_ZERO_COPY,
    PADDED,
    TRUSTED,
    TRUSTED_PADDED,
    VERIFIED,
    VERIFIED_PADDED,
    ZERO_COPY,
    Sender,
    cores,
    digest,
    local_ray,
    medians,
)
from bench.measure import interleaved, keep_memory, progress, require_same
from bench.report import Row, without_targets
from bench.workloads import PAD_ID, batch_of
from maskpack.dispatch import WorkerGroup, endpoint

CASE = "dispatch reference"
_RANKS = 8
_MORE_ROUNDS = 5  # of what takes only a few milliseconds, for one of the others

_RATIOS = (
    (PADDED, VERIFIED, ">= 16"),
    (JAGGED, VERIFIED, ">= 4.5"),
    (JAGGED_ZERO_COPY, VERIFIED, None),
    (ZERO_COPY, VERIFIED, ">= 2"),
    (PADDED, VERIFIED_PADDED, ">= 9"),
    (JAGGED_PADDED, VERIFIED_PADDED, ">= 3"),
    (ZERO_COPY, VERIFIED_PADDED, ">= 1.1"),
    (PADDED, TRUSTED, ">= 25"),
    (JAGGED, TRUSTED, ">= 7"),
    (JAGGED_ZERO_COPY, TRUSTED, None),
    (ZERO_COPY, TRUSTED, ">= 2"),
    (PADDED, TRUSTED_PADDED, ">= 12"),
    (JAGGED_PADDED, TRUSTED_PADDED, ">= 4"),
    (ZERO_COPY, TRUSTED_PADDED, ">= 1"),
)
_ROUND_TRIP = (
    (VERIFIED, ">= 10"),
    (VERIFIED_PADDED, ">= 10"),
    (TRUSTED, None),
    (TRUSTED_PADDED, None),
)


def run(
    rows: int = 256,
    rounds: int = 9,
    *,
    workload: str = "reference",
    scale: float = 1.0,
    speeds: Sequence[int | None] = link.SPEEDS,
    plot: Path | None = None,
) -> list[Row]:
    """The rows of the report, and the chart where `plot` names a file. Raises NotExact if a form loses a bit.

    `scale` is that of `batch_of`. `speeds` are those of the link, in Gbit/s, None for one without limit; with none at
    all there is only the model.
    """
    progress(f"dispatch {workload}: {rows} rows")
    batch = batch_of(workload, rows, scale=scale)
    with local_ray(batch):
        with closing(Sender(batch, keep=False)) as sender:
            check(sender)
            sizes = {name: sender.stored_bytes(name) for name in FORMS}
            report, local = _end_to_end(sender, rounds)
            report += _round_trips(sender, rounds)
            report += _one_process(batch, sender, rounds)
        report += _through_worker_group(batch, rounds)
        report += _kept_memory(batch, rounds)
    report += [Row(CASE, f"object store, {name}", size, "bytes") for name, size in sizes.items()]
    report.append(Row(CASE, f"object store, {PADDED} / maskpack", sizes[PADDED] / sizes[VERIFIED], "x", ">= 40"))
    crossings = link.measure(workload, rows, rounds, speeds, scale=scale)
    report += link.report(crossings)
    model = dispatch_model.Model(local, sizes)
    report += dispatch_model.report(model, crossings)
    if plot is not None:
        plot.write_text(dispatch_model.chart(model, crossings, rows, workload))
    if workload == "reference":
        return report
    cases = {CASE: f"dispatch {workload}"}
    return [replace(row, case=cases.get(row.case, f"{row.case}, {workload}")) for row in without_targets(report)]


def check(sender: Sender) -> None:
    """Raises NotExact unless the actor sees the bits of the batch in every form."""
    expected = digest(sender.batch)
    for name in FORMS:
        progress(f"  bits of {name}")
        sender.check(name, expected)


# -------------------------------------------------------------------- driver to actor


def _end_to_end(sender: Sender, rounds: int) -> tuple[list[Row], dict[str, float]]:
    """Rows of every form with its phases, and the end-to-end milliseconds of each."""
    progress("dispatch: end to end")
    works: dict[str, Callable[[], Mapping[str, float]]] = {}
    for name, form in FORMS.items():
        works[name] = lambda name=name: sender.send(name)
        if not form.view:  # a view is read as it is
            works[f"{name}, read"] = lambda name=name: sender.send(name, then_read=True)
    ms = medians(works, rounds)
    local = {name: ms[name]["end to end"] for name in FORMS}
    then_read = {name: ms[name if form.view else f"{name}, read"]["end to end"] for name, form in FORMS.items()}
    report = [Row(CASE, f"end to end, {name}", value, "ms") for name, value in local.items()]
    report += [Row(CASE, f"end to end and one read, {name}", value, "ms") for name, value in then_read.items()]
    for phase in ("encode", "put", "get", "restore"):
        report += [Row(CASE, f"{phase}, {name}", ms[name][phase], "ms") for name in FORMS]
    report += _ratios(local, "")
    report += [Row(CASE, row.name, row.value, row.unit) for row in _ratios(then_read, " and one read")]
    return report, local


def _ratios(ms: Mapping[str, float], what: str) -> list[Row]:
    return [
        Row(CASE, f"end to end{what}, {above} / {below}", ms[above] / ms[below], "x", target)
        for above, below, target in _RATIOS
    ]


def _round_trips(sender: Sender, rounds: int) -> list[Row]:
    """With log-probs that come back, until they lie padded on the driver."""
    progress("dispatch: round trips of log-probs")
    names = [PADDED, ZERO_COPY, *(name for name, _ in _ROUND_TRIP)]
    ms = medians({name: lambda name=name: sender.round_trip(name) for name in names}, rounds)
    took = {name: phases["end to end"] for name, phases in ms.items()}
    return [
        *(Row(CASE, f"round trip of log-probs, {name}", value, "ms") for name, value in took.items()),
        *(
            Row(CASE, f"round trip of log-probs, {PADDED} / {name}", took[PADDED] / took[name], "x", target)
            for name, target in _ROUND_TRIP
        ),
    ]


class _Worker:
    @endpoint(format="nested")
    def nested(self, batch: TensorDict) -> None:
        """Its batch is usable."""

    @endpoint(format="padded")
    def padded(self, batch: TensorDict) -> None:
        """Its batch is usable."""


def _through_worker_group(batch: TensorDict, rounds: int) -> list[Row]:
    """The same through `maskpack.dispatch.WorkerGroup`, with one rank."""
    progress("dispatch: through WorkerGroup")
    actor = ray.remote(_Worker).options(num_cpus=cores()).remote()
    works: dict[str, Callable[[], Mapping[str, float]]] = {}
    for name, verify in (("verified", "always"), ("trusted", "never")):
        group = WorkerGroup([actor], pad_token_id=PAD_ID, verify=verify)
        for layout in ("nested", "padded"):
            works[f"{name}, {layout}"] = lambda group=group, layout=layout: _called(group, layout, batch)
    ms = medians(works, rounds)
    ray.kill(actor)
    return [
        Row(CASE, f"{phase}, WorkerGroup.call, {name}", value, "ms")
        for name, phases in ms.items()
        for phase, value in phases.items()
    ]


def _called(group: WorkerGroup, layout: str, batch: TensorDict) -> dict[str, float]:
    """Seconds of a call, and what the group says of its phases."""
    begin = time.perf_counter()
    group.call(layout, batch)
    end = time.perf_counter()
    stages = {"encode": "prepare", "put": "put", "rank decodes": "decode"}
    seconds = {phase: group.metrics[f"maskpack/dispatch/{stage}_seconds"] for phase, stage in stages.items()}
    return {"end to end": end - begin, **seconds}


def _kept_memory(batch: TensorDict, rounds: int) -> list[Row]:
    """End to end again, with glibc told to keep what is freed, here and in the actor. That cannot be undone."""
    progress("dispatch: end to end, kept memory")
    keep_memory()
    names = [name for name in FORMS if name != FLOOR]
    with closing(Sender(batch, keep=True)) as sender:
        ms = medians({name: lambda name=name: sender.send(name) for name in names}, rounds)
    took = {name: phases["end to end"] for name, phases in ms.items()}
    ratios = _ratios(took, ", kept memory")
    return [
        *(Row(CASE, f"end to end, kept memory, {name}", value, "ms") for name, value in took.items()),
        *(Row(CASE, row.name, row.value, row.unit) for row in ratios),
    ]


# -------------------------------------------------------------------- put and get in one process


def _one_process(batch: TensorDict, sender: Sender, rounds: int) -> list[Row]:
    """`put` and `get` of whole batches, and of the rows of eight ranks; encoding is not timed."""
    progress("dispatch: put and get in one process")
    packed, flat = sender.packed, sender.flat
    padded_chunks = [chunk.clone() for chunk in batch.chunk(_RANKS)]
    jagged_chunks = [baselines.nest(chunk) for chunk in padded_chunks]
    bounds = _bounds(batch.batch_size[0], _RANKS)
    cuts = _bounds(len(flat), _RANKS)
    parts = _sliced(packed, bounds)[1]
    require_same("dispatch, rows of the ranks", maskpack.decompress(maskpack.PackedBatch.cat(parts)), batch)
    once, one, eight = "put + get, maskpack", "put + get, floor", "put + 8 gets and slices, floor"
    ranks, padded, jagged = (f"8 ranks, {name}" for name in ("maskpack", PADDED, JAGGED))
    ms = interleaved(
        {
            once: lambda: _got([packed]),
            one: lambda: _got([flat]),
            ranks: lambda: _sliced(packed, bounds),
            eight: lambda: _sliced(flat, cuts),
        },
        _MORE_ROUNDS * rounds,
    )
    ms |= interleaved({padded: lambda: _got(padded_chunks), jagged: lambda: _got(jagged_chunks)}, rounds)
    ratios = (
        (once, one, "<= 1.2"),
        (ranks, one, "<= 2"),
        (ranks, eight, None),
        (padded, ranks, None),
        (jagged, ranks, None),
    )
    return [
        *(Row(CASE, name, value, "ms") for name, value in ms.items()),
        *(Row(CASE, f"{above} / {below}", ms[above] / ms[below], "x", target) for above, below, target in ratios),
    ]


def _got(values: Sequence[Any]) -> tuple[list[ray.ObjectRef], list[Any]]:
    """Each put, then each got. The references are returned too: freeing is not timed."""
    refs = [ray.put(value) for value in values]
    return refs, [ray.get(ref) for ref in refs]


def _sliced(value: Any, bounds: Sequence[tuple[int, int]]) -> tuple[ray.ObjectRef, list[Any]]:
    """Put once; then got once for every rank, which takes its rows."""
    ref = ray.put(value)
    return ref, [ray.get(ref)[start:stop] for start, stop in bounds]


def _bounds(length: int, parts: int) -> list[tuple[int, int]]:
    return [(length * part // parts, length * (part + 1) // parts) for part in range(parts)]
