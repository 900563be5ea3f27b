"""A Ray of this machine alone, and the medians of works that time themselves there."""

from __future__ import annotations

import os
import signal
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import ray
from ray._private.tensor_serialization_utils import ZeroCopyTensorsWarning, zero_copy_tensors_reducer
from ray.cloudpickle import CloudPickler
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import interleaved

_STORES = 3  # sizes of the padded batch that the object store holds
_SMALL_STORE = 2**27
WARM = 4  # rounds, until every form has had its pages of the object store and of the actor


def cores() -> int:
    """Of this process. An actor gets as many CPUs: Ray gives torch in an actor as many threads as it has CPUs."""
    return len(os.sched_getaffinity(0))


@contextmanager
def local_ray(batch: TensorDict, *, num_cpus: int | None = None) -> Iterator[None]:
    """A Ray of this machine alone, with room for a few such batches in the object store; shut down at the end.
    `num_cpus` are twice as many as cores if not given: each actor has all, and gives them back a little later."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # 15 by default: an actor would wait for all else that the machine does
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    terminate = signal.getsignal(signal.SIGTERM)
    ray.init(
        address="local",
        num_cpus=num_cpus or 2 * cores(),
        object_store_memory=_SMALL_STORE + _STORES * sum(field.nbytes for field in batch.values()),
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    signal.signal(signal.SIGTERM, terminate)  # Ray's handler kills its processes while calls wait for them, and aborts
    try:
        yield
    finally:
        ray.shutdown()


def medians(works: Mapping[str, Callable[[], Mapping[str, float]]], rounds: int) -> dict[str, dict[str, float]]:
    """Median milliseconds of every phase of works that time themselves, in `interleaved` rounds, after WARM that do
    not count. What `interleaved` times itself is not used: it holds the freeing in the actor."""
    taken: dict[str, list[Mapping[str, float]]] = {name: [] for name in works}
    interleaved({name: lambda name=name: taken[name].append(works[name]()) for name in works}, rounds, warm=WARM)
    return {
        name: {phase: 1e3 * statistics.median(call[phase] for call in calls[WARM:]) for phase in calls[0]}
        for name, calls in taken.items()
    }


def set_zero_copy(on: bool) -> None:
    """Switches Ray's zero-copy flag for what this process pickles from now on."""
    if on:
        warnings.simplefilter("ignore", ZeroCopyTensorsWarning)
        CloudPickler.dispatch[Tensor] = zero_copy_tensors_reducer
    else:
        CloudPickler.dispatch.pop(Tensor, None)
