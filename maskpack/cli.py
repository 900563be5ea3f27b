"""The command `maskpack`: `demo` shows maskpack at work on this machine, `inspect` where the bytes of a batch go."""

from __future__ import annotations

import argparse
import inspect
import json
import pickle
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor

from maskpack.errors import MaskpackError, MaskpackWarning
from maskpack.packed import PackedBatch, compress
from maskpack.registry import RL_FIELDS, MaskNestingRegistry, show
from maskpack.report import Figures, chart, dtype_name, figures, printable, to_json
from maskpack.tree import is_object

_DEMO_NEEDS = ("ray", "rich", "transformers")
_TORCH_FILE = (b"PK\x03\x04", b"\x80")
"""How files of torch.save begin. In a packed batch these bytes would be the size of a header that cannot be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `maskpack` with `argv` (by default that of the process); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="maskpack", description="Moves the padded batches of RL post-training without the padding."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="send real rollouts to Ray workers, padded and through maskpack, and compare bits, bytes and time",
        description="Samples rollouts of a tiny model, scores them and trains on them in Ray workers, once from the "
        "padded batch and once through maskpack. Exits with status 1 if any bit of the outputs differs.",
    )
    demo.add_argument("--prompts", type=_positive, default=16, help="prompts (default: %(default)s)")
    demo.add_argument("--responses", type=_positive, default=8, help="responses to each prompt (default: %(default)s)")
    demo.add_argument("--ranks", type=_positive, default=2, help="Ray workers (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the weights and the samples (default: %(default)s)")
    _add_inspect(commands)
    args = parser.parse_args(argv)
    if args.command == "inspect":
        return _inspect(args)
    if args.prompts * args.responses < args.ranks:
        demo.error(f"{args.prompts * args.responses} rows for {args.ranks} ranks; each rank needs at least one row")
    return _demo(args)


def _demo(args: argparse.Namespace) -> int:
    try:
        from maskpack import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _DEMO_NEEDS:
            raise
        print(f"maskpack demo: {missing} is not installed; run: pip install 'maskpack[demo]'", file=sys.stderr)
        return 2
    return demo.run(args.prompts, args.responses, args.seed, args.ranks)


# -------------------------------------------------------------------- inspect


class _Unusable(Exception):
    """An argument or a file that cannot be used; the message says why."""


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show where the bytes of a saved batch go, field by field",
        description="Shows the padded, real and wire bytes of every field. FILE is a packed batch that "
        "PackedBatch.save wrote, a TensorDict or a dict of tensors that torch.save wrote, or the directory of a "
        "memory-mapped TensorDict. What is not packed is compressed first.",
    )
    parser.add_argument("file", metavar="FILE", help="a saved batch, packed or not")
    parser.add_argument("--pad-token-id", type=int, metavar="N", help="the tokenizer's pad id, for batches not packed")
    parser.add_argument("--registry", metavar="FILE", help="YAML or JSON of fields and axes, on top of RL_FIELDS")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickles, which run code: only what you trust")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a bar chart of the fields")


def _inspect(args: argparse.Namespace) -> int:
    try:
        if args.plot is not None and not args.plot.lower().endswith(".svg"):
            raise _Unusable(
                f"--plot is {args.plot!r}; expected a file that ends in .svg, the only kind that is written"
            )
        registry = RL_FIELDS if args.registry is None else RL_FIELDS | _registry(Path(args.registry))
        found = figures(_packed(Path(args.file), registry, args.pad_token_id, args.allow_pickle))
        if args.plot is not None:
            Path(args.plot).write_text(chart(found, Path(args.file).name), encoding="utf-8")
    except (_Unusable, MaskpackError, OSError) as error:
        print(f"maskpack inspect: {_one_line(error)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"file": args.file, **to_json(found)}, indent=2))
    else:
        codec = "no codec" if found.codec is None else f"codec {found.codec}"
        print(f"{printable(args.file)}: {found.rows:,} rows, {len(found.fields):,} fields, {codec}\n\n{_table(found)}")
    return 0


def _table(found: Figures) -> str:
    """The figures as aligned text: a line for each field, the totals, and the dense fields with their reasons."""
    head = ("field", "dtype", "encoding", "padded", "real", "wire", "padded/wire", "left to gain")
    lines = [
        (
            printable(show(field.path)),
            dtype_name(field),
            printable(field.encoding),
            *_amounts(field.padded_bytes, field.real_bytes, field.wire_bytes),
            _left(field.left),
        )
        for field in found.fields
    ]
    lines.append(("layouts", "", "", "", "", f"{found.layouts:,}", "", ""))
    lines.append(("objects", "", "", *_amounts(found.objects, found.objects, found.objects), ""))
    lines.append(("header", "", "", "", "", f"{found.header:,}", "", ""))
    total = ("total", "", "", *_amounts(found.padded_bytes, found.real_bytes, found.wire_bytes), _left(found.left))
    widths = [max(map(len, column)) for column in zip(head, *lines, total, strict=True)]
    rule = "-" * (sum(widths) + 2 * len(widths) - 2)
    out = [_aligned(head, widths), rule, *[_aligned(line, widths) for line in lines], rule, _aligned(total, widths)]
    if found.left is None:
        out.append("What is left to gain needs zstandard: pip install zstandard")
    dense = [field for field in found.fields if field.kind == "dense"]
    if dense:
        out += ["", "Dense fields:"]
        out += [
            f"  {printable(show(field.path))} {field.shape} {dtype_name(field)}, {field.padded_bytes:,} bytes: "
            f"{printable(field.reason or 'by design')}"
            for field in dense
        ]
    return "\n".join(out)


def _amounts(padded: int, real: int, on_wire: int) -> tuple[str, str, str, str]:
    return f"{padded:,}", f"{real:,}", f"{on_wire:,}", f"{padded / on_wire:,.1f}" if on_wire else "-"


def _left(left: int | None) -> str:
    return "-" if left is None else f"{left:,}"


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """Three columns of text, then numbers."""
    cells = [
        text.ljust(width) if place < 3 else text.rjust(width)
        for place, (text, width) in enumerate(zip(line, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def _one_line(error: Exception) -> str:
    """The message, which names arguments of functions, in the words of the command."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    for argument, option in (
        ("pad_token_id=tokenizer.pad_token_id", "--pad-token-id N, that of the tokenizer"),
        ("allow_pickle=True", "--allow-pickle"),
    ):
        text = text.replace(argument, option)
    return printable(" ".join(text.split()))


