"""Sequences and faults of the storage backend of TransferQueue.

Most cases are sequences: columns of all kinds are put, overwritten, read in any order, cleared, saved and
restored, and beside them SimpleStorage's own classes hold the same rows in this process; every result is the same, bit
for bit and in the same containers.

In every 64th case a process of the queue dies while others put and get samples: a writer in the middle of its
puts, or a storage unit. A get gives rows as some put wrote them, all fields of a row from the same put, or raises an
error of TransferQueue or of maskpack; it never takes longer than PATIENCE. After the death of a writer every sample can
be put again, and then read as it was put last.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict
from test_transferqueue_rows import DTYPES, KINDS, NAMES, Theirs, assert_equal, column, padded
from transfer_queue import interface

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend)
from maskpack.errors import MaskpackError

BACKEND, UNITS, KEYS, PATIENCE = "Maskpack", 3, 300, 30
PARTITION = "faults"
NAMED = (MaskpackError, KeyError, ValueError, RuntimeError)


class Wrong(AssertionError):
    """Rows that nobody put, or a call that hangs."""


# -------------------------------------------------------------------- rows that say what they are


def ids_of(key: int, version: int) -> torch.Tensor:
    return torch.arange((7 * key + 3 * version) % 11) + 1000 * version + 1_000_000 * key


def batch_of(keys: list[int], version: int) -> TensorDict:
    """Fields of one put. The image is large and the same for all rows of a version, so it is stored once."""
    ids = [ids_of(key, version) for key in keys]
    image = torch.full((20_000,), float(version))
    fields: dict[str, Any] = {
        "ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        "scores": torch.nested.as_nested_tensor([row.double().sin() for row in ids], layout=torch.jagged),
        "version": torch.full((len(keys),), version),
        "extra": NonTensorStack(*[{"key": key, "version": version, "image": image} for key in keys]),
    }
    return TensorDict(fields, batch_size=[len(keys)])


def put(keys: list[int], version: int) -> None:
    names = [str(key) for key in keys]
    tq.kv_batch_put(names, PARTITION, batch_of(keys, version), [{"version": version}] * len(keys))


def checked(keys: list[int], fields: list[str], newest: int | None = None) -> None:
    """Gets samples and looks at every row: it is of its key, whole, and of one version."""
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        got = tq.kv_batch_get([str(key) for key in keys], PARTITION, fields)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    columns = {
        name: list(value.unbind()) if isinstance(value := got[name], torch.Tensor) else list(value) for name in fields
    }
    for place, key in enumerate(keys):
        version = int(columns["version"][place])
        expected = {"ids": ids_of(key, version), "version": torch.tensor(version)}
        expected["scores"] = expected["ids"].double().sin()
        right = all(torch.equal(columns[name][place], expected[name]) for name in fields if name != "extra")
        if "extra" in fields:
            extra = columns["extra"][place]
            image = extra["image"]
            right = right and (extra["key"], extra["version"], image.shape) == (key, version, (20_000,))
            right = right and bool((image == version).all())
        if not right:
            raise Wrong(f"sample {key}, version {version}: { ({name: columns[name][place] for name in fields}) }")
        if newest is not None and version != newest:
            raise Wrong(f"sample {key} is of version {version}; the last put was {newest}")


def attempted(keys: list[int], fields: list[str], seen: Counter[str]) -> None:
    try:
        checked(keys, fields)
        seen["right"] += 1
    except Wrong:
        raise
    except NAMED as error:
        seen[type(error).__name__] += 1


# -------------------------------------------------------------------- sequences


class Sequence:
    """Puts, gets, clears and checkpoints of one partition, each get beside that of rows in dicts."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.partition = f"sequence {seed}"
        self.theirs = Theirs()
        self.known: dict[int, set[str]] = {}
        # a partition's controller refuses a field that changes its kind or dtype; None: rows of a padded batch
        kinds = {name: (rng.randrange(KINDS), rng.choice(DTYPES)) for name in NAMES}
        self.kinds = kinds if rng.random() < 0.8 else None

    def play(self, seen: Counter[str]) -> None:
        for _ in range(self.rng.randint(6, 14)):
            steps = [self.put] * 11 + ([self.clear] * 2 + [self.restore] if self.known else [])
            step = self.rng.choice(steps)
            step()
            seen[step.__name__] += 1
            for _ in range(2 * bool(self.known)):
                seen["get"] += self.get()
        if self.known:
            self.cleared(list(self.known))

    def keys(self, samples: list[int]) -> list[str]:
        return [str(sample) for sample in samples]

    def some(self) -> list[int]:
        return self.rng.sample(sorted(self.known), self.rng.randint(1, len(self.known)))

    def batch(self, rows: int) -> TensorDict:
        if self.kinds is None:
            return padded(self.rng, rows)
        names = self.rng.sample(NAMES, self.rng.randint(1, 6))
        return TensorDict({name: column(self.rng, rows, *self.kinds[name]) for name in names}, batch_size=[rows])

    def put(self) -> None:
        """New samples, or fields of some that are there."""
        rows, most = self.rng.choice((1, 1, 1, 2, 5, 9)), max(self.known, default=-1) + 1
        samples = list(range(most, most + rows))
        if self.known and self.rng.random() < 0.4:
            samples = self.some()[:rows]
        data = self.batch(len(samples))
        tq.kv_batch_put(self.keys(samples), self.partition, data, [{}] * len(samples))
        self.theirs.put(samples, data)
        for sample in samples:
            self.known.setdefault(sample, set()).update(data.keys())

    def get(self) -> int:
        some = self.some()
        fields = sorted(set.intersection(*(self.known[sample] for sample in some)))
        if not fields:
            return 0
        wanted = self.rng.sample(fields, self.rng.randint(1, len(fields)))
        got, want = tq.kv_batch_get(self.keys(some), self.partition, wanted), self.theirs.get(some, wanted)
        for name in wanted:
            assert_equal(got.get(name), want.get(name), name)
        return 1

    def cleared(self, samples: list[int]) -> None:
        tq.kv_clear(self.keys(samples), self.partition)

    def clear(self) -> None:
        samples = self.some()
        self.cleared(samples)
        self.theirs.clear(samples)
        for sample in samples:
            del self.known[sample]

    def restore(self) -> None:
        """What was cleared after a checkpoint is there again."""
        with tempfile.TemporaryDirectory() as folder:
            tq.save_checkpoint(folder)
            self.cleared(self.some())
            tq.load_checkpoint(folder)


