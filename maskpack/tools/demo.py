"""`maskpack demo`: Ray workers score rollouts of a tiny model and train on them, once from the padded batch and once
through maskpack, and every bit of the outputs is compared.

    padded      clone each rank's rows -> ray.put -> actor method -> ray.get -> torch.cat      what people do today
    maskpack    WorkerGroup.pack -> WorkerGroup.call, the same actor method behind @endpoint

Both run the same code on the same tensors, so a single differing bit is an error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any, Literal, cast

import ray
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from maskpack.dispatch.group import WorkerGroup
from maskpack.errors import MaskpackError
from maskpack.packed.batch import decompress
from maskpack.tools.demo_rollout import PAD, Trainer, rollout_batch, sums, tiny_model

Way = Literal["padded", "maskpack"]
WAYS: tuple[Way, Way] = ("padded", "maskpack")
METHODS = ("log_probs", "update")
STAGES = ("encode", "put", "fetch, decode", "model", "results back")
ROUNDS = 3
Trips = dict[tuple[str, Way], list["Trip"]]

_OBJECT_STORE_BYTES = 512 * 2**20


class OutputsDiffer(MaskpackError):
    """The two ways gave different bits."""


# -------------------------------------------------------------------- the two ways, measured


@dataclass(frozen=True)
class Trip:
    """One call on all ranks: what came back, the bytes each way, and milliseconds by stage."""

    output: dict[str, Tensor]
    sent: int
    returned: int
    stages: dict[str, float]

    @property
    def whole(self) -> float:
        return sum(self.stages.values())

    @property
    def moving(self) -> float:
        """Everything but the model."""
        return self.whole - self.stages["model"]


class _Tap:
    """An actor handle that notes what passes, so that both ways are measured at the same place."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.arguments: tuple[Any, ...] = ()
        self.results: list[Any] = []
        self.submitted = 0.0

    def __getattr__(self, method: str) -> Any:
        def tapped(**options: Any) -> SimpleNamespace:
            return SimpleNamespace(remote=functools.partial(self._submit, method, options), options=tapped)

        return tapped()

    def _submit(self, method: str, options: dict[str, Any], *arguments: Any) -> Any:
        found: Any = getattr(self.actor, method).options(**options).remote(*arguments)
        self.arguments = arguments
        self.results = cast("list[Any]", found) if isinstance(found, list) else [found]
        self.submitted = time.monotonic()
        return cast("Any", found)


def _trip(way: Way, taps: Sequence[_Tap], method: str, batch: TensorDict) -> Trip:
    begin = time.monotonic()
    if way == "padded":
        # Cloned, because a view of the batch would be pickled with the storage of all its rows.
        parts = [part.clone() for part in batch.split(_rank_sizes(batch.shape[0], len(taps)))]
        encoded = time.monotonic()
        refs = [ray.put(part) for part in parts]
        results: Any = ray.get([getattr(tap, method).remote(ref) for tap, ref in zip(taps, refs, strict=True)])
        output = torch.cat(results) if isinstance(results[0], TensorDictBase) else results
    else:
        group = WorkerGroup(taps, pad_token_id=PAD)
        packed = group.pack(batch)
        encoded = time.monotonic()
        output = group.call(method, packed)
    end = time.monotonic()
    return Trip(_named(output), *_bytes(taps), _stages(taps, begin, encoded, end))


def _rank_sizes(rows: int, ranks: int) -> list[int]:
    least, more = divmod(rows, ranks)
    return [least + (rank < more) for rank in range(ranks)]


def _named(output: Any) -> dict[str, Tensor]:
    """The tensors of a TensorDict, or of each rank's metrics, by the names that the comparison reports."""
    if isinstance(output, TensorDictBase):
        return {str(name): value for name, value in output.items() if isinstance(value, Tensor)}
    return {f"{name} of rank {rank}": value for rank, metrics in enumerate(output) for name, value in metrics.items()}


def _bytes(taps: Sequence[_Tap]) -> tuple[int, int]:
    """Both ways; an object that several ranks read is sent once."""
    arguments: list[Any] = [argument for tap in taps for argument in tap.arguments]
    sent = list(dict.fromkeys(value for value in arguments if isinstance(value, cast("Any", ray.ObjectRef))))
    inline = [value for value in arguments if not isinstance(value, ray.ObjectRef)]
    returned = [result for tap in taps for result in tap.results]
    return sum(map(wire_bytes, [*ray.get(sent), *inline])), sum(map(wire_bytes, ray.get(returned)))


