"""The command `maskpack doctor`: what padding costs a batch, which fields stay padded, and the registry line for each;
whether the registry of a trainer takes fewer bytes.

batch -- compress ----> sizes as it is --------------------.
      -- compress ----> sizes by the best preset ----------+
      -- found_axes --> axes, if the registry lacks them --+--> Diagnosis --> text, JSON, or a registry in a file
      -- Suggester ---> a spec for each padded field ------+
      -- with_hints, strict compress --> sizes with these -'
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath
from typing import Any, NamedTuple, cast

from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.keys import path_of, plain, show
from maskpack.core.pads import PAD_TOKEN_ID, Pad
from maskpack.core.tree import flatten
from maskpack.errors import LayoutError, MaskpackError
from maskpack.fields.options import reading
from maskpack.fields.presets import PRESETS
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed.batch import PackedBatch, decompress
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.sizes import Figures, TokenCounts, figures, printable, to_json, token_counts
from maskpack.tools.cover import NONE, Cover, axes_of, base_of, checked, compressed, cover, uncovered
from maskpack.tools.files import Unusable, one_line, saved_batch, saved_registry, write_registry
from maskpack.tools.suggest import Suggester, Suggestion, line_of

_LARGEST = 5
_NAMES = ("RL_FIELDS", "MaskNestingRegistry", "MaskNestingSpec", "MaskAxis", *Pad.__members__)
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
        covered: sizes with the registry of `cover`; None if it adds nothing to the one given, or the batch was packed.
        cover: the registry that covers the batch; of a batch that was packed, without new axes and unchecked.
        preset: the one that takes the fewest bytes, if it is worth its name; None if the batch was packed.
        note: about a pad_token_id that was not given; empty if none is needed.
        refusal: why `compress` refuses the batch with the registry given; `sizes` are those with the axes of `cover`.
            Empty if it does not.
    """

    sizes: Figures
    covered: Figures | None
    cover: Cover
    preset: Preset | None
    note: str
    refusal: str

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """One for each field that stays padded."""
        return self.cover.suggestions

    @property
    def counts(self) -> TokenCounts | None:
        """Tokens of the batch, and those that rows share; None without token ids."""
        return token_counts(self.cover.packed)

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
    known = Suggester(tensors, registry, pad_token_id)
    preset = None if saved is not None else _preset_of(tensors, registry, pad_token_id)
    axes = NONE if saved is not None else axes_of(tensors, known)
    base, refusal = base_of(registry, known, axes), ""
    try:
        packed = compressed(tensors, registry, known.pad_token_id) if saved is None else saved
    except LayoutError as error:
        fits = f" maskpack.fields.{preset.name} takes this batch, in {preset.wire_bytes:,} bytes." if preset else ""
        refusal = f"{error}{fits}"
        try:
            packed = compressed(tensors, base | MaskNestingRegistry({}, axes.axes), known.pad_token_id)
        except LayoutError:
            raise LayoutError(refusal) from error
    sizes = figures(packed, left=False)
    if saved is not None:
        found, covered = uncovered(saved, base, known, sizes), None
    else:
        found = cover(tensors, base, axes, known, sizes, pad_token_id)
        covered = figures(found.packed, left=False) if found.adds else None
    if preset is not None and preset.wire_bytes > _WORTH * sizes.wire_bytes and not (refusal or found.adds):
        preset = None
    note = "" if pad_token_id is not None else _note(found, packing=saved is None)
    return Diagnosis(sizes, covered, found, preset, note, refusal)


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
            found.append(Preset(name, figures(compressed(batch, preset, token), left=False).wire_bytes, token))
    return min(found, key=lambda preset: preset.wire_bytes, default=None)


