"""The command `maskpack doctor`: what padding costs a batch, which fields stay padded, and the registry line for each;
whether the registry of a trainer takes fewer bytes.

batch -- compress --> sizes as it is -----------------.
      -- compress --> sizes by the best preset -------+
      -- Suggester -> a spec for each padded field ---+--> Diagnosis --> text or JSON
      -- compress --> sizes with these specs ---------'
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.keys import show
from maskpack.core.pads import PAD_TOKEN_ID
from maskpack.core.tree import flatten
from maskpack.errors import LayoutError, MaskpackError, MaskpackWarning
from maskpack.fields.options import not_strict
from maskpack.fields.presets import PRESETS
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.layout.row_layout import RowLayout
from maskpack.nesting.coverage import DenseField
from maskpack.nesting.schema import LAYOUTS, FieldForm
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.sizes import Figures, TokenCounts, figures, printable, to_json, token_counts
from maskpack.packed.table import forget
from maskpack.tools.files import Unusable, one_line, saved_batch, saved_registry
from maskpack.tools.suggest import Suggester, Suggestion

_LARGEST = 5
_WORTH = 0.95
"""A preset is named if it takes less than this share of the bytes."""


class Preset(NamedTuple):
    """A registry of `maskpack.fields` by its name, the bytes of the batch packed with it, and the pad token seen."""

    name: str
    wire_bytes: int
    pad_token_id: int | None


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        sizes: of the batch as it is.
        covered: sizes with the suggestions; None if there are none, or the batch was packed.
        counts: tokens of the batch with the suggestions, and those that rows share; None without token ids.
        masks: by name.
        suggestions: one for each field that stays padded.
        preset: the one that takes the fewest bytes, if it is worth its name; None if the batch was packed.
        pad_token_id: the one given, or the one seen under the masks.
        note: about a pad_token_id that was not given; empty if none is needed.
    """

    sizes: Figures
    covered: Figures | None
    counts: TokenCounts | None
    masks: Mapping[str, RowLayout]
    suggestions: tuple[Suggestion, ...]
    preset: Preset | None
    pad_token_id: int | None
    note: str

    @property
    def padding(self) -> int:
        """Bytes of the padded batch that are padding, as far as masks are known."""
        fields = (self.covered or self.sizes).fields
        return sum(field.padded_bytes - field.real_bytes for field in fields if field.kind == "padded")


def diagnose(
    batch: TensorDictBase | PackedBatch,
    registry: MaskNestingRegistry = RL_FIELDS,
    pad_token_id: int | None = None,
    max_bytes: int | None = MAX_BYTES,
) -> Diagnosis:
    """Looks at a batch.

    Args:
        batch: padded, nested or packed. It is not changed.
        registry: as for `compress`.
        pad_token_id: the tokenizer's; by default the value under the masks of the token fields.
        max_bytes: as for `decompress`, if the batch is packed.

    Raises:
        LayoutError: a field fits none of its masks or has no plain bits, or the batch takes more than `max_bytes`. It
            names the preset that takes the batch, if there is one.
    """
    saved = cast("PackedBatch | None", batch if isinstance(batch, PackedBatch) else None)
    tensors: Any = batch if saved is None else decompress(saved, max_bytes=max_bytes)
    suggester = Suggester(tensors, registry, pad_token_id)
    token = suggester.pad_token_id
    preset = None if saved is not None else _preset_of(tensors, registry, pad_token_id)
    try:
        packed = _compressed(tensors, registry, token) if saved is None else saved
    except LayoutError as error:
        if preset is None:
            raise
        fits = f"maskpack.fields.{preset.name} takes this batch, in {preset.wire_bytes:,} bytes."
        raise LayoutError(f"{error} {fits}") from error
    sizes, covered = figures(packed, left=False), None
    padded = [DenseField(of.path, of.shape, of.dtype, of.padded_bytes, of.reason) for of in sizes.fields if of.reason]
    suggestions = tuple(map(suggester.suggest, [*padded, *suggester.hidden()]))
    if suggestions and saved is None:
        packed = _compressed(tensors, registry | {one.key: one.spec for one in suggestions}, token)
        covered = figures(packed, left=False)
    note = "" if pad_token_id is not None else _note(packed.schema.forms if saved is None else (), registry, token)
    if preset is not None and preset.wire_bytes > _WORTH * sizes.wire_bytes:
        preset = None
    return Diagnosis(sizes, covered, token_counts(packed), packed.layouts, suggestions, preset, token, note)


