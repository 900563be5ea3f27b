"""Saved batches and registries, read for the command line.

    a packed batch, or one in a format of formats.py    \\
    dicts of columns, lists of rows or of micro-batches  > saved_batch --> PackedBatch or TensorDict, and a note
    a folder or URL of a RolloutLog: some of its rows   /
"""

from __future__ import annotations

import importlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.core.backends import is_installed
from maskpack.core.objects import Objects
from maskpack.core.tree import flatten, is_object
from maskpack.errors import MaskpackError
from maskpack.fields.options import is_registry_file
from maskpack.fields.presets import PRESETS
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.jagged import jagged_from
from maskpack.packed.batch import PackedBatch
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.file.container import FORMAT, MAX_HEADER
from maskpack.packed.report import printable
from maskpack.store.log import RolloutLog
from maskpack.tools import formats
from maskpack.views.view import BatchView

SMALL, MOST_RATIO = 1 << 30, 1 << 10
"""Without a limit, a batch takes at most SMALL bytes padded, or MOST_RATIO times its file where that is more."""

SAMPLE = 256
"""The most rows of a log that are looked at."""

_OTHERS = {
    b"PAR1": 'a Parquet file. Read it first: torch.save(pyarrow.parquet.read_table("{}").to_pydict(), "batch.pt")',
    b"\x93NUMPY": 'one array. Save a dict of arrays: numpy.savez("batch.npz", input_ids=numpy.load("{}"), ...)',
}
"""What other files are by their first bytes, and what to do."""
_KINDS = "torch.save, pickle, packed batch, npz, JSON, a folder of TensorDict.memmap or a log"
_Rows = Sequence[Any]


class Unusable(Exception):
    """An argument or a file that cannot be used; the message says why."""


Saved = tuple[PackedBatch | TensorDictBase, str]
"""A batch, and what of its file it is; empty for the whole file."""


def saved_log(path: str, allow_pickle: bool) -> RolloutLog | None:
    """The log in a folder, or behind a URL of fsspec; None for a file, and for a folder of TensorDict.memmap. Raises
    Unusable, MaskpackError or OSError."""
    folder = Path(path)
    if "://" not in path and (not folder.is_dir() or (folder / "meta.json").is_file()):
        return None
    try:
        return RolloutLog(path, mode="r", allow_pickle=allow_pickle)
    except (ImportError, ValueError) as error:  # of fsspec
        raise Unusable(f"{path} cannot be read: {error}") from error
    except MaskpackError as error:
        files = [one for one in folder.glob("*.*") if one.suffix != ".seg"] if "://" not in path else []
        if files:
            kind = files[0].suffix
            raise Unusable(f"{path} is a folder of files and no log. Give the files: {path}/*{kind}") from error
        raise


def saved_batch(file: Path | str, allow_pickle: bool = False, max_bytes: int | None = None) -> Saved:
    """The batch in a file, or a sample of the rows of a log.

    Args:
        max_bytes: the most bytes that it may take padded; by default 1,024 times the file, between 1 and 64 GiB, and
            1 GiB for a log, of which fewer rows are taken.

    Raises:
        Unusable, MaskpackError, OSError: it cannot be read, holds no batch, would run code, or takes too many bytes.
    """
    if max_bytes is not None and max_bytes < 1:
        raise Unusable(f"--max-bytes is {max_bytes}; expected at least 1")
    log = saved_log(str(file), allow_pickle)
    if log is not None:
        return _sample(log, SMALL if max_bytes is None else max_bytes)
    file = Path(file)
    if str(file) == "-" or (file.exists() and not file.is_file() and not file.is_dir()):
        raise Unusable(f"{file} is a stream, and a batch is read from a file. Save it to one, and give its name")
    if max_bytes is None:
        size = sum(one.stat().st_size for one in [file, *file.rglob("*")])
        max_bytes = min(MAX_BYTES, max(SMALL, MOST_RATIO * size))
    try:
        data: Any = _reader(file, allow_pickle, max_bytes)()
        if isinstance(data, formats.DataProto):
            data = data.tensordict(allow_pickle)
        batch, note = (data, "") if isinstance(data, PackedBatch | TensorDictBase) else _joined(data, file)
    except (OSError, MaskpackError, Unusable):
        raise
    except Exception as error:  # a pickle raises whatever it likes
        line = (str(error).splitlines() or [""])[0]
        refused = isinstance(error, pickle.UnpicklingError) and not allow_pickle
        hint = ". Give --allow-pickle if you trust the file: a pickle runs code" if refused else ""
        raise Unusable(f"{file} cannot be read: {type(error).__name__}: {line:.300}{hint}") from error
    if isinstance(batch, PackedBatch):
        return batch, note
    if is_object(batch):
        raise Unusable(f"{file} holds a {type(batch).__name__}; expected a TensorDict or a dict of tensors")
    if any(leaf.is_meta for leaf in batch.values(True, True) if isinstance(leaf, Tensor)):
        raise Unusable(f"{file} holds tensors on the meta device, which have no bytes; expected a batch with its data")
    _need_at_most(nbytes_of(batch), max_bytes, file)
    return batch, note


