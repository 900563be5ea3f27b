"""Bytes and time of a pickle of the batches of SkyRL and OpenRLHF, as they pickle them and packed.

    SkyRL      TrainingInputBatch: one block padded on the left [B, S], response fields right-aligned [B, R]
    OpenRLHF   Experience: rows padded on the right [B, S], a value for each token after the first [B, S - 1]

The batches are those of `bench.workloads.trainers`, with the rows of a workload. Pickles are of
protocol 5 with buffers out of band, all of which is copied once more, as Ray copies it into its store. OpenRLHF
sets a flag of Ray that leaves tensors out of band, `zero-copy`. Each object must come back bit for bit, or the case
raises. CPU time of one thread. Needs skyrl and openrlhf.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import (
    Pickled,
    interleaved,
    nbytes,
    progress,
    require_same,
    torch_threads,
    unpickled,
)
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups, ratios, times
from bench.workloads import PAD_ID, WORKLOADS
from bench.workloads.trainers import trainer_batch
from maskpack.adapters.openrlhf import pickle_experiences
from maskpack.adapters.skyrl import pickle_tensor_batches


@case(
    "carriers",
    help="bytes and time of the pickles of SkyRL's and OpenRLHF's batches",
    on="cpu",
    rows=64,
    tiny={"rows": 8, "scale": 0.016},
)
def run(rows: int, rounds: int, *, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if an object does not come back."""
    with torch_threads(1):
        for workload in WORKLOADS:
            progress(f"carriers {workload}: {rows} rows")
            yield _figures(f"SkyRL {workload}", skyrl_batch(workload, rows, scale), pickle_tensor_batches, rows, rounds)
            yield _figures(f"OpenRLHF {workload}", experience(workload, rows, scale), pickle_experiences, rows, rounds)


def skyrl_batch(workload: str, rows: int, scale: float = 1.0) -> Any:
    """The batch that SkyRL's trainer stages for its workers, after advantages were computed."""
    batch = TrainingInputBatch({**dict(trainer_batch("skyrl", workload, rows, scale).items()), "values": None})
    batch.metadata = {"response_length": batch["response_mask"].shape[1], "pad_size": 0}
    return batch


def experience(workload: str, rows: int, scale: float = 1.0) -> Any:
    """The Experience that OpenRLHF's trainer sends to its workers, after advantages were computed."""
    fields = dict(trainer_batch("openrlhf", workload, rows, scale).items())
    reward = fields["returns"].amax(1)
    return Experience(
        **fields,
        rewards=reward,
        total_length=fields["attention_mask"].sum(1).float(),
        index=list(range(rows)),
        prompts=[f"prompt {row // 16}" for row in range(rows)],
        info={"reward": reward, "return": reward.clone()},
    )


def _figures(name: str, data: Any, pickles: Callable[..., Callable[[], None]], rows: int, rounds: int) -> list[Row]:
    def packed() -> Pickled:
        undo = pickles(pad_token_id=PAD_ID)
        try:
            return _copied(data)
        finally:
            undo()

    to: dict[str, Callable[[], Pickled]] = {"own": lambda: _copied(data), "maskpack": packed}
    if isinstance(data, Experience):
        to["zero-copy"] = lambda: _copied(data, _ZeroCopy)
    made = {who: work() for who, work in to.items()}
    for result in made.values():
        require_same(name, _tensors(unpickled(result)), _tensors(data))
    works: dict[str, Callable[[], object]] = {f"{who}, to pickle": work for who, work in to.items()}
    works |= {f"{who}, from pickle": partial(unpickled, result) for who, result in made.items()}
    ms = interleaved(works, rounds, time.thread_time)
    sizes = {who: nbytes(result) / rows for who, result in made.items()}
    both = {who: ms[f"{who}, to pickle"] + ms[f"{who}, from pickle"] for who in to}
    return [
        *(Row(name, who, size, "bytes/row") for who, size in sizes.items()),
        *ratios(name, sizes, [("own", "maskpack", None)], "bytes, "),
        *times(name, ms),
        *ratios(name, both, [(who, "maskpack", None) for who in to if who != "maskpack"], "both ways, "),
    ]


class _ZeroCopy(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if type(value) is Tensor else NotImplemented


def _copied(data: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> Pickled:
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    pickler(stream, 5, buffer_callback=buffers.append).dump(data)
    return bytes(stream.getbuffer()), [pickle.PickleBuffer(bytearray(buffer.raw())) for buffer in buffers]


def _tensors(data: Any) -> TensorDict:
    fields: Mapping[str, Any] = data if isinstance(data, dict) else vars(data)
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return TensorDict(tensors, batch_size=[len(tensors["sequences"])])
