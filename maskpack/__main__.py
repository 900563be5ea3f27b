"""`python -m maskpack` is the command `maskpack`."""

from maskpack.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
