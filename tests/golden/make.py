"""The golden files: what version 4 of the format wrote, and what they hold in plain tensors.

`python -m tests.golden.make` writes the files that are missing. One that is there is never written again: bytes that
were written once must stay readable.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from maskpack import (
    EDGE,
    PAD_TOKEN_ID,
    PER_ROW,
    RL_FIELDS,
    MaskAxis,
    MaskNestingRegistry,
    MaskNestingSpec,
    PackedBatch,
    compress,
)
from maskpack.core.pads import ANY_ZERO
from maskpack.packed.table import forget

HERE = Path(__file__).parent
SUFFIX = ".maskpack"
NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]  # with a sign and a payload


@dataclass
class Golden:
    """What a file holds.

    Attributes:
        batch: the content.
        options: of `compress`.
        writing: arguments of `to_bytes`.
        kinds: the encodings of some fields.
    """

    batch: TensorDict
    options: dict[str, Any] = field(default_factory=dict)
    writing: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)


def packed(golden: Golden) -> PackedBatch:
    forget()
    return compress(golden.batch, **{"registry": {}, **golden.options})


def rows_under(mask: list[list[int]], values: list[list[Any]], dtype: torch.dtype, pad: Any = 0) -> torch.Tensor:
    """[B, S]: the values of each row at its real places, the pad elsewhere."""
    out = []
    for places, line in zip(mask, values, strict=True):
        left = iter(line)
        out.append([next(left) if real else pad for real in places])
        assert not list(left)
    return torch.tensor(out, dtype=dtype)


def stack(*items: Any) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(item) for item in items])


# -------------------------------------------------------------------- contents

LENGTHS = (137, 70, 0, 3, 66, 1)
MASK = [[int(2 <= s < 2 + n if b != 1 else s < 40 or 90 <= s < 120) for s in range(140)] for b, n in enumerate(LENGTHS)]


def noise(seed: int, most: int) -> list[list[int]]:
    """Rows of numbers below `most` for MASK."""
    rows: list[list[int]] = []
    for length in LENGTHS:
        row = []
        for _ in range(length):
            seed = (6364136223846793005 * seed + 1442695040888963407) % 2**64
            row.append((seed >> 20) % most)
        rows.append(row)
    return rows


def draws(state: int = 12345) -> Iterator[int]:
    """Numbers below 2^31 that look random."""
    while True:
        state = (1103515245 * state + 12345) % 2**31
        yield state


def under_mask(*names: str, pad: Any = 0) -> dict[str, MaskNestingSpec]:
    return {name: MaskNestingSpec("mask", pad) for name in ("mask", *names)}


def encodings() -> Golden:
    def made(value: Callable[[int, int], Any]) -> list[list[Any]]:
        return [[value(b, s) for s in range(length)] for b, length in enumerate(LENGTHS)]

    i64 = torch.int64
    far = noise(1, 2**23)
    near = noise(2, 5)
    spread = [[value + 1000 * (s % 3) for s, value in enumerate(row)] for row in noise(4, 2**20)]
    fields = {
        "plain": rows_under(MASK, noise(5, 2**63), i64),
        "plain1": rows_under(MASK, noise(6, 256), torch.uint8),
        "blocks": rows_under(MASK, noise(3, 5), torch.int16, -1),
        "blocks_signed": rows_under(MASK, [[value - 2**19 for value in row] for row in spread], i64),
        "blocks_of_one_word": rows_under(MASK, made(lambda b, s: 2**40 * b), i64),
        "blocks8": rows_under(MASK, [[value - 4 for value in row] for row in noise(11, 7)], torch.int8),
        "far": rows_under(MASK, far, torch.int32),
        "near": rows_under(
            MASK, [[x + y - 2 for x, y in zip(*rows, strict=True)] for rows in zip(far, near, strict=True)], torch.int32
        ),
        "blocks_of_bools": rows_under(MASK, noise(12, 2), torch.bool),
        "rle": rows_under(MASK, made(lambda b, s: b - 3 * (s > 50)), i64),
        "blocks_coded": rows_under(
            MASK, [[2 ** (value % 17) + value // 17 for value in row] for row in noise(15, 999)], i64
        ),
        "blocks_one": rows_under(MASK, made(lambda b, s: 1), torch.float16),
        "delta_rises": rows_under(MASK, made(lambda b, s: 3 * s - b), i64),
        "delta_wraps": rows_under(MASK, made(lambda b, s: (27 * s + b + 128) % 256 - 128), torch.int8),
        "delta": rows_under(MASK, made(lambda b, s: 2**33 * b + s + 5 * (s > 30)), i64),
        "sparse": rows_under(MASK, made(lambda b, s: {20: 1.5, 60: -0.0}.get(s, 0.0)), torch.float32),
    }
    columns = torch.zeros(*fields["plain"].shape, 2, dtype=i64)
    for b, line in enumerate(MASK):
        for s, real in enumerate(line):
            if real:
                columns[b, s] = torch.tensor([fields["plain"][b, s].item() % 2**40, -3])
    fields["columns"] = columns
    rows = noise(14, 2**63)
    rows[1], rows[4] = rows[0][30:80] + rows[1][50:], rows[4][:20] + rows[0][:46]
    fields["pieces"] = rows_under(MASK, rows, i64)
    holes = [
        [(x + y) * (s % 9 > 2) for s, (x, y) in enumerate(zip(*rows, strict=True))]
        for rows in zip(far, near, strict=True)
    ]
    fields["holes"] = rows_under(MASK, holes, torch.int32)
    fields["same"] = fields["plain"].clone()
    batch = TensorDict({"mask": torch.tensor(MASK), **fields}, [len(MASK)])
    specs = under_mask(*fields)
    specs["near"] = MaskNestingSpec("mask", hints=("near:far",))
    specs["blocks"] = MaskNestingSpec("mask", -1)
    specs["columns"] = MaskNestingSpec("mask", hints=("columns",))
    specs["pieces"] = MaskNestingSpec("mask", hints=("pieces",))
    specs["sparse"] = MaskNestingSpec("mask", hints=("sparse",))
    specs["holes"] = MaskNestingSpec("mask", hints=("sparse", "near:far"))
    kinds = {name: name.partition("_")[0].rstrip("1248") for name in fields}
    kinds |= {
        "same": "plain",
        "far": "blocks",
        "near": "blocks",
        "columns": "columns plain blocks",
        "pieces": "pieces plain",
        "sparse": "sparse plain",
        "holes": "sparse blocks",
    }
    return Golden(batch, {"registry": specs}, kinds=kinds)


def repeated_rows() -> Golden:
    """Some rows are equal, in fields of several kinds; one has no tokens."""
    order = (0, 1, 0, 3, 1, 0, 2)
    mask = [MASK[row] for row in order]
    lines = {"plain": noise(20, 2**63), "blocks": noise(22, 8)}
    lines["rle"] = [[2**50 * b - 7 * (s > 20) for s in range(length)] for b, length in enumerate(LENGTHS)]
    lines["delta"] = [[2**40 * b + s * (s > 20) for s in range(length)] for b, length in enumerate(LENGTHS)]
    fields = {name: rows_under(mask, [rows[row] for row in order], torch.int64) for name, rows in lines.items()}
    batch = TensorDict({"mask": torch.tensor(mask, dtype=torch.bool), **fields, "dense": torch.ones(7, 3)}, [7])
    kinds = {name: f"dictionary {name}" for name in fields} | {"dense": "blocks"}
    specs = {name: MaskNestingSpec("mask", hints=("dictionary",)) for name in fields} | under_mask()
    return Golden(batch, {"registry": specs}, kinds=kinds)


def rollout() -> Golden:
    """Prompts end at column 3, responses begin there; a hole in the mask of row 1, a row of pads."""
    attention = [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0]]
    ids = rows_under(attention, [[11, 12, 13, 14], [21, 22, 23, 24, 25], []], torch.int64, 99)
    batch = TensorDict(
        {
            "prompts": ids[:, :3].clone(),
            "responses": ids[:, 3:].clone(),
            "input_ids": ids,
            "attention_mask": torch.tensor(attention),
            "position_ids": torch.tensor([[0, 0, 1, 2, 3, 3], [0, 1, 2, 3, 3, 4], [0, 0, 0, 0, 0, 0]]),
            "response_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]),
            "old_log_probs": torch.tensor([[-0.5, -1.25, 0], [-2, 0, NAN], [0, 0, 0]]),
            "advantages": torch.tensor([[0.5, 0.5, 0.0], [-1, -0.0, -1], [0, 0, 0]]),
            "token_level_scores": torch.tensor([[0, 1.0, 0], [0, 0, -1], [0, 0, 0]], dtype=torch.bfloat16),
            "reward_baselines": torch.tensor([0.25, -0.25, math.inf]),
            "uid": stack("a", "a", "b"),
            "global_token_num": NonTensorData([4, 5, 0], batch_size=[3]),
            "temperature": NonTensorData(0.7, batch_size=[3]),
        },
        [3],
    )
    return Golden(batch, {"registry": RL_FIELDS, "pad_token_id": 99}, kinds={"input_ids": "concat"})


def forms() -> Golden:
    """Ragged dim 2, pads of every kind, sub-TensorDicts with batch dims of their own, jagged fields."""
    mask = [[1, 1, 0], [1, 0, 0]]
    rope = torch.tensor([[[1, 2, 2], [3, 4, 4]], [[5, 5, 5], [6, 6, 6]]])
    jagged = torch.nested.nested_tensor([torch.tensor([1.5, 2.5]), torch.tensor([3.5])], layout=torch.jagged)
    shared = torch.nested.nested_tensor_from_jagged(torch.tensor([7, 8, 9]), jagged.offsets())
    half = torch.float16
    inner = TensorDict({"x": torch.arange(12).view(2, 3, 2), "deep": TensorDict({}, [2, 3])}, [2, 3])
    batch = TensorDict(
        {
            "mask": torch.tensor(mask, dtype=torch.float32),
            "rope": rope,
            "token": rows_under(mask, [[1, 2], [3]], torch.int32, 50256),
            "nan": rows_under(mask, [[1, 2], [3]], torch.float64, math.nan),
            "minus_zero": rows_under(mask, [[1, 2], [0]], half, -0.0),
            "infinite": rows_under(mask, [[1, 2], [0]], half, -math.inf),
            "true": rows_under(mask, [[1, 0], [0]], torch.bool, True),
            "complex": rows_under(mask, [[1j, 2], [3]], torch.complex64, 1 - 2j),
            "per_row": torch.tensor([[1, 2, 8], [3, 9, 9]], dtype=torch.int16),
            "per_row_128": torch.tensor([[1, 2j, -1j], [3, 7, 7]], dtype=torch.complex128),
            "largest": rows_under(mask, [[1, 2], [3]], torch.uint64, 2**64 - 1),
            "elements": torch.tensor([[[1, 2], [3, 4], [0, 0]], [[5, 6], [0, 0], [0, 0]]], dtype=torch.uint8),
            "jagged": jagged,
            "shared": shared,
            "dense_128": torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128),
            "no_bytes": torch.zeros(2, 0, 3),
            "other": inner,
            "none": TensorDict({}, [2], device="cpu"),
        },
        [2],
        device="cpu",
    )
    pads = {
        "mask": 0,
        "rope": EDGE,
        "token": PAD_TOKEN_ID,
        "nan": math.nan,
        "minus_zero": -0.0,
        "infinite": -math.inf,
        "true": True,
        "complex": 1 - 2j,
        "per_row": PER_ROW,
        "per_row_128": PER_ROW,
        "largest": 2**64 - 1,
        "elements": 0,
    }
    specs = {name: MaskNestingSpec("mask", pad, -1 if name == "rope" else 1) for name, pad in pads.items()}
    return Golden(batch, {"registry": specs | {"x": MaskNestingSpec(None)}, "pad_token_id": 50256})


def dtypes() -> Golden:
    """Every dtype, dense and padded, by its bytes."""
    names = "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32"
    names += " complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    fields: dict[str, torch.Tensor] = {}
    for name in names.split():
        dtype = getattr(torch, name)
        size = dtype.itemsize
        raw = [(place * 37 + 11) % (2 if name == "bool" else 256) for place in range(4 * size)]
        line = torch.tensor(raw, dtype=torch.uint8).view(dtype)
        fields[f"{name}_dense"] = line.view(2, 2).clone()
        padded = line[2:].clone().repeat_interleave(2).view(2, 2)
        fields[f"{name}_padded"] = padded
    batch = TensorDict({"mask": torch.tensor([[1, 0], [1, 0]]), **fields}, [2])
    specs = {name: MaskNestingSpec("mask", PER_ROW) for name in fields if name.endswith("padded")}
    return Golden(batch, {"registry": specs | {"mask": MaskNestingSpec("mask")}})


def plain_objects() -> Golden:
    """None, bools, numbers, text, lists, tuples, dicts, tensors, NumPy arrays and scalars."""
    every = [None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**40), 0.0, -0.0, 0.1, 1e300, 5e-324]
    every += [math.inf, -math.inf, NAN, "", 'täxt\n"\\ 😀', [], (), {}, [[]], ((1,), [2])]
    every += [{"b": "a", "a": {"": [3.5]}, "ü": None}]
    scalars = [np.float32(0.1), np.float64(-0.0), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.float16(7)]
    scalars += [np.complex64(1 - 2j), np.int64(5)]
    image = torch.arange(6, dtype=torch.float32).view(2, 3)
    tensors = {
        "a": image,
        "again": image.clone(),
        "empty": torch.zeros(0, 3, dtype=torch.int16),
        "scalar": torch.tensor(3),
        "bf16": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "c128": torch.tensor([1 + 2j], dtype=torch.complex128),
        "numpy": np.array([[1, 2], [3, 4]], dtype=np.uint16),
        "flags": np.array([True, False]),
        "numpy_scalar": np.array(2.5),
    }
    batch = TensorDict({"x": torch.zeros(2, 2)}, [2, 2])
    batch.set("rows", NonTensorStack(stack(1, "two"), stack([3], None)))
    outer = TensorDict({"one": NonTensorData(every), "scalars": NonTensorData(scalars)}, [2])
    outer.set("per_row", stack({"pixels": tensors}, (tensors["a"], [])))
    outer.set("listed", NonTensorData([torch.tensor([1]), 2]))
    outer.set("below", batch)
    return Golden(outer, {"registry": {"listed": MaskNestingSpec(None), "x": MaskNestingSpec(None)}})


def pickled() -> Golden:
    batch = TensorDict({"x": torch.arange(2.0)}, [2])
    batch.set("odd", stack({1}, b"bytes"))
    batch.set("plain", stack(1, 2))
    return Golden(batch, writing={"allow_pickle": True})


def rootless() -> Golden:
    """Rows that are no batch dim: flat fields between cu_seqlens, dense ones of any shape."""
    batch = TensorDict(
        {
            "cu_seqlens": torch.tensor([0, 2, 2, 5], dtype=torch.int32),
            "ids": torch.tensor([4, 5, 6, 7, 8]),
            "experts": torch.arange(10, dtype=torch.uint8).view(5, 2),
            "table": torch.tensor([[1.5, -0.0]]),
            "number": torch.tensor(7),
            "note": NonTensorData("x"),
            "inner": TensorDict({"z": torch.ones(4)}, []),
        },
        [],
    )
    specs = {name: MaskNestingSpec("packed") for name in ("ids", "experts")}
    axes = {"packed": (MaskAxis("cu_seqlens", form="cu_seqlens"),)}
    return Golden(batch, {"registry": MaskNestingRegistry(specs, axes)})


def no_rows() -> Golden:
    batch = TensorDict(
        {"mask": torch.zeros(0, 5), "x": torch.zeros(0, 5, 2), "y": torch.zeros(0, dtype=torch.int8)}, [0]
    )
    batch.set("uid", NonTensorStack())
    return Golden(batch, {"registry": under_mask("x")})


def no_width() -> Golden:
    batch = TensorDict({"mask": torch.zeros(2, 0), "x": torch.zeros(2, 0), "y": torch.zeros(2, dtype=torch.int8)}, [2])
    return Golden(batch, {"registry": under_mask("x")})


def many_runs() -> Golden:
    """Masks that bits make smaller than runs: one of a width that fills no whole byte; beside it one of few runs."""
    width, left = 131, draws()
    mask = [[place % 2 for place in range(width)], [1 - place % 2 for place in range(width)]]
    mask += [[next(left) >> 16 & 1 for _ in range(width)] for _ in range(4)]
    mask += [[0] * width, [1] * width]
    values = [[(place * place + 100 * row) % 251 for place in range(sum(line))] for row, line in enumerate(mask)]
    few = [[int(place < 20 * row) for place in range(width)] for row in range(len(mask))]
    batch = TensorDict(
        {
            "mask": torch.tensor(mask, dtype=torch.bool),
            "ids": rows_under(mask, values, torch.int32, 999),
            "few": torch.tensor(few),
        },
        [len(mask)],
    )
    specs = {"mask": MaskNestingSpec("mask"), "ids": MaskNestingSpec("mask", 999), "few": MaskNestingSpec("few")}
    return Golden(batch, {"registry": specs})


def zstd() -> Golden:
    """A noisy field, one close to it, one that compresses, and small ones that travel as they are."""
    mask = [[int(s < 200 - 40 * b) for s in range(200)] for b in range(4)]
    left = draws()
    noise = [[-(next(left) / 2**31) for _ in range(sum(line))] for line in mask]
    close = [[value + (place % 3) * 2.0**-22 for place, value in enumerate(row)] for row in noise]
    text = [[(place * place) % 70000 for place in range(len(row))] for row in noise]
    batch = TensorDict(
        {
            "mask": torch.tensor(mask),
            "rollout_log_probs": rows_under(mask, noise, torch.float32),
            "old_log_probs": rows_under(mask, close, torch.float32),
            "ids": rows_under(mask, text, torch.int32, 999),
            "scores": torch.tensor([1.0, 2.0, 3.0, 4.5]),
        },
        [4],
    )
    specs = under_mask("rollout_log_probs") | {"ids": MaskNestingSpec("mask", 999)}
    specs["old_log_probs"] = MaskNestingSpec("mask", hints=("near:rollout_log_probs",))
    return Golden(batch, {"registry": specs, "codec": "zstd"}, kinds={"old_log_probs": "blocks"})


def zeros() -> Golden:
    """Zeros of any sign, and names of dims."""
    mask = torch.tensor([[0, 1, 1, 0, 0, 0, 0, 0, 0, 0], [0] * 10, [1] * 10])
    x = torch.tensor([-1.0, 2.0, -3.0, 4.0, 5.0, -6.0, -7.0, 8.0, 9.0, -10.0]) * mask
    fields = {"mask": mask, "one": x, "two": -x, "half": x.half(), "brain": x.bfloat16(), "double": x.double()}
    inner = TensorDict({"y": torch.arange(6.0).view(3, 2)}, [3, 2], names=["rows", None])
    batch = TensorDict({**fields, "same": x[:1].repeat(3, 1) * 0, "inner": inner}, [3], names=["rows"])
    specs = {name: MaskNestingSpec("mask", 0 if name == "mask" else ANY_ZERO) for name in (*fields, "same")}
    return Golden(batch, {"registry": specs | {"y": MaskNestingSpec(None)}})


def checksum() -> Golden:
    golden = rollout()
    return replace(golden, writing={"checksum": True})


GOLDEN: dict[str, Callable[[], Golden]] = {
    make.__name__: make
    for make in (
        encodings,
        repeated_rows,
        rollout,
        forms,
        dtypes,
        plain_objects,
        pickled,
        rootless,
        no_rows,
        no_width,
        many_runs,
        zstd,
        checksum,
        zeros,
    )
}


def file(name: str) -> Path:
    return HERE / f"{name}{SUFFIX}"


def main() -> None:
    for name, make in GOLDEN.items():
        if not file(name).exists():
            golden = make()
            file(name).write_bytes(packed(golden).to_bytes(**golden.writing))
            print(f"wrote {file(name).name}, {file(name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
