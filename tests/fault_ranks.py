"""Actors of test_faults.py: ranks that do to themselves what they are told, some to be killed, owners of objects."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from samples import PAD, assert_same, workload
from tensordict import TensorDict, TensorDictBase

from maskpack.dispatch import WorkerGroup, endpoint

RANKS, MANY = 4, 8
FACTOR = 1.5

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # whatever the ranks can import


class Worker:
    """A rank that does what it is told to do to itself, once."""

    def __init__(self) -> None:
        self._fault, self._folder = "", Path()
        self._ran: list[int] = []

    def arm(self, fault: str, folder: str = "") -> None:
        """For the next call: `exit`, to raise something, or `wait`: it says in the folder that it began, and goes on
        when the folder is gone; `wait, raise` does both."""
        self._fault, self._folder = fault, Path(folder)

    def process(self) -> int:
        return os.getpid()

    def ran(self) -> list[int]:
        """Rows that it ran since this was asked last."""
        rows, self._ran = self._ran, []
        return rows

    @endpoint
    def score(self, batch: TensorDict, factor: float) -> TensorDict:
        self._begin(batch)
        return batch.set("old_log_probs", batch["old_log_probs"] * factor)

    @endpoint
    def mix(self, batch: TensorDict, other: TensorDict, whole: TensorDict, *, table: np.ndarray) -> TensorDict:
        """Of two batches that are divided alike, one that is not, and an array."""
        self._begin(batch)
        values = other["advantages"] * batch["old_log_probs"] + whole["returns"].amax() + float(table.max())
        return TensorDict({"values": values * batch["response_mask"]}, batch_size=batch.batch_size)

    @endpoint
    def rows(self, batch: TensorDict) -> list[int]:
        self._begin(batch)
        return batch["row"].tolist()

    def _begin(self, batch: TensorDict) -> None:
        """Whatever it was armed with; then the rows count as run."""
        fault, self._fault = self._fault, ""
        if fault == "exit":
            os._exit(1)
        if fault.startswith("wait"):
            (self._folder / "began").touch()
            while self._folder.exists():
                time.sleep(0.005)
        if fault.endswith("raise"):
            raise ValueError("this rank failed")
        if fault == "raise timeout":
            raise TimeoutError("what it called did not answer")
        if fault == "raise oddly":
            raise Odd("this rank", "failed")
        self._ran += batch["row"].tolist()


class Odd(Exception):
    """Unpickling gives __init__ one argument."""

    def __init__(self, who: str, what: str) -> None:
        super().__init__(f"{who} {what}")


class Doomed:
    """Takes the place of a rank, to be killed before it hears of its call."""

    def score(self, *parcel: Any) -> None:
        raise AssertionError("it was to be dead")

    def up(self) -> None:
        pass


class Pickled:
    """Whoever unpickles this gets what was pickled."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


class Keeper:
    """Owns objects, which are lost with it."""

    def put(self, data: bytes) -> list[ray.ObjectRef]:
        return [ray.put(Pickled(data))]


RemoteWorker, RemoteDoomed, RemoteKeeper = (
    ray.remote(num_cpus=0, max_restarts=0)(kind) for kind in (Worker, Doomed, Keeper)
)


class Team:
    """Ranks that are alive; the dead are replaced by spares, which start in the background."""

    def __init__(self, actors: int, spares: int) -> None:
        self.actors = [RemoteWorker.remote() for _ in range(actors)]
        self._spares = [RemoteWorker.remote() for _ in range(spares)]

    def group(self, ranks: int = RANKS) -> WorkerGroup:
        """Where there are fewer actors than ranks, some are several ranks."""
        return WorkerGroup((self.actors * ranks)[:ranks], pad_token_id=PAD)

    def replace(self, rank: int) -> None:
        self._spares.append(RemoteWorker.remote())
        self.actors[rank] = self._spares.pop(0)

    def ran(self, without: Sequence[int] = ()) -> list[int]:
        """Rows that the ranks ran since this was asked last, sorted."""
        asked = [actor.ran.remote() for rank, actor in enumerate(self.actors) if rank not in without]
        return sorted(row for rows in ray.get(asked) for row in rows)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def kill(actor: Any) -> None:
    """Ends an actor, and returns once Ray has ended it: a little later it still answers."""
    ray.kill(actor)

    def is_gone() -> bool:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=1)
        except ray.exceptions.RayActorError:
            return True
        except ray.exceptions.GetTimeoutError:
            pass
        return False

    until(is_gone)


@dataclass
class Sample:
    """A batch, and what a call without a fault makes of it."""

    batch: TensorDict
    before: TensorDict
    expected: TensorDict

    @classmethod
    def of(cls, rows: int, prompt: int, response: int) -> Sample:
        batch = workload(rows=rows, prompt=prompt, response=response)
        batch["row"] = torch.arange(rows)
        return cls(batch, batch.clone(), Worker().score(batch.clone(), FACTOR))

    def rows(self, rank: int, ranks: int = RANKS) -> list[int]:
        size = len(self.before) // ranks
        return list(range(rank * size, (rank + 1) * size))

    def check(self, seen: TensorDictBase) -> None:
        assert_same(seen, self.expected)


def samples() -> tuple[Sample, Sample]:
    """Rows so few that Ray sends them within the calls; and rows of which each rank has an object."""
    return Sample.of(32, 32, 224), Sample.of(96, 512, 4096)
