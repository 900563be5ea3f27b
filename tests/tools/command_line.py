"""What a command prints: its result, or one line of error; and what a process does that ends well."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

from maskpack.tools import cli


def printed(command: str, argv: Iterable[Any], capsys: Any, status: int = 0) -> str:
    seen = cli.main([command, *map(str, argv)])
    shown = capsys.readouterr()
    assert seen == status
    assert (shown.out == "") == (shown.err != "")
    assert shown.err.count("\n") <= 1
    return shown.out or shown.err


def refused(command: str, argv: Iterable[Any], capsys: Any) -> str:
    """The one line that the command says of a bad file."""
    said = printed(command, argv, capsys, 2)
    assert said.startswith(f"maskpack {command}: ")
    assert said.index("\n") == len(said) - 1
    return said


def output_of(*command: Any, **options: Any) -> str:
    """What a process prints that has to end well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