def _need_at_most(size: int, max_bytes: int, file: Path) -> None:
    if size > max_bytes:
        raise Unusable(
            f"{file} holds {size} bytes padded; expected at most {max_bytes}. Give a larger --max-bytes if you trust "
            "who wrote it"
        )


def _reader(file: Path, allow_pickle: bool, max_bytes: int) -> Callable[[], Any]:
    """What reads a file, by its first bytes. Raises Unusable for a file that holds no batch."""
    if file.is_dir():
        if not allow_pickle:
            raise Unusable(f"{file} is a folder of TensorDict.memmap. Give --allow-pickle if you trust it")
        return partial(TensorDict.load_memmap, file)
    with file.open("rb") as opened:
        start = opened.read(32)
        size = int.from_bytes(start[:8], "little")
        if start[8:9] == b"{" and size <= MAX_HEADER:
            if f'"{FORMAT}"'.encode() in start + opened.read(size):
                return partial(PackedBatch.load, file, allow_pickle=allow_pickle, max_bytes=max_bytes)
            raise Unusable(
                f"{file} is a safetensors file, as of the weights of a model, and no packed batch. If it has fields, "
                f'torch.save(safetensors.torch.load_file("{file}"), "batch.pt")'
            )
    if start.startswith(b"PK\x03\x04"):
        if not zipfile.is_zipfile(file):
            raise Unusable(f"{file} begins as a file of torch.save or NumPy, and ends early. Save or copy it again")
        with zipfile.ZipFile(file) as members:
            if all(name.endswith(".npy") for name in members.namelist()):
                _need_at_most(sum(member.file_size for member in members.infolist()), max_bytes, file)
                return partial(formats.read_npz, file)
        return partial(formats.read_torch, file, allow_pickle)
    if start.startswith(b"\x80"):
        return partial(formats.read_pickle, file, allow_pickle)
    if start.lstrip()[:1] in (b"{", b"["):
        return partial(formats.read_json, file)
    for first, kind in _OTHERS.items():
        if start.startswith(first):
            raise Unusable(f"{file} is {kind.format(file)}")
    seen = "is none of the files that are read" if start else "is empty"
    raise Unusable(f"{file} {seen}: {_KINDS}")


# -------------------------------------------------------------------- logs


