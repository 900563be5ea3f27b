"""The command `maskpack`: `maskpack demo` shows maskpack at work on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

_DEMO_NEEDS = ("ray", "rich", "transformers")


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
    args = parser.parse_args(argv)
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


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