def wire_bytes(value: Any) -> int:
    """Bytes that Ray carries for `value`: the pickle stream (protocol 5) and its out-of-band buffers."""
    buffers: list[Any] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def _stages(taps: Sequence[_Tap], begin: float, encoded: float, end: float) -> dict[str, float]:
    """Milliseconds along the rank that finished last; they add up to the whole call."""
    spans: list[tuple[float, float]] = ray.get([tap.actor.span.remote() for tap in taps])
    last = max(range(len(taps)), key=lambda rank: spans[rank][1])
    marks = [begin, encoded, taps[last].submitted, *spans[last], end]
    return {name: 1e3 * (stop - start) for name, start, stop in zip(STAGES, marks[:-1], marks[1:], strict=True)}


# -------------------------------------------------------------------- bit for bit


def compare(padded: Mapping[str, Tensor], maskpack: Mapping[str, Tensor]) -> int:
    """Compares two sets of tensors bit for bit.

    Returns:
        How many values were compared.

    Raises:
        OutputsDiffer: other names, dtypes or shapes, or a bit that differs; names the field, the place and both values.
    """
    if set(padded) != set(maskpack):
        raise OutputsDiffer(f"the padded way gave {sorted(padded)}; maskpack gave {sorted(maskpack)}.")
    for name in padded:
        _compare(name, padded[name], maskpack[name])
    return sum(value.numel() for value in padded.values())


def _compare(name: str, padded: Tensor, maskpack: Tensor) -> None:
    if padded.dtype != maskpack.dtype or padded.shape != maskpack.shape:
        raise OutputsDiffer(
            f'"{name}" is {padded.dtype} {tuple(padded.shape)} the padded way; {maskpack.dtype} '
            f"{tuple(maskpack.shape)} through maskpack."
        )
    bits, other = (value.reshape(-1).contiguous().view(torch.uint8) for value in (padded, maskpack))
    differs = (bits != other).view(padded.numel(), -1).any(1) if padded.numel() else torch.zeros(0, dtype=torch.bool)
    if not differs.any():
        return
    first = int(differs.nonzero()[0])
    row, *rest = (int(index) for index in torch.unravel_index(torch.tensor(first), padded.shape))
    place = f"row {row}" + (f", column {', '.join(map(str, rest))}" if rest else "")
    raise OutputsDiffer(
        f'"{name}" differs in {int(differs.sum())} of {padded.numel()} values, first in {place}: '
        f"{_shown(padded, first)} the padded way; {_shown(maskpack, first)} through maskpack."
    )


def _shown(values: Tensor, index: int) -> str:
    value = values.reshape(-1)[index : index + 1]
    bits = int.from_bytes(value.view(torch.uint8).numpy().tobytes(), sys.byteorder)
    return f"{value.item()!r} (bits {bits:#x})"


# -------------------------------------------------------------------- the run


def run(prompts: int, responses: int, seed: int, ranks: int) -> int:
    """Runs the demo with `prompts` x `responses` rows; returns the exit status: 0, or 1 if any bit differs."""
    console = Console()
    try:
        with _progress(console) as progress, _one_thread(), _local_ray(ranks):
            batch, trips, compared = _work(progress, prompts, responses, seed, ranks)
    except OutputsDiffer as error:
        console.print("THE OUTPUTS DIFFER", style="bold white on red")
        console.print(str(error), style="bold red", markup=False, soft_wrap=True)
        return 1
    console.print(_table(batch, trips, ranks))
    console.print(
        f"All outputs were bitwise equal: {compared:,} values compared in {ROUNDS} rounds.", style="bold green"
    )
    return 0


