"""`python -m maskpack` is the command `maskpack`."""

from maskpack.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