def _sample(log: RolloutLog, max_bytes: int) -> Saved:
    """Rows of the last append."""
    chunks = log.chunks()
    if not chunks:
        raise Unusable(f"{log.path} has no rows; expected some")
    rows = chunks[-1][-SAMPLE:]
    size = BatchView.of(log[rows]).padded_nbytes
    rows = rows[-max(1, rows.size * max_bytes // max(size, max_bytes)) :]
    return log[rows], f"of the last append, of {len(log):,} in all"


# -------------------------------------------------------------------- dicts and lists


def _joined(data: Any, file: Path) -> Saved:
    """A dict, a list of micro-batches, of which the first is taken, or a list of rows, which are joined."""
    note = ""
    if isinstance(data, Mapping):
        columns = cast("Mapping[Any, Any]", data).values()
        lists = [value for value in columns if _is_list_of_dicts(value)]
        if len(lists) == 1 and not any(_is_column(value) for value in columns):
            data = lists[0]
    if _is_list_of_dicts(data):
        items = cast("list[Mapping[str, Any]]", data)
        first: Any = items[0]
        whole = any(isinstance(x, Tensor) and x.dim() > 1 and not x.is_floating_point() for x in first.values())
        if whole or (isinstance(first, TensorDictBase) and first.batch_dims):
            data, note = first, f"the first of {len(items):,} micro-batches"
        else:
            names = dict.fromkeys(name for item in items for name in item)
            data = {name: [item.get(name) for item in items] for name in names}
            note = f"joined from {len(items):,} dicts"
    if isinstance(data, Mapping) and not isinstance(data, TensorDictBase):
        data = _tensordict(cast("Mapping[Any, Any]", data), file)
    if not isinstance(data, TensorDictBase):
        raise Unusable(f"{file} holds a {type(data).__name__}; expected a TensorDict or a dict of tensors")
    return data, note


def _is_list_of_dicts(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_column(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray) or (type(value) in (list, tuple) and _column(value) is not None)


def _tensordict(data: Mapping[Any, Any], file: Path) -> TensorDict:
    """A dict as a TensorDict, whose rows are a batch dim if all tensors have the same number of rows. A list with a
    number or a row of numbers for each of the rows is a column."""
    arrays: list[Any] = [x for x in data.values() if isinstance(x, Tensor | np.ndarray)]
    rows: set[int] = {x.shape[0] for x in arrays if x.ndim}
    lists = {name: len(x) for name, x in data.items() if type(x) in (list, tuple) and _is_column(x)}
    rows = rows or {lists[name] for name in lists if _has_rows(data[name])} or {*lists.values()}
    if not arrays and len(rows) > 1:
        said = ", ".join(f"{name} {length:,}" for name, length in lists.items())
        raise Unusable(
            f"{file} holds lists of different lengths: {said}; expected one entry for each row. Leave the others out"
        )

    def build(part: Mapping[Any, Any], size: list[int]) -> TensorDict:
        out = TensorDict({}, batch_size=size)
        for name, value in part.items():
            if not isinstance(name, str):
                raise Unusable(f"{file} holds a dict with the key {name!r:.80}; expected names of fields")
            if isinstance(value, list | tuple) and {len(cast("_Rows", value))} == rows and _is_column(value):
                value = _column(cast("_Rows", value))
            if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
                value = torch.from_numpy(value)
            if isinstance(value, Mapping) and not isinstance(value, TensorDictBase):
                value = build(cast("Mapping[Any, Any]", value), size)
            elif not isinstance(value, Tensor | TensorDictBase) or (isinstance(value, Tensor) and not value.dim()):
                value = NonTensorData(value, batch_size=size)
            out.set(name, value)
        return out

    batch = build(data, [])
    shapes = {leaf.shape[:1] for leaf in batch.values(True, True) if isinstance(leaf, Tensor)}
    if not shapes:
        raise Unusable(f"{file} holds a dict without tensors, or lists of rows, or of dicts; expected a batch")
    return build(data, [*shapes.pop()]) if len(shapes) == 1 else batch


def _has_rows(values: _Rows) -> bool:
    """Whether the entries of a column are rows of numbers."""
    return not isinstance(values[0], int | float | np.number) and bool(np.ndim(values[0]))


def _column(values: _Rows) -> Tensor | None:
    """A number for each row as [B], rows of numbers as a jagged tensor; None for other lists."""
    numbers = int | float | np.number
    if values and all(isinstance(value, numbers) for value in values):
        return torch.tensor(values, device="cpu")
    of_text = any(not isinstance(x, numbers) for value in values if type(value) is list for x in cast("_Rows", value))
    objects = any(str(getattr(value, "dtype", "")) == "object" for value in values)
    if not values or of_text or objects or not all(isinstance(value, Tensor | np.ndarray | list) for value in values):
        return None
    rows = [torch.as_tensor(value, device="cpu") for value in values]
    kinds = {(row.dtype, row.shape[1:]) for row in rows if row.numel()} or {(rows[0].dtype, rows[0].shape[1:])}
    if not any(row.dim() for row in rows):
        return torch.stack(rows)
    if len(kinds) > 1 or not all(row.dim() for row in rows):
        return None
    ((dtype, shape),) = kinds
    lengths = [len(row) for row in rows]
    joined = torch.cat([row.to(dtype).reshape(-1, *shape) for row in rows])
    return jagged_from(joined, torch.from_numpy(np.cumsum([0, *lengths])), min(lengths), max(lengths))


def nbytes_of(batch: TensorDictBase) -> int:
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


# -------------------------------------------------------------------- registries


def need_writable(file: str) -> None:
    """Raises Unusable if `write_registry` cannot write a file of that name."""
    _notation("--write", file)
    if Path(file).exists():
        raise Unusable(f"--write {file}: the file exists. Give another name, or remove it")
    if not Path(file).absolute().parent.is_dir():
        raise Unusable(f"--write {file}: there is no such folder. Make it, or give another name")


def write_registry(registry: MaskNestingRegistry, file: str) -> None:
    """Writes a new file that `saved_registry` reads."""
    notation = _notation("--write", file)
    data = registry.to_dict()
    text = json.dumps(data, indent=2) + "\n" if notation is json else notation.safe_dump(data, sort_keys=False)
    with open(file, "x", encoding="utf-8") as opened:
        opened.write(text)


def _notation(option: str, file: str) -> Any:
    """The module that writes and reads the notation of a file: json or yaml."""
    if not is_registry_file(file):
        names = f", or one of {', '.join(PRESETS)}" if option == "--registry" else ""
        raise Unusable(f"{option} is {file}; expected a file that ends in .json, .yaml or .yml{names}")
    if file.lower().endswith(".json"):
        return json
    if not is_installed("yaml"):
        raise Unusable("PyYAML is not installed; run: pip install pyyaml, or use a .json file")
    return importlib.import_module("yaml")


def saved_registry(name: str | None) -> MaskNestingRegistry:
    """The registry of a YAML or JSON file, or one of PRESETS; without a name RL_FIELDS."""
    if name is None or name in PRESETS:
        return RL_FIELDS if name is None else PRESETS[name]
    notation = _notation("--registry", name)
    text = Path(name).read_bytes()
    try:
        return MaskNestingRegistry.from_dict(notation.loads(text) if notation is json else notation.safe_load(text))
    except Exception as error:  # of json, of yaml, or of the registry
        raise Unusable(f"--registry {name}: {error}; expected what MaskNestingRegistry.to_dict gives") from error


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