def _note(found: Cover, packing: bool) -> str:
    """The note about a pad_token_id that was not given."""
    token, registry = found.pad_token_id, found.registry
    if token is not None:
        return (
            f"pad_token_id was not given; {token} is the value under the masks of the token fields. Pass it to "
            f"compress as pad_token_id={token}."
        )
    specs = [registry.find(form.path) for form in found.packed.schema.forms if form.kind == "padded" and packing]
    if any(spec is not None and PAD_TOKEN_ID in spec.pads for spec in specs):
        return "pad_token_id was not given, and no padding shows it. Pass that of the tokenizer to compress."
    return ""


# -------------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> tuple[str, int]:
    """The command; returns what to print and the exit status."""
    if len(args.file) > 1 and not args.strict and args.write is None:
        several = "Give one file, check several with --strict, or write a registry for all with --write"
        raise Unusable(f"{len(args.file)} files; expected one. {several}")
    registry = saved_registry(args.registry)
    base = "RL_FIELDS" if args.registry is None else "registry"

    def diagnosed(file: str) -> Diagnosis:
        batch = saved_batch(file, args.allow_pickle, args.max_bytes)
        return diagnose(batch, registry, args.pad_token_id, max_bytes=None)

    if args.strict:
        if args.write is not None:
            raise Unusable("--write and --strict do not go together. Write the registry first, then check with it")
        return _strict(args.file, diagnosed, base, args.json)
    if len(args.file) > 1:
        return _written(args, registry, base)
    (file,) = args.file
    diagnosis = diagnosed(file)
    if args.write is not None:
        write_registry(diagnosis.cover.registry, args.write)
    out = json.dumps(as_json(diagnosis, file, base), indent=2) if args.json else text(diagnosis, file, base)
    if args.write is not None and not args.json:
        out = "\n".join([out, "", *map(printable, _written_to(args.write))])
    return out, int(args.write is None and bool(diagnosis.suggestions or diagnosis.refusal))


def _written(args: argparse.Namespace, registry: MaskNestingRegistry, base: str) -> tuple[str, int]:
    """Writes a registry that takes all files: that of the first, with what each other file adds to it. Raises Unusable
    if there is none."""
    token = args.pad_token_id
    out: list[str] = []
    found: list[dict[str, Any]] = []
    for file in args.file:
        batch: Any = saved_batch(file, args.allow_pickle, args.max_bytes)
        with _refusal_names(file):
            diagnosis = diagnose(batch, registry, token, max_bytes=None)
        found.append(as_json(diagnosis, file, base))
        out += _short(diagnosis, file)
        cover, base = diagnosis.cover, "registry"
        token = cover.pad_token_id if token is None else token
        registry = cover.extended if cover.adds else registry
    for file in args.file:
        batch = saved_batch(file, args.allow_pickle, args.max_bytes)
        with _refusal_names(file):
            checked(decompress(batch, max_bytes=None) if isinstance(batch, PackedBatch) else batch, registry, token)
    write_registry(registry, args.write)
    given = "" if token is None else f", with pad_token_id={token}"
    out += ["", f"Checked: strict mode takes all {len(args.file)} files{given}, and every bit comes back."]
    out += _written_to(args.write)
    return json.dumps(found, indent=2) if args.json else "\n".join(map(printable, out)), 0


@contextmanager
def _refusal_names(file: str) -> Generator[None]:
    """Raises Unusable that names the file in place of a MaskpackError."""
    try:
        yield
    except MaskpackError as error:
        raise Unusable(
            f"no registry was found for all files; write one without {file}. It is refused: {error}"
        ) from error


def _written_to(file: str) -> list[str]:
    return [f"written to {file}, for --registry. In Python:", f"registry = {reading(file)}"]


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
            if diagnosis.refusal:
                raise Unusable(diagnosis.refusal)
        except (Unusable, MaskpackError, OSError, MemoryError, RuntimeError) as error:
            status = 2
            found.append({"file": file, "error": one_line(error)})
            out.append(f"{file}: {one_line(error)}")
            continue
        found.append(as_json(diagnosis, file, base))
        status = max(status, min(len(diagnosis.suggestions), 1))
        out += _short(diagnosis, file)
    return json.dumps(found, indent=2) if in_json else "\n".join(map(printable, out)), status


