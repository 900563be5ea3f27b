"""Nested batches whose entry LAYOUTS or fields were changed: calls restore them soundly, or raise a MaskpackError.

Changes are flipped bytes, casts, cuts, other tensors, objects, removed entries and edited keys of LAYOUTS, and fields
that are replaced, cast, cut or swapped. What `unnest_batch_by_mask` gives is compared with plain loops: the valid
tokens are at the bits of the mask, in a tensor of its width. `compress` of the same batch gives the same bits.
"""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import samples
import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.core.pads import ANY_ZERO
from maskpack.errors import MaskpackError
from maskpack.nesting.schema import LAYOUTS

COUNT = 50_000
MOST_CHANGES = 3
DTYPES = (*(torch.bool, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32),)
DTYPES = (*DTYPES, torch.float8_e5m2, torch.complex64, torch.uint16)
PARTS = ("padded", "node", "flat", "jagged", "torch.int64", "torch.bool", "response", "m", "", None, [], {}, True, 1.5)
NUMBERS = (-9, -1, 0, 1, 2, 8, 63, 1 << 31, 1 << 63, 1 << 200)


@functools.cache
def originals() -> list[tuple[dict[str, Any], TensorDict]]:
    """Options and nested batches: a rollout, one with more dims, its rows, joined pads of all kinds, empty ones, a
    sub-batch, flat and jagged fields."""
    rl: dict[str, Any] = {"registry": mp.RL_FIELDS, "pad_token_id": samples.PAD}
    pads = {"e": mp.EDGE, "z": [0, ANY_ZERO], "r": mp.PER_ROW, "c": 0}
    options: dict[str, Any] = {"registry": samples.registry_of(**pads)}

    def small(rows: int, width: int, minus: bool = False) -> TensorDict:
        mask = [[row <= place < 2 * row + 3 for place in range(width)] for row in range(rows)]
        z = samples.field(mask, torch.float32, -0.0 if minus else 0.0, width=width)
        e = samples.field(mask, torch.int32, samples.EDGE, width=width)
        c = samples.field(mask, torch.complex64, 0, (2,), width=width)
        return samples.under(oracle.mask_tensor(mask, width), z=z, e=e, r=z.double(), c=c)[0]

    cu = mp.MaskNestingRegistry({"x": mp.MaskNestingSpec("rows")}, {"rows": mp.MaskAxis("cu", "cu_seqlens")})
    flat = TensorDict({"x": torch.arange(5), "cu": torch.tensor([0, 3, 5])}, [])
    own = TensorDict({"j": samples.filled([2, 0, 1]), "s": samples.rollout(samples.ROWS[:3])}, [3])
    parts = [mp.nest_batch_by_mask(small(3, 9, minus), **options) for minus in (False, True)]
    batches = [(options, mp.nesting.cat(parts)), (options, parts[1])]
    batches += [(options, mp.nest_batch_by_mask(small(*shape), **options)) for shape in ((0, 4), (3, 0))]
    batches += [({"registry": cu}, mp.nest_batch_by_mask(flat, cu)), (rl, mp.nest_batch_by_mask(own, **rl))]
    for batch in (samples.rollout(holes=True), samples.workload("m-rope", 4)):
        batches.append((rl, mp.nest_batch_by_mask(batch, **rl)))
    return [*batches, (rl, mp.nesting.take(batches[-2][1], [4, 0, 0]))]