def _packed(file: Path, registry: MaskNestingRegistry, pad_token_id: int | None, allow_pickle: bool) -> PackedBatch:
    if file.is_dir():
        batch = _memory_mapped(file, allow_pickle)
    else:
        with file.open("rb") as opened:
            start = opened.read(9)
        if not start.startswith(_TORCH_FILE) or start.endswith(b"{"):
            return PackedBatch.load(file, allow_pickle=allow_pickle)
        batch = _torch_file(file, allow_pickle)
    if isinstance(batch, PackedBatch):
        return batch
    if isinstance(batch, Mapping) and not isinstance(batch, TensorDictBase):
        batch = _tensordict(cast("Mapping[Any, Any]", batch), file)
    if not isinstance(batch, TensorDictBase) or is_object(batch):
        raise _Unusable(f"{file} holds a {type(batch).__name__}; expected a TensorDict or a dict of tensors")
    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in batch.values(True, True)):
        raise _Unusable(f"{file} holds tensors on the meta device, which have no bytes; expected a batch with its data")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)  # the table lists the dense fields
        return compress(batch, registry=registry, pad_token_id=pad_token_id)


def _torch_file(file: Path, allow_pickle: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=not allow_pickle)
    except OSError:
        raise
    except Exception as error:  # a pickle raises whatever it likes
        if isinstance(error, pickle.UnpicklingError) and not allow_pickle:
            raise _Unusable(
                f"{file} holds more than plain tensors, or is damaged; reading it means running a pickle, and a pickle "
                "runs code. Give --allow-pickle if you trust the file"
            ) from error
        _unreadable(file, "torch.load", error)


def _memory_mapped(directory: Path, allow_pickle: bool) -> Any:
    if not (directory / "meta.json").is_file():
        raise _Unusable(f"{directory} is a directory without meta.json; expected a memory-mapped TensorDict")
    load: Any = TensorDict.load_memmap
    known = inspect.signature(load).parameters
    if not allow_pickle and "allow_pickle" not in known:
        raise _Unusable(
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
            raise _Unusable(
                f"{directory} holds pickles, and a pickle runs code. Give --allow-pickle if you trust them"
            ) from error
        _unreadable(directory, "TensorDict.load_memmap", error)


def _unreadable(file: Path, call: str, error: Exception) -> NoReturn:
    first = (str(error).splitlines() or [""])[0]
    raise _Unusable(f"{file} cannot be read by {call}: {type(error).__name__}: {first:.300}") from error


def _tensordict(data: Mapping[Any, Any], file: Path) -> TensorDict:
    """A dict as a TensorDict; its rows are a batch dim where all tensors have as many."""
    found: list[Tensor] = []

    def entries(part: Mapping[Any, Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for name, value in part.items():
            if not isinstance(name, str):
                raise _Unusable(f"{file} holds a dict with the key {name!r:.80}; expected names of fields")
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
        raise _Unusable(f"{file} holds a dict without tensors; expected a batch")
    rows = {tensor.shape[0] if tensor.dim() else None for tensor in found}
    first = rows.pop()
    return built(tree, [] if rows or first is None else [int(first)])


def _registry(file: Path) -> MaskNestingRegistry:
    text = file.read_bytes()
    kind = file.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise _Unusable(f"--registry is {file}; expected a file that ends in .json, .yaml or .yml")
    try:
        return MaskNestingRegistry.from_dict(json.loads(text) if kind == ".json" else _from_yaml(text))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # from_dict takes parts as they come
        raise _Unusable(f"--registry {file}: {error}; expected what MaskNestingRegistry.to_dict gives") from error


def _from_yaml(text: bytes) -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise _Unusable("PyYAML is not installed; run: pip install pyyaml, or give the registry as JSON") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
