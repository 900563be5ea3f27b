"""The keyword arguments that `nest_batch_by_mask` and `compress` share."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from maskpack.core.arguments import flag, said
from maskpack.core.keys import Key
from maskpack.errors import RegistryError
from maskpack.fields.registry import MaskNestingRegistry, Spec

STRICT = "MASKPACK_STRICT"
"""The environment variable that puts the calls of a process into strict mode while it is "1". `pytest
--maskpack-strict` sets it, so that processes that tests start are in strict mode, too."""
_not_strict: ContextVar[bool] = ContextVar("not_strict", default=False)


@contextmanager
def not_strict() -> Generator[None]:
    """In this block STRICT has no effect: for tools that show the fields that stay padded, and for calls inside
    maskpack whose caller has no strict option."""
    before = _not_strict.set(True)
    try:
        yield
    finally:
        _not_strict.reset(before)


Registry = MaskNestingRegistry | Mapping[Any, Spec]
"""A registry, or a dict of specs or tuples (mask, pad), whose axes are the masks that these name. The keys are Keys;
they are typed as Any because a dict with str keys is not a Mapping[Key, ...] to a type checker."""


def registry_of(registry: Registry, call: str) -> MaskNestingRegistry:
    """The registry; a dict of specs is converted."""
    if not isinstance(registry, Mapping):
        remedy = "Pass RL_FIELDS, or RL_FIELDS | {...}."
        if isinstance(registry, str | os.PathLike) and is_registry_file(str(registry)):
            remedy = f"Read the file: registry={reading(str(registry))}."
        raise RegistryError(
            f"{call}: registry is {said(registry)}; expected a MaskNestingRegistry, or a dict of MaskNestingSpecs or "
            f"tuples (mask, pad). {remedy}"
        )
    if isinstance(registry, MaskNestingRegistry):
        return registry
    return MaskNestingRegistry(cast("Mapping[Key, Any]", registry))


def is_registry_file(file: str) -> bool:
    """Whether the name of a file is that of YAML or JSON."""
    return file.lower().endswith((".json", ".yaml", ".yml"))


def reading(file: str) -> str:
    """The Python that reads a registry from a YAML or JSON file."""
    load = "json.load" if file.lower().endswith(".json") else "yaml.safe_load"
    return f"MaskNestingRegistry.from_dict({load}(open({json.dumps(file, ensure_ascii=False)})))"


@dataclass(frozen=True)
class Options:
    """The checked keyword arguments that `nest_batch_by_mask` and `compress` share."""

    call: str
    registry: MaskNestingRegistry
    pad_token_id: int | None
    strict: bool
    verify: bool

    @classmethod
    def of(
        cls,
        call: str,
        registry: Registry,
        pad_token_id: int | None,
        strict: bool = False,
        verify: bool = True,
    ) -> Options:
        if isinstance(pad_token_id, np.integer):
            pad_token_id = int(pad_token_id)
        whole = isinstance(pad_token_id, int) and not isinstance(pad_token_id, bool)
        if pad_token_id is not None and not (whole and -(1 << 63) <= pad_token_id < 1 << 64):
            raise RegistryError(
                f"{call}: pad_token_id is {said(pad_token_id)}; expected a whole number. Pass tokenizer.pad_token_id."
            )
        registry = registry_of(registry, call)
        strict = flag(strict, "strict_mask_nesting", call, RegistryError)
        return cls(call, registry, pad_token_id, strict, flag(verify, "verify", call, RegistryError))

    def of_this_process(self) -> Options:
        """These options, in strict mode if the variable STRICT says so. Raises RegistryError if its value is none of
        those that it may have."""
        if _not_strict.get():
            return self
        value = os.environ.get(STRICT, "")
        if value not in ("", "0", "1"):
            raise RegistryError(
                f'{self.call}: the environment variable {STRICT} is {value!r}; expected "1" for strict mode, or "0", '
                f'"" or no such variable. Set {STRICT}=1, or unset it.'
            )
        return replace(self, strict=True) if value == "1" else self
