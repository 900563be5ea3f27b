"""The command `maskpack`: `demo` shows maskpack at work on this machine, `inspect` where the bytes of a batch go, and
`doctor` what to do about them."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from maskpack.errors import MaskpackWarning
from maskpack.fields.registry import show
from maskpack.packed.batch import PackedBatch, compress
from maskpack.packed.sizes import Figures, chart, dtype_name, figures, printable, to_json
from maskpack.tools import doctor
from maskpack.tools.files import FAULTS, Unusable, add_limit, enough_memory, one_line, saved_batch, saved_registry

_LONGEST = 80
_DEMO_NEEDS = ("ray", "rich", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `maskpack` with `argv` (by default that of the process); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="maskpack", description="Moves the padded batches of RL post-training without the padding."
    )
    parser.add_argument("--version", action="version", version=f"maskpack {version('maskpack')}")
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
    doctor.add_arguments(commands)
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return doctor.run(args)
    if args.command == "inspect":
        return _inspect(args)
    if args.prompts * args.responses < args.ranks:
        demo.error(f"{args.prompts * args.responses} rows for {args.ranks} ranks; each rank needs at least one row")
    return _demo(args)


def _demo(args: argparse.Namespace) -> int:
    try:
        from maskpack.tools import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _DEMO_NEEDS:
            raise
        print(f"maskpack demo: {missing} is not installed; run: pip install 'maskpack[demo]'", file=sys.stderr)
        return 2
    return demo.run(args.prompts, args.responses, args.seed, args.ranks)


# -------------------------------------------------------------------- inspect


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
    parser.add_argument("--registry", metavar="FILE", help="YAML or JSON of fields and axes (default: RL_FIELDS)")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickles, which run code: only what you trust")
    add_limit(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--plot", metavar="FILE.svg", help="write a bar chart of the fields")


def _inspect(args: argparse.Namespace) -> int:
    try:
        if args.plot is not None and not args.plot.lower().endswith(".svg"):
            raise Unusable(f"--plot is {args.plot!r}; expected a file that ends in .svg, the only kind that is written")
        with enough_memory():
            found = figures(_packed(args))
        if args.plot is not None:
            Path(args.plot).write_text(chart(found, Path(args.file).name), encoding="utf-8")
    except FAULTS as error:
        print(f"maskpack inspect: {one_line(error)}", file=sys.stderr)
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
            _cell(show(field.path)),
            dtype_name(field),
            _cell(field.encoding),
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


def _cell(name: str) -> str:
    """A name in a column, which is as wide as the longest."""
    text = printable(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


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


def _packed(args: argparse.Namespace) -> PackedBatch:
    registry = saved_registry(args.registry)
    batch = saved_batch(Path(args.file), args.allow_pickle, args.max_bytes)
    if isinstance(batch, PackedBatch):
        return batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)  # the table lists the dense fields
        return compress(batch, registry=registry, pad_token_id=args.pad_token_id)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
