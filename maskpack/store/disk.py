"""Files of a log. Everything that is written to a disk goes through the functions of this module.

write, sync, cut      of an open file;  locked, unlocked, waited: its lock
open_file, publish    of a folder: a file appears whole, or not at all;  make: the folder
LocalFolder           reads by mmap;  RemoteFolder: by fsspec
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

from maskpack.errors import StorageError

_SMALL = 1 << 16
"""Buffers below this many bytes are written together."""
_OPEN = 128
"""Files that a folder keeps mapped."""
_ROOM = 1 << 26
"""Bytes for which a map has room at least, so that a file that grows is mapped seldom."""
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PART = ".part"
"""The end of the name of a file that is not complete."""
PATIENCE = 60.0
"""The longest wait for a process that opens a log, in seconds."""


def write(file: int, at: int, buffers: Iterable[Any]) -> int:
    """Writes buffers one after the other from a place in a file on; returns where they end. Raises OSError."""
    small = bytearray()

    def flush(data: Any) -> None:
        nonlocal at
        line = memoryview(data).cast("B")
        while line.nbytes:
            done = os.pwrite(file, line, at)
            at, line = at + done, line[done:]

    for buffer in buffers:
        line = memoryview(buffer)
        if line.nbytes < _SMALL:
            small += line
            continue
        if small:
            flush(bytes(small))
            small.clear()
        flush(line)
    if small:
        flush(bytes(small))
    return at


def sync(file: int) -> None:
    """Returns when what was written, and the size, are on the disk. Raises OSError."""
    getattr(os, "fdatasync", os.fsync)(file)


def cut(file: int, size: int) -> None:
    """Ends a file after `size` bytes, on the disk, too."""
    os.ftruncate(file, size)
    os.fsync(file)


def make(folder: Path) -> None:
    """Makes a folder, and those that it is in, on the disk, too."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def open_file(path: Path, flags: int) -> int:
    """Opens a file, without waiting. Raises StorageError for what is not a regular file, and for a link if it is to be
    written to: the file that it names may be anyone's."""
    link = os.O_NOFOLLOW if flags & os.O_RDWR else 0
    cause, file = None, -1
    try:
        file = os.open(path, flags | link | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        cause = error
    raise StorageError(
        f"RolloutLog: {path} is a link, or no regular file; expected a file of the log. Remove it; restore it from a "
        "backup if there was one."
    ) from cause


def create(path: Path) -> int:
    """A new file to write to, in the place of an old one."""
    remove(path)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def locked(file: int, how: int) -> bool:
    """Whether this process has got a lock on a file, LOCK_EX or LOCK_SH."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlocked(file: int) -> bool:
    """Whether nobody has a file for himself."""
    free = locked(file, fcntl.LOCK_SH)
    if free:
        fcntl.flock(file, fcntl.LOCK_UN)
    return free


def waited(done: Callable[[], bool]) -> bool:
    """Whether something was done within PATIENCE."""
    end = time.monotonic() + PATIENCE
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def publish(path: Path, buffers: Iterable[Any]) -> None:
    """Writes a file that appears under its name when all of it is on the disk."""
    part = path.with_name(path.name + PART)
    file = create(part)
    try:
        write(file, 0, buffers)
        os.fsync(file)
    finally:
        os.close(file)
    rename(part, path)


def rename(part: Path, path: Path) -> None:
    """Gives a file its name, in the place of an old one."""
    os.replace(part, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on the disk."""
    with contextlib.suppress(PermissionError):  # not every system can open a folder
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


class Replaced(Exception):
    """A file was replaced by another of its name, or is gone."""


class Folder(Protocol):
    """Files by name. Missing files raise FileNotFoundError."""

    def names(self) -> set[str]: ...
    def size(self, name: str) -> int: ...
    def read(self, name: str, begin: int, end: int, header: bytes = b"") -> bytes:
        """The bytes of a part; fewer where the file ends. Raises Replaced if the file begins with another header."""
        ...

    def view(self, name: str, header: bytes, begin: int, end: int) -> memoryview:
        """A part, which is read when it is used. Raises Replaced if the file begins with another header."""
        ...


class _Map:
    """The bytes of a file, and of what is appended to it later. Python's own mmap keeps a file open for each map, and
    maps no more than there is."""

    def __init__(self, file: int) -> None:
        self.nbytes = max(2 * os.fstat(file).st_size, _ROOM)
        self._at: int = _libc.mmap(None, self.nbytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if self._at == ctypes.c_void_p(-1).value:
            self._at = 0
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.__array_interface__ = {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._at, True),
        }

    def __del__(self) -> None:
        if self._at:
            _libc.munmap(self._at, self.nbytes)


class LocalFolder:
    """A folder of this machine. Views are mapped: a replaced file lives as long as views of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._maps: dict[tuple[str, bytes], _Map] = {}

    def names(self) -> set[str]:
        return set(os.listdir(self.root))

    def size(self, name: str) -> int:
        return os.stat(self.root / name).st_size

    def read(self, name: str, begin: int, end: int, header: bytes = b"") -> bytes:
        with _there(self.root / name, bool(header)) as file:
            if os.pread(file.fileno(), len(header), 0) != header:
                raise Replaced(name)
            return os.pread(file.fileno(), end - begin, begin)

    @contextlib.contextmanager
    def at_rest(self, lock: str, tail: str) -> Generator[bool]:
        """Whether no process writes to the folder; then none begins to before the end of the context. A writer locks
        `lock`, and `tail` once it has written it; one that has only the first is waited for."""
        try:
            file = open_file(self.root / lock, os.O_RDONLY)
        except FileNotFoundError:  # a copy
            yield True
            return
        try:
            if not waited(lambda: locked(file, fcntl.LOCK_SH) or not self._is_unlocked(tail)):
                raise StorageError(
                    f"RolloutLog: {self.root} is being opened by another process, which has not ended this in "
                    f"{PATIENCE} s; expected one that does. Look at the process, and open the log again."
                )
            yield locked(file, fcntl.LOCK_SH)
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have it, too
            os.close(file)

    def _is_unlocked(self, name: str) -> bool:
        try:
            with _there(self.root / name, False) as file:
                return unlocked(file.fileno())
        except FileNotFoundError:
            return True

    def forget(self) -> None:
        """Lets go of all files; views stay readable."""
        self._maps.clear()

    def view(self, name: str, header: bytes, begin: int, end: int) -> memoryview:
        if end <= begin:
            return memoryview(b"")
        held = self._maps.get((name, header))
        if held is None or held.nbytes < end:
            with _there(self.root / name, True) as file:
                held = _Map(file.fileno())
                if os.pread(file.fileno(), len(header), 0) != header:
                    raise Replaced(name)
            while len(self._maps) >= _OPEN:
                self._maps.pop(next(iter(self._maps)), None)
            self._maps[name, header] = held
        return memoryview(np.asarray(held).data)[begin:end]  # which keeps the map


def _there(path: Path, replaced: bool) -> Any:
    try:
        return open(open_file(path, os.O_RDONLY), "rb", buffering=0)
    except FileNotFoundError as error:
        if replaced:
            raise Replaced(path.name) from error
        raise


class RemoteFolder:
    """A folder that fsspec reads."""

    def __init__(self, url: str) -> None:
        self.fs, self.root = fsspec.core.url_to_fs(url)  # type: ignore[reportUnknownMemberType]
        self.fs: Any
        self.root: str

    def names(self) -> set[str]:
        self.fs.invalidate_cache(self.root)
        there: list[str] = self.fs.ls(self.root, detail=False) if self.fs.exists(self.root) else []
        return {name.rpartition("/")[2] for name in there}

    def size(self, name: str) -> int:
        return self.fs.size(f"{self.root}/{name}")

    def read(self, name: str, begin: int, end: int, header: bytes = b"") -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}", start=begin, end=end)

    def view(self, name: str, header: bytes, begin: int, end: int) -> memoryview:
        return memoryview(self.read(name, begin, end))

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Writes a file that appears under its name when it is complete."""
        self.fs.makedirs(self.root, exist_ok=True)
        if isinstance(self.fs, LocalFileSystem):
            publish(Path(self.root, name), parts)
            return
        with self.fs.open(f"{self.root}/{name}", "wb") as file:
            for part in parts:
                file.write(part)
