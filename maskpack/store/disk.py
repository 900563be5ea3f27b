"""Files of a log. Everything that is written to a disk goes through the functions of this module.

write, sync, cut      of an open file
publish, remove       of a folder: a file appears whole, or not at all;  make: the folder
LocalFolder           reads by mmap;  RemoteFolder: by fsspec
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem

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


def create(path: Path) -> int:
    """A new file to write to; an old one of that name is emptied."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)


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
        return open(path, "rb", buffering=0)
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
