"""Bytes and time of a pickle of the batches of SkyRL and OpenRLHF, as they pickle them and packed.

    SkyRL      TrainingInputBatch: one block padded on the left [B, S], response fields right-aligned [B, R]
    OpenRLHF   Experience: rows padded on the right [B, S], a value for each token after the first [B, S - 1]

Values and lengths are those of a workload, laid out anew; S and R are the longest of the batch. Pickles are of protocol
5: in band, as for files, and with buffers out of band, all of which is copied once more, as Ray copies it into its
store. OpenRLHF sets a flag of Ray that leaves tensors out of band, `zero-copy`. Each object must come back bit for bit,
or the case raises. CPU time of one thread. Needs skyrl and openrlhf.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from tensordict import TensorDict
from torch import Tensor

from bench.harness.measure import interleaved, progress, require_same, torch_threads
from bench.harness.registry import case
from bench.harness.report import Row, ratios, times
from bench.workloads import PAD_ID, WORKLOADS, batch_of
from maskpack.adapters.openrlhf import pickle_experiences
from maskpack.adapters.skyrl import pickle_tensor_batches

_Pickle = tuple[bytearray | bytes, list[bytearray]]


@case(
    "carriers",
    help="bytes and time of the pickles of SkyRL's and OpenRLHF's batches",
    on="cpu",
    rows=64,
    tiny={"rows": 8, "scale": 0.016},
)
def run(rows: int, rounds: int, *, scale: float = 1.0) -> list[Row]:
    """Raises NotExact if an object does not come back."""
    report: list[Row] = []
    with torch_threads(1):
        for workload in WORKLOADS:
            batch = batch_of(workload, rows, scale=scale)
            progress(f"carriers {workload}: {rows} rows")
            report += _figures(f"SkyRL {workload}", skyrl_batch(batch), pickle_tensor_batches, rows, rounds)
            report += _figures(f"OpenRLHF {workload}", experience(batch), pickle_experiences, rows, rounds)
    return report


# -------------------------------------------------------------------- batches


def skyrl_batch(batch: TensorDict) -> Any:
    """The batch that SkyRL's trainer stages for its workers, after advantages were computed."""
    valid, on_response = _masks(batch)
    sequence, response = (_filled(mask.sum(1)).flip(1) for mask in (valid, on_response))
    width = response.shape[1]

    def right(name: str) -> Tensor:
        return _laid(batch[name][on_response], response, 0)

    before = sequence[:, -width:] & ~response  # prompt tokens beside short responses have log-probs, too
    drawn = -torch.rand(before.shape, generator=torch.Generator().manual_seed(0)) * before
    fields = {
        "sequences": _laid(batch["input_ids"][valid], sequence, PAD_ID),
        "attention_mask": sequence.long(),
        "response_mask": response.long(),
        "loss_mask": right("response_mask").float(),
        "rollout_logprobs": right("rollout_log_probs"),
        "base_action_log_probs": right("ref_log_prob") + drawn,
        "action_log_probs": right("old_log_probs") + drawn,
        "values": right("values") if "values" in batch else None,
        "advantages": right("advantages"),
        "returns": right("returns"),
    }
    made = TrainingInputBatch(fields)
    made.metadata = {"response_length": width, "pad_size": 0}
    return made


def experience(batch: TensorDict) -> Any:
    """The Experience that OpenRLHF's trainer sends to its workers, after advantages were computed."""
    valid, on_response = _masks(batch)
    sequence = _filled(valid.sum(1))
    on_sequence = torch.cat([torch.zeros_like(valid[:, : -on_response.shape[1]]), on_response], 1)
    response = _laid(on_sequence[valid], sequence, False)[:, 1:]

    def at_tokens(name: str) -> Tensor:
        return _laid(batch[name][on_response], response, 0)

    action = at_tokens("response_mask")
    reward = batch["token_level_rewards"].sum(1)
    last = action.shape[1] - action.flip(1).argmax(1) - 1
    returns = reward[:, None] * (torch.arange(action.shape[1]) <= last[:, None])
    values = at_tokens("values") * action if "values" in batch else None
    advantages = returns.clone()
    if values is not None:  # whitened, as its GAE with gamma = lambda = 1
        advantages = returns - values
        advantages = (advantages - advantages[action > 0].mean()) / advantages[action > 0].std()
    old = at_tokens("old_log_probs") * action
    return Experience(
        sequences=_laid(batch["input_ids"][valid], sequence, PAD_ID),
        attention_mask=sequence.long(),
        action_mask=action,
        action_log_probs=old,
        base_action_log_probs=at_tokens("ref_log_prob") * action,
        rollout_log_probs=at_tokens("rollout_log_probs"),
        values=values,
        returns=returns,
        advantages=advantages,
        rewards=reward,
        response_length=action.sum(1),
        total_length=valid.sum(1).float(),
        index=list(range(len(batch))),
        prompts=[f"prompt {row // 16}" for row in range(len(batch))],
        info={"reward": reward, "return": returns[:, 0].clone()},
    )


