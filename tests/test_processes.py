"""What forks and threads may do with each object, as docs/deciding.md says. WorkerGroup: dispatch/test_faults.py."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_log import forked
from samples import PAD, assert_same, rollout, workload
from tensordict import TensorDict
from torch.utils.data import DataLoader, Dataset

import maskpack as mp
from maskpack.nesting import take
from maskpack.packed.batch import PackedBatch
from maskpack.planning import plan_micro_batches
from maskpack.store import RolloutLog
from maskpack.views import BatchView

pytestmark = pytest.mark.filterwarnings("ignore:compress", "ignore:nest_batch", "ignore:RolloutLog", "ignore:.*fork")
ROWS = 24


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Torch takes several, and has taken them before a process forks."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    torch.ones(1 << 22).sum()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def batch() -> TensorDict:
    """Of some MiB, so that the core takes several threads."""
    return workload(rows=ROWS, prompt=512, response=4096)


def worked(batch: TensorDict, packed: PackedBatch, log: RolloutLog) -> dict[str, Any]:
    """What one may do in any process and thread."""
    nested = mp.nest_batch_by_mask(batch, pad_token_id=PAD)
    return {
        "compress": mp.compress(batch, pad_token_id=PAD).to_bytes(),
        "nested, compress": mp.compress(nested).to_bytes(),
        "decompress": mp.decompress(packed),
        "unnest": mp.unnest_batch_by_mask(nested),
        "take": mp.decompress(packed.take([3, 0, 3])),
        "cat": mp.decompress(PackedBatch.cat([packed[:2], packed[1:]])),
        "take, nested": take(nested, [1, 0])["responses"].values(),
        "a view": BatchView.of(packed)[[2, 1]].materialize(),
        "check": mp.check(batch, pad_token_id=PAD),
        "log": mp.decompress(log.take(log.rows[::-1])),
        "plan": plan_micro_batches([5, 3, 9, 1], 9).micro_batches,
    }


def assert_worked(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(seen) == list(expected)
    for name, value in seen.items():
        assert_same(value, expected[name])


@pytest.fixture(params=["short", "long"])
def given(request: pytest.FixtureRequest, batch: TensorDict, tmp_path: Path) -> Any:
    own = batch if request.param == "long" else rollout()
    packed = mp.compress(own, pad_token_id=PAD)
    with RolloutLog(tmp_path / "log", pad_token_id=PAD) as log:
        log.append(packed)
        yield own, packed, log


def works_in_a_fork(given: Any, expected: dict[str, Any]) -> bool:
    """Torch's threads do not survive a fork: the child takes one, as a worker of a DataLoader does."""

    def work() -> None:
        signal.alarm(60)  # ends one that waits
        torch.set_num_threads(1)
        assert_worked(worked(*given), expected)

    return os.waitpid(forked(work), 0)[1] == 0


def test_a_fork_does_what_its_parent_does(given: Any) -> None:
    assert works_in_a_fork(given, worked(*given))


def test_a_fork_of_a_process_with_other_threads(given: Any) -> None:
    """They are in no call when it forks, or in calls that hold no lock of the process."""
    expected, over, wrong = worked(*given), threading.Event(), list[BaseException]()
    own, packed, _ = given

    def work() -> None:
        try:
            while not over.is_set():
                assert_same(mp.decompress(packed), own)
                mp.compress(own, pad_token_id=PAD)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            assert works_in_a_fork(given, expected)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not wrong


def test_threads_share_all_objects(given: Any) -> None:
    expected = worked(*given)
    with ThreadPoolExecutor(8) as threads:
        for seen in threads.map(lambda _: worked(*given), range(16)):
            assert_worked(seen, expected)


def test_threads_append_to_one_log(tmp_path: Path) -> None:
    def batch_of(number: int) -> TensorDict:
        mask = torch.arange(6) < torch.tensor([[number % 6], [6 - number % 6]])
        return TensorDict({"response_mask": mask.long(), "responses": mask * (number + 1)}, [2])

    with RolloutLog(tmp_path / "log", pad_token_id=0) as log:

        def append(number: int) -> range:
            rows = log.append(batch_of(number), tags={"number": [number, number]})
            assert_same(mp.decompress(log.take(rows)), batch_of(number))
            return rows

        with ThreadPoolExecutor(6) as threads:
            numbers = list(threads.map(append, range(40)))
        assert sorted(row for rows in numbers for row in rows) == list(range(80))
        for number, rows in enumerate(numbers):
            assert log.where(number=number).tolist() == list(rows)


class Rows(Dataset[TensorDict]):
    def __init__(self, source: PackedBatch | RolloutLog) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> TensorDict:
        return mp.decompress(self.source.take([row]))


@pytest.mark.parametrize("of", ["packed", "log"])
def test_workers_of_a_data_loader_read_rows(given: Any, of: str) -> None:
    own, packed, log = given
    first: Callable[[list[TensorDict]], TensorDict] = lambda rows: rows[0]  # noqa: E731
    loader = DataLoader(
        Rows(packed if of == "packed" else log), 1, num_workers=2, collate_fn=first, multiprocessing_context="fork"
    )
    for row, seen in enumerate(loader):
        assert_same(seen, own[row : row + 1])
    assert np.array_equal(log.rows, np.arange(len(own)))