# -------------------------------------------------------------------- faults


@ray.remote(num_cpus=0.1)
class Writer:
    """Puts versions of random samples until it dies."""

    def run(self, seed: int, first: int) -> None:
        tq.init()
        rng, version = random.Random(seed), first
        while True:
            put(sorted(rng.sample(range(KEYS), rng.choice([1, 5, 40]))), version)
            version += 1

    def ready(self) -> None:
        tq.init()


def start() -> None:
    options = {"storage_backend": BACKEND, BACKEND: {"num_data_storage_units": UNITS}}
    tq.init(OmegaConf.create({"backend": options}))


def some(rng: random.Random) -> tuple[list[int], list[str]]:
    names = rng.sample(["ids", "scores", "extra"], rng.randint(0, 3))
    return rng.sample(range(KEYS), rng.choice([1, 10, 100, KEYS])), [*names, "version"]


def writer_dies(rng: random.Random, seen: Counter[str]) -> None:
    """Two writers write the same samples; one dies, then the other, and then everything is put once more."""
    put(list(range(KEYS)), 0)
    writers = [Writer.remote() for _ in range(2)]
    ray.get([writer.ready.remote() for writer in writers])
    for place, writer in enumerate(writers):
        writer.run.remote(rng.random(), 1 + 500 * place)
    for writer in writers:
        until = time.monotonic() + rng.random()
        while time.monotonic() < until:
            attempted(*some(rng), seen)
        ray.kill(writer)
        attempted(*some(rng), seen)
    time.sleep(0.2)  # what is on its way arrives
    put(list(range(KEYS)), 9999)
    for _ in range(5):
        checked(*some(rng), newest=9999)
    tq.kv_clear([str(key) for key in range(KEYS)], PARTITION)


def unit_dies(rng: random.Random, seen: Counter[str]) -> None:
    """A storage unit dies beside a writer and a reader. What the others hold can be read, but for large tensors, which
    may have lived in it; then the queue is new."""
    put(list(range(KEYS)), 0)
    writer = Writer.remote()
    ray.get(writer.ready.remote())
    writer.run.remote(rng.random(), 1)
    units = list(interface._TQ_STORAGE[BACKEND])
    until, victim = time.monotonic() + rng.random(), rng.choice(units)
    while time.monotonic() < until:
        attempted(*some(rng), seen)
    ray.kill(victim)
    attempted(*some(rng), seen)
    before = seen["right"]
    for key in range(0, KEYS, 100):
        attempted([key], ["ids", "version"], seen)
    if seen["right"] == before:
        raise Wrong("no sample of the other storage units can be read")
    signal.setitimer(signal.ITIMER_REAL, 2 * PATIENCE)
    try:
        put(list(range(KEYS)), 1)
    except NAMED as error:
        seen[f"put: {type(error).__name__}"] += 1
    else:
        raise Wrong("a put into a storage unit that is dead did not raise")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    ray.kill(writer)
    tq.close()
    start()


def hung(*_: object) -> None:
    raise Wrong(f"no answer in {PATIENCE} s")


@contextmanager
def session(_: Any) -> Iterator[None]:
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(
        [*(str(tests / name) for name in ("", "tools", "adapters")), os.environ.get("PYTHONPATH", "")]
    )
    ray.init(
        address="local",
        num_cpus=12,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    signal.signal(signal.SIGALRM, hung)
    try:
        start()
        yield
        tq.close()
    finally:
        ray.shutdown()


def play(seed: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    try:
        if seed % 64:
            Sequence(seed).play(seen)
        else:
            (writer_dies, unit_dies)[seed // 64 % 2](random.Random(seed), seen)
    except Exception:
        tq.close()
        start()
        raise
    return seen
