"""The command `maskpack`: `inspect` shows where the bytes of a batch go, `doctor` says what to do about them, and
`demo` shows maskpack at work on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from maskpack.errors import MaskpackError
from maskpack.packed.decode import MAX_BYTES
from maskpack.tools import doctor, inspector
from maskpack.tools.files import MOST_RATIO, SMALL, Unusable, one_line

_DEMO_NEEDS = ("ray", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `maskpack` with `argv`, by default the arguments of the process; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="maskpack", description="Moves the padded batches of RL post-training without the padding."
    )
    parser.add_argument("--version", action="version", version=f"maskpack {version('maskpack')}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    args = parser.parse_args(argv)
    if args.command == "demo":
        rows = args.prompts * args.responses
        if rows < args.ranks:
            parser.error(f"{rows} rows for {args.ranks} ranks; each rank needs at least one row")
        return _demo(args)
    try:
        text, status = (doctor if args.command == "doctor" else inspector).run(args)
    except (Unusable, MaskpackError, OSError, MemoryError, RuntimeError) as error:
        print(f"maskpack {args.command}: {one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return status


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


# -------------------------------------------------------------------- arguments


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="make a step of a GRPO trainer, padded, with maskpack and with replay; compare outputs, bytes and time",
        description="Makes a step of a GRPO trainer with a tiny model in Ray workers: from padded rows, through "
        "maskpack, and with replay of packed rows. Exits with status 1 if maskpack changes a bit of the outputs, or "
        "replay more than rounding does.",
    )
    demo.add_argument("--prompts", type=_positive, default=6, help="prompts (default: %(default)s)")
    demo.add_argument("--responses", type=_positive, default=8, help="responses to each prompt (default: %(default)s)")
    demo.add_argument("--ranks", type=_positive, default=2, help="Ray workers (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the weights and the batch (default: %(default)s)")


def _add_inspect(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show where the bytes of a saved batch go, field by field",
        description="Shows the padded, real and wire bytes of every field of a saved batch. A batch that is not packed "
        "is compressed first.",
    )
    _add_file(parser)


def _add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what padding costs a saved batch, which fields stay padded, and the registry line for each",
        description="Says what padding costs a saved batch, what maskpack sends, which fields stay padded, and the "
        "registry line for each. Exits with status 1 if a field stays padded and no registry is written.",
    )
    _add_file(parser, nargs="+")
    strict = "check each FILE for a CI run: print only the fields that stay padded, and exit with 1 if there are any"
    parser.add_argument("--strict", action="store_true", help=strict)
    write = "write a registry that covers all FILEs, as YAML or JSON, for --registry; an existing file is an error"
    parser.add_argument("--write", metavar="REGISTRY", help=write)


def _add_file(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    """The arguments of the commands that read a saved batch."""
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs=nargs,
        help="a packed batch of PackedBatch.save; a TensorDict, a dict of tensors or a verl DataProto of torch.save; "
        "a pickled DataProto; or a folder or URL of a RolloutLog",
    )
    parser.add_argument("--pad-token-id", type=int, metavar="N", help="the tokenizer's pad id, for batches not packed")
    registry = "YAML or JSON of fields and axes, the registry of compress(registry=) (default: RL_FIELDS)"
    parser.add_argument("--registry", metavar="FILE", help=registry)
    parser.add_argument("--allow-pickle", action="store_true", help="read pickles, which run code: only what you trust")
    limit = f"{SMALL:,}, or {MOST_RATIO:,} times the file if that is more, at most {MAX_BYTES:,}"
    limit = f"the most bytes that the batch may take padded (default: {limit})"
    parser.add_argument("--max-bytes", type=int, metavar="N", help=limit)
    parser.add_argument("--json", action="store_true", help="print JSON")


# -------------------------------------------------------------------- demo


def _demo(args: argparse.Namespace) -> int:
    begin = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begin:5.1f} s  {text} ...", flush=True)

    try:
        progress("importing Ray and transformers")
        from maskpack.tools import demo
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _DEMO_NEEDS:
            raise
        print(f"maskpack demo: {missing} is not installed; run: pip install 'maskpack[demo]'", file=sys.stderr)
        return 2
    text, status = demo.run(args.prompts, args.responses, args.seed, args.ranks, progress)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
