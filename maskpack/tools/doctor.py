"""The command `maskpack doctor`: what padding costs a batch, what would travel dense, and the line that covers it.

batch -- compress --> figures of what travels now ---.
      -- Covers ----> a spec for each dense field ---+--> Diagnosis --> plain words, or JSON
      -- compress --> figures with these specs ------'
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from tensordict import TensorDictBase

from maskpack.core.bits import from_words
from maskpack.core.keys import Key
from maskpack.errors import MaskpackWarning
from maskpack.fields.registry import DENSE, MaskNestingRegistry, Path, show
from maskpack.fields.rl_fields import RL_FIELDS
from maskpack.nesting.coverage import DenseField
from maskpack.nesting.survey import dense_fields
from maskpack.packed.batch import PackedBatch, compress, decompress
from maskpack.packed.decode import MAX_BYTES
from maskpack.packed.sizes import Figures, figures, printable, to_json
from maskpack.tools.files import FAULTS, Unusable, add_limit, enough_memory, one_line, saved_batch, saved_registry
from maskpack.tools.suggest import Cover, Covers, names_in, spec_text

_LARGEST = 5


@dataclass(frozen=True)
class Axis:
    """A layout of the batch: B rows of a width, T real positions in all."""

    name: str
    rows: int
    width: int
    num_tokens: int

    @property
    def fill(self) -> float:
        """The share that is real; 1.0 without any position."""
        return self.num_tokens / (self.rows * self.width) if self.rows * self.width else 1.0


@dataclass(frozen=True)
class Finding:
    """A tensor that travels dense, and what would cover it; `key` is its place in a registry, that of the object around
    it where it lies inside one."""

    field: DenseField
    cover: Cover
    key: Path

    @property
    def line(self) -> str:
        """Its entry in a registry, in Python."""
        whole = "  # travels whole" if self.cover.spec.mask is None else ""
        return f"{_key(self.key)!r}: {spec_text(self.cover.spec)},{whole}"


@dataclass(frozen=True)
class Diagnosis:
    """What there is to say of a batch.

    Attributes:
        now: the figures of the batch as it would travel, or travels.
        cured: with the lines of the findings; None if there are none, or the batch was packed already.
        axes: its layouts.
        findings: what travels dense.
        notes: warnings, a sentence or two each.
        pad_token_id: given or seen.
    """

    now: Figures
    cured: Figures | None
    axes: tuple[Axis, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    pad_token_id: int | None

    @property
    def padding(self) -> int:
        """Bytes of the padded batch that are padding, as far as masks are known."""
        best = self.cured or self.now
        return sum(field.padded_bytes - field.real_bytes for field in best.fields if field.kind == "padded")


def diagnose(
    batch: TensorDictBase | PackedBatch,
    registry: MaskNestingRegistry = RL_FIELDS,
    pad_token_id: int | None = None,
    max_bytes: int | None = MAX_BYTES,
    masks: Sequence[Key] = (),
) -> Diagnosis:
    """Looks at a batch.

    Args:
        batch: padded, nested or packed. It is not changed.
        registry: what is known of its fields.
        pad_token_id: the tokenizer's; looked for under the masks if it is not given.
        max_bytes: of a packed batch, which is decoded: as for `decompress`.
        masks: fields [B, width] that are masks, beside the axes of the registry; looked for if none is named.

    Raises:
        LayoutError: masks that are none, fields without plain bits, or more than `max_bytes`.
    """
    saved = cast("PackedBatch | None", batch if isinstance(batch, PackedBatch) else None)
    plain: Any = batch if saved is None else decompress(saved, max_bytes=max_bytes)
    covers = Covers(plain, registry, pad_token_id, masks)
    token = covers.pad_token_id or 0
    misfits = covers.misfits() if saved is None else {}
    known = registry | {_key(path): DENSE for path in misfits}
    packed = _compressed(plain, known, token) if saved is None else saved
    dense = dense_fields(plain, known, pad_token_id=token) if saved is None else _dense(saved)
    dense = [*(DenseField.of(path, covers.tensors[path], why) for path, why in misfits.items()), *dense]
    findings = tuple(Finding(field, covers.cover(field.path), _entry(field.path, covers)) for field in dense)
    specs = {_key(one.key): one.cover.spec for one in findings}
    cured = _compressed(plain, registry | specs, token) if saved is None and specs else None
    layouts = (packed if cured is None else cured).layouts
    return Diagnosis(
        figures(packed, left=False),
        None if cured is None else figures(cured, left=False),
        tuple(Axis(name, layout.num_rows, layout.width, layout.num_tokens) for name, layout in layouts.items()),
        findings,
        tuple(_notes(packed if cured is None else cured, covers, pad_token_id)),
        covers.pad_token_id,
    )


def _compressed(batch: TensorDictBase, registry: MaskNestingRegistry, pad_token_id: int) -> PackedBatch:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MaskpackWarning)  # findings say it
        return compress(batch, registry=registry, pad_token_id=pad_token_id)


def _dense(packed: PackedBatch) -> list[DenseField]:
    return [
        DenseField(field.path, field.shape, field.dtype, field.padded_bytes, field.reason)
        for field in figures(packed, left=False).fields
        if field.reason
    ]


def _entry(path: Path, covers: Covers) -> Path:
    """The entry of the batch that a tensor is, or lies in."""
    return next(path[:end] for end in range(len(path), 0, -1) if path[:end] in covers.paths)


def _key(path: Path) -> Any:
    return path[0] if len(path) == 1 else path


# -------------------------------------------------------------------- notes


def _notes(packed: PackedBatch, covers: Covers, pad_token_id: int | None) -> Iterator[str]:
    if pad_token_id is None and covers.pad_token_id is not None:
        yield (
            f"pad_token_id was not given; {covers.pad_token_id} is what stands under the masks of the token fields. "
            f"compress wants it said: pad_token_id={covers.pad_token_id}."
        )
    if None not in (pad_token_id, covers.pad_token_seen) and pad_token_id != covers.pad_token_seen:
        yield (
            f"the pad token is said to be {pad_token_id}, and {covers.pad_token_seen} stands under the masks of the "
            "token fields. Check it."
        )
    signed = [form for form in packed.schema.forms if _has_minus_zero(packed, form.path, form.pads, form.dtype)]
    if signed:
        yield (
            f"-0.0 under the mask of {_listed(form.path for form in signed)}, which is not 0.0, bit for bit. It is "
            "carried, at one value a row; x.masked_fill(mask == 0, 0) in the producer leaves 0.0 and costs nothing."
        )
    wide = [path for path, value in covers.tensors.items() if value.dtype == torch.float64 and value.dim() > 1]
    if wide:
        size = sum(covers.tensors[path].nbytes for path in wide if not covers.tensors[path].is_nested)
        yield f"float64: {_listed(wide)}, {size:,} bytes padded. If float32 will do, casting them halves that."
    narrow = [path for path, value in covers.tensors.items() if value.dtype == torch.int64 and _fits_int32(value)]
    if narrow:
        size = sum(covers.tensors[path].nbytes for path in narrow)
        yield (
            f"int64 whose values fit int32: {_listed(narrow)}, {size:,} bytes padded. On maskpack's wire it matters "
            "not, because integers travel in the bytes that their values need; casting them halves what they take "
            "padded and in memory."
        )


def _has_minus_zero(packed: PackedBatch, path: Path, pads: tuple[Any, ...], dtype: torch.dtype | None) -> bool:
    if dtype is None or not dtype.is_floating_point or path not in packed.fields:
        return False
    if path in packed.row_pads:
        held = from_words(packed.row_pads[path], dtype).to(torch.float64)
        return bool(((held == 0) & torch.signbit(held)).any())
    return len(pads) == 1 and str(pads[0]) == "-0.0"


def _fits_int32(value: torch.Tensor) -> bool:
    if value.is_nested or value.dim() < 2 or not value.numel():
        return False
    low, high = torch.aminmax(value)
    return int(low) >= -(2**31) and int(high) < 2**31


def _listed(paths: Any) -> str:
    return ", ".join(show(path) for path in paths)


# -------------------------------------------------------------------- what is printed


def text(found: Diagnosis, file: str, gbit: float, base: str) -> str:
    """The diagnosis in plain words; `base` is the registry that the lines go on top of, in Python."""
    now = found.now
    out = [f"{file}: {now.rows:,} rows, {len(now.fields):,} fields", ""]
    out += [
        f"  {axis.name}: {axis.width:,} wide, {axis.fill:.1%} real ({axis.num_tokens:,} positions)"
        for axis in found.axes
    ]
    share = found.padding / now.padded_bytes if now.padded_bytes else 0.0
    out += [
        "",
        f"padded:    {now.padded_bytes:,} bytes, {share:.1%} of them padding, {_seconds(now.padded_bytes, gbit)}",
        f"maskpack:  {now.wire_bytes:,} bytes, {_ratio(now)}, {_seconds(now.wire_bytes, gbit)}",
        f"largest on the wire: {_largest(now)}",
    ]
    if found.findings:
        out += ["", f"{len(found.findings)} travel dense:"]
        for one in found.findings:
            out += [f"  {one.field}", f"    {one.cover.seen}", f"    {one.line}"]
        out += ["", _outcome(found, gbit), "", snippet(found, base)]
    else:
        out += ["", "Every tensor of two or more dims is covered."]
    out += [part for note in found.notes for part in ("", f"note: {note}")]
    return "\n".join(printable(line) for part in out for line in part.split("\n"))


def snippet(found: Diagnosis, base: str) -> str:
    """Python that makes the registry of which `compress(batch, registry=registry)` covers the findings."""
    names = {name for one in found.findings for name in names_in(one.cover.spec)}
    names |= {"RL_FIELDS"} if base == "RL_FIELDS" else set()
    lines = [f"    {one.line}" for one in found.findings]
    token = "" if found.pad_token_id is None else f", pad_token_id={found.pad_token_id}"
    return "\n".join(
        [
            f"from maskpack import {', '.join(sorted(names, key=lambda name: (not name.isupper(), name)))}",
            "",
            f"registry = {base} | {{",
            *lines,
            "}",
            f"# compress(batch, registry=registry{token})",
        ]
    )


def as_json(found: Diagnosis, file: str, gbit: float, base: str) -> dict[str, Any]:
    """The diagnosis in what JSON can say."""

    def size(count: int) -> dict[str, Any]:
        return {"bytes": count, "seconds": count * 8 / (gbit * 1e9)}

    return {
        "file": file,
        "gbit": gbit,
        "covered": not found.findings,
        "axes": [
            {"name": axis.name, "rows": axis.rows, "width": axis.width, "real": axis.num_tokens, "fill": axis.fill}
            for axis in found.axes
        ],
        "padded": {**size(found.now.padded_bytes), "padding_bytes": found.padding},
        "wire": size(found.now.wire_bytes),
        "wire_with_lines": None if found.cured is None else size(found.cured.wire_bytes),
        "dense": [
            {
                "path": list(one.field.path),
                "shape": list(one.field.shape),
                "dtype": str(one.field.dtype).removeprefix("torch."),
                "bytes": one.field.nbytes,
                "reason": one.field.reason,
                "seen": one.cover.seen,
                "line": one.line,
                "by_design": one.cover.spec.mask is None,
            }
            for one in found.findings
        ],
        "registry": snippet(found, base) if found.findings else None,
        "notes": list(found.notes),
        "figures": to_json(found.now),
    }


def _seconds(count: int, gbit: float) -> str:
    return f"{count * 8 / (gbit * 1e9):.3g} s at {gbit:g} Gbit/s"


def _ratio(now: Figures) -> str:
    return f"{now.ratio:,.1f} times fewer" if now.ratio >= 1 else f"more, because its header takes {now.header:,}"


def _largest(now: Figures) -> str:
    order = sorted(now.fields, key=lambda field: -field.wire_bytes)[:_LARGEST]
    shown = [f"{show(field.path)} {field.wire_bytes:,}" for field in order if field.wire_bytes]
    objects = [f"Python objects {now.objects:,}"] if now.objects else []
    return ", ".join([*shown, *objects]) or "nothing"


def _outcome(found: Diagnosis, gbit: float) -> str:
    if found.cured is None:
        return "Pack it again with these lines:"
    count = found.cured.wire_bytes
    return f"With these lines {count:,} bytes travel, {_seconds(count, gbit)}:"


# -------------------------------------------------------------------- the command


def add_arguments(commands: Any) -> None:
    """`maskpack doctor`, for the parser of cli.py."""
    parser = commands.add_parser(
        "doctor",
        help="say what padding costs a saved batch, what travels dense, and the registry line that covers it",
        description="Says in plain words what padding costs a batch, what maskpack would send, which fields would "
        "travel dense, and the registry line for each. FILE is a packed batch, what torch.save wrote of a TensorDict, "
        "a dict of tensors or a verl DataProto, what DataProto.save_to_disk wrote, or the directory of a memory-mapped "
        "TensorDict. Exits with status 1 if something travels dense.",
    )
    parser.add_argument("file", metavar="FILE", help="a saved batch, packed or not")
    parser.add_argument("--pad-token-id", type=int, metavar="N", help="the tokenizer's pad id (default: looked for)")
    parser.add_argument(
        "--registry",
        metavar="FILE",
        help="YAML or JSON of fields and axes, the registry of compress(registry=) (default: RL_FIELDS)",
    )
    parser.add_argument(
        "--mask",
        action="append",
        default=[],
        metavar="NAME",
        help='a field that is a mask, "sub/name" inside a sub-batch; once for each (default: looked for)',
    )
    parser.add_argument(
        "--gbit", type=float, default=10.0, metavar="N", help="speed of the link (default: %(default)g)"
    )
    parser.add_argument("--allow-pickle", action="store_true", help="read pickles, which run code: only what you trust")
    add_limit(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")


def run(args: argparse.Namespace) -> int:
    """The command; returns the exit status."""
    try:
        if not 0 < args.gbit < float("inf"):
            raise Unusable(f"--gbit is {args.gbit}; expected the speed of a link, above 0")
        registry = saved_registry(args.registry)
        with enough_memory():
            batch = saved_batch(FilePath(args.file), args.allow_pickle, args.max_bytes)
            masks = [_key(tuple(name.split("/"))) for name in args.mask]
            found = diagnose(batch, registry, args.pad_token_id, max_bytes=None, masks=masks)
    except FAULTS as error:
        print(f"maskpack doctor: {one_line(error)}", file=sys.stderr)
        return 2
    base = "RL_FIELDS" if args.registry is None else "registry"
    if args.json:
        print(json.dumps(as_json(found, args.file, args.gbit, base), indent=2))
    else:
        print(text(found, args.file, args.gbit, base))
    return 1 if found.findings else 0
