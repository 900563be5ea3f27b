"""A pytest plugin for tests that others wrote over TransferQueue: with QUEUE_BACKEND=Maskpack, what they initialise as
SimpleStorage is that backend. Ray is small, and local to the process.

    QUEUE_BACKEND=Maskpack python -m pytest -p transferqueue_upstream .../tests/e2e/test_kv_interface_e2e.py
"""

from __future__ import annotations

import functools
import os

import ray
import transfer_queue
from omegaconf import OmegaConf
from transfer_queue import interface

import maskpack.adapters.transferqueue  # noqa: F401  (registers the backend)

BACKEND = os.environ.get("QUEUE_BACKEND", "SimpleStorage")
_init, _ray_init = interface.init, ray.init


@functools.wraps(_init)
def init(conf=None):
    given = OmegaConf.create(conf or {}, flags={"allow_objects": True})
    backend = given.get("backend") or {}
    if BACKEND != "SimpleStorage" and backend.get("storage_backend", "SimpleStorage") == "SimpleStorage":
        units = (backend.get("SimpleStorage") or {}).get("num_data_storage_units", 2)
        chosen = {"storage_backend": BACKEND, BACKEND: {"num_data_storage_units": units}}
        given = OmegaConf.merge(given, {"backend": chosen})
    return _init(given)


@functools.wraps(_ray_init)
def small_ray(*args, **options):
    small = {"num_cpus": 16, "object_store_memory": 200_000_000, "include_dashboard": False, "log_to_driver": False}
    return _ray_init(*args, **{**small, "address": "local", **options})


interface.init = transfer_queue.init = init
ray.init = small_ray