class Changes:
    """Changes of one batch."""

    def __init__(self, rng: np.random.Generator, batch: TensorDict) -> None:
        self.rng, self.batch = rng, batch

    def one(self, items: Any) -> Any:
        return items[int(self.rng.integers(len(items)))]

    def other(self, x: Any) -> Any:
        """A tensor with other bytes, dtype or shape, or something else."""
        if not isinstance(x, Tensor) or self.rng.random() < 0.1:
            size = self.batch.batch_size
            return self.one((NonTensorData("o", batch_size=size), TensorDict({}, size), torch.zeros(*size, 3, 2)))
        if x.is_nested:
            values, ends = self.other(x.values()), x.offsets().clone()
            if not isinstance(values, Tensor):
                return values
            values, ends = (x.values(), self.other(ends)) if self.rng.random() < 0.3 else (values, ends)
            return torch.nested.nested_tensor_from_jagged(values, ends) if isinstance(ends, Tensor) else ends
        ways: list[Callable[[Tensor], Any]] = [lambda x: x.to(self.one(DTYPES)), torch.zeros_like, lambda x: x.flip(0)]
        ways += [lambda x: x[:-1], lambda x: x[..., :-1], lambda x: torch.cat([x, x]), lambda x: x[..., None], self.bit]
        ways += [lambda x: x.mT if x.dim() > 1 else x[::2], lambda x: x[:1].expand(x.shape), self.bit, self.bit]
        return self.one(ways)(x)

    def bit(self, x: Tensor) -> Tensor:
        raw = x.contiguous().clone().view(-1).view(torch.uint8)
        if raw.numel() and x.dtype != torch.bool:
            raw[self.rng.integers(raw.numel())] ^= 1 << int(self.rng.integers(8))
        return raw.view(x.dtype).view(x.shape)

    def key(self, key: str) -> str:
        if self.rng.random() < 0.3:
            at = int(self.rng.integers(len(key)))
            return key[:at] + self.one('"[]{},0a-') + key[at + int(self.rng.integers(2)) :]
        said = json.loads(key)
        at = int(self.rng.integers(len(said)))
        said[at] = self.one((*PARTS, *NUMBERS, said[at - 1]))
        return json.dumps(said if self.rng.random() < 0.9 else said[1:])

    def change(self) -> None:
        held = self.batch.get(LAYOUTS, None)
        names = [*held.keys()] if type(held) is TensorDict else []
        way = self.rng.random()
        if not names or way < 0.02:
            self.batch.set(LAYOUTS, self.other(None))
        elif way < 0.6:
            name = self.one(names)
            value = held.get(name)
            new = self.other(value) if way < 0.4 else value if way < 0.55 else held.get(self.one(names))
            key = self.key(name) if 0.4 < way < 0.55 else name
            entries = {other: held.get(other) for other in names if other != name}
            self.batch.set(LAYOUTS, TensorDict(entries | ({} if way < 0.05 else {key: new}), self.batch.batch_size))
        else:
            fields = [name for name in self.batch.keys() if name != LAYOUTS]  # noqa: SIM118
            name = self.one(fields)
            new = self.other(self.batch.get(name)) if way < 0.9 else self.batch.get(self.one(fields))
            entries = {own: self.batch.get(own) for own in [*fields, LAYOUTS]}
            self.batch = TensorDict(entries | {name: new}, self.batch.batch_size)


def assert_sound(nested: TensorDict, padded: TensorDict) -> list[tuple[str, ...]]:
    """Valid tokens are at the bits of their mask. The fields that are padded again."""
    fields: list[tuple[str, ...]] = []
    said = {key: json.loads(key) for key in nested[LAYOUTS].keys()}  # noqa: SIM118
    masks = {name: (key, more[0]) for key, (name, *more) in said.items() if isinstance(name, str)}
    for path, kind, *more in said.values():
        x = nested.get(tuple(path), None) if not isinstance(path, str) and path else None
        if kind == "padded" and isinstance(x, Tensor) and x.is_nested:
            key, width = masks[more[0]]
            raw = nested[LAYOUTS][key]
            raw = (raw.real if raw.is_complex() else raw).to(torch.uint8).contiguous().numpy()
            on = np.unpackbits(raw, axis=1, bitorder="little")[:, :width]
            whole = padded.get(tuple(path)).movedim(more[1], 1)
            assert tuple(whole.shape[:2]) == on.shape, path
            for row, want in enumerate(oracle.jagged_rows(x)):
                oracle.assert_same_tensor(whole[row][torch.from_numpy(on[row]).bool()], want)
            fields.append(tuple(path))
    return fields


def play(seed: int) -> Counter[str]:
    rng = np.random.default_rng(seed)
    options, original = originals()[seed % len(originals())]
    changes, done = Changes(rng, original.clone()), Counter[str]()
    for _ in range(int(rng.integers(1, MOST_CHANGES + 1))):
        try:
            changes.change()
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # torch cannot do this
            done["no change"] += 1
    batch, out = changes.batch, dict[str, Any]()
    calls: dict[str, Callable[[], Any]] = {
        "unnest": lambda: mp.unnest_batch_by_mask(batch),
        "compress": lambda: mp.decompress(mp.compress(batch, **options)),
        "nest": lambda: mp.unnest_batch_by_mask(mp.nest_batch_by_mask(batch, **options)),
        "select": lambda: mp.select_and_pad_to_response(batch),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call in calls.items():
            try:
                out[name] = call()
                done[name] += 1
            except MaskpackError:
                done[f"{name} refused"] += 1
        if "unnest" in out:
            fields = assert_sound(batch, out["unnest"])
            again = mp.unnest_batch_by_mask(batch)
            for name, path in itertools.product(out, fields):
                seen = (again if name == "unnest" else out[name]).get(path, None)
                if name != "select" or seen is not None:
                    oracle.assert_same_tensor(seen, out["unnest"].get(path), f"{name} {path}")
    return done