def _short(diagnosis: Diagnosis, file: str) -> list[str]:
    """The lines about one of several files."""
    padded = len(diagnosis.suggestions)
    out = [
        f"{file}: {_stay_padded(padded) if padded else f'{len(diagnosis.sizes.fields):,} fields, none stays padded'}"
    ]
    for one in diagnosis.suggestions:
        out += [f"  {one.field}", f"    {one.seen}", f"    {one.line}"]
    return out + ([f"  note: {diagnosis.note}"] if diagnosis.note else [])


def _stay_padded(fields: int) -> str:
    return "1 stays padded" if fields == 1 else f"{fields:,} stay padded"


def text(diagnosis: Diagnosis, file: str, base: str) -> str:
    """The diagnosis as text; the lines go on top of the registry `base`, a name in Python, unless they stand alone."""
    sizes, covered = diagnosis.sizes, diagnosis.covered
    sample = " (a sample)" if "://" in file or FilePath(file).is_dir() else ""
    out = [f"{file}: {sizes.rows:,} rows{sample}, {len(sizes.fields):,} fields", ""]
    for name, mask in diagnosis.cover.packed.layouts.items():
        fill = mask.num_tokens / ((mask.num_rows * mask.width) or 1)
        out.append(f"  {name}: {mask.width:,} wide, {fill:.1%} valid ({mask.num_tokens:,} tokens)")
    share = diagnosis.padding / (sizes.padded_bytes or 1)
    ratio = f"{sizes.ratio:,.1f} times fewer" if sizes.ratio >= 1 else f"more: its header takes {sizes.header:,}"
    preset, fits = diagnosis.preset, list[str]()
    if preset is not None:
        fewer, token = 1 - preset.wire_bytes / sizes.wire_bytes, preset.pad_token_id
        fits = [
            f"preset:    {preset.wire_bytes:,} bytes{f', {fewer:.1%} fewer' if fewer > 0 else ''}, with "
            f"maskpack.fields.{preset.name}",
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
    padded = {one.field.path for one in diagnosis.suggestions}
    if diagnosis.refusal:
        out += [f"refused with {base}: {diagnosis.refusal}", ""]
    if padded:
        sent = sum(field.wire_bytes for field in sizes.fields if field.path in padded)
        number = len(diagnosis.suggestions)
        all_the_same = f"{'it is' if number == 1 else 'they are'} compressed all the same, to {sent:,} bytes:"
        out.append(f"{_stay_padded(number)}; {all_the_same}")
        for one in diagnosis.suggestions:
            out += [f"  {one.field}", f"    {one.seen}", f"    {one.line}"]
    else:
        out.append("Every tensor of two or more dims is covered.")
    found = diagnosis.cover
    if found.added.axes:
        out += ["", "Replay needs the axes sequence and response. The fields show them:"]
        out += [f"  {clause}" for clause in found.found.seen]
    if found.added.fields or found.added.axes:
        if covered is None:
            out += ["", "Pack it again with this registry:"]
        else:
            if found.scored is not None:
                scored = f", replay scores {found.scored:,} response tokens"
            elif found.found.apart is not None:
                scored = ""
            else:
                scored = ", replay finds no response axis (name its masks as the axes sequence and response)"
            more = covered.wire_bytes - sizes.wire_bytes
            gain = f"{more:,} more than now" if more > 0 else f"{covered.ratio:,.1f} times fewer than padded"
            out += ["", f"With this registry {covered.wire_bytes:,} bytes travel, {gain}."]
            out += [f"Checked: strict mode takes the batch, every bit comes back{scored}."]
        out += _side_by_side(diagnosis)
        out += ["", *snippet(diagnosis, base).split("\n")]
    if diagnosis.note:
        out += ["", f"note: {diagnosis.note}"]
    return "\n".join(map(printable, out))


def _side_by_side(diagnosis: Diagnosis) -> list[str]:
    """The remedy for prompts and responses that are padded apart."""
    apart = diagnosis.cover.found.apart
    if apart is None:
        return []
    (prompts, _), (responses, _) = apart
    parent = path_of(prompts)[:-1]
    fields = {form.path for form in diagnosis.cover.packed.schema.forms}
    names = ("input_ids", "attention_mask")
    if any((*parent, name) in fields for name in names):
        names = ("sequence_ids", "sequence_mask")
    return [
        "",
        f"Replay needs one sequence. If {show(prompts)} and {show(responses)} are prompts and their responses, put",
        "them side by side into the batch, and run the doctor again; with the hint concat the ids cost almost nothing:",
        *(
            f"  batch[{plain((*parent, name))!r}] = torch.cat([batch[{head!r}], batch[{tail!r}]], 1)"
            for name, head, tail in zip(names, *apart, strict=True)
        ),
    ]


def snippet(diagnosis: Diagnosis, base: str) -> str:
    """Python code of a registry with which `compress(batch, registry=registry)` covers every field."""
    found = diagnosis.cover
    lines = [line_of(key, spec) for key, spec in found.added.items()]
    onto = f"{base} | " if found.base.fields else ""
    if not found.added.axes:
        begin, end = ("{", "}") if onto else ("MaskNestingRegistry({", "})")
        code = [f"registry = {onto}{begin}", *(f"    {line}" for line in lines), end]
    else:
        axes = [line_of(name, way) for name, ways in found.added.axes.items() for way in ways]
        code = [f"registry = {onto}MaskNestingRegistry(", "    {"]
        code += [*(f"        {line}" for line in lines), "    },", "    axes={"]
        code += [*(f"        {line}" for line in axes), "    },", ")"]
    named = re.sub(r"'.*?'", "", " ".join(code))  # without the names of fields and masks
    names = {name for name in re.findall(r"\w+", named) if name in _NAMES}
    imported = ", ".join(sorted(names, key=lambda name: (not name.isupper(), name)))
    token = "" if found.pad_token_id is None else f", pad_token_id={found.pad_token_id}"
    code += [f"# compress(batch, registry=registry{token})"]
    if found.found.ids is not None and found.scored is not None:
        ids = "" if found.found.ids == "input_ids" else f", input_ids={found.found.ids!r}"
        code.append(f"# ReplayOptions(registry=registry{ids})")
    return "\n".join([f"from maskpack import {imported}", "", *code])


def as_json(diagnosis: Diagnosis, file: str, base: str) -> dict[str, Any]:
    """The diagnosis as plain values."""
    covered, found, counts = diagnosis.covered, diagnosis.cover, diagnosis.counts
    return {
        "file": file,
        **to_json(diagnosis.sizes),
        "padding_bytes": diagnosis.padding,
        "wire_bytes_with_lines": None if covered is None else covered.wire_bytes,
        "preset": None if diagnosis.preset is None else diagnosis.preset._asdict(),
        **(dict.fromkeys(TokenCounts._fields) if counts is None else counts._asdict()),
        "masks": {
            name: {"rows": mask.num_rows, "width": mask.width, "num_tokens": mask.num_tokens}
            for name, mask in found.packed.layouts.items()
        },
        "stay_padded": [
            {**asdict(one.field), "dtype": str(one.field.dtype)[6:], "seen": one.seen, "line": one.line}
            for one in diagnosis.suggestions
        ],
        "refusal": diagnosis.refusal or None,
        "axes": list(found.found.seen),
        "apart": None if found.found.apart is None else [[*map(show, part)] for part in found.found.apart],
        "response_tokens": found.scored,
        "registry": snippet(diagnosis, base) if found.added.fields or found.added.axes else None,
        "note": diagnosis.note or None,
    }