def _masks(batch: TensorDict) -> tuple[Tensor, Tensor]:
    """bool [B, S] and [B, R]: tokens of rows, and those of their responses."""
    valid = batch["attention_mask"].bool()
    return valid, valid[:, -batch["responses"].shape[1] :]


def _filled(lengths: Tensor) -> Tensor:
    """bool [B, width], padded on the right."""
    return torch.arange(int(lengths.max())) < lengths[:, None]


def _laid(values: Tensor, mask: Tensor, pad: float) -> Tensor:
    out = torch.full(mask.shape, pad, dtype=values.dtype)
    out[mask] = values
    return out


# -------------------------------------------------------------------- figures


def _figures(name: str, data: Any, pickled: Callable[..., Callable[[], None]], rows: int, rounds: int) -> list[Row]:
    def packed(dumped: Callable[[Any], _Pickle]) -> _Pickle:
        undo = pickled(pad_token_id=PAD_ID)
        try:
            return dumped(data)
        finally:
            undo()

    report: list[Row] = []
    for band, dumped in {"out of band": _apart, "in band": _together}.items():
        to: dict[str, Callable[[], _Pickle]] = {
            "own": lambda dumped=dumped: dumped(data),
            "maskpack": lambda dumped=dumped: packed(dumped),
        }
        if dumped is _apart and isinstance(data, Experience):
            to["zero-copy"] = lambda: _apart(data, _ZeroCopy)
        made = {who: work() for who, work in to.items()}
        for result in made.values():
            require_same(name, _tensors(_loaded(result)), _tensors(data))
        works: dict[str, Callable[[], object]] = {f"{who}, to pickle": work for who, work in to.items()}
        works |= {f"{who}, from pickle": lambda result=result: _loaded(result) for who, result in made.items()}
        ms = interleaved(works, rounds, time.thread_time)
        case, sizes = f"{name}, {band}", {who: _nbytes(result) / rows for who, result in made.items()}
        both = {who: ms[f"{who}, to pickle"] + ms[f"{who}, from pickle"] for who in to}
        report += [Row(case, who, size, "bytes/row") for who, size in sizes.items()]
        report += [Row(case, "bytes, own / maskpack", sizes["own"] / sizes["maskpack"], "x"), *times(case, ms)]
        pairs = [(who, "maskpack", None) for who in to if who != "maskpack"]
        report += ratios(case, both, pairs, "both ways, ")
    return report


class _ZeroCopy(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if type(value) is Tensor else NotImplemented


def _apart(data: Any, pickler: type[pickle.Pickler] = pickle.Pickler) -> _Pickle:
    buffers: list[Any] = []
    stream = io.BytesIO()
    pickler(stream, 5, buffer_callback=buffers.append).dump(data)
    return bytearray(stream.getbuffer()), [bytearray(buffer.raw()) for buffer in buffers]


def _together(data: Any) -> _Pickle:
    return pickle.dumps(data, protocol=5), []


def _loaded(pickled: _Pickle) -> Any:
    return pickle.loads(pickled[0], buffers=pickled[1])


def _nbytes(pickled: _Pickle) -> int:
    return len(pickled[0]) + sum(map(len, pickled[1]))


def _tensors(data: Any) -> TensorDict:
    fields: Mapping[str, Any] = data if isinstance(data, dict) else vars(data)
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return TensorDict(tensors, batch_size=[len(tensors["sequences"])])
