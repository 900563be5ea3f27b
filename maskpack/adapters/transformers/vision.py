"""Images and videos of packed rows: which a model takes, and whether each row has as many as its ids say.

    input_ids      p I I I I p r | p p r | p I I p r r     I: places of an image, which all have one id
    pixel_values   [16, d]                 [8, d]           joined in the order of the rows

A model puts the features of all images, one after the other, at all places. It compares their total numbers alone: if
one row had a place too many and another one too few, features would go to other rows. So they are compared row by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maskpack.adapters.transformers import experts, mixers
from maskpack.adapters.transformers.refusals import Refusal
from maskpack.core.arguments import IntArray
from maskpack.layout.prefix_tree import PrefixTree
from maskpack.replay.inputs import PackedInputs
from maskpack.replay.media import Media

_BOUNDS = (
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "prefix_tree", "context_group"),
    *(experts.NAME, mixers.KEYWORD, "invariant"),
)
"""What replay passes to the text layers."""


class _MediaKind(NamedTuple):
    """The options that have the ids of its places, and the names of its tensors."""

    name: str
    ids: tuple[str, ...]
    pixels: str
    grid: str


_MEDIA = (
    _MediaKind("image", ("image_token_id", "image_token_index"), "pixel_values", "image_grid_thw"),
    _MediaKind("video", ("video_token_id", "video_token_index"), "pixel_values_videos", "video_grid_thw"),
)
_AUDIO = ("audio_token_id", "audio_token_index")


def sees(base: Any) -> bool:
    """Whether a model takes images or videos."""
    return any(kind.pixels in inspect.signature(base.forward).parameters for kind in _MEDIA)


def keep_bounds_in_text(base: Any) -> None:
    """Parts beside the text model are not told the bounds of packed rows: some vision towers pass bounds of their
    images to their attention by the same names. The hooks stay with the parts."""
    parts: list[Any] = list(base.modules())
    decoder = base.get_decoder() if callable(getattr(base, "get_decoder", None)) else base
    text = decoder if decoder in parts else base
    around = [part for part in parts if part is not text and text in list(part.modules())]
    for part in around:
        for beside in part.children():
            if beside is not text and beside not in around and _no_bounds not in beside._forward_pre_hooks.values():
                beside.register_forward_pre_hook(_no_bounds, with_kwargs=True)


def _no_bounds(_part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _BOUNDS}


# -------------------------------------------------------------------- what goes in


def need_text(model: Any, config: Any, ids: Tensor) -> None:
    """Raises ReplayError if ids have places of images, videos or audio. One synchronisation on CUDA if the model has
    such ids."""
    _need_none(model, all_places(model, config), ids, "text alone: the batch has no pixels of these rows")


def all_places(model: Any, config: Any) -> set[int]:
    """The ids of places of images, videos and audio."""
    return _ids_of(model, config, [*_AUDIO, *(name for kind in _MEDIA for name in kind.ids)])


def _need_none(model: Any, places: set[int], ids: Tensor, expected: str) -> None:
    if places and bool(torch.isin(ids, torch.tensor(sorted(places), device=ids.device)).any()):
        raise Refusal.PLACEHOLDERS(model=type(model).__name__, ids=sorted(places), expected=expected)


def _ids_of(model: Any, config: Any, names: Sequence[str]) -> set[int]:
    found: set[Any] = {getattr(part, name, None) for part in (model.config, config) for name in names}
    return found - {None}


def given_media(model: Any, base: Any, config: Any, inputs: PackedInputs) -> dict[str, Tensor]:
    """The images and videos of packed rows, by the names of the arguments of the model; nothing for text. One or two
    synchronisations on CUDA if the model has ids of places.

    Raises:
        ReplayError: the model does not take what there is, or a row has another number of places than of features.
    """
    media = inputs.media
    if media is None:
        need_text(model, config, inputs.input_ids)
        return {}
    ids = inputs.input_ids[0, : inputs.num_tokens]
    marked = _marked(model, base, config, media, ids, inputs.position_ids)
    _check_rows(model, media, [_counts(part, inputs) for part in marked])
    if inputs.tree is None:
        return media.joined(media.rows)
    return media.joined(_once(model, inputs.tree, np.logical_or.reduce(marked)))


def padded_media(model: Any, base: Any, config: Any, ids: Tensor, positions: Tensor, media: Media) -> dict[str, Tensor]:
    """`given_media` of padded rows [b, S]: those with tokens."""
    _check_rows(model, media, [part.sum(-1) for part in _marked(model, base, config, media, ids, positions)])
    return media.joined(media.rows)


def _marked(model: Any, base: Any, config: Any, media: Media, ids: Tensor, positions: Tensor) -> list[Any]:
    """For each of _MEDIA, the bools on the host that say which ids are its places. One synchronisation on CUDA. Raises
    ReplayError if the model does not take these media."""
    who = type(model).__name__
    taken = inspect.signature(base.forward).parameters
    if not sees(base):
        raise Refusal.TEXT_ALONE(model=who, names=", ".join(media.names))
    if odd := [name for name in media.names if name not in taken]:
        known = [name for kind in _MEDIA for name in kind[2:] if name in taken]
        raise Refusal.MEDIA(model=type(base).__name__, names=", ".join(odd), known=", ".join(known))
    if "token_type_ids" in taken or hasattr(model, "create_masks_for_generate"):
        raise Refusal.OWN_MASKS(model=who)
    if callable(getattr(base, "get_rope_index", None)) and positions.dim() != 3:
        raise Refusal.M_ROPE(model=who)
    _need_none(model, _ids_of(model, config, _AUDIO), ids, "no audio")
    found = [_ids_of(model, config, kind.ids) for kind in _MEDIA]
    places = [torch.isin(ids, torch.tensor(sorted(one), dtype=ids.dtype, device=ids.device)) for one in found]
    return list(torch.stack(places).cpu().numpy())


def _counts(marked: Any, inputs: PackedInputs) -> IntArray:
    """How many tokens of each row with tokens are marked."""
    tree = inputs.tree
    if tree is None:
        return np.diff(np.append(0, marked.cumsum())[inputs.bounds])
    before = np.append(0, marked[tree.of_row_token].cumsum())[tree.row_offsets]
    return np.diff(before)[tree.lengths > 0]


def _check_rows(model: Any, media: Media, counts: Sequence[IntArray]) -> None:
    """Raises ReplayError unless each row has a place for each feature of its images, and of its videos."""
    who, merge = type(model).__name__, getattr(getattr(model.config, "vision_config", None), "spatial_merge_size", None)
    for kind, of_rows in zip(_MEDIA, counts, strict=True):
        ratio: tuple[int, int] | None = None  # places and images of a row, where all images have as many places
        alike = media.names == [kind.pixels]
        for row, places in zip(media.rows.tolist(), of_rows.tolist(), strict=True):
            pixels, patches = media.entries(row, kind.pixels), media.patches_of(row, kind.grid)
            if patches is not None and patches != pixels:
                raise Refusal.PATCHES(row=row, seen=pixels, pixels=kind.pixels, grid=kind.grid, said=patches)
            expected: int | str = places
            if patches is not None and merge:
                expected = patches // merge**2
            elif bool(places) != bool(pixels):
                expected = "some" if pixels else 0
            elif alike and pixels:
                ratio = ratio or (places, pixels)
                expected = places if places * ratio[1] == pixels * ratio[0] else f"{pixels * ratio[0] / ratio[1]:g}"
            if places != expected:
                raise Refusal.PLACES(
                    row=row, seen=places, kind=kind.name, entries=pixels, pixels=kind.pixels, wanted=expected, model=who
                )


def _once(model: Any, tree: PrefixTree, marked: Any) -> Iterator[int]:
    """The rows whose media go in: the first of those that share all their places, in the order of the tree."""
    seen = np.zeros(tree.num_tokens, np.bool_)
    for row in tree.order.tolist():
        tokens = tree.of_row_token[tree.row_offsets[row] : tree.row_offsets[row + 1]]
        places = tokens[marked[tokens]]
        known = seen[places]
        if known.any() and not known.all():
            raise Refusal.SOME_PLACES(row=row, model=type(model).__name__)
        if places.size and not known.any():
            seen[places] = True
            yield row
