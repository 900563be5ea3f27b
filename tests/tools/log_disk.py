"""A disk that loses its power: what files of a folder may have on them then.

`Disk(folder)` notes each write, cut, sync, name and fault that goes through maskpack.store.disk, while the files
themselves are as a process sees them. `State` follows these events, and makes folders as they may be found:

written, not synced    each sector of 512 bytes may be there or not, in any order, and any size between the two
names, not synced      each may have been given or not
a sync that failed     what it should have written is lost, although the process reads it
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maskpack.store import disk

SECTOR = 512
UNNAMED = ("lock",)


class Disk:
    """Attributes:
    events: (kind, ...) in the order in which they happened.
    full: writes that succeed before the disk has no room; None for any number.
    failing: syncs that succeed before one fails; None for any number.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[tuple[Any, ...]] = []
        self.full: int | None = None
        self.failing: int | None = None
        self._ids: dict[int, int] = {}
        self._next = 0
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            if path.name not in UNNAMED:
                self.events.append(("there", path.name, self._new(path.stat().st_ino), path.read_bytes()))

    @contextmanager
    def attached(self) -> Iterator[Disk]:
        """The functions of maskpack.store.disk go through this disk."""
        held = disk.os, disk.remove
        disk.os, disk.remove = self, self._remove  # type: ignore[assignment]
        try:
            yield self
        finally:
            disk.os, disk.remove = held

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _new(self, inode: int) -> int:
        self._ids[inode] = self._next
        self._next += 1
        return self._ids[inode]

    def _id(self, file: int) -> int:
        inode = os.fstat(file).st_ino
        if inode not in self._ids:  # a file that was made elsewhere
            self.events.append(("name", Path(os.readlink(f"/proc/self/fd/{file}")).name, self._new(inode)))
        return self._ids[inode]

    # ---------------------------------------------------------------- what disk.py calls

    def open(self, path: Any, flags: int, *rest: Any, **more: Any) -> int:
        new = not os.path.exists(path)
        if new and self.full is not None and self.full <= 0:
            raise OSError(errno.ENOSPC, "no room")
        file = os.open(path, flags, *rest, **more)
        if flags & os.O_CREAT:
            if new:
                self.events.append(("name", Path(path).name, self._new(os.fstat(file).st_ino)))
            if flags & os.O_TRUNC:
                self.events.append(("cut", self._id(file), 0))
        return file

    def pwrite(self, file: int, line: Any, at: int) -> int:
        data, new = bytes(line), self._id(file)
        if self.full is not None and at + len(data) > os.fstat(file).st_size:  # in place, there is room
            self.full -= 1
            if self.full < 0:
                data = data[: len(data) // 2 if self.full == -1 else 0]
                if not data:
                    raise OSError(errno.ENOSPC, "no room")
        done = os.pwrite(file, data, at)
        self.events.append(("write", new, at, data))
        return done

    def ftruncate(self, file: int, size: int) -> None:
        os.ftruncate(file, size)
        self.events.append(("cut", self._id(file), size))

    def fsync(self, file: int) -> None:
        if self.failing is not None:
            self.failing -= 1
            if self.failing == -1:
                self.events.append(("lost", self._id(file)))
                raise OSError(errno.EIO, "the disk failed")
        if os.path.isdir(f"/proc/self/fd/{file}"):
            if os.path.samefile(f"/proc/self/fd/{file}", self.folder):
                self.events.append(("names",))
        else:
            self.events.append(("sync", self._id(file)))

    fdatasync = fsync

    def replace(self, old: Any, new: Any) -> None:
        os.replace(old, new)
        self.events.append(("rename", Path(old).name, Path(new).name))

    def _remove(self, path: Path) -> None:
        if path.exists():
            path.unlink()
            self.events.append(("unlink", path.name))


class State:
    """The files of a disk after some events."""

    def __init__(self) -> None:
        self.durable: dict[int, bytearray] = {}
        self.pending: dict[int, list[tuple[Any, ...]]] = {}
        self.cached: dict[int, bytearray] = {}
        self.names: dict[str, int] = {}
        self.later: list[tuple[Any, ...]] = []

    def follow(self, event: tuple[Any, ...], rng: random.Random) -> None:
        kind, *rest = event
        if kind in ("there", "name"):
            name, number, *data = rest
            for files in (self.durable, self.cached):
                files[number] = bytearray(data[0] if data else b"")
            self.pending[number] = []
            if data:
                self.names[name] = number
            else:
                self.later.append(event)
        elif kind in ("rename", "unlink"):
            self.later.append(event)
        elif kind == "names":
            self.names, self.later = _named(self.names, self.later), []
        elif kind == "sync":
            number = rest[0]
            for change in self.pending[number]:
                _change(self.durable[number], change)
            self.pending[number] = []
        elif kind == "lost":
            number = rest[0]
            if number in self.pending:
                self.durable[number] = self._some(number, rng, 0.5)
                self.pending[number] = []
        else:
            self.pending[rest[0]].append(event)
            _change(self.cached[rest[0]], event)

    def folder(self, path: Path, how: str, rng: random.Random) -> None:
        """Makes a folder as it may be found: after the death of the process, `how` is "killed"; otherwise "none",
        "all" or "some" of what was not synced is there."""
        path.mkdir()
        later = self.later
        if how == "none":
            later = []
        elif how == "some":
            later = (
                [event for event in later if rng.random() < 0.5] if rng.random() < 0.5 else later[: rng.randrange(4)]
            )
        for name, number in _named(self.names, later).items():
            if how == "killed":
                data = self.cached[number]
            else:
                share = {"none": 0.0, "all": 1.0, "some": rng.choice([0.0, 0.2, 0.5, 0.8, 1.0])}[how]
                data = self._some(number, rng, share)
            (path / name).write_bytes(data)

    def _some(self, number: int, rng: random.Random, share: float) -> bytearray:
        """A file with some of what was not synced."""
        data = bytearray(self.durable[number])
        for change in self.pending[number]:
            kind, _, at, *line = change
            if kind == "cut":
                if rng.random() < share:
                    _change(data, change)
                continue
            end = at + len(line[0])
            for begin in range(at // SECTOR * SECTOR, end, SECTOR):
                if rng.random() < share:
                    low, high = max(begin, at), min(begin + SECTOR, end)
                    _change(data, ("write", number, low, line[0][low - at : high - at]))
        if 0 < share < 1 and self.pending[number] and rng.random() < 0.3:  # the size, without what was written
            data.extend(bytes(max(rng.randint(len(data), max(len(data), len(self.cached[number]))) - len(data), 0)))
        return data


def _change(data: bytearray, change: tuple[Any, ...]) -> None:
    kind, _, at, *line = change
    data.extend(bytes(max(at - len(data), 0)))
    if kind == "cut":
        del data[at:]
    else:
        data[at : at + len(line[0])] = line[0]


def _named(names: dict[str, int], events: list[tuple[Any, ...]]) -> dict[str, int]:
    names = dict(names)
    for kind, *rest in events:
        if kind == "name":
            names[rest[0]] = rest[1]
        elif kind == "unlink":
            names.pop(rest[0], None)
        elif rest[0] in names:
            names[rest[1]] = names.pop(rest[0])
    return names