def _compressed(batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> PackedBatch:
    forget()  # encodings that were chosen for another registry
    with warnings.catch_warnings(), not_strict():
        warnings.simplefilter("ignore", MaskpackWarning)  # the suggestions say it
        return compress(batch, registry=registry, pad_token_id=pad_token_id or 0)


def _preset_of(batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> Preset | None:
    """The smallest of the presets that know every tensor of two or more dims, and otherwise than the registry does."""
    tensors = [path for path, of in flatten(batch, without=LAYOUTS) if isinstance(of, Tensor) and of.dim() > 1]
    found: list[Preset] = []
    for name, preset in PRESETS.items():
        specs = [preset.find(path) for path in tensors]
        if None in specs or (preset.axes == registry.axes and specs == [registry.find(path) for path in tensors]):
            continue
        with suppress(MaskpackError):  # what it refuses it does not fit
            token = Suggester(batch, preset, pad_token_id).pad_token_id
            found.append(Preset(name, figures(_compressed(batch, preset, token), left=False).wire_bytes, token))
    return min(found, key=lambda preset: preset.wire_bytes, default=None)


def _note(forms: Sequence[FieldForm], registry: MaskNestingRegistry, token: int | None) -> str:
    """The note about a pad_token_id that was not given; `token` was seen under the masks."""
    if token is not None:
        return (
            f"pad_token_id was not given; {token} is the value under the masks of the token fields. Pass it to "
            f"compress as pad_token_id={token}."
        )
    specs = (registry.find(form.path) for form in forms if form.kind == "padded")
    if any(spec is not None and PAD_TOKEN_ID in spec.pads for spec in specs):
        return "pad_token_id was not given, and no padding shows it. Pass that of the tokenizer to compress."
    return ""


# -------------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> tuple[str, int]:
    """The command; returns what to print and the exit status."""
    if len(args.file) > 1 and not args.strict:
        raise Unusable(f"{len(args.file)} files; expected one. Give one file, or check several with --strict")
    registry = saved_registry(args.registry)
    base = "RL_FIELDS" if args.registry is None else "registry"

    def diagnosed(file: str) -> Diagnosis:
        batch = saved_batch(file, args.allow_pickle, args.max_bytes)
        return diagnose(batch, registry, args.pad_token_id, max_bytes=None)

    if args.strict:
        return _strict(args.file, diagnosed, base, args.json)
    (file,) = args.file
    diagnosis = diagnosed(file)
    out = as_json(diagnosis, file, base) if args.json else text(diagnosis, file, base)
    return out if isinstance(out, str) else json.dumps(out, indent=2), 1 if diagnosis.suggestions else 0


def _strict(files: Sequence[str], diagnosed: Callable[[str], Diagnosis], base: str, in_json: bool) -> tuple[str, int]:
    """The check of several files, each by itself: a line for each, the registry line for each field that stays padded,
    and a pad token that was not given. The status is 1 if a field stays padded, and 2 if a file cannot be read or
    `compress` refuses its batch."""
    out: list[str] = []
    found: list[dict[str, Any]] = []
    status = 0
    for file in files:
        try:
            diagnosis = diagnosed(file)
        except (Unusable, MaskpackError, OSError, MemoryError, RuntimeError) as error:
            status = 2
            found.append({"file": file, "error": one_line(error)})
            out.append(f"{file}: {one_line(error)}")
            continue
        found.append(as_json(diagnosis, file, base))
        padded, fields = len(diagnosis.suggestions), len(diagnosis.sizes.fields)
        status = max(status, min(padded, 1))
        out.append(f"{file}: {f'{padded} stay padded' if padded else f'{fields:,} fields, none stays padded'}")
        for one in diagnosis.suggestions:
            out += [f"  {one.field}", f"    {one.seen}", f"    {one.line}"]
        out += [f"  note: {diagnosis.note}"] if diagnosis.note else []
    return json.dumps(found, indent=2) if in_json else "\n".join(map(printable, out)), status


def text(diagnosis: Diagnosis, file: str, base: str) -> str:
    """The diagnosis as text; the lines go on top of the registry `base`, a name in Python."""
    sizes, covered = diagnosis.sizes, diagnosis.covered
    sample = " (a sample)" if "://" in file or FilePath(file).is_dir() else ""
    out = [f"{file}: {sizes.rows:,} rows{sample}, {len(sizes.fields):,} fields", ""]
    for name, mask in diagnosis.masks.items():
        fill = mask.num_tokens / ((mask.num_rows * mask.width) or 1)
        out.append(f"  {name}: {mask.width:,} wide, {fill:.1%} valid ({mask.num_tokens:,} tokens)")
    share = diagnosis.padding / (sizes.padded_bytes or 1)
    ratio = f"{sizes.ratio:,.1f} times fewer" if sizes.ratio >= 1 else f"more: its header takes {sizes.header:,}"
    preset, fits = diagnosis.preset, list[str]()
    if preset is not None:
        fewer, token = 1 - preset.wire_bytes / sizes.wire_bytes, preset.pad_token_id
        fits = [
            f"preset:    {preset.wire_bytes:,} bytes, {fewer:.1%} fewer, with maskpack.fields.{preset.name}",
            f"           compress(batch, registry={preset.name}{'' if token is None else f', pad_token_id={token}'})",
        ]
    largest = sorted(sizes.fields, key=lambda field: -field.wire_bytes)[:_LARGEST]
    objects = [f"Python objects {sizes.objects:,}"] if sizes.objects else []
    shown = [*(f"{show(field.path)} {field.wire_bytes:,}" for field in largest if field.wire_bytes), *objects]
    out += [
        "",
        f"padded:    {sizes.padded_bytes:,} bytes, {share:.1%} of them padding",
        f"maskpack:  {sizes.wire_bytes:,} bytes, {ratio}",
        *fits,
        f"largest on the wire: {', '.join(shown) or 'nothing'}",
    ]
    counts = diagnosis.counts
    if counts is not None and counts.shared_tokens:
        out.append(
            f"prefixes: {counts.shared_tokens / counts.tokens:.1%} of {counts.tokens:,} tokens repeat another row; "
            "ReplayOptions(share_prefixes=True) skips them"
        )
    out.append("")
    if diagnosis.suggestions:
        out.append(f"{len(diagnosis.suggestions)} stay padded:")
        for one in diagnosis.suggestions:
            out += [f"  {one.field}", f"    {one.seen}", f"    {one.line}"]
        title = "Pack it again with these lines:"
        if covered is not None:
            title = f"With these lines {covered.wire_bytes:,} bytes travel:"
        out += ["", title, "", *snippet(diagnosis, base).split("\n")]
    else:
        out.append("Every tensor of two or more dims is covered.")
    if diagnosis.note:
        out += ["", f"note: {diagnosis.note}"]
    return "\n".join(map(printable, out))


def snippet(diagnosis: Diagnosis, base: str) -> str:
    """Python code of a registry with which `compress(batch, registry=registry)` covers every field."""
    lines = [f"    {one.line}" for one in diagnosis.suggestions]
    code = re.sub(r"'.*?'", "", " ".join([base, *lines]))  # without the names of fields and masks
    names = set(re.findall(r"\b(?:MaskNestingSpec|RL_FIELDS|EDGE|PAD_TOKEN_ID|PER_ROW|SIGNED_ZERO|ANY_ZERO)\b", code))
    token = "" if diagnosis.pad_token_id is None else f", pad_token_id={diagnosis.pad_token_id}"
    imported = ", ".join(sorted(names, key=lambda name: (not name.isupper(), name)))
    head = [f"from maskpack import {imported}", "", f"registry = {base} | {{"]
    return "\n".join([*head, *lines, "}", f"# compress(batch, registry=registry{token})"])


def as_json(diagnosis: Diagnosis, file: str, base: str) -> dict[str, Any]:
    """The diagnosis as plain values."""
    covered, suggestions = diagnosis.covered, diagnosis.suggestions
    return {
        "file": file,
        **to_json(diagnosis.sizes),
        "padding_bytes": diagnosis.padding,
        "wire_bytes_with_lines": None if covered is None else covered.wire_bytes,
        "preset": None if diagnosis.preset is None else diagnosis.preset._asdict(),
        **(dict.fromkeys(TokenCounts._fields) if diagnosis.counts is None else diagnosis.counts._asdict()),
        "masks": {
            name: {"rows": mask.num_rows, "width": mask.width, "num_tokens": mask.num_tokens}
            for name, mask in diagnosis.masks.items()
        },
        "stay_padded": [
            {**asdict(one.field), "dtype": str(one.field.dtype)[6:], "seen": one.seen, "line": one.line}
            for one in suggestions
        ],
        "registry": snippet(diagnosis, base) if suggestions else None,
        "note": diagnosis.note or None,
    }
