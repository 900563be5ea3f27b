"""The command `maskpack doctor`: where the bytes of a batch go, and the registry that strict mode and replay need.

some rows         -- RL_FIELDS, each preset, guessed masks --> the registry that fits best
all, in parts     -- strict compress --> the bytes of each field
                  -- decompress -------> the same bits?
                  -- PackedInputs -----> the tokens that replay scores, or why it refuses
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor

from maskpack.core.difference import difference
from maskpack.core.keys import Key, show
from maskpack.core.pads import PUBLIC, Pad
from maskpack.core.tree import flatten, has
from maskpack.errors import LayoutError, MaskpackError, MaskpackWarning
from maskpack.fields.options import not_strict, reading
from maskpack.fields.presets import PRESETS
from maskpack.fields.registry import MaskNestingRegistry
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.check import COVERAGE, Finding, check, stays_padded
from maskpack.nesting.documents import BOUNDS, LENGTHS
from maskpack.nesting.nest import unnest_batch_by_mask
from maskpack.nesting.response import RESPONSE, SEQUENCE
from maskpack.nesting.rows import take
from maskpack.nesting.schema import LAYOUTS
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.report import Report, printable, report
from maskpack.packed.table import forget
from maskpack.replay import PackedInputs, ReplayOptions
from maskpack.tools import files
from maskpack.tools.suggest import FoundAxes, Suggester, Suggestion, found_axes, line_of

_CALL = "maskpack doctor"
_NAMES = ("RL_FIELDS", "MaskNestingRegistry", "MaskNestingSpec", "MaskAxis", *PUBLIC)
_IDS: tuple[Key, ...] = ("input_ids", "sequences", "tokens", "token_ids")
"""The names that token ids have in presets."""
_PART, _PARTS = 1 << 23, 32
"""A batch is packed in parts of so many bytes, or in so many parts, if these are larger."""
_ROWS = 128
"""The rows that registries are tried on."""
_T = TypeVar("_T", bound=Any)


@dataclass(frozen=True)
class Diagnosis:
    """A registry with which strict mode takes a batch.

    Attributes:
        name: of the base that lines and axes are added to; "registry" for one that was given, empty for none.
        pad_token_id: the one given, or the one seen under the masks.
        sizes: of the batch packed with the registry.
        ids: the field of the token ids.
        scored: the response tokens that replay finds; None if it does not take the batch.
        why: why it does not.
        before: sizes with the registry given, or with RL_FIELDS; None if that refuses the batch.
        refusal: why it does.
        padded: the fields that stay padded with that.
        findings: what else will go wrong.
    """

    name: str
    registry: MaskNestingRegistry
    found: FoundAxes
    suggestions: tuple[Suggestion, ...]
    pad_token_id: int | None
    sizes: Report
    ids: Key
    scored: int | None
    why: str
    before: Report | None = None
    refusal: str = ""
    padded: tuple[Finding, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def adds(self) -> bool:
        """Whether it is another registry than the one given."""
        return bool(self.suggestions or self.found.axes or self.name in PRESETS)


def diagnose(
    batch: TensorDictBase | PackedBatch, registry: MaskNestingRegistry | None = None, pad_token_id: int | None = None
) -> Diagnosis:
    """Looks at a batch, padded, jagged, nested or packed, which is not changed.

    Args:
        registry: as for `compress`; None for RL_FIELDS, a preset or guessed masks, whatever fits best.
        pad_token_id: the tokenizer's; by default the value under the masks of the token fields.

    Raises:
        LayoutError: no registry fits the batch.
    """
    batch = decompress(batch, max_bytes=None) if isinstance(batch, PackedBatch) else batch
    batch = unnest_batch_by_mask(batch) if has(batch, LAYOUTS) else batch
    given = RL_FIELDS if registry is None else registry
    known, before, refusal = Suggester(batch, given, pad_token_id), None, ""
    try:
        before = _sizes(batch, given, known.pad_token_id)
    except LayoutError as error:
        refusal = str(error)
    rows = _some_rows(batch)
    packed = tuple(one for one in check(rows, {}) if one.kind == "documents")
    blind = any(one.path[-1] not in ("position_ids", *BOUNDS, *LENGTHS) for one in packed)
    bases = {"": MaskNestingRegistry({}), "RL_FIELDS": RL_FIELDS, **PRESETS}
    bases = bases if registry is None else {"registry": registry}
    fits: dict[tuple[str, bool], Diagnosis] = {}
    for name, base in bases.items():
        for axes in (False,) if name in PRESETS else (False, True):
            try:
                fits[name, axes] = _fit(rows, name, base, axes, pad_token_id, blind)
            except MaskpackError as error:
                refusal = refusal or str(error)
    fits = {key: fit for key, fit in fits.items() if key[0] not in PRESETS or fit.scored is not None}
    if not fits:
        raise LayoutError(refusal)

    def rank(key: tuple[str, bool]) -> tuple[bool, int, bool]:
        count = len(fits[key].suggestions) + len(fits[key].found.axes)
        return fits[key].scored is None, count, not (key[0] or count)

    name, axes = min(fits, key=rank)
    out = _fit(batch, name, bases[name], axes, pad_token_id, blind)
    padded = () if before is None else (*_dense(before, known), *known.hidden())
    findings = (*(packed if blind else ()), *out.findings)
    return replace(out, before=before, refusal="" if before else refusal, padded=padded, findings=findings)


def _fit(
    batch: TensorDictBase, name: str, base: MaskNestingRegistry, axes: bool, pad_token_id: int | None, blind: bool
) -> Diagnosis:
    """A base with the lines that a batch needs, tried: packed in strict mode, compared with what comes back, and given
    to replay, unless that is `blind` to the documents in a row. `axes`: with those that the fields show."""
    known, found = Suggester(batch, base, pad_token_id), FoundAxes({}, None, "")
    if axes and not blind and not known.gives(SEQUENCE, RESPONSE):
        found = found_axes(known.tensors, known.pad_token_id)
        ways = {
            key: tuple(dict.fromkeys([*(base.axes.get(key, ()) if name == "registry" else ()), *own]))
            for key, own in found.axes.items()
        }
        known = Suggester(batch, base | MaskNestingRegistry({}, ways), pad_token_id)
    token = known.pad_token_id
    lines = tuple(map(known.suggest, [*_dense(_sizes(batch, known.registry, token), known), *known.hidden()]))
    registry = known.registry | {one.key: one.spec for one in lines}
    ids = found.ids or next((key for key in _IDS if (key,) in known.tensors), "input_ids")
    options = ReplayOptions(registry=registry, input_ids=ids, no_prompt="skip")
    sizes, scored, why, first = list[Report](), 0, "", 0
    findings: dict[tuple[Any, str], Finding] = {}
    for part, packed in _packed(batch, registry, token, strict=True):
        back = dict(flatten(decompress(packed, max_bytes=None)))
        for path, x in flatten(part):
            if isinstance(x, Tensor) and not _same(x, back[path].to(x.device)):
                raise LayoutError(
                    f'{_CALL}: field "{show(path)}" does not come back with its bits. Please report this.'
                )
        sizes.append(report(packed))
        for one in check(part, registry, pad_token_id=token or 0):
            if one.kind not in COVERAGE:
                findings.setdefault((one.path, one.kind), replace(one, rows=tuple(row + first for row in one.rows)))
        first += packed.num_rows
        try:
            inputs = None if why or blind else PackedInputs.of(part, options=options)
            if inputs is not None:  # of a batch without a response, a loss mask picks its tokens
                tokens, own = inputs.response.num_tokens, inputs.scored
                scored += tokens if own is None or tokens < inputs.num_tokens else len(own)
        except MaskpackError as error:
            why = str(error)
    tokens = None if why or blind else scored
    return Diagnosis(name, registry, found, lines, token, _sum(sizes), ids, tokens, why, findings=(*findings.values(),))


def _same(x: Any, y: Any) -> bool:
    if x.is_nested:
        return difference(x.offsets(), y.offsets()) is None and _same(x.values(), y.values())
    return difference(x, y) is None


# -------------------------------------------------------------------- parts


def _packed(
    batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None, strict: bool = False
) -> Iterator[tuple[TensorDictBase, PackedBatch]]:
    """Parts of a batch, and as `compress` packs them in a process that has packed nothing else, without warnings."""
    forget()  # encodings that were chosen for another registry
    rows, size = batch.batch_size[0] if batch.batch_dims else 1, files.nbytes_of(batch)
    count = max(1, min(rows, size // max(_PART, size // _PARTS)))
    for number in range(count):
        bounds = slice(rows * number // count, rows * (number + 1) // count)
        part = batch if count == 1 else take(batch, bounds)
        with warnings.catch_warnings(), not_strict():
            warnings.simplefilter("ignore", MaskpackWarning)  # the suggestions say it
            packed = compress(part, registry=registry, pad_token_id=pad_token_id or 0, strict_mask_nesting=strict)
        yield part, packed


def _sizes(batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int | None) -> Report:
    return _sum([report(packed) for _, packed in _packed(batch, registry, pad_token_id)])


def _some_rows(batch: TensorDictBase) -> TensorDictBase:
    rows = batch.batch_size[0] if batch.batch_dims else 0
    most = max(1, min(_ROWS, rows * _PART // max(files.nbytes_of(batch), 1)))
    return take(batch, np.linspace(0, rows - 1, most).astype(np.int64)) if most < rows else batch


def _sum(parts: list[Report]) -> Report:
    out, *more = parts
    for part in more:
        same = [
            replace(_plus(x, y, "padded_bytes", "real_bytes", "wire_bytes"), reason=x.reason or y.reason)
            for x, y in zip(out.fields, part.fields, strict=True)
        ]
        out = replace(_plus(out, part, "rows", "layouts", "objects", "header"), fields=tuple(same), tokens=None)
    return out


def _plus(x: _T, y: _T, *names: str) -> _T:
    return replace(x, **{name: getattr(x, name) + getattr(y, name) for name in names})


def _dense(sizes: Report, known: Suggester) -> list[Finding]:
    return [stays_padded(of.path, known.tensors[of.path], of.reason) for of in sizes.fields if of.reason]


# -------------------------------------------------------------------- the command


def run(args: argparse.Namespace) -> tuple[str, int]:
    """The command; returns what to print and the exit status. Several files share the registry of the first and what
    each other one adds to it; with `--strict` each is looked at by itself."""
    if args.write is not None:
        if args.strict:
            raise files.Unusable("--write and --strict do not go together. Write the registry, then check with it")
        files.need_writable(args.write)
    registry = None if args.registry is None else files.saved_registry(args.registry)
    token, several, status = args.pad_token_id, len(args.file) > 1, 0
    found: list[Mapping[str, Any]] = []
    out: list[str] = []
    for file in args.file:
        try:
            batch, note = files.saved_batch(file, args.allow_pickle, args.max_bytes)
            one = diagnose(batch, registry, token)
            if one.refusal and args.strict:
                raise files.Unusable(one.refusal)
        except (files.Unusable, MaskpackError, OSError, MemoryError, RuntimeError) as error:
            if not args.strict and several and isinstance(error, MaskpackError):
                raise files.Unusable(f"no registry takes all files. Leave {file} out: {error}") from error
            if not args.strict:
                raise
            found.append({"file": file, "error": files.one_line(error)})
            out, status = [*out, f"{file}: {files.one_line(error)}"], 2
            continue
        found.append(as_json(one, file, note))
        out += _short(one, file) if several or args.strict else text(one, file, note).split("\n")
        status = max(status, int(bool(one.padded or one.refusal)))
        if not args.strict:
            registry, token = one.registry, one.pad_token_id if token is None else token
    if several and not args.strict:
        for file in args.file:
            again = diagnose(files.saved_batch(file, args.allow_pickle, args.max_bytes)[0], registry, token)
            if again.suggestions:
                raise files.Unusable(
                    f"no registry takes all files. Leave {file} out: it needs {again.suggestions[0].line}"
                )
        padded, wire = (sum(one[name] for one in found) for name in ("padded_bytes", "wire_bytes"))
        out += ["", f"All files: {padded:,} bytes padded, {wire:,} packed, {padded / wire:,.1f} times fewer."]
        out += ["Checked: strict mode takes all of them with one registry, and every bit comes back."]
    if args.write is not None and registry is not None:
        files.write_registry(registry, args.write)
        out += ["", f"written to {args.write}, for --registry. In Python:", f"registry = {reading(args.write)}"]
        status = 0
    shown: Any = found if several or args.strict else found[0]
    return json.dumps(shown, indent=2) if args.json else "\n".join(map(printable, out)), status


def _short(one: Diagnosis, file: str) -> list[str]:
    """The lines about one of several files."""
    named = f"; maskpack.fields.{one.name} fits" if one.name in PRESETS else ""
    fields = f"{len(one.sizes.fields):,} fields, {len(one.padded) or 'none'} of them padded"
    return [f"{file}: {fields}{named}", *_lines(one), *(f"  {note}" for note in _notes(one))]


def _lines(one: Diagnosis) -> list[str]:
    return [line for of in one.suggestions for line in (f"  {of.field.line}", f"    {of.seen}", f"    {of.line}")]


def _notes(one: Diagnosis) -> list[str]:
    """The findings, and the pad token."""
    specs = [one.registry.find(of.path) for of in one.sizes.fields if of.kind == "padded"]
    needed = any(spec is not None and Pad.PAD_TOKEN_ID in spec.pads for spec in specs)
    seen = "no padding shows the pad token" if one.pad_token_id is None else f"the pad token is {one.pad_token_id}"
    note = f"note: {seen}. Pass that of the tokenizer to compress as pad_token_id" if needed else ""
    return [*map(str, one.findings), *([note] if note else [])]


def text(one: Diagnosis, file: str, note: str = "") -> str:
    """The diagnosis as text."""
    sizes, base = one.sizes, "the registry" if one.name == "registry" else "RL_FIELDS"
    rows = f"{sizes.rows:,} row" + ("s" if sizes.rows != 1 else "")
    out = [f"{file}: {rows}, {len(sizes.fields):,} fields{f' ({note})' if note else ''}", ""]
    out += [*sizes.table(), "", f"as read: {sizes.padded_bytes:,} bytes"]
    for found, which in ((one.before, base), (sizes if one.adds else None, "the registry below")):
        if found is not None:
            out.append(f"packed:  {found.wire_bytes:,} bytes, {found.ratio:,.1f} times fewer, with {which}")
    out.append("")
    if one.refusal:
        out.append(f"{base} refuses the batch: {one.refusal}")
    elif not one.padded:
        out.append(f"Every tensor of two or more dims is covered by {base}.")
    else:
        out.append(f"{len(one.padded):,} of the fields stay padded with {base}, and are compressed all the same.")
    if one.adds:
        needs = "Strict mode and replay need a registry" if one.padded else "Replay needs a registry"
        out += [f"{needs}; for bytes alone nothing is needed.", *_lines(one)]
        out += [f"  {one.found.seen}"] if one.found.seen else []
        out += ["", *snippet(one).split("\n")]
    out += ["", "Checked: strict mode takes the batch, and every bit comes back."]
    if one.scored is None:
        out.append(f"Not checked: replay, which does not take the batch. {one.why}".strip())
    else:
        out += [
            f"Replay finds {one.scored:,} response tokens.",
            "Not checked: that the masks mean this, and log-probs.",
        ]
        out[-1] += " The first response_log_probs of a model compares a row with that row alone."
    return "\n".join(map(printable, "\n".join([*out, *_notes(one)]).split("\n")))


def snippet(one: Diagnosis) -> str:
    """Python code of a registry with which `compress(batch, registry=registry)` covers every field."""
    lines = [f"    {of.line}" for of in one.suggestions]
    ways = [f"    {line_of(name, way)}" for name, own in one.found.axes.items() for way in own]
    code = ["MaskNestingRegistry({", *lines, *(["}, axes={", *ways] if ways else []), "})"]
    if one.name:
        code = [f"{one.name} | {code[0]}", *code[1:]] if lines or ways else [one.name]
    code[0] = f"registry = {code[0]}"
    words = re.findall(r"\w+", re.sub(r"'.*?'", "", " ".join(code)))  # without the names of fields and masks
    imported = sorted({*_NAMES} & {*words}, key=lambda word: (not word.isupper(), word))
    head = [f"from maskpack import {', '.join(imported)}"] if imported else []
    head += [f"from maskpack.fields import {one.name}"] if one.name in PRESETS else []
    token = "" if one.pad_token_id is None else f", pad_token_id={one.pad_token_id}"
    code.append(f"# compress(batch, registry=registry{token})")
    if one.scored is not None:
        code.append(f"# ReplayOptions(registry=registry, input_ids={one.ids!r})")
    return "\n".join([*head, "", *code])


def as_json(one: Diagnosis, file: str, note: str = "") -> dict[str, Any]:
    """The diagnosis as plain values."""
    return {
        "file": file,
        "note": note,
        **one.sizes.to_dict(),
        "wire_bytes_before": None if one.before is None else one.before.wire_bytes,
        "stay_padded": [list(field.path) for field in one.padded],
        "lines": [of.line for of in one.suggestions],
        "base": one.name,
        "registry": snippet(one),
        "response_tokens": one.scored,
        "why": one.why or None,
        "refusal": one.refusal or None,
        "findings": [*map(str, one.findings)],
        "pad_token_id": one.pad_token_id,
    }
