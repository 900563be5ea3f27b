"""What many tests share: the path, a local Ray, and hypothesis profiles.

HYPOTHESIS_PROFILE is `ci` (few examples, the same ones every time), `full`, or `slow` for tests whose every example
takes long.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: threads of several processes would wait for each other

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    *(str(path) for path in HERE.iterdir() if path.is_dir()),
]  # some tests share what others have

if os.environ.get("TRITON_INTERPRET") == "1":
    from quick_interpreter import hasten

    hasten()

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile(
    "ci", max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile(
    "slow", max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=_QUIET
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

LONGEST = (
    *("test_interpreted_rows", "test_interpreted_device", "test_interpreted_ops", "test_triton_targets"),
    *("test_context_parallel", "test_dispatch", "test_faults", "test_cluster", "test_cases", "test_cli"),
)
"""The files that take longest come first, so that no process is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in each process of xdist
        import warm_workers

        config.stash[_FOLDER] = tempfile.mkdtemp(prefix="warm")
        os.environ.update(warm_workers.environment(config.stash[_FOLDER]))


def pytest_unconfigure(config: pytest.Config) -> None:
    if _FOLDER in config.stash:
        shutil.rmtree(config.stash[_FOLDER])


_FOLDER = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("KERNEL_CASES") == "first":  # of each test function
        functions = {item.nodeid.partition("[")[0]: item for item in reversed(items) if _interprets(item)}
        chosen = set(functions.values())
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))


def _interprets(item: pytest.Item) -> bool:
    return item.get_closest_marker("interpreter") is not None


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
