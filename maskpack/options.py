"""The keyword arguments that `nest_batch_by_mask` and `compress` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from maskpack.errors import RegistryError
from maskpack.registry import Key, MaskNestingRegistry, MaskNestingSpec, Path, path_of

Verify = Literal["always", "first", "never"]
OnLoss = Literal["keep", "error", "drop"]
Registry = MaskNestingRegistry | Mapping[Any, MaskNestingSpec]
"""What functions take as a registry; a plain dict of specs has no axes but the masks it names. Its keys are Keys, of
which a dict of strings is no Mapping to a type checker."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments that `nest_batch_by_mask` and `compress` share, checked."""

    call: str
    registry: MaskNestingRegistry
    pad_token_id: int | None
    strict: bool
    ignore: frozenset[Path]
    verify: Verify
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
        for name, value, allowed in (
            ("verify", verify, ("always", "first", "never")),
            ("on_loss", on_loss, ("keep", "error", "drop")),
        ):
            if value not in allowed:
                raise RegistryError(f"{call}: {name} is {value!r}; expected one of {', '.join(allowed)}. Choose one.")
        if isinstance(ignore_dense_fields, str):
            raise RegistryError(
                f"{call}: ignore_dense_fields is the string {ignore_dense_fields!r}; expected a collection of field "
                f"names. Write [{ignore_dense_fields!r}]."
            )
        if isinstance(pad_token_id, np.integer):
            pad_token_id = int(pad_token_id)
        if pad_token_id is not None and (isinstance(pad_token_id, bool) or not isinstance(pad_token_id, int)):
            raise RegistryError(
                f"{call}: pad_token_id is {pad_token_id!r}; expected a whole number. Pass tokenizer.pad_token_id."
            )
        if not isinstance(registry, Mapping):
            raise RegistryError(
                f"{call}: registry is {registry!r}; expected a MaskNestingRegistry or a dict of MaskNestingSpecs. "
                "Pass RL_FIELDS, or RL_FIELDS | {...}."
            )
        if not isinstance(registry, MaskNestingRegistry):
            registry = MaskNestingRegistry(registry)
        ignore = frozenset(path_of(key) for key in ignore_dense_fields)
        if strict and on_loss == "keep":
            on_loss = "error"
        return cls(call, registry, pad_token_id, strict, ignore, verify, on_loss)
