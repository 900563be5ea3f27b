"""The packages that tests need besides those that maskpack needs.

    needs("ray")    the package; where it is not installed, the test or its file is skipped

A plain folder of its name on the path can be imported, too, and is not the package: its spec has no origin.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

import pytest


def is_installed(package: str) -> bool:
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def needs(module: str) -> Any:
    """A package, or a module of one."""
    package = module.partition(".")[0]
    if not is_installed(package):
        pytest.skip(f"{package} is not installed", allow_module_level=True)
    return import_module(module)


def plain_folder(name: str) -> ModuleType:
    """What Python imports of a plain folder."""
    return module_from_spec(ModuleSpec(name, None, is_package=True))


def without(package: str) -> Any:
    """Runs a test with the argument `found`: what Python finds in place of a package that is not installed."""
    return pytest.mark.parametrize("found", [None, plain_folder(package)], ids=["nothing", "a folder"])
