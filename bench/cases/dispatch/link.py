"""Two Ray nodes on one machine, in two network namespaces that a virtual cable joins, and the forms sent across it.

    namespace near: driver, head node  ---- veth, `tc tbf` of 10 or 25 Gbit/s each way ----  namespace far: actor's node

Ray's object manager carries the object over TCP, as between two machines, and the far node has an object store of its
own. Both nodes
share the cores of the machine, so a padded batch pays for both ends of its transfer here.

Needs Linux, root, `ip`, `tc`, `setpriv` and `unshare`. Where they are missing, or namespaces are not allowed, a line
says so and nothing is measured. Every process lives in a process namespace that dies with the one process started here,
which dies with this one. Only SIGKILL leaves something behind: two names of namespaces, and a folder below /tmp.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases.dispatch.forms import JAGGED, TRUSTED, VERIFIED, ZERO_COPY
from bench.harness.measure import progress
from bench.harness.report import Row, ratios

SPEEDS = (10, 25)  # Gbit/s
FORMS = (ZERO_COPY, JAGGED, VERIFIED, TRUSTED)
CASE = "dispatch link"
FAR = "far"  # the Ray resource of the far node
NEAR_ADDRESS, FAR_ADDRESS = "10.213.47.1", "10.213.47.2"

_ROOT = Path(__file__).resolve().parents[3]
_TOOLS = ("ip", "tc", "setpriv", "unshare")
_BURST_SECONDS = 0.25e-3  # of tbf: far less than any transfer, and enough for the timer of the kernel
_TARGETS = {10: ">= 12", 25: ">= 5"}


@dataclass(frozen=True)
class Crossing:
    """What was measured at one speed of the link.

    Attributes:
        limit: Gbit/s.
        ms: median milliseconds of the phases of each form, as `Sender.send` gives them.
    """

    limit: int
    ms: dict[str, dict[str, float]]

    @property
    def name(self) -> str:
        return f"{self.limit} Gbit/s"


def measure(workload: str, rows: int, rounds: int, speeds: Sequence[int], *, scale: float = 1.0) -> Iterator[Crossing]:
    """One crossing a speed; none where this machine cannot have such a link. Raises NotExact in the driver process if
    a form loses a bit on the way, which ends this with an error too."""
    if not speeds:
        return
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if lacking or os.geteuid() != 0:
        progress(f"link: skipped, needs {', '.join(lacking) or 'root'}; only the model is shown")
        return
    with ExitStack() as stack:
        try:
            near, far = stack.enter_context(_namespaces())
        except subprocess.CalledProcessError as error:
            progress(f"link: skipped, {error.stderr.strip()}; only the model is shown")
            return
        driver = stack.enter_context(_driver(near, far, [workload, rows, scale]))
        for speed in speeds:
            yield _crossing(driver, near, far, speed, rounds)


def report(crossing: Crossing) -> list[Row]:
    """The rows of what was measured."""
    at, ms = crossing.name, {name: phases["end to end"] for name, phases in crossing.ms.items()}
    pairs = [(rival, ours, None) for rival in (ZERO_COPY, JAGGED) for ours in (VERIFIED, TRUSTED)]
    pairs[0] = ZERO_COPY, VERIFIED, _TARGETS.get(crossing.limit)
    return [
        *(Row(CASE, f"{at}: end to end, {name}", value, "ms") for name, value in ms.items()),
        *(Row(CASE, f"{at}: get, {name}", phases["get"], "ms") for name, phases in crossing.ms.items()),
        *ratios(CASE, ms, pairs, f"{at}: "),
    ]


def _crossing(driver: subprocess.Popen[str], near: str, far: str, speed: int, rounds: int) -> Crossing:
    _limit(near, speed)
    _limit(far, speed)
    progress(f"link of {speed} Gbit/s")
    return Crossing(speed, _ask(driver, {"rounds": rounds}))


# -------------------------------------------------------------------- namespaces


@contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable whose ends bear their names. Raises CalledProcessError."""
    near, far = f"mp{os.getpid()}a", f"mp{os.getpid()}b"  # names of devices have 15 letters at most
    with ExitStack() as stack:
        for name in (near, far):
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        _run("ip", "link", "add", near, "netns", near, "type", "veth", "peer", "name", far, "netns", far)
        for name, address in ((near, NEAR_ADDRESS), (far, FAR_ADDRESS)):
            _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", name, "up")
        _limit(near, 1)  # fails here where the kernel has no tbf
        yield near, far


def _limit(name: str, speed: int) -> None:
    """Limits what leaves the namespace to `speed` Gbit/s."""
    burst = int(speed * 1e9 / 8 * _BURST_SECONDS)
    tbf = ("tbf", "rate", f"{speed}gbit", "burst", f"{burst}b", "latency", "20ms")
    _run("tc", "-n", name, "qdisc", "replace", "dev", name, "root", *tbf)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


# -------------------------------------------------------------------- processes


@contextmanager
def _process(namespace: str, *command: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in the network namespace, and in a process namespace of its own; killed with all its children."""
    # --pdeathsig: should this process be killed itself
    apart = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    process = subprocess.Popen(["ip", "netns", "exec", namespace, *apart, *command], text=True, cwd=_ROOT, **more)
    try:
        yield process
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills an `unshare`, and waits for its child, the first of its process namespace, which dies with it. The kernel
    ends all others there before that one, so that afterwards nothing runs."""
    children: list[str] = []
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ends = [os.pidfd_open(int(child)) for child in children]
    process.kill()
    process.communicate()
    for end in ends:
        select.select([end], [], [])
        os.close(end)


@contextmanager
def _driver(near: str, far: str, batch: list[str | int | float]) -> Iterator[subprocess.Popen[str]]:
    """The driver with the head node, after the far node has joined it and every form has arrived with all its bits."""
    folder = tempfile.mkdtemp(prefix="mp", dir="/tmp")  # paths of sockets must be short
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # recent Rays ask every node for the token of their cluster; this one has one of its own
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    command = (sys.executable, "-m", "bench.cases.dispatch.far", folder, *map(str, batch))
    try:
        with _process(near, *command, env=environment, **pipes) as driver:
            head = _answer(driver)
            ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", head["address"])
            options = ("--num-cpus", str(head["cpus"]), "--object-store-memory", str(head["store"]))
            place = ("--node-ip-address", FAR_ADDRESS, "--resources", json.dumps({FAR: 1}))
            with _process(far, *ray, *options, *place, env=environment, stdout=subprocess.DEVNULL):
                _ask(driver, {})
                yield driver
    finally:
        shutil.rmtree(folder)


def _ask(driver: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
    assert driver.stdin is not None
    driver.stdin.write(json.dumps(question) + "\n")
    driver.stdin.flush()
    return _answer(driver)


def _answer(driver: subprocess.Popen[str]) -> dict[str, Any]:
    assert driver.stdout is not None
    line = driver.stdout.readline()
    if not line:
        raise RuntimeError(f"link: the driver process ended with {driver.wait()}; its errors stand above.")
    return json.loads(line)
