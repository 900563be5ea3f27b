"""Saved batches and registries, read for the command line; what is refused says why in one line.

    PackedBatch.save, torch.save of a TensorDict, of a dict or of a DataProto,     saved_batch     PackedBatch or
    a pickled DataProto, the directory of a memory-mapped TensorDict           --------------->  TensorDict

Reading runs no code of the file unless `allow_pickle` says so.
"""

from __future__ import annotations

import inspect
import json
import pickle
from argparse import ArgumentParser
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.objects import Objects
from maskpack.core.tree import flatten, is_object
from maskpack.errors import MaskpackError
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.packed.batch import PackedBatch
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.sizes import printable
from maskpack.tools.verl_files import holds_data_proto, read_data_proto

_TORCH_FILE = (b"PK\x03\x04", b"\x80")
"""How files of torch.save begin. In a packed batch these bytes would be the size of a header that cannot be."""


_SMALL, _MOST_RATIO = 1 << 30, 1 << 10
"""Bytes that any file may hold, and bytes for each one of a file, where no limit is given."""


class Unusable(Exception):
    """An argument or a file that cannot be used; the message says why."""


def saved_batch(file: Path, allow_pickle: bool, max_bytes: int | None = None) -> PackedBatch | TensorDictBase:
    """The batch in a file, or in the directory of a memory-mapped TensorDict.

    Args:
        max_bytes: the most bytes that it may take padded; `_usual_limit` where it is None.

    Raises:
        Unusable, MaskpackError, OSError: it cannot be read, holds no batch, would run code, or takes too many bytes.
    """
    if max_bytes is not None and max_bytes < 1:
        raise Unusable(f"--max-bytes is {max_bytes}; expected at least 1")
    max_bytes = _usual_limit(file) if max_bytes is None else max_bytes
    if file.is_dir():
        batch = _memory_mapped(file, allow_pickle)
    else:
        with file.open("rb") as opened:
            start = opened.read(9)
        if not start.startswith(_TORCH_FILE) or start.endswith(b"{"):
            return PackedBatch.load(file, allow_pickle=allow_pickle, max_bytes=max_bytes)
        batch = _data_proto(file, allow_pickle) if holds_data_proto(file) else _torch_file(file, allow_pickle)
    if isinstance(batch, PackedBatch):
        return batch
    if isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase):
        batch = _tensordict(cast("Mapping[Any, Any]", batch), file)
    if not isinstance(batch, TensorDictBase) or is_object(batch):
        raise Unusable(f"{file} holds a {type(batch).__name__}; expected a TensorDict or a dict of tensors")
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in batch.values(True, True)):
        raise Unusable(f"{file} holds tensors on the meta device, which have no bytes; expected a batch with its data")
    size = _nbytes(batch)
    if size > max_bytes:  # a tensor may say one value many times
        raise Unusable(
            f"{file} holds {size} bytes padded; expected at most {max_bytes}. Give a larger --max-bytes if you trust "
            "who wrote it"
        )
    return batch


def _usual_limit(file: Path) -> int:
    """A real batch is some hundred times its packed file, or is small."""
    parts = file.rglob("*") if file.is_dir() else [file]
    size = sum(part.stat().st_size for part in parts if part.is_file())
    return min(MAX_BYTES, max(_SMALL, _MOST_RATIO * size))


def _nbytes(batch: TensorDictBase) -> int:
    """Bytes of its tensors and of what lies in its Python objects, as far as plain Python goes."""
    total, seen = 0, {}
    todo: list[Any] = [Objects.of(value).data if is_object(value) else value for _, value in flatten(batch)]
    while todo:
        item: Any = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, Tensor):
            total += item.numel() * item.element_size()
        elif isinstance(item, np.ndarray):
            total += item.size * max(item.itemsize, 1)
        elif isinstance(item, str | bytes | bytearray):
            total += len(item)
        elif isinstance(item, Mapping):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
    return total


@contextmanager
def enough_memory() -> Generator[None]:
    """Raises Unusable where memory does not suffice; torch says it by RuntimeError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise Unusable(f"it does not fit into the memory of this machine ({error})") from error


def add_limit(parser: ArgumentParser) -> None:
    """The option `--max-bytes` of `saved_batch`."""
    parser.add_argument(
        "--max-bytes",
        type=int,
        metavar="N",
        help=f"the most bytes that the batch may take padded (default: {_SMALL:,}, or {_MOST_RATIO:,} times the file "
        f"where that is more, and at most {MAX_BYTES:,})",
    )


def saved_registry(file: str | None) -> MaskNestingRegistry:
    """The registry of a YAML or JSON file, or RL_FIELDS."""
    return RL_FIELDS if file is None else _registry(Path(file))


def one_line(error: Exception) -> str:
    """The message, which names arguments of functions, in the words of the command."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    for argument, option in (
        ("pad_token_id=tokenizer.pad_token_id", "--pad-token-id N, that of the tokenizer"),
        ("allow_pickle=True", "--allow-pickle"),
        ("Pass a larger max_bytes, or None,", "Give a larger --max-bytes"),
    ):
        text = text.replace(argument, option)
    return printable(" ".join(text.split()))


