"""What many tests share: the path, the tiers, Triton's interpreter, a local Ray, and hypothesis profiles.

HYPOTHESIS_PROFILE is `ci` (few examples, the same ones every time), `full`, `slow` for tests whose every example takes
long, or `planted`, which is `ci` without a search for smaller examples.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of several processes would wait for each other

import pytest
from hypothesis import HealthCheck, Phase, settings

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    *(str(path) for path in HERE.iterdir() if path.is_dir()),
]  # some tests share what others have

import quick_interpreter
import tiers


def _has_gpu() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


HAS_GPU = _has_gpu()
INTERPRETED = quick_interpreter.is_there() and not HAS_GPU
"""Whether tests of kernels have them interpreted. Whether Triton interprets is decided when it is imported."""
if INTERPRETED:
    os.environ["TRITON_INTERPRET"] = "1"

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "ci", max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile(
    "slow", max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile("planted", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LONGEST = ("test_triton_targets", "test_context_parallel", "test_dispatch", "test_faults", "test_cluster", "test_cases")
"""The files that take longest come first, so that no process is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    tiers.watch()
    in_worker = hasattr(config, "workerinput")
    if INTERPRETED and (in_worker or not config.getoption("numprocesses", None)):  # where tests run
        quick_interpreter.load()
    if not in_worker:
        import warm_workers

        config.stash[_FOLDER] = tempfile.mkdtemp(prefix="warm")
        os.environ.update(warm_workers.environment(config.stash[_FOLDER]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER])


_FOLDER = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)  # before marks are looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tiers.mark(items)
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def pytest_collection_finish() -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # tests of kernels set it again
    tiers.forget()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """How a batch is encoded depends on those before it: a test begins as in a new process, and in one thread, without
    which tests wait for each other, small models compute slower, and forks have none of the others."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    table = sys.modules.get("maskpack.packed.table")
    if table is not None:
        table.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("interpreter") is None:
        return (yield)
    with _interpreter(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    if HAS_GPU:  # kernels are compiled by whichever test comes first
        return (yield)
    with tiers.stays_in_its_process(item):
        return (yield)


@contextmanager
def _interpreter(item: pytest.Item) -> Iterator[None]:
    """Kernels are interpreted on the host, unless there is a GPU, and hypothesis draws fewer examples for them."""
    if not INTERPRETED:
        yield
        return
    test: Any = getattr(item, "obj", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        if own is not None and settings.get_profile("full") is not settings.default:
            few = settings(own, max_examples=min(own.max_examples, 4))
            patch.setattr(test, "_hypothesis_internal_use_settings", few)
        yield


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """A Ray on this machine for the tests of a file. Some environments have none."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False
        )
        yield
        ray.shutdown()


@pytest.fixture
def puts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What this process puts into Ray's store."""
    import ray

    put, seen = ray.put, list[Any]()
    monkeypatch.setattr(ray, "put", lambda value: seen.append(value) or put(value))
    return seen
