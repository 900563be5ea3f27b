"""The keyword arguments that `nest_batch_by_mask` and `compress` share."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np

from maskpack.core.arguments import flag, said
from maskpack.core.keys import Key, Path, need_keys, path_of
from maskpack.core.latest import Latest
from maskpack.core.pads import PadValue
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


class VerifyFirst:
    """A value of `verify=` that checks the pads of the first batch with given fields, and trusts them in later batches.

    Use one object for each producer of batches, because their pads may differ even if their fields are the same. A
    field is checked again until its batch has padding that only EDGE fits, or only the other pads of the registry.
    Of zeros `SIGNED_ZERO` is remembered, so a row that mixes 0.0 and -0.0 later gets one sign. A pickled object
    remembers nothing.
    """

    def __init__(self) -> None:
        self._pads: Latest[dict[Path, PadValue]] = Latest(256)
        self.times = 0
        """How often something was learnt."""

    def known(self, fields: Any) -> Mapping[Path, PadValue]:
        """The pads of fields in a set of fields."""
        return self._pads.get(fields) or {}

    def learn(self, fields: Any, pads: Mapping[Path, PadValue]) -> None:
        """Remembers these pads, in addition to those of other fields in the set. Threads that learn at once may have to
        learn again."""
        self._pads.keep(fields, {**self.known(fields), **pads})
        self.times += 1

    def __reduce__(self) -> tuple[Any, ...]:
        return VerifyFirst, ()


Verify = Literal["always", "first", "never"] | VerifyFirst
"""`first` makes a WorkerGroup or a storage keep a VerifyFirst. For a function it means `always`, as each call sees one
batch."""
OnLoss = Literal["keep", "error"]
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
    ignore: frozenset[Path]
    verify: Literal["always", "never"] | VerifyFirst
    on_loss: OnLoss

    @classmethod
    def of(
        cls,
        call: str,
        registry: Registry,
        pad_token_id: int | None,
        strict: bool,
        ignore_dense_fields: Iterable[Key],
        verify: Verify,
        on_loss: OnLoss,
    ) -> Options:
        if not isinstance(verify, VerifyFirst) and verify not in ("always", "first", "never"):
            known = "always, first, never, a VerifyFirst"
            raise RegistryError(f"{call}: verify is {said(verify)}; expected one of {known}. Choose one.")
        if on_loss not in ("keep", "error"):
            raise RegistryError(f"{call}: on_loss is {said(on_loss)}; expected one of keep, error. Choose one.")
        if isinstance(pad_token_id, np.integer):
            pad_token_id = int(pad_token_id)
        whole = isinstance(pad_token_id, int) and not isinstance(pad_token_id, bool)
        if pad_token_id is not None and not (whole and -(1 << 63) <= pad_token_id < 1 << 64):
            raise RegistryError(
                f"{call}: pad_token_id is {said(pad_token_id)}; expected a whole number. Pass tokenizer.pad_token_id."
            )
        registry = registry_of(registry, call)
        strict = flag(strict, "strict_mask_nesting", call, RegistryError)
        ignore = frozenset(map(path_of, need_keys(ignore_dense_fields, "ignore_dense_fields", call)))
        resolved: Any = kept_verify(verify)
        options = cls(call, registry, pad_token_id, False, ignore, resolved, on_loss)
        return options.in_strict_mode() if strict else options

    def in_strict_mode(self) -> Options:
        """These options in strict mode, in which a field with non-pad values is an error."""
        return replace(self, strict=True, on_loss="error")

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
        return self.in_strict_mode() if value == "1" else self


def kept_verify(verify: Verify) -> Verify:
    """`verify` for an object that handles several batches: "first" becomes a VerifyFirst."""
    return VerifyFirst() if verify == "first" else verify
