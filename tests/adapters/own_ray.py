"""A small Ray of a module of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
TESTS = Path(__file__).parents[1]
SMALL = {"object_store_memory": 200_000_000, "include_dashboard": False, "log_to_driver": False}


@contextmanager
def own_ray(*folders: Path | str, num_cpus: int = 8, **environment: Any) -> Iterator[None]:
    """Its workers import modules of the tests and of these folders, too, and have one thread; `environment` is more of
    `runtime_env`."""
    path = os.pathsep.join([str(TESTS), *map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment["env_vars"] = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init(address="local", num_cpus=num_cpus, runtime_env=environment, **SMALL)
    try:
        yield
    finally:
        ray.shutdown()
