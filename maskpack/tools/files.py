"""Saved batches and registries, read for the command line.

    PackedBatch.save                                           \\
    torch.save of a TensorDict, a dict or a verl DataProto      >
    a pickled DataProto (DataProto.save_to_disk)                >  saved_batch --> PackedBatch or TensorDict
    a folder of TensorDict.memmap                              /
    a folder or URL of a RolloutLog             saved_log --> RolloutLog -- a sample of its rows --'

Reading runs no code of the file unless `allow_pickle` is true.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import pickle
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.backends import is_installed
from maskpack.core.keys import show
from maskpack.core.objects import Objects
from maskpack.core.tree import flatten, is_object
from maskpack.errors import MaskpackError, MaskpackWarning
from maskpack.fields.options import is_registry_file
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.packed.batch import PackedBatch
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.file.container import MAX_HEADER
from maskpack.packed.sizes import printable
from maskpack.store.log import RolloutLog
from maskpack.tools.memmaps import META, read_memmap
from maskpack.tools.pickles import DataProto, read_pickle, read_torch
from maskpack.views.view import BatchView

SMALL, MOST_RATIO = 1 << 30, 1 << 10
"""Without a limit, a batch takes at most SMALL bytes padded, or MOST_RATIO times its file where that is more."""

SAMPLE = 256
"""The most rows of a log that are looked at, and the most chunks that they come from."""


_KINDS = "a torch.save file, a pickle, a packed batch, a memory-mapped TensorDict nor a log"


class Unusable(Exception):
    """An argument or a file that cannot be used; the message says why."""


def saved_log(path: str, allow_pickle: bool) -> RolloutLog | None:
    """The log in a folder, or behind a URL of fsspec; None for a file, and for a folder of TensorDict.memmap. Raises
    Unusable, MaskpackError or OSError."""
    if "://" not in path and (not Path(path).is_dir() or (Path(path) / META).is_file()):
        return None
    try:
        return RolloutLog(path, mode="r", allow_pickle=allow_pickle)
    except (ImportError, ValueError) as error:  # of fsspec
        raise Unusable(f"{path} cannot be read: {error}") from error


def saved_batch(file: Path | str, allow_pickle: bool, max_bytes: int | None = None) -> PackedBatch | TensorDictBase:
    """The batch in a file, or a sample of the rows of a log.

    Args:
        max_bytes: the most bytes that it may take padded; by default 1,024 times the file, between 1 and 64 GiB, and
            1 GiB for a log, of which fewer rows are taken.

    Raises:
        Unusable, MaskpackError, OSError: it cannot be read, holds no batch, would run code, or takes too many bytes.
    """
    log = saved_log(str(file), allow_pickle)
    if log is not None:
        return _sample(log, SMALL if max_bytes is None else max_bytes)
    file = Path(file)
    if max_bytes is None:
        size = sum(one.stat().st_size for one in [file, *file.rglob("*")])
        max_bytes = min(MAX_BYTES, max(SMALL, MOST_RATIO * size))
    elif max_bytes < 1:
        raise Unusable(f"--max-bytes is {max_bytes}; expected at least 1")
    read = _reader(file, allow_pickle, max_bytes)
    try:
        batch: Any = read()
        if isinstance(batch, DataProto):
            batch = batch.tensordict(allow_pickle)
    except (OSError, MaskpackError):
        raise
    except Exception as error:  # a pickle raises whatever it likes
        line = (str(error).splitlines() or [""])[0]
        refused = isinstance(error, pickle.UnpicklingError) and not allow_pickle
        hint = ". Give --allow-pickle if you trust the file: a pickle runs code" if refused else ""
        raise Unusable(f"{file} cannot be read: {type(error).__name__}: {line:.300}{hint}") from error
    if isinstance(batch, PackedBatch):
        return batch
    if isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase):
        batch = _tensordict(cast("Mapping[Any, Any]", batch), file)
    if not isinstance(batch, TensorDictBase) or is_object(batch):
        raise Unusable(f"{file} holds a {type(batch).__name__}; expected a TensorDict or a dict of tensors")
    if any(leaf.is_meta for leaf in batch.values(True, True) if isinstance(leaf, Tensor)):
        raise Unusable(f"{file} holds tensors on the meta device, which have no bytes; expected a batch with its data")
    if (size := _nbytes(batch)) > max_bytes:
        raise Unusable(
            f"{file} holds {size} bytes padded; expected at most {max_bytes}. Give a larger --max-bytes if you trust "
            "who wrote it"
        )
    return batch


def _reader(file: Path, allow_pickle: bool, max_bytes: int) -> Callable[[], Any]:
    """What reads a file, by its first bytes. Raises Unusable for a file that holds no batch."""
    if file.is_dir():
        return partial(read_memmap, file)
    with file.open("rb") as opened:
        start = opened.read(32)
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= MAX_HEADER:
        return partial(PackedBatch.load, file, allow_pickle=allow_pickle, max_bytes=max_bytes)
    if start.startswith(b"PK\x03\x04"):
        return partial(read_torch, file, allow_pickle)
    if start.startswith(b"\x80"):
        return partial(read_pickle, file, allow_pickle)
    seen = "is neither" if start else "is empty: neither"
    raise Unusable(f"{file} {seen} {_KINDS}")


def _sample(log: RolloutLog, max_bytes: int) -> PackedBatch:
    """Rows at even distances in chunks at even distances, as far as these have the fields of the last chunk. Warns of
    the others."""
    chunks = log.chunks()
    if not chunks:
        raise Unusable(f"{log.path} has no rows; expected some")
    fields = _fields(log[chunks[-1][-1:]])
    picked = [chunks[at] for at in _even(len(chunks), SAMPLE)]
    alike = [_fields(log[own[:1]]) == fields for own in picked]
    if not all(alike):
        names = {show(path) for own in picked for path, _ in {*_fields(log[own[:1]])} ^ {*fields}}
        warnings.warn(
            f"{log.path}: {alike.count(False)} of {len(picked)} appends that were looked at have other fields or "
            f"dtypes than the last, and are left out: {', '.join(sorted(names))}",
            MaskpackWarning,
            stacklevel=2,
        )
    rows = np.concatenate([own for own, same in zip(picked, alike, strict=True) if same])
    rows = rows[_even(rows.size, SAMPLE)]
    size = BatchView.of(log[rows]).padded_nbytes
    if size > max_bytes:
        rows = rows[_even(rows.size, max(1, rows.size * max_bytes // size))]
    return log[rows]


def _even(of: int, most: int) -> list[int]:
    """At most so many of the numbers from 0 to `of` - 1, at even distances, with the last one."""
    return [(of * (number + 1) - 1) // min(of, most) for number in range(min(of, most))]


def _fields(packed: PackedBatch) -> list[Any]:
    return [(form.path, form.dtype) for form in packed.schema.forms]


def _tensordict(data: Mapping[Any, Any], file: Path) -> TensorDict:
    """A dict as a TensorDict, whose rows are a batch dim if all tensors have the same number of rows."""

    def build(part: Mapping[Any, Any], size: list[int]) -> TensorDict:
        out = TensorDict({}, batch_size=size)
        for name, value in part.items():
            if not isinstance(name, str):
                raise Unusable(f"{file} holds a dict with the key {name!r:.80}; expected names of fields")
            if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
                value = build(cast("Mapping[Any, Any]", value), size)
            elif not isinstance(value, Tensor | TensorDictBase) or (isinstance(value, Tensor) and not value.dim()):
                value = NonTensorData(value, batch_size=size)
            out.set(name, value)
        return out

    batch = build(data, [])
    shapes = {leaf.shape[:1] for leaf in batch.values(True, True) if isinstance(leaf, Tensor)}
    if not shapes:
        raise Unusable(f"{file} holds a dict without tensors; expected a batch")
    return build(data, [*shapes.pop()]) if len(shapes) == 1 else batch


def _nbytes(batch: TensorDictBase) -> int:
    """Bytes of its tensors and of those in its Python objects; an expanded one counts with all its elements."""
    total, known = 0, dict[int, Any]()
    todo: list[Any] = [Objects.of(value).data if is_object(value) else value for _, value in flatten(batch)]
    while todo:
        item: Any = todo.pop()
        if id(item) in known:
            continue
        known[id(item)] = item
        if isinstance(item, Tensor | np.ndarray):
            array = cast("Any", item)
            shape = [array.numel()] if isinstance(item, Tensor) and item.is_nested else array.shape
            total += math.prod(shape) * max(array.dtype.itemsize, 1)
        elif isinstance(item, Mapping | list | tuple | set | frozenset):
            todo += item.values() if isinstance(item, Mapping) else item
    return total


def write_registry(registry: MaskNestingRegistry, file: str) -> None:
    """Writes a new file that `saved_registry` reads. Raises Unusable if there is one already."""
    notation = _notation("--write", file)
    data = registry.to_dict()
    text = json.dumps(data, indent=2) if notation is json else notation.safe_dump(data, sort_keys=False)
    path = Path(file)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8")
        os.link(part, path)  # whole or not at all, and never over another
    except FileExistsError as error:
        raise Unusable(f"--write {file}: the file exists. Give another name, or remove it") from error
    finally:
        part.unlink(missing_ok=True)


def _notation(option: str, file: str) -> Any:
    """The module that writes and reads the notation of a file: json or yaml."""
    if not is_registry_file(file):
        raise Unusable(f"{option} is {file}; expected a file that ends in .json, .yaml or .yml")
    if file.lower().endswith(".json"):
        return json
    if not is_installed("yaml"):
        raise Unusable("PyYAML is not installed; run: pip install pyyaml, or use a .json file")
    return importlib.import_module("yaml")


def saved_registry(file: str | None) -> MaskNestingRegistry:
    """The registry of a YAML or JSON file, or RL_FIELDS."""
    if file is None:
        return RL_FIELDS
    notation = _notation("--registry", file)
    text = Path(file).read_bytes()
    try:
        return MaskNestingRegistry.from_dict(notation.loads(text) if notation is json else notation.safe_load(text))
    except Exception as error:  # of json, of yaml, or of the registry
        raise Unusable(f"--registry {file}: {error}; expected what MaskNestingRegistry.to_dict gives") from error


def one_line(error: Exception) -> str:
    """The message of an error of `saved_batch` or compress, with options of the command in place of arguments.
    Raises a RuntimeError that is about something else than memory."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif isinstance(error, MemoryError) or "allocate memory" in text:
        text = f"it does not fit into the memory of this machine ({text})"
    elif isinstance(error, RuntimeError) and not isinstance(error, MaskpackError):
        raise error
    for argument, option in (
        ("pad_token_id=tokenizer.pad_token_id", "--pad-token-id N, that of the tokenizer"),
        ("allow_pickle=True", "--allow-pickle"),
        ("Pass a larger max_bytes, or None,", "Give a larger --max-bytes"),
    ):
        text = text.replace(argument, option)
    return printable(" ".join(text.split()))
