"""The driver of `link`, run inside the near network namespace: head node, batch, and an actor on the far node.

    python -m bench.cases.dispatch.far FOLDER WORKLOAD ROWS SCALE

It talks in lines of JSON. It says where the head is, {"address", "cpus", "store"}. Then the answer to {} is {}, when
the far node is there and the actor has hashed every form; the answer to {"rounds": n} are the median milliseconds of
every form and phase. It ends when nothing more is asked.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import ray

from bench.cases.dispatch.forms import Sender, digest
from bench.cases.dispatch.link import FAR, FORMS, NEAR_ADDRESS
from bench.harness.local_ray import cores, local_ray, medians, store_bytes
from bench.workloads import batch_of

_PATIENCE = 120  # seconds for the far node


def main(arguments: Sequence[str]) -> None:
    folder, workload, rows, scale = arguments
    batch = batch_of(workload, int(rows), scale=float(scale))
    with local_ray(batch, _node_ip_address=NEAR_ADDRESS, _temp_dir=folder):
        address = ray.get_runtime_context().gcs_address
        _say({"address": address, "cpus": cores(), "store": store_bytes(batch)})
        _hear()
        _wait_for_far_node()
        sender = Sender(batch, resources={FAR: 1})
        expected = digest(batch)
        for name in FORMS:
            sender.check(name, expected)
        _say({})
        while question := _hear():
            _say(medians({name: lambda name=name: sender.send(name) for name in FORMS}, question["rounds"]))


def _wait_for_far_node() -> None:
    deadline = time.monotonic() + _PATIENCE
    while FAR not in ray.cluster_resources():
        if time.monotonic() > deadline:
            raise RuntimeError(f"dispatch_far: the far node did not join within {_PATIENCE} s.")
        time.sleep(0.1)


def _say(answer: dict) -> None:
    print(json.dumps(answer), flush=True)


def _hear() -> dict:
    """A question; empty at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {}


if __name__ == "__main__":
    main(sys.argv[1:])
