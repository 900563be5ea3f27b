"""The command `maskpack`: `inspect` shows where the bytes of a batch go, `doctor` says which registry it needs, and
`demo` runs examples/demo.py."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from maskpack.core.backends import is_installed
from maskpack.errors import MaskpackError
from maskpack.packed.decode import MAX_BYTES
from maskpack.tools import doctor, inspector
from maskpack.tools.files import MOST_RATIO, SMALL, Unusable, one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `maskpack` with `argv`, by default the arguments of the process; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="maskpack", description="Moves the padded batches of RL post-training without the padding."
    )
    parser.add_argument("--version", action="version", version=f"maskpack {version('maskpack')}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "make a step of a GRPO trainer, padded, with maskpack and with replay; compare outputs, bytes and time"
    commands.add_parser("demo", help=about, add_help=False)
    inspect = commands.add_parser("inspect", help="show where the bytes of a saved batch go, field by field")
    inspect.add_argument("file", metavar="FILE", help=_FILE)
    examine = commands.add_parser(
        "doctor",
        help="show where the bytes of saved batches go, and the registry that strict mode and replay need",
        epilog="Exits with 1 if a field stays padded and no registry is written, and with 2 if a FILE is not read.",
    )
    examine.add_argument("file", metavar="FILE", nargs="+", help=_FILE)
    strict = "check each FILE by itself, for a CI run: print only the fields that stay padded"
    examine.add_argument("--strict", action="store_true", help=strict)
    write = "write a registry that covers all FILEs, as YAML or JSON, for --registry; an existing file is an error"
    examine.add_argument("--write", metavar="REGISTRY", help=write)
    for command in (inspect, examine):
        _add_options(command)
    args, rest = parser.parse_known_args(argv)
    if args.command == "demo":
        return _demo(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        text, status = (doctor if args.command == "doctor" else inspector).run(args)
    except (Unusable, MaskpackError, OSError, MemoryError, RuntimeError) as error:
        print(f"maskpack {args.command}: {one_line(error)}", file=sys.stderr)
        return 2
    print(text)
    return status


_FILE = (
    "a packed batch; a TensorDict, dicts or lists of torch.save; a verl DataProto; npz or JSON; a folder "
    "of TensorDict.memmap; or a folder or URL of a RolloutLog"
)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pad-token-id", type=int, metavar="N", help="the tokenizer's pad id (default: as it is seen)")
    registry = "YAML or JSON of fields and axes, or the name of a preset (default: RL_FIELDS)"
    parser.add_argument("--registry", metavar="REGISTRY", help=registry)
    parser.add_argument("--allow-pickle", action="store_true", help="read pickles, which run code: only what you trust")
    limit = f"{SMALL:,}, or {MOST_RATIO:,} times the file if that is more, at most {MAX_BYTES:,}"
    limit = f"the most bytes that the batch may take padded (default: {limit})"
    parser.add_argument("--max-bytes", type=int, metavar="N", help=limit)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _demo(argv: Sequence[str]) -> int:
    """Runs the example as the main program: a wheel has it in the package, a clone beside it."""
    for name in ("ray", "transformers"):
        if not is_installed(name):
            print(f"maskpack demo: {name} is not installed; run: pip install 'maskpack[demo]'", file=sys.stderr)
            return 2
    package = Path(__file__).parents[1]
    program = next(path for home in (package, package.parent) if (path := home / "examples/demo.py").is_file())
    sys.argv = [str(program), *argv]
    runpy.run_path(str(program), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
