"""Draws docs/batch.svg: one batch padded, nested, and packed. Everything drawn is measured on that batch.

batch  ->  nest_batch_by_mask  ->  its first rows as cells, with padding and without
       ->  compress, report    ->  a bar of bytes for each field, of all rows

python docs/draw_batch.py     writes docs/batch.svg
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tensordict import TensorDict

import maskpack as mp
from bench.harness.figure import svg, text

FILE = Path(__file__).with_name("batch.svg")

_PAD, _P, _R, _B = 0, 8, 24, 64
_PROMPTS, _RESPONSES = (5, 8, 3, 6), (7, 4, 12, 5, 24, 3, 9, 6)  # of the rows that are drawn: two responses a prompt
_DRAWN = len(_RESPONSES)
_TOOL = (2, slice(3, 8))  # a row called a tool: zeros of response_mask between real tokens

_CELL, _LINE, _LEFT, _WIDE = 13, 13, 20, 456
_PADDED, _NESTED, _BARS = 88, 228, 388  # where the rows and the bars begin
_NAMES, _SCALE, _STEP = 140, 160, 22  # of bars: where they begin, their pixels, their distance
_HIGH = _BARS + 9 * _STEP + 34
_COLOURS = {
    "ink": ("#1f2328", "#d5d9de"),
    "paper": ("#ffffff", "#14181d"),
    "prompt": ("#1d4ed8", "#7aa5ff"),
    "response": ("#0f766e", "#2dd4bf"),
    "tool": ("#99c9c4", "#1f5f59"),
    "padding": ("#e6e8eb", "#2b313a"),
    "wire": ("#c2410c", "#fb923c"),
    "real": ("#93a4b8", "#6b7f96"),
}
_CELLS = tuple(_COLOURS)[2:]
_BOLD = 'font-weight="bold"'


def make_batch() -> TensorDict:
    """[64]: two responses to each of 32 prompts, with the fields of a policy update."""
    rng = torch.Generator().manual_seed(1)
    prompt_lengths = torch.randint(2, _P + 1, (_B // 2, 1), generator=rng)
    prompt_lengths[: len(_PROMPTS), 0] = torch.tensor(_PROMPTS)
    ends = torch.randint(2, _R // 2, (_B, 1), generator=rng)
    ends[:_DRAWN, 0] = torch.tensor(_RESPONSES)
    in_prompt = (torch.arange(_P) >= _P - prompt_lengths).repeat_interleave(2, 0)
    in_response = torch.arange(_R) < ends
    real = torch.cat([in_prompt, in_response], dim=1).long()
    prompts = torch.randint(1, 50_000, (_B // 2, _P), generator=rng).repeat_interleave(2, 0) * in_prompt
    responses = torch.randint(1, 50_000, (_B, _R), generator=rng) * in_response
    learned = in_response.long()
    learned[_TOOL] = 0
    log_probs = torch.randn(_B, _R, generator=rng)
    return TensorDict(
        {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
            "response_mask": learned,
            "old_log_probs": log_probs.where(in_response, 0),
            "advantages": torch.randn(_B, 1, generator=rng).expand(_B, _R).where(in_response, 0),
            "token_level_scores": (torch.arange(_R) == ends - 1) * torch.tensor([[1.0], [0.0]] * (_B // 2)),
        },
        batch_size=[_B],
    )


def draw() -> str:
    """The SVG."""
    batch = make_batch()
    nested = mp.nest_batch_by_mask(batch, pad_token_id=_PAD, strict_mask_nesting=True)
    packed = mp.compress(batch, pad_token_id=_PAD, strict_mask_nesting=True)
    kinds = _kinds(batch)
    jagged = [[kind for kind in row if kind != "padding"] for row in kinds]
    assert [len(row) for row in jagged] == nested["input_ids"].offsets().diff().tolist()
    legend = (("prompt", "prompt"), ("response", "response"), ("tool", "tool output"), ("padding", "padding"))
    cells = sum(map(len, kinds))
    parts = [
        text(_LEFT, 28, f"One batch of {_B} rows: padded, nested, packed", f'font-size="15" {_BOLD}'),
        *_legend(legend, 42),
        *_grid(_PADDED, f"padded: {cells:,} positions (rows 0 to {_DRAWN - 1} drawn)", kinds[:_DRAWN]),
        *_grid(_NESTED, f"nested: {sum(map(len, jagged)):,} valid tokens", jagged[:_DRAWN]),
        *_bytes(packed),
    ]
    rules = "".join(f".batch .{kind}{{fill:var(--{kind})}}" for kind in _CELLS)
    return svg("batch", _WIDE, _HIGH, "One batch padded, nested and packed", _COLOURS, rules, parts)


def _kinds(batch: TensorDict) -> list[list[str]]:
    """What stands at each position of each row."""
    kinds = [["padding"] * (_P + _R) for _ in range(_B)]
    for row, s in batch["attention_mask"].nonzero().tolist():
        learned = s >= _P and batch["response_mask"][row, s - _P] != 0
        kinds[row][s] = "prompt" if s < _P else "response" if learned else "tool"
    return kinds


def _grid(top: int, title: str, kinds: Sequence[Sequence[str]]) -> Iterator[str]:
    yield text(_LEFT, top - 10, title, _BOLD)
    for row, cells in enumerate(kinds):
        for kind in _CELLS:
            boxes = "".join(
                f"M{_LEFT + _CELL * place} {top + _LINE * row}h{_CELL - 1}v{_LINE - 3}h-{_CELL - 1}z"
                for place, cell in enumerate(cells)
                if cell == kind
            )
            if boxes:
                yield f'<path d="{boxes}" class="{kind}"/>'


def _bytes(packed: mp.PackedBatch) -> Iterator[str]:
    """A bar for each field: padded, and on it the real values and what is packed of them."""
    whole = mp.report(packed)
    found, runs, header = whole.fields, whole.layouts, whole.header
    padded, real, wire = (
        sum(getattr(field, f"{kind}_bytes") for field in found) for kind in ("padded", "real", "wire")
    )
    yield text(_LEFT, _BARS - 28, f"packed: {wire:,} bytes (nested {real:,}, padded {padded:,})", _BOLD)
    yield text(_LEFT, _BARS - 11, f"and {runs:,} for the lengths of rows, {header:,} for a header that hardly grows")
    most = max(field.padded_bytes for field in found)
    for place, field in enumerate(found):
        y = _BARS + place * _STEP
        yield text(_NAMES - 10, y + 12, field.path[-1], 'text-anchor="end"')
        for kind, size in (("padding", field.padded_bytes), ("real", field.real_bytes), ("wire", field.wire_bytes)):
            yield f'<rect x="{_NAMES}" y="{y}" width="{_SCALE * size / most:.1f}" height="16" class="{kind}"/>'
        end = _NAMES + _SCALE * field.padded_bytes / most
        yield text(end + 8, y + 12, f"{field.wire_bytes:,} {field.encoding}")
    parts = (("padding", "padded"), ("real", "nested"), ("wire", "packed: bytes, encoding"))
    yield from _legend(parts, _BARS + len(found) * _STEP + 10)


def _legend(parts: Sequence[tuple[str, str]], y: int, x: float = _LEFT) -> Iterator[str]:
    for kind, name in parts:
        yield f'<rect x="{x:.0f}" y="{y}" width="10" height="10" class="{kind}"/>'
        yield text(x + 16, y + 9, name)
        x += 38 + 6.5 * len(name)


if __name__ == "__main__":
    FILE.write_text(draw())
