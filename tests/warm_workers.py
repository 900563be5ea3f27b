"""Interpreters and Ray's workers of the tests, forked from one process that has imported torch and tensordict.

    raylet, a test --> python warm_workers.py default_worker.py ... --> the process that imported --> fork: the worker

A process takes 6 seconds of one core to import them, and the suite starts about 200. This file is the `py_executable`
of Ray, and stands in for `python` in the commands of tests: it passes its arguments, environment and streams on to the
process, which the first one starts, and ends with the worker, with its status. The worker finds what is not torch or
tensordict as any other process does. In another namespace of processes, workers are started as ever.
"""

from __future__ import annotations

import array
import atexit
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from typing import NoReturn

FOLDER = "WARM_WORKERS"
"""The environment variable with the folder of the socket. The process ends when the folder is gone."""
_NAMESPACE = "/proc/self/ns/pid"
_KNOWS = "_private/runtime_env/py_executable.py"


def environment(folder: str) -> dict[str, str]:
    """The environment variables that make each Ray of this process and of its children start workers so; none if it
    is not installed, or a release from before `py_executable`."""
    from importlib.util import find_spec

    ray = find_spec("ray")
    if ray is None or ray.origin is None or not os.path.isfile(os.path.join(os.path.dirname(ray.origin), _KNOWS)):
        return {}
    with open(os.path.join(folder, "namespace"), "w") as file:
        file.write(os.readlink(_NAMESPACE))
    executable = f"{sys.executable} -S -E {os.path.abspath(__file__)}"
    return {FOLDER: folder, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"runtime_env": {"py_executable": executable}})}


def python() -> list[str]:
    """The begin of a command that is run as by `python`: a script, -c or -m, and its arguments."""
    return [sys.executable, *(["-S", "-E", os.path.abspath(__file__)] if FOLDER in os.environ else [])]


# -------------------------------------------------------------------- what the raylet or a test starts


def pass_on(folder: str, arguments: list[str]) -> None:
    with open(os.path.join(folder, "namespace")) as file:
        if file.read() != os.readlink(_NAMESPACE):
            as_ever(arguments)
    with open(os.path.join(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        address = os.path.join(folder, "socket")
        if not os.path.exists(address):
            command = [sys.executable, __file__]
            with open(os.path.join(folder, "log"), "w") as log:  # the streams of the first worker end with it
                server = subprocess.Popen(
                    command, start_new_session=True, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
                )
            while not os.path.exists(address):
                if server.poll() is not None:
                    as_ever(arguments)
                time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        own = {"argv": arguments, "env": {**os.environ}, "cwd": os.getcwd(), "nice": os.nice(0)}
        start = json.dumps(own).encode()
        streams = array.array("i", [0, 1, 2]).tobytes()
        connection.sendmsg([len(start).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(start)
        status = connection.recv(1)  # nothing comes of one that dies
    sys.exit(status[0] if status else f"{arguments[:1]} died")


def as_ever(arguments: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, *arguments])


# -------------------------------------------------------------------- the process that has imported


def serve(folder: str) -> None:
    import tensordict  # noqa: F401  (imports torch, its compiler and NumPy)

    address = os.path.join(folder, "socket")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address + ".new")
        listening.listen(64)
        os.rename(address + ".new", address)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
        while os.path.exists(address):
            if not select.select([listening], [], [], 1.0)[0]:
                continue
            connection, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                become(connection)
            connection.close()


def become(connection: socket.socket) -> None:
    """Goes on as the worker that a connection asks for. Killed if the other side is."""
    import runpy

    header, passed, *_ = connection.recvmsg(8, socket.CMSG_SPACE(12))
    start = bytearray()
    while len(start) < int.from_bytes(header, "little"):
        start += connection.recv(1 << 16)
    for stream, given in enumerate(array.array("i", passed[0][2])):
        os.dup2(given, stream)
        os.close(given)
    asked = json.loads(start)
    os.setsid()
    os.nice(asked["nice"] - os.nice(0))  # Ray's workers give way to drivers
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    own, sys.argv = os.path.dirname(os.path.abspath(__file__)), asked["argv"]
    path = [each for each in sys.path if os.path.abspath(each) != own]
    more = [each for each in asked["env"].get("PYTHONPATH", "").split(os.pathsep) if each and each not in path]
    first, *arguments = sys.argv
    sys.path[:] = ["" if first in ("-c", "-m") else os.path.dirname(first), *more, *path]
    status = 0
    try:
        if first == "-c":
            sys.argv = [first, *arguments[1:]]
            exec(arguments[0], {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = arguments
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # as an interpreter does, then what was registered
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(bytes([status & 255]))
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        pass_on(os.environ[FOLDER], sys.argv[1:])
    else:
        serve(os.environ[FOLDER])
