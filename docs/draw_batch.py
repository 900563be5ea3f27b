"""Draws docs/batch.svg: one small batch padded, nested, and packed. Everything drawn is measured on that batch.

batch  ->  nest_batch_by_mask  ->  rows of cells, with padding and without
       ->  compress, report    ->  a bar of bytes for each field

python docs/draw_batch.py     writes docs/batch.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from tensordict import TensorDict

import maskpack as mp
from maskpack.packed.sizes import fields

FILE = Path(__file__).with_name("batch.svg")

_PAD, _P, _R = 0, 8, 24
_PROMPTS = (5, 5, 8, 8, 3, 3, 6, 6)  # two responses to each
_RESPONSES = (7, 4, 12, 5, 24, 3, 9, 6)
_TOOL = (2, slice(3, 8))  # a row called a tool: zeros of response_mask between real tokens

_CELL, _LINE, _LEFT, _TOP, _SECOND, _BARS = 12, 17, 24, 112, 474, 318
_WIDE, _NAMES, _SCALE, _STEP = 884, 168, 560, 24  # of bars: where they begin, their pixels, their distance
_HIGH = _BARS + 9 * _STEP + 54
_INK, _PAPER = ("#1f2328", "#d5d9de"), ("#ffffff", "#14181d")
_COLOURS = {
    "prompt": ("#1d4ed8", "#7aa5ff"),
    "response": ("#0f766e", "#2dd4bf"),
    "tool": ("#99c9c4", "#1f5f59"),
    "padding": ("#e6e8eb", "#2b313a"),
    "wire": ("#c2410c", "#fb923c"),
    "real": ("#93a4b8", "#6b7f96"),
}
_BOLD = 'font-weight="bold"'


def make_batch() -> TensorDict:
    """[8]: two responses to each of four prompts, with the fields of a policy update."""
    rng = torch.Generator().manual_seed(1)
    ends = torch.tensor(_RESPONSES)[:, None]
    in_prompt = torch.arange(_P) >= _P - torch.tensor(_PROMPTS)[:, None]
    in_response = torch.arange(_R) < ends
    real = torch.cat([in_prompt, in_response], dim=1).long()
    prompts = torch.randint(1, 50_000, (4, _P), generator=rng).repeat_interleave(2, 0) * in_prompt
    responses = torch.randint(1, 50_000, (8, _R), generator=rng) * in_response
    learned = in_response.long()
    learned[_TOOL] = 0
    log_probs = torch.randn(8, _R, generator=rng)
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
            "response_mask": learned,
            "old_log_probs": log_probs.where(in_response, 0),
            "advantages": torch.randn(8, 1, generator=rng).expand(8, _R).where(in_response, 0),
            "token_level_scores": (torch.arange(_R) == ends - 1) * torch.tensor([[1.0], [0.0]] * 4),
        },
        batch_size=[8],
    )


def draw() -> str:
    """The SVG."""
    batch = make_batch()
    nested = mp.nest_batch_by_mask(batch, pad_token_id=_PAD, strict_mask_nesting=True)
    packed = mp.compress(batch, pad_token_id=_PAD, strict_mask_nesting=True)
    kinds = _kinds(batch)
    jagged = [[kind for kind in row if kind != "padding"] for row in kinds]
    assert [len(row) for row in jagged] == nested["input_ids"].offsets().diff().tolist()
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDE}" height="{_HIGH}" viewBox="0 0 {_WIDE} {_HIGH}" '
        'font-family="sans-serif" font-size="12" class="ink">',
        "<title>One batch padded, nested and packed</title>",
        _style(),
        '<rect width="100%" height="100%" rx="6" class="paper"/>',
        _text(_LEFT, 28, "One batch: padded, nested, packed", f'font-size="16" {_BOLD}'),
        *_legend((("prompt", "prompt"), ("response", "response"), ("tool", "tool output"), ("padding", "padding")), 46),
        *_grid(_LEFT, f"padded: {len(kinds)} rows of {_P} + {_R} positions", kinds),
        *_grid(_SECOND, f"nested: {sum(map(len, jagged))} real tokens, rows as long as they are", jagged),
        *_bytes(packed),
        "</svg>",
    ]
    return "\n".join([*out, ""])


def _kinds(batch: TensorDict) -> list[list[str]]:
    """What stands at each position of each row."""
    kinds = [["padding"] * (_P + _R) for _ in range(8)]
    for row, s in batch["attention_mask"].nonzero().tolist():
        learned = s >= _P and batch["response_mask"][row, s - _P] != 0
        kinds[row][s] = "prompt" if s < _P else "response" if learned else "tool"
    return kinds


def _grid(left: int, title: str, kinds: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _text(left, _TOP - 12, title, _BOLD)
    for row, cells in enumerate(kinds):
        for kind in _COLOURS:
            boxes = "".join(
                f"M{left + _CELL * place} {_TOP + _LINE * row}h{_CELL - 1}v{_LINE - 4}h-{_CELL - 1}z"
                for place, cell in enumerate(cells)
                if cell == kind
            )
            if boxes:
                yield f'<path d="{boxes}" class="{kind}"/>'


def _bytes(packed: mp.PackedBatch) -> Iterator[str]:
    """A bar for each field: padded, and on it the real values and what is packed of them."""
    found = fields(packed)
    whole = mp.report(None, packed)
    runs, header = whole["maskpack/layouts_bytes"], whole["maskpack/header_bytes"]
    padded, real, wire = (
        sum(getattr(field, f"{kind}_bytes") for field in found) for kind in ("padded", "real", "wire")
    )
    total = f"packed: {wire:,} bytes of fields (nested {real:,}, padded {padded:,})"
    yield _text(_LEFT, _BARS - 32, total, _BOLD)
    yield _text(
        _LEFT, _BARS - 14, f"and {runs:,} for the runs of rows, {header:,} for a header that hardly grows with them"
    )
    most = max(field.padded_bytes for field in found)
    for place, field in enumerate(found):
        y = _BARS + place * _STEP
        yield _text(_NAMES - 10, y + 12, field.path[-1], 'text-anchor="end"')
        for kind, size in (("padding", field.padded_bytes), ("real", field.real_bytes), ("wire", field.wire_bytes)):
            yield f'<rect x="{_NAMES}" y="{y}" width="{_SCALE * size / most:.1f}" height="16" class="{kind}"/>'
        end = _NAMES + _SCALE * field.padded_bytes / most
        yield _text(end + 8, y + 12, f"{field.wire_bytes:,} {field.encoding}")
    parts = (("padding", "padded"), ("real", "nested"), ("wire", "packed: bytes and encoding"))
    yield from _legend(parts, _BARS + len(found) * _STEP + 18, _NAMES)


def _legend(parts: Sequence[tuple[str, str]], y: int, x: float = _LEFT) -> Iterator[str]:
    for kind, name in parts:
        yield f'<rect x="{x:.0f}" y="{y}" width="10" height="10" class="{kind}"/>'
        yield _text(x + 16, y + 9, name)
        x += 46 + 6.5 * len(name)


def _style() -> str:
    """Colours for white, and for dark where the reader's system asks for them."""

    def rules(which: int) -> str:
        fills = {"ink": _INK, "paper": _PAPER, **_COLOURS}
        return "".join(f".{name}{{fill:{colours[which]}}}" for name, colours in fills.items())

    return f"<style>{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}</style>"


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'


if __name__ == "__main__":
    FILE.write_text(draw())
