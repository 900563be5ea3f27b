"""Images and videos of the rows of a batch, in the order of the rows.

    multi_modal_inputs           [{"pixel_values": [4, d], "image_grid_thw": [1, 3]}, {}, {"pixel_values": [8, d], ...}]
or  pixel_values, image_grid_thw   jagged [B, patches, d] and [B, images, 3]

    Media    parts    the first dict, the last one          of_row    0 -1 1
    joined   pixel_values [12, d], image_grid_thw [2, 3]    what a model is given beside the tokens of all rows

Rows with one object, such as those of a group, have one part. Rows without tokens have none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.arguments import said
from maskpack.core.index import IntArray
from maskpack.core.tree import entry_at, is_object
from maskpack.errors import ReplayError
from maskpack.packed.batch import PackedBatch, decompress

OBJECTS = "multi_modal_inputs"
FIELDS = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")
GRIDS = ("image_grid_thw", "video_grid_thw")
_AUDIO = ("input_features", "input_values", "feature_attention_mask")
_FOR_POSITIONS = ("second_per_grid_ts", "video_second_per_grid", "mm_token_type_ids", "rope_deltas")
"""Entries from which models compute position ids, which replay takes from the batch."""
_SAMPLES = 64  # numbers of a tensor that are looked at before it is compared with others


@dataclass(frozen=True, eq=False)
class Media:
    """The images and videos of rows.

    Attributes:
        parts: what rows have, by name: tensors [entries, ...], such as patches or images.
        patches: for each part, the number of patches that its grids (GRIDS) say, by the name of the grid.
        of_row: int64 [B], the part of each row of the batch; -1 for none.
        rows: int64 [n], the rows that have tokens.
    """

    parts: tuple[Mapping[str, Tensor], ...]
    patches: tuple[Mapping[str, int], ...]
    of_row: IntArray
    rows: IntArray

    @classmethod
    def of(
        cls, batch: TensorDictBase | PackedBatch, lengths: IntArray, call: str, *, compare: bool = False
    ) -> Media | None:
        """The media of a batch whose rows have so many tokens; None if no row with tokens has any.

        Args:
            compare: whether rows have one part also if their media are equal, but not the same objects. Tensors of the
                same shapes are compared where they are.

        Raises:
            ReplayError: a field of another form, or of audio; or rows whose tensors cannot be joined.
        """
        given = _of_rows(batch, lengths.size, call)
        if given is None:
            return None
        parts: list[dict[str, Tensor]] = []
        known: dict[Any, int] = {}
        of_row = np.full(lengths.size, -1, np.int64)
        for row, tensors in enumerate(given):
            if tensors and lengths[row]:
                key = tuple((name, x.data_ptr(), x.shape, x.stride(), x.dtype) for name, x in tensors.items())
                if key not in known:
                    known[key] = len(parts)
                    parts.append(tensors)
                of_row[row] = known[key]
        if not parts:
            return None
        if compare:
            first = _first_equal(parts)
            of_row = np.where(of_row < 0, -1, first[of_row])
        _need_joinable(parts, call)
        patches = [{name: int(x[name].prod(-1).sum()) for name in GRIDS if name in x} for x in parts]
        return cls(tuple(parts), tuple(patches), of_row, np.flatnonzero(lengths))

    def to(self, device: torch.device) -> Media:
        """The same on a device. A copy from the host does not synchronise."""
        used = set(self.of_row.tolist())
        sent = [
            {name: x.to(device, non_blocking=x.device.type == "cpu") for name, x in part.items()} if n in used else part
            for n, part in enumerate(self.parts)
        ]
        return replace(self, parts=tuple(sent))

    @property
    def names(self) -> list[str]:
        """All names that a row has."""
        return list(dict.fromkeys(name for part in self.parts for name in part))

    def joined(self, rows: Iterable[int]) -> dict[str, Tensor]:
        """The tensors of some rows of the batch, one after the other, by name."""
        numbers = [int(self.of_row[row]) for row in rows]
        chosen = [self.parts[number] for number in numbers if number >= 0]
        names = dict.fromkeys(name for part in chosen for name in part)
        found = {name: [part[name] for part in chosen if name in part] for name in names}
        return {name: x[0] if len(x) == 1 else torch.cat(x) for name, x in found.items()}

    def entries(self, row: int, name: str) -> int:
        """The number of entries of a row: of `pixel_values`, its patches or images."""
        part = int(self.of_row[row])
        return self.parts[part][name].shape[0] if part >= 0 and name in self.parts[part] else 0

    def patches_of(self, row: int, grid: str) -> int | None:
        """The number of patches that the grids of a row say; None if it has no such grid."""
        part = int(self.of_row[row])
        return self.patches[part].get(grid) if part >= 0 else None


def _of_rows(batch: TensorDictBase | PackedBatch, rows: int, call: str) -> list[dict[str, Tensor]] | None:
    """The tensors of each row, by name; None if the batch has no field of media."""
    names = [name for name in (OBJECTS, *FIELDS, *_AUDIO) if _has(batch, name)]
    if not names:
        return None
    fields = decompress(batch, *names, format="nested") if isinstance(batch, PackedBatch) else batch
    if sounds := [name for name in _AUDIO if name in names]:
        raise _sound(sounds[0], call)
    out: list[dict[str, Tensor]] = [{} for _ in range(rows)]
    if OBJECTS in names:
        out = _of_objects(entry_at(fields, (OBJECTS,)), rows, call)
        names.remove(OBJECTS)
        if names and any(out):
            raise ReplayError(
                f'{call}: the batch has media in "{OBJECTS}" and in {", ".join(names)}; expected one of the two. Drop '
                "the other."
            )
    for name in names:
        for tensors, x in zip(out, _of_jagged(name, entry_at(fields, (name,)), rows, call), strict=True):
            if x.shape[0]:
                tensors[name] = x
    return out


def _has(batch: TensorDictBase | PackedBatch, name: str) -> bool:
    return (name,) in batch.forms if isinstance(batch, PackedBatch) else entry_at(batch, (name,)) is not None


def _of_objects(value: Any, rows: int, call: str) -> list[dict[str, Tensor]]:
    """Of a field with one dict for each row."""
    given: list[Any] = value.tolist() if is_object(value) and tuple(value.batch_size) == (rows,) else [value]
    if not all(one is None or isinstance(one, Mapping) for one in given):
        kinds = " and ".join(sorted({type(one).__name__ for one in given}))
        raise ReplayError(
            f'{call}: field "{OBJECTS}" is {kinds} for {rows} rows; expected a dict of tensors, or None, for each row. '
            "A list or an array that is one object of the whole batch does not follow its rows: set "
            f'batch["{OBJECTS}"] = NonTensorStack(*dicts).'
        )
    return [_of_dict(one or {}, row, call) for row, one in enumerate(given)]


def _of_dict(given: Mapping[Any, Any], row: int, call: str) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for name, x in given.items():
        if x is None or name in _FOR_POSITIONS:
            continue
        if name in _AUDIO:
            raise _sound(name, call)
        if not isinstance(x, Tensor) or x.is_nested or x.dim() == 0:
            seen = tuple(x.shape) if isinstance(x, Tensor) and not x.is_nested else said(x)
            raise ReplayError(
                f'{call}: "{name}" in "{OBJECTS}" of row {row} is {seen}; expected a tensor [entries, ...]. Make it '
                "one, or drop it."
            )
        if x.shape[0]:
            out[name] = x
    return out


def _of_jagged(name: str, value: Any, rows: int, call: str) -> list[Tensor]:
    """Of a jagged field [B, entries, ...], as views. One synchronisation on CUDA."""
    tensor = isinstance(value, Tensor)
    if not tensor or value.layout != torch.jagged or cast("Any", value).lengths() is not None:
        seen = tuple(value.shape) if tensor and not value.is_nested else said(value)
        raise ReplayError(
            f'{call}: field "{name}" is {seen}; expected a jagged tensor [B, entries, ...] with the entries of each '
            f'row, or dicts of tensors in "{OBJECTS}": a plain tensor does not record the row of each entry. '
            "With one entry per row: torch.nested.as_nested_tensor(list(x[:, None]), layout=torch.jagged)."
        )
    jagged: Any = value
    ends: list[int] = jagged.offsets().tolist()
    if len(ends) != rows + 1:
        raise ReplayError(f'{call}: field "{name}" has {len(ends) - 1} rows, the batch {rows}. Fix the producer.')
    return [jagged.values()[begin:end] for begin, end in itertools.pairwise(ends)]


def _sound(name: str, call: str) -> ReplayError:
    return ReplayError(
        f'{call}: the batch has audio in "{name}"; expected text, images or videos only. Run these rows with '
        "the model's own forward; if there is no sound, drop the field."
    )


def _need_joinable(parts: Sequence[Mapping[str, Tensor]], call: str) -> None:
    """Raises ReplayError unless rows have the same names, entries of a name are alike, and grids have three numbers."""
    forms: dict[str, tuple[Any, ...]] = {}
    of_kind: dict[bool, list[str]] = {}
    for part in parts:
        for video in (False, True):
            names = sorted(name for name in part if ("video" in name) == video)
            if names and of_kind.setdefault(video, names) != names:
                raise ReplayError(
                    f"{call}: a row has {', '.join(of_kind[video])}, another {', '.join(names)}; expected the same "
                    f"names in all rows with {'videos' if video else 'images'}. Fix the producer."
                )
        for name, x in part.items():
            form = tuple(x.shape[1:]), x.dtype, x.device
            if forms.setdefault(name, form) != form:
                raise ReplayError(
                    f'{call}: entries of "{name}" are {forms[name][0]} of {forms[name][1]} on {forms[name][2]} in one '
                    f"row, {form[0]} of {form[1]} on {form[2]} in another; expected the same in all rows, which are "
                    "joined. Pad the images of all rows to one size, or replay these rows separately."
                )
            whole = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
            if name in GRIDS and (x.dim() != 2 or x.shape[1] != 3 or not whole):
                raise ReplayError(
                    f'{call}: "{name}" of a row is {tuple(x.shape)} of {x.dtype}; expected integers [entries, 3]: '
                    "frames, height and width in patches. Fix the producer."
                )


def _first_equal(parts: Sequence[Mapping[str, Tensor]]) -> IntArray:
    """int64 [parts]: the first part that is equal to each. A few numbers say which to compare whole."""
    out = np.arange(len(parts))
    alike: dict[Any, list[int]] = {}
    for n, part in enumerate(parts):
        looks = tuple((name, x.shape, x.dtype, *_sampled(x)) for name, x in sorted(part.items()))
        for other in alike.setdefault(looks, []):
            if all(torch.equal(x, parts[other][name]) for name, x in part.items()):
                out[n] = other
                break
        else:
            alike[looks].append(n)
    return out


def _sampled(x: Tensor) -> list[Any]:
    flat: Any = x.detach().reshape(-1)
    return flat[:: max(1, flat.shape[0] // _SAMPLES)].tolist()
