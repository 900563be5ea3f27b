"""OpenRLHF: its Experience, pickled in packed form."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from maskpack import fields
from maskpack.core.keys import Path
from maskpack.fields.options import Registry
from maskpack.packed.carried import Carried, check_options, pickle_as

__all__ = ["pickle_experiences"]

Experience: Any = importlib.import_module("openrlhf.trainer.ppo_utils.experience").Experience


def pickle_experiences(*, registry: Registry = fields.openrlhf, **options: Any) -> Callable[[], None]:
    """Makes this process pickle every Experience in packed form, for Ray and for files.

    An Experience is restored bit for bit: of a batch, or of one sample, whose tensors have no dim for rows. The
    reading process needs maskpack installed, but no call. Subclasses are pickled as before. `copy.copy` of an
    Experience copies its tensors, too.

    Args:
        registry, options: of `maskpack.compress`.

    Returns:
        A function that undoes this.
    """
    check_options(registry=registry, **options)

    def reduced(experience: Any) -> tuple[Any, ...]:
        entries, sequences = _entries(experience), experience.sequences
        dims = sequences.dim() if isinstance(sequences, Tensor) else 0
        lifted = [path for path, value in entries.items() if dims == 1 and _is_plain(value)]
        entries |= {path: entries[path][None] for path in lifted}
        rows = len(sequences) if dims > 1 else dims
        return _restored, (type(experience), Carried.of(entries, rows, registry=registry, **options), lifted)

    return pickle_as((Experience,), reduced)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_nested and not value.requires_grad


def _entries(experience: Any) -> dict[Path, Any]:
    """The attributes, and in place of `info` what is in it."""
    entries: dict[Path, Any] = {}
    for name, value in experience.__dict__.items():
        info = cast("dict[Any, Any]", value) if name == "info" and type(value) is dict else {}
        if info and all(isinstance(key, str) for key in info):
            entries |= {(name, key): part for key, part in info.items()}
        else:
            entries[name,] = value
    return entries


def _restored(kind: Any, carried: Carried, lifted: list[Path]) -> Any:
    experience: Any = kind.__new__(kind)
    attributes = experience.__dict__
    for (name, *within), value in carried.entries().items():
        if (name, *within) in lifted:
            value = value.squeeze(0)
        if within:
            attributes.setdefault(name, {})[within[0]] = value
        else:
            attributes[name] = value
    return experience