def _work(progress: Progress, prompts: int, responses: int, seed: int, ranks: int) -> tuple[TensorDict, Trips, int]:
    remote: Any = ray.remote(Trainer)
    actors = [remote.remote(seed) for _ in range(ranks)]
    task = progress.add_task("rollouts", total=prompts * responses)
    batch = rollout_batch(
        tiny_model(seed), sums(prompts, seed), responses, seed, lambda ended: progress.advance(task, ended)
    )
    task = progress.add_task("workers start", total=ranks)
    for actor in actors:
        ray.get(actor.span.remote())
        progress.advance(task)
    taps = [_Tap(actor) for actor in actors]
    # The first calls pay for imports and for memory that is touched the first time: they are not measured.
    task = progress.add_task("warm-up", total=4)
    for way in WAYS:
        _round(way, taps, batch[: 2 * ranks], lambda: progress.advance(task))
    trips: Trips = {(method, way): [] for method in METHODS for way in WAYS}
    task = progress.add_task(f"{ROUNDS} rounds, both ways", total=4 * ROUNDS)
    compared = compare(_named(batch), _named(decompress(WorkerGroup(taps, pad_token_id=PAD).pack(batch))))
    for number in range(ROUNDS):
        order = WAYS if number % 2 == 0 else WAYS[::-1]
        done = {way: _round(way, taps, batch, lambda: progress.advance(task)) for way in order}
        for method in METHODS:
            compared += compare(*(done[way][method].output for way in WAYS))
            for way in WAYS:
                trips[method, way].append(done[way][method])
    return batch, trips, compared


def _round(way: Way, taps: Sequence[_Tap], batch: TensorDict, on_trip: Callable[[], None]) -> dict[str, Trip]:
    """Both methods, the second with what the first gave."""
    scored = _trip(way, taps, "log_probs", batch)
    on_trip()
    updated = _trip(way, taps, "update", batch.copy().update(scored.output))
    on_trip()
    return {"log_probs": scored, "update": updated}


@contextlib.contextmanager
def _local_ray(ranks: int) -> Generator[None]:
    """A Ray of this process's own, unless it runs one already."""
    if ray.is_initialized():
        yield
        return
    # Without it Ray warns of a coming change in how it hides GPUs, of which the demo uses none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(
        address="local",
        num_cpus=ranks,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _one_thread() -> Generator[None]:
    """In the driver as in the workers: more threads than cores make the times those of the scheduler."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -------------------------------------------------------------------- what it prints


def _progress(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def _table(batch: TensorDict, trips: Trips, ranks: int) -> Table:
    filled = batch["attention_mask"].float().mean().item()
    table = Table(
        title=f"{batch.shape[0]} rows of {batch['prompts'].shape[1]} + {batch['responses'].shape[1]} tokens, "
        f"{filled:.1%} real, to {ranks} workers and back",
        caption="Bytes are what Ray carried: pickle streams and out-of-band buffers. Times are medians of "
        f"{ROUNDS} rounds, along the worker that finished last; the model runs the same code both ways.",
    )
    table.add_column("")
    for name in (*WAYS, "padded / maskpack"):
        table.add_column(name, justify="right")
    for method in METHODS:
        pair = [trips[method, way] for way in WAYS]
        table.add_row(f"[bold]{method}[/]")
        _add_bytes(table, "to the workers", [way[-1].sent for way in pair])
        _add_bytes(table, "back to the driver", [way[-1].returned for way in pair])
        for stage in STAGES:
            _add_times(table, stage, [[trip.stages[stage] for trip in way] for way in pair])
        _add_times(table, "all but the model", [[trip.moving for trip in way] for way in pair])
        table.add_section()
    both = [list(zip(*(trips[method, way] for method in METHODS), strict=True)) for way in WAYS]
    table.add_row("[bold]both calls[/]")
    _add_bytes(table, "there and back", [sum(trip.sent + trip.returned for trip in way[-1]) for way in both])
    _add_times(table, "all but the model", [[sum(trip.moving for trip in calls) for calls in way] for way in both])
    _add_times(table, "whole", [[sum(trip.whole for trip in calls) for calls in way] for way in both])
    return table


def _add_bytes(table: Table, name: str, pair: Sequence[int]) -> None:
    padded, packed = pair
    table.add_row(f"  {name}", *(f"{value / 1e3:,.1f} kB" for value in pair), f"{padded / packed:.1f} x")


def _add_times(table: Table, name: str, pair: Sequence[Sequence[float]]) -> None:
    padded, packed = (median(times) for times in pair)
    ratio = "the same code" if name == "model" else f"{padded / packed:.1f} x"
    table.add_row(f"  {name}", f"{padded:,.1f} ms", f"{packed:,.1f} ms", ratio)
