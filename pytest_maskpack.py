"""The pytest plugin of maskpack: `pytest --maskpack-strict` puts every call of a test run into strict mode.

pytest imports this module in every run. It lies beside the package and imports neither maskpack nor torch.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "MASKPACK_STRICT"
"""The environment variable that `compress` and `nest_batch_by_mask` look at."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("maskpack").addoption(
        "--maskpack-strict",
        action="store_true",
        help="every compress, nest_batch_by_mask and WorkerGroup is strict: a field that would stay padded is an error",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Sets the variable for this process and those that it starts, and restores it at the end."""
    if not config.getoption("--maskpack-strict"):
        return
    before = os.environ.get(VARIABLE)

    def restore() -> None:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before

    os.environ[VARIABLE] = "1"
    config.add_cleanup(restore)


def pytest_report_header(config: pytest.Config) -> str | None:
    return "maskpack: strict mask nesting" if config.getoption("--maskpack-strict") else None
