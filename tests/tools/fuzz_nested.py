"""Nested batches whose entry LAYOUTS or fields were changed: calls restore them soundly, or raise a MaskpackError.

Entries of LAYOUTS are flipped, cast, cut, replaced or removed, their keys edited or swapped, those of another batch put
beside them, and fields replaced. What `unnest_batch_by_mask` gives has the valid tokens at the bits of their mask, and
twice the same bits, as have others.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import samples
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

import maskpack as mp
from maskpack.core.pads import ANY_ZERO
from maskpack.errors import MaskpackError
from maskpack.nesting.schema import LAYOUTS

COUNT = 50_000
DTYPES = ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float32", "float8_e5m2", "complex64", "uint16"]


@functools.cache
def originals() -> list[tuple[dict[str, Any], TensorDict]]:
    """Options and nested batches: joined pads of all kinds, no rows, no width, flat and jagged fields, sub-batches, a
    rollout, its rows, and fields of more dims."""
    rl: dict[str, Any] = {"registry": mp.RL_FIELDS, "pad_token_id": samples.PAD}
    own = {"registry": samples.registry_of(e=mp.EDGE, z=[0, ANY_ZERO], r=mp.PER_ROW, c=0)}
    cu = {"registry": mp.MaskNestingRegistry({"x": ("rows", 0)}, {"rows": mp.MaskAxis("cu", "cu_seqlens")})}

    def small(rows: int, width: int, pad: float = 0.0) -> TensorDict:
        mask = [[row <= place < 2 * row + 3 for place in range(width)] for row in range(rows)]
        z = samples.field(mask, torch.float32, pad, width=width)
        e = samples.field(mask, torch.int32, samples.EDGE, width=width)
        c = samples.field(mask, torch.complex64, 0, (2,), width=width)
        batch = samples.under(oracle.mask_tensor(mask, width), z=z, e=e, r=z.double(), c=c)[0]
        return mp.nest_batch_by_mask(batch, **own)

    flat = TensorDict({"x": torch.arange(5), "cu": torch.tensor([0, 3, 5])}, [])
    turns = TensorDict({"y": torch.ones(3, 2)}, [3, 2], names=[None, "turn"])
    deep = TensorDict({"j": samples.filled([2, 0, 1]), "s": samples.rollout(samples.ROWS[:3]), "t": turns}, [3])
    joined = mp.nesting.cat([small(3, 9), small(3, 9, -0.0)])
    batches = [(own, batch) for batch in (joined, small(3, 9, -0.0), small(0, 4), small(3, 0))]
    batches += [(cu, mp.nest_batch_by_mask(flat, **cu))]
    for batch in (deep, samples.rollout(holes=True), samples.workload("m-rope", 4)):
        batches.append((rl, mp.nest_batch_by_mask(batch, **rl)))
    return [*batches, (rl, mp.nesting.take(batches[-2][1], [4, 0, 0]))]


class Changes:
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
            parts = [x.values(), x.offsets().clone()]
            at = int(self.rng.random() < 0.3)
            parts[at] = self.other(parts[at])
            if not isinstance(parts[0], Tensor) or getattr(parts[1], "dtype", None) != torch.int64:
                raise TypeError("neither values nor offsets")
            return torch.nested.nested_tensor_from_jagged(*parts)
        ways: list[Callable[[Tensor], Any]] = [lambda x: x.to(getattr(torch, self.one(DTYPES))), lambda x: x.flip(0)]
        ways += [lambda x: x[:-1], lambda x: x[..., :-1], lambda x: torch.cat([x, x]), lambda x: x[..., None]]
        ways += [lambda x: x.mT if x.dim() > 1 else x[::2], torch.zeros_like, self.bit, self.bit, self.bit]
        return self.one(ways)(x)

    def bit(self, x: Tensor) -> Tensor:
        raw = x.contiguous().clone().view(-1).view(torch.uint8)
        if raw.numel() and x.dtype != torch.bool:
            raw[self.rng.integers(raw.numel())] ^= 1 << int(self.rng.integers(8))
        return raw.view(x.dtype).view(x.shape)

    def key(self, key: str) -> str:
        at = int(self.rng.integers(len(key)))
        kind = key if self.rng.random() < 0.5 else self.one(("mask ", "pads ", "signs ", "types ")) + key[5:].strip()
        return kind if self.rng.random() < 0.5 else key[:at] + self.one("0a ms") + key[at + int(self.rng.integers(2)) :]

    def change(self) -> None:
        held, way = self.batch.get(LAYOUTS), self.rng.random()
        names = [*held.keys()] if type(held) is TensorDict else []
        if not names or way < 0.02:
            self.batch.set(LAYOUTS, self.other(None))
        elif way < 0.05:
            self.batch.set(LAYOUTS, held.update(self.one(originals())[1][LAYOUTS]))
        elif way < 0.6:
            name = self.one(names)
            new = self.other(held.get(name)) if way < 0.4 else held.get(name if way < 0.55 else self.one(names))
            key = self.key(name) if 0.4 < way < 0.55 else name
            entries = {other: held.get(other) for other in names if other != name}
            self.batch.set(LAYOUTS, TensorDict(entries | ({} if way < 0.1 else {key: new}), self.batch.batch_size))
        else:
            fields = [name for name in self.batch.keys() if name != LAYOUTS]  # noqa: SIM118
            new = self.other(self.batch.get(self.one(fields))) if way < 0.9 else self.batch.get(self.one(fields))
            entries = dict(self.batch.items()) | {self.one(fields): new}
            self.batch = TensorDict(entries, self.batch.batch_size)


def padded_fields(nested: TensorDict, padded: TensorDict) -> list[tuple[str, ...]]:
    """The jagged fields that are padded again, whose valid tokens are at the bits of their mask."""
    held, fields = dict(nested[LAYOUTS].items()), list[tuple[str, ...]]()
    for value in [value for key, value in held.items() if key.startswith("types ")]:
        types = value.tolist()[0] if isinstance(value, NonTensorStack) else value.data
        parts = {name: (whole, low) for name, whole, low in types.parts}
        widths = {name: width for name, width, _ in types.schema.axes}
        for form in types.schema.forms:
            x = nested.get(form.path, None) if form.kind == "padded" else None
            if isinstance(x, Tensor) and x.is_nested:
                name, low = parts.get(form.layout, (form.layout, 0))
                bits = held[f"mask {name}"]
                bits = (bits.real if bits.is_complex() else bits).to(torch.uint8).contiguous().numpy()
                on = np.unpackbits(bits, axis=1, bitorder="little")[:, low : low + widths[form.layout]]
                whole = padded.get(form.path).movedim(form.ragged_dim, 1)
                assert whole.shape[:2] == on.shape, form.path
                for row, want in enumerate(oracle.jagged_rows(x)):
                    oracle.assert_same_tensor(whole[row][torch.from_numpy(on[row]).bool()], want)
                fields.append(form.path)
    return fields


def play(seed: int) -> Counter[str]:
    rng, done, out = np.random.default_rng(seed), Counter[str](), dict[str, Any]()
    options, original = originals()[seed % len(originals())]
    changes = Changes(rng, original.clone())
    for _ in range(int(rng.integers(1, 4))):
        try:
            changes.change()
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # torch cannot do this
            done["no change"] += 1
    batch = changes.batch
    calls: dict[str, Callable[[], Any]] = {
        "unnest": lambda: mp.unnest_batch_by_mask(batch),
        "again": lambda: mp.unnest_batch_by_mask(batch),
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
    for name, path in itertools.product(out, padded_fields(batch, out["unnest"]) if "unnest" in out else ()):
        if name != "select" or out[name].get(path, None) is not None:
            oracle.assert_same_tensor(out[name].get(path), out["unnest"].get(path), f"{name} {path}")
    return done
