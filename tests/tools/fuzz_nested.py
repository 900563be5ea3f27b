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
from maskpack.nesting.schema import LAYOUTS

COUNT = 50_000
DTYPES = ["bool", "int8", "uint8", "int64", "float16", "bfloat16", "float32", "float8_e5m2", "complex64", "uint16"]


@functools.cache
def originals() -> list[tuple[dict[str, Any], TensorDict]]:
    """Pads of all kinds, no rows, no width, flat and jagged fields, sub-batches, more dims, rows of a rollout."""
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
    given = [(cu, flat), (rl, deep), (rl, samples.workload("m-rope", 4)), (rl, samples.rollout(holes=True))]
    batches = [(own, batch) for batch in (small(3, 9, -0.0), small(0, 4), small(3, 0))]
    batches += [(own, mp.nesting.cat([small(3, 9), small(3, 9, -0.0)]))]
    batches += [(options, mp.nest_batch_by_mask(batch, **options)) for options, batch in given]
    return [*batches, (rl, mp.nesting.take(batches[-1][1], [4, 0, 0]))]


def bit(rng: np.random.Generator, x: Tensor) -> Tensor:
    raw = x.contiguous().clone().view(-1).view(torch.uint8)
    if raw.numel() and x.dtype != torch.bool:
        raw[rng.integers(raw.numel())] ^= 1 << int(rng.integers(8))
    return raw.view(x.dtype).view(x.shape)


def other(rng: np.random.Generator, x: Any, size: torch.Size) -> Any:
    """A tensor with other bytes, dtype or shape, or something else."""
    if not isinstance(x, Tensor) or rng.random() < 0.1:
        return (NonTensorData("o", batch_size=size), TensorDict({}, size), torch.zeros(*size, 3, 2))[rng.integers(3)]
    if x.is_nested:
        parts, at = [x.values(), x.offsets().clone()], int(rng.random() < 0.3)
        parts[at] = other(rng, parts[at], size)
        if not isinstance(parts[0], Tensor) or getattr(parts[1], "dtype", None) != torch.int64:
            raise TypeError("neither values nor offsets")
        return torch.nested.nested_tensor_from_jagged(*parts)
    ways: list[Callable[[Tensor], Any]] = [lambda x: x.to(getattr(torch, rng.choice(DTYPES))), lambda x: x.flip(0)]
    ways += [lambda x: x[:-1], lambda x: x[..., :-1], lambda x: torch.cat([x, x]), lambda x: x[..., None]]
    ways += [lambda x: x.mT if x.dim() > 1 else x[::2], torch.zeros_like, *[lambda x: bit(rng, x)] * 3]
    return ways[rng.integers(len(ways))](x)


def changed(rng: np.random.Generator, batch: TensorDict) -> TensorDict:
    """A batch with one change."""
    held, size, way = batch.get(LAYOUTS), batch.batch_size, rng.random()
    entries, fields = dict(held.items()) if type(held) is TensorDict else {}, dict(batch.exclude(LAYOUTS).items())
    if not entries or way < 0.02:
        return batch.set(LAYOUTS, other(rng, None, size))
    if way < 0.05:
        return batch.set(LAYOUTS, held.update(originals()[rng.integers(len(originals()))][1][LAYOUTS]))
    if way > 0.6:
        name, value = rng.choice([*fields]), fields[rng.choice([*fields])]
        return TensorDict({**fields, LAYOUTS: held, name: other(rng, value, size) if way < 0.9 else value}, size)
    key, at = str(rng.choice([*entries])), int(rng.integers(6))
    value = entries[rng.choice([*entries])] if way > 0.55 else entries.pop(key)
    if way > 0.4 and rng.random() < 0.5:
        key = rng.choice(["mask ", "pads ", "signs ", "types "]) + key[5:].strip()
    elif way > 0.4:
        key = key[:at] + rng.choice([*"0a ms"]) + key[at + int(rng.integers(2)) :]
    entries |= {} if way < 0.1 else {key: other(rng, value, size) if way < 0.4 else value}
    return batch.set(LAYOUTS, TensorDict(entries, size))


def padded_fields(nested: TensorDict, padded: TensorDict) -> list[tuple[str, ...]]:
    """The jagged fields that are padded again, whose valid tokens are at the bits of their mask."""
    held, fields = dict(nested[LAYOUTS].items()), list[tuple[str, ...]]()
    for digest, value in [(key[6:], value) for key, value in held.items() if key.startswith("types ")]:
        types = value.tolist()[0] if isinstance(value, NonTensorStack) else value.data
        parts = {name: (whole, low) for name, whole, low in types.parts}
        widths = {name: width for name, width, _ in types.schema.axes}
        for form in types.schema.forms:
            x = nested.get(form.path, None) if form.kind == "padded" else None
            if isinstance(x, Tensor) and x.is_nested:
                name, low = parts.get(form.layout, (form.layout, 0))
                bits = held[f"mask {digest} {name}"]
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
    options, batch = originals()[seed % len(originals())][0], originals()[seed % len(originals())][1].clone()
    for _ in range(int(rng.integers(1, 4))):
        try:
            batch = changed(rng, batch)
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError):  # torch cannot do this
            done["no change"] += 1
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
            except mp.errors.MaskpackError:
                done[f"{name} refused"] += 1
    for name, path in itertools.product(out, padded_fields(batch, out["unnest"]) if "unnest" in out else ()):
        if name != "select" or out[name].get(path, None) is not None:
            oracle.assert_same_tensor(out[name].get(path), out["unnest"].get(path), f"{name} {path}")
    return done