FAULTS = (Unusable, MaskpackError, OSError)
"""What a command says in one line."""


# -------------------------------------------------------------------- batches


def _data_proto(file: Path, allow_pickle: bool) -> Any:
    try:
        return read_data_proto(file, allow_pickle)
    except OSError:
        raise
    except Exception as error:  # a pickle raises whatever it likes
        first = (str(error).splitlines() or [""])[0]
        hint = "" if allow_pickle else ". Give --allow-pickle if you trust the file: a pickle runs code"
        raise Unusable(
            f"{file} holds a DataProto that cannot be read: {type(error).__name__}: {first:.300}{hint}"
        ) from error


def _torch_file(file: Path, allow_pickle: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=not allow_pickle)
    except OSError:
        raise
    except Exception as error:  # a pickle raises whatever it likes
        if isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise Unusable(
                f"{file} holds more than plain tensors, or is damaged; reading it means running a pickle, and a pickle "
                "runs code. Give --allow-pickle if you trust the file"
            ) from error
        _unreadable(file, "torch.load", error)


def _memory_mapped(directory: Path, allow_pickle: bool) -> Any:
    if not (directory / "meta.json").is_file():
        raise Unusable(f"{directory} is a directory without meta.json; expected a memory-mapped TensorDict")
    load: Any = TensorDict.load_memmap
    known = inspect.signature(load).parameters
    if not allow_pickle and "allow_pickle" not in known:
        raise Unusable(
            f"{directory}: this tensordict may run pickles that lie in the directory, and a pickle runs code. Give "
            "--allow-pickle if you trust it, or install a tensordict whose load_memmap takes allow_pickle"
        )
    # Opened for writing, a file that was cut off would be filled up with zeros.
    wanted = {"allow_pickle": allow_pickle, "mode": "r"}
    said = {name: value for name, value in wanted.items() if name in known}
    try:
        return load(directory, **said)
    except Exception as error:  # a pickle raises whatever it likes, and load_memmap believes what it reads
        if not allow_pickle and any(path.suffix in (".pickle", ".pkl") for path in directory.rglob("*")):
            raise Unusable(
                f"{directory} holds pickles, and a pickle runs code. Give --allow-pickle if you trust them"
            ) from error
        _unreadable(directory, "TensorDict.load_memmap", error)


def _unreadable(file: Path, call: str, error: Exception) -> NoReturn:
    first = (str(error).splitlines() or [""])[0]
    raise Unusable(f"{file} cannot be read by {call}: {type(error).__name__}: {first:.300}") from error


def _tensordict(data: Mapping[Any, Any], file: Path) -> TensorDict:
    """A dict as a TensorDict; its rows are a batch dim where all tensors have as many."""
    found: list[Tensor] = []

    def entries(part: Mapping[Any, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in part.items():
            if not isinstance(name, str):
                raise Unusable(f"{file} holds a dict with the key {name!r:.80}; expected names of fields")
            if isinstance(value, Tensor):
                found.append(value)
            inner = isinstance(value, Mapping) and not isinstance(value, TensorDictBase)
            out[name] = entries(cast("Mapping[Any, Any]", value)) if inner else value
        return out

    def built(part: dict[str, Any], size: list[int]) -> TensorDict:
        kept = {
            name: built(cast("dict[str, Any]", value), size)
            if isinstance(value, dict)
            else value
            if isinstance(value, Tensor | TensorDictBase)
            else NonTensorData(value, batch_size=size)
            for name, value in part.items()
        }
        return TensorDict(kept, batch_size=size)

    tree = entries(data)
    if not found:
        raise Unusable(f"{file} holds a dict without tensors; expected a batch")
    rows = {tensor.shape[0] if tensor.dim() else None for tensor in found}
    first = rows.pop()
    return built(tree, [] if rows or first is None else [int(first)])


# -------------------------------------------------------------------- registries


def _registry(file: Path) -> MaskNestingRegistry:
    text = file.read_bytes()
    kind = file.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise Unusable(f"--registry is {file}; expected a file that ends in .json, .yaml or .yml")
    try:
        return MaskNestingRegistry.from_dict(json.loads(text) if kind == ".json" else _from_yaml(text))
    except MaskpackError as error:
        raise Unusable(f"--registry {file}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise Unusable(f"--registry {file}: {error}; expected what MaskNestingRegistry.to_dict gives") from error


def _from_yaml(text: bytes) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise Unusable("PyYAML is not installed; run: pip install pyyaml, or give the registry as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
