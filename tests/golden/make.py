"""The golden files: what version 1 of the format wrote, and what they hold in plain tensors.

`python -m tests.golden.make` writes the files that are missing. One that is there is never written again: bytes that
were written once must stay readable.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from maskpack import (
    DENSE,
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
from maskpack.packed.decode import Decoder
from maskpack.packed.encodings import Bits, Narrow, Plain, Ramp, Runs, Sparse, Steps
from maskpack.packed.references import Columns, Joined, Same, repeated

HERE = Path(__file__).parent
SUFFIX = ".maskpack"
NAN = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]  # with a sign and a payload

Encoder = Callable[[np.ndarray, np.ndarray], Any]


@dataclass
class Golden:
    """What a file holds.

    Attributes:
        batch: the content.
        options: of `compress`.
        encoders: makes the encodings of some fields, whatever `compress` chooses.
        writing: arguments of `to_bytes`.
        kinds: encodings that the file must show.
    """

    batch: TensorDict
    options: dict[str, Any] = field(default_factory=dict)
    encoders: Mapping[str, Encoder] = field(default_factory=dict)
    writing: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()


def packed(golden: Golden) -> PackedBatch:
    out = compress(golden.batch, **{"registry": {}, **golden.options})
    fields = dict(out.fields)
    for name, encode in golden.encoders.items():
        fields[(name,)] = encode(*Decoder(out, False, "cpu").source((name,)))
    return replace(out, fields=fields)


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

MASK = [[0, 1, 1, 1, 0, 0], [1, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]


def under_mask(*names: str, pad: Any = 0) -> dict[str, MaskNestingSpec]:
    return {name: MaskNestingSpec("mask", pad) for name in ("mask", *names)}


def encodings() -> Golden:
    i64 = torch.int64
    fields = {
        "plain": rows_under(MASK, [[5, -6, 7], [2**40, 9, 0, 1], [], [3]], i64),
        "narrow1": rows_under(MASK, [[1, 2, 255], [0, 9, 8, 7], [], [6]], i64),
        "narrow1_based": rows_under(MASK, [[-1000, -999, -950], [-1000, -900, -901, -902], [], [-1000]], i64),
        "narrow2": rows_under(MASK, [[1, 2, 65535], [0, 9, 8, 7], [], [600]], torch.int32),
        "narrow3": rows_under(MASK, [[1, 2, 16777215], [0, 9, 151643, 7], [], [600]], i64),
        "narrow4": rows_under(MASK, [[1, 2, 4294967295], [0, 9, 8, 7], [], [600]], i64),
        "bits": rows_under(MASK, [[0, 1, 0], [1, 1, 0, 1], [], [1]], torch.bool),
        "bits_of_two": rows_under(MASK, [[-1.5, 2.5, -1.5], [2.5, 2.5, -1.5, 2.5], [], [2.5]], torch.float32),
        "runs": rows_under(MASK, [[4, 4, 4], [4, 4, -5, -5], [], [4]], i64),
        "runs_one": rows_under(MASK, [[1, 1, 1], [1, 1, 1, 1], [], [1]], torch.int16),
        "ramp": rows_under(MASK, [[7, 10, 13], [-1, 2, 5, 8], [], [0]], i64),
        "ramp_wraps": rows_under(MASK, [[100, 127, -102], [27, 54, 81, 108], [], [0]], torch.int8),
        "steps": rows_under(MASK, [[0, 1, 2], [5, 5, 5, 6], [], [3]], i64),
        "sparse": rows_under(MASK, [[0, 0, 1.5], [0, 0, 0, 0], [], [-0.0]], torch.float32),
    }
    columns = torch.zeros(4, 6, 2, dtype=i64)
    for b, line in enumerate(MASK):
        for s, real in enumerate(line):
            if real:
                columns[b, s] = torch.tensor([10 * b + s, -3])
    fields["columns"] = columns
    fields["same"] = fields["plain"].clone()
    batch = TensorDict({"mask": torch.tensor(MASK), **fields}, [4])
    narrow = dict.fromkeys(("narrow1", "narrow1_based", "narrow2", "narrow3", "narrow4"), Narrow.encode)
    encoders = {
        "mask": Runs.encode,
        "plain": lambda words, _: Plain(words),
        **narrow,
        "bits": Bits.encode,
        "bits_of_two": Bits.encode,
        "runs": Runs.encode,
        "runs_one": Runs.encode,
        "ramp": Ramp.encode,
        "ramp_wraps": Ramp.encode,
        "steps": Steps.encode,
        "sparse": Sparse.encode,
        "columns": lambda words, bounds: Columns(
            (Plain(words[::2].copy()), Runs.encode(words[1::2].copy(), bounds // 2))
        ),
        "same": lambda *_: Same(("plain",)),
    }
    kinds = ("plain", "narrow", "bits", "runs", "ramp", "steps", "sparse", "columns", "same")
    return Golden(batch, {"registry": under_mask(*fields)}, encoders, kinds=kinds)


def repeated_rows() -> Golden:
    """Rows 0 and 2 are one, 1 and 3 are one; in one field stored plain, in the others narrow and as steps."""
    mask = [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]]
    values = [[7, 8, 12], [9], [7, 8, 12], [9]]
    fields = {name: rows_under(mask, values, torch.int64) for name in ("plain", "narrow", "steps")}
    batch = TensorDict({"mask": torch.tensor(mask, dtype=torch.bool), **fields, "dense": torch.ones(4, 3)}, [4])

    def encoder(encode: Encoder) -> Encoder:
        return lambda words, bounds: repeated(words, bounds, encode)

    encoders = {
        "mask": Bits.encode,
        "plain": encoder(lambda words, _: Plain(words)),
        "narrow": encoder(Narrow.encode),
        "steps": encoder(Steps.encode),
        "dense": encoder(Runs.encode),
    }
    return Golden(batch, {"registry": under_mask(*fields)}, encoders, kinds=("repeated", "steps"))


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
    encoders = {"input_ids": lambda *_: Joined(("prompts",), ("responses",))}
    return Golden(batch, {"registry": RL_FIELDS, "pad_token_id": 99}, encoders, kinds=("joined",))


def forms() -> Golden:
    """Ragged dim 2, pads of every kind, row pads, sub-TensorDicts with batch dims of their own, jagged fields."""
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
    return Golden(batch, {"registry": specs | {"x": DENSE}, "pad_token_id": 50256})


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


def objects() -> Golden:
    every = [None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(10**40), 0.0, -0.0, 0.1, 1e300, 5e-324]
    every += [math.inf, -math.inf, NAN, "", 'täxt\n"\\ 😀', "\ud83d\ude00", "\udc00", [], (), {}, [[]], ((1,), [2])]
    every += [{1: "a", "1": "b", (2, "x"): [3.5], None: (), 2.5: None, True + 1: False}]
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
    return Golden(outer, {"registry": {"listed": MaskNestingSpec(None), "x": DENSE}})


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
    width, state, mask = 131, 12345, [[place % 2 for place in range(131)], [1 - place % 2 for place in range(131)]]
    for _ in range(4):
        line = []
        for _ in range(width):
            state = (1103515245 * state + 12345) % 2**31
            line.append(state >> 16 & 1)
        mask.append(line)
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
    noise, state = [], 12345
    for line in mask:
        row = []
        for _ in range(sum(line)):
            state = (1103515245 * state + 12345) % 2**31
            row.append(-(state / 2**31))
        noise.append(row)
    close = [[value + (place % 3) * 2.0**-22 for place, value in enumerate(row)] for row in noise]
    text = [[(place * place) % 70000 for place in range(len(row))] for row in noise]
    batch = TensorDict(
        {
            "mask": torch.tensor(mask),
            "rollout_log_probs": rows_under(mask, noise, torch.float32),
            "old_log_probs": rows_under(mask, close, torch.float32),
            "ids": rows_under(mask, text, torch.int32),
            "scores": torch.tensor([1.0, 2.0, 3.0, 4.5]),
        },
        [4],
    )
    specs = under_mask("rollout_log_probs", "ids")
    specs["old_log_probs"] = MaskNestingSpec("mask", hints=("delta:rollout_log_probs",))
    return Golden(batch, {"registry": specs, "codec": "zstd"}, kinds=("plain",))


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
        objects,
        pickled,
        rootless,
        no_rows,
        no_width,
        many_runs,
        zstd,
        checksum,
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
