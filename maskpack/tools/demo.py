"""The command `maskpack demo`: Ray workers score rollouts of a tiny model, once from the padded batch and once through
maskpack, and every bit of the outputs is compared.

    padded      clone each rank's rows -> ray.put -> actor method -> ray.get -> torch.cat      what people do today
    maskpack    WorkerGroup.pack -> WorkerGroup.call, the same actor method behind @endpoint

The model is a Qwen3 with random weights, and the tokens are random; the lengths are drawn as those of rollouts are:

    prompts     . . . . x x x x         left padded to P
    responses   x x x . . . . .         right padded to R
"""

from __future__ import annotations

import functools
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from maskpack.core.difference import difference
from maskpack.dispatch.group import WorkerGroup, endpoint
from maskpack.errors import MaskpackError
from maskpack.nesting.response import extract_response
from maskpack.packed.batch import decompress

PAD = 256
PROMPT_WIDTH, RESPONSE_WIDTH = 64, 1024
_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids", "responses")
_ROWS_AT_ONCE = 8

WAYS = ("padded", "maskpack")
ROUNDS = 3


class OutputsDiffer(MaskpackError):
    """The two ways gave different bits."""


# -------------------------------------------------------------------- rollouts


def tiny_model(seed: int) -> Any:
    """A Qwen3ForCausalLM of 35 000 float32 weights over 256 bytes and PAD; the same weights for the same seed."""
    config = Qwen3Config(
        vocab_size=PAD + 1,
        pad_token_id=PAD,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=PROMPT_WIDTH + RESPONSE_WIDTH,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("Any", Qwen3ForCausalLM(config)).float().eval()


def rollout_batch(prompts: int, responses: int, seed: int) -> TensorDict:
    """The padded batch of B = prompts * responses rows, with the fields of a GRPO trainer: random tokens of log-normal
    lengths, and a reward of 0 or 1 at the last one. The responses to a prompt follow each other."""
    rng = torch.Generator().manual_seed(seed)
    rows = prompts * responses

    def lengths(count: int, median: int, most: int) -> Tensor:
        return (median * torch.empty(count).log_normal_(0, 1, generator=rng)).long().clamp(1, most)

    ids = torch.randint(PAD, (rows, PROMPT_WIDTH + RESPONSE_WIDTH), generator=rng)
    ids[:, :PROMPT_WIDTH] = ids[::responses, :PROMPT_WIDTH].repeat_interleave(responses, 0)
    before = lengths(prompts, 12, PROMPT_WIDTH).repeat_interleave(responses)[:, None]
    after = lengths(rows, 60, RESPONSE_WIDTH)[:, None]
    column = torch.arange(ids.shape[1]) - PROMPT_WIDTH
    mask = (column >= -before) & (column < after)
    ids = torch.where(mask, ids, PAD)
    response_mask = mask[:, PROMPT_WIDTH:].long()
    reward = torch.randint(2, (prompts, responses), generator=rng).float()
    scores = torch.zeros(response_mask.shape).scatter(1, after - 1, reward.view(-1, 1))
    advantages = (reward - reward.mean(1, keepdim=True)).view(-1, 1) * response_mask
    return TensorDict(
        {
            "prompts": ids[:, :PROMPT_WIDTH].clone(),
            "responses": ids[:, PROMPT_WIDTH:].clone(),
            "input_ids": ids,
            "attention_mask": mask.long(),
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "token_level_scores": scores,
            "token_level_rewards": scores.clone(),
            "advantages": advantages,
            "returns": advantages.clone(),
            "uid": [f"prompt {row // responses}" for row in range(rows)],
        },
        batch_size=[rows],
    )


# -------------------------------------------------------------------- the worker


class Scorer:
    """One data-parallel rank: its method takes a TensorDict of rows, and behind `@endpoint` packed rows too."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._model = tiny_model(seed)
        self._span = 0.0, 0.0

    def span(self) -> tuple[float, float]:
        """The times at which the model's work of the last call began and ended, by the clock of the machine."""
        return self._span

    @endpoint
    def log_probs(self, batch: TensorDictBase) -> TensorDict:
        """old_log_probs and entropys float32 [B, R], 0 after each response."""
        begin = time.monotonic()
        out: dict[str, list[Tensor]] = {"old_log_probs": [], "entropys": []}
        with torch.no_grad():
            for rows in batch.select(*_MODEL_INPUTS).split(_ROWS_AT_ONCE):
                inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
                scores: Tensor = self._model(**inputs, use_cache=False).logits.log_softmax(-1)
                # The last column wraps around to the first token; no response token is scored there.
                following = scores.gather(-1, rows["input_ids"].roll(-1, 1)[..., None])[..., 0]
                out["old_log_probs"].append(extract_response(rows, following))
                out["entropys"].append(extract_response(rows, -(scores.exp() * scores).sum(-1)))
        result = TensorDict({name: torch.cat(parts) for name, parts in out.items()}, batch_size=batch.batch_size)
        self._span = begin, time.monotonic()
        return result


# -------------------------------------------------------------------- the two ways, measured


@dataclass(frozen=True)
class Trip:
    """One call on all ranks: the outputs, the bytes each way, and milliseconds in the model and in all."""

    output: dict[str, Tensor]
    sent: int
    returned: int
    model: float
    whole: float

    @property
    def moving(self) -> float:
        return self.whole - self.model


class _Tap:
    """An actor handle that notes arguments and results, so that both ways are measured at the same place."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.arguments: tuple[Any, ...] = ()
        self.results: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        def tapped(**options: Any) -> SimpleNamespace:
            return SimpleNamespace(remote=functools.partial(self._submit, method, options), options=tapped)

        return tapped()

    def _submit(self, method: str, options: dict[str, Any], *arguments: Any) -> Any:
        result: Any = getattr(self.actor, method).options(**options).remote(*arguments)
        self.arguments = arguments
        self.results = cast("list[Any]", result) if isinstance(result, list) else [result]
        return cast("Any", result)


def _trip(way: str, taps: Sequence[_Tap], batch: TensorDict) -> Trip:
    begin = time.monotonic()
    if way == "padded":
        least, more = divmod(batch.shape[0], len(taps))
        sizes = [least + (rank < more) for rank in range(len(taps))]
        # Cloned, because a view of the batch would be pickled with the storage of all its rows.
        refs = [ray.put(part.clone()) for part in batch.split(sizes)]
        results: Any = ray.get([tap.log_probs.remote(ref) for tap, ref in zip(taps, refs, strict=True)])
        output: Any = torch.cat(results)
    else:
        group = WorkerGroup(taps, pad_token_id=PAD)
        output = group.call("log_probs", group.pack(batch))
    end = time.monotonic()
    spans: list[tuple[float, float]] = ray.get([tap.actor.span.remote() for tap in taps])
    first, last = max(spans, key=lambda span: span[1])
    arguments: list[Any] = [argument for tap in taps for argument in tap.arguments]
    refs = list(dict.fromkeys(value for value in arguments if isinstance(value, cast("Any", ray.ObjectRef))))
    sent = [*ray.get(refs), *(value for value in arguments if not isinstance(value, ray.ObjectRef))]
    returned = ray.get([result for tap in taps for result in tap.results])
    sent_bytes, returned_bytes = (sum(map(wire_bytes, values)) for values in (sent, returned))
    return Trip(_named(output), sent_bytes, returned_bytes, 1e3 * (last - first), 1e3 * (end - begin))


def _named(output: TensorDictBase) -> dict[str, Tensor]:
    """The tensors of a TensorDict, by the names that the comparison reports."""
    return {str(name): value for name, value in output.items() if isinstance(value, Tensor)}


def wire_bytes(value: Any) -> int:
    """Bytes that Ray carries for `value`: the pickle stream (protocol 5) and its out-of-band buffers."""
    buffers: list[Any] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


# -------------------------------------------------------------------- bit for bit


def compare(padded: Mapping[str, Tensor], maskpack: Mapping[str, Tensor]) -> int:
    """Compares two sets of tensors bit for bit.

    Returns:
        The number of values.

    Raises:
        OutputsDiffer: other names, dtypes or shapes, or a bit that differs; names the field, the place and both values.
    """
    forms = [{name: (x.dtype, tuple(x.shape)) for name, x in way.items()} for way in (padded, maskpack)]
    if forms[0] != forms[1]:
        raise OutputsDiffer(f"the padded way gave {forms[0]}; maskpack gave {forms[1]}.")
    for name, value in padded.items():
        found = difference(value, maskpack[name])
        if found is not None:
            raise OutputsDiffer(
                f'"{name}" differs in {found.count} of {value.numel()} values, first in {found.place}: '
                f"{found.values[0]} the padded way; {found.values[1]} through maskpack."
            )
    return sum(value.numel() for value in padded.values())


# -------------------------------------------------------------------- the run


def run(prompts: int, responses: int, seed: int, ranks: int, say: Callable[[str], None]) -> int:
    """Runs the demo with `prompts` x `responses` rows; returns the exit status: 0, or 1 if any bit differs."""
    threads, alone = torch.get_num_threads(), not ray.is_initialized()
    torch.set_num_threads(1)  # as in the workers: threads that wait for a core would be measured too
    # Without it Ray warns of a coming change in how it hides GPUs, of which the demo uses none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        say(f"{ranks} workers start ...")
        taps = [_Tap(actor) for actor in WorkerGroup.launch(Scorer, ranks, seed).actors]
        batch = rollout_batch(prompts, responses, seed)
        say(f"{ROUNDS} rounds, both ways ...")
        trips, compared = _measure(taps, batch)
    except OutputsDiffer as error:
        say(f"THE OUTPUTS DIFFER\n{error}")
        return 1
    finally:
        torch.set_num_threads(threads)
        if alone:
            ray.shutdown()
    say(_table(batch, trips, ranks))
    padded, packed = (trips[way][-1].sent for way in WAYS)
    ratio = f"{padded / packed:.1f} times fewer bytes than padded"
    say(f"\nTo the workers, maskpack sent {packed / 1e3:,.1f} kB: {ratio}.")
    say(f"All outputs were bitwise equal: {compared:,} values compared in {ROUNDS} rounds.")
    return 0


def _measure(taps: Sequence[_Tap], batch: TensorDict) -> tuple[dict[str, list[Trip]], int]:
    """The trips of each way in all rounds, and the number of values that were compared."""
    for way in WAYS:  # the first calls pay for imports and for memory that is touched the first time
        _trip(way, taps, batch[: 2 * len(taps)])
    trips: dict[str, list[Trip]] = {way: [] for way in WAYS}
    compared = compare(_named(batch), _named(decompress(WorkerGroup(taps, pad_token_id=PAD).pack(batch))))
    for number in range(ROUNDS):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            trips[way].append(_trip(way, taps, batch))
        compared += compare(*(trips[way][-1].output for way in WAYS))
    return trips, compared


def _table(batch: TensorDict, trips: Mapping[str, Sequence[Trip]], ranks: int) -> str:
    valid = batch["attention_mask"].float().mean().item()
    lines = [
        f"\n{batch.shape[0]} rows of {PROMPT_WIDTH} + {RESPONSE_WIDTH} tokens, {valid:.1%} valid, to {ranks} workers "
        "and back. Bytes are those that\nRay carried: pickle streams and out-of-band buffers. Times are medians of "
        f"{ROUNDS} rounds; the model,\ntimed on the worker that ended last, runs the same code both ways.\n",
        f"{'':<20}{WAYS[0]:>14}{WAYS[1]:>14}  padded / maskpack",
    ]
    for name, attribute, unit, scale in (
        ("to the workers", "sent", "kB", 1e3),
        ("back to the driver", "returned", "kB", 1e3),
        ("the model", "model", "ms", 1),
        ("all but the model", "moving", "ms", 1),
        ("whole", "whole", "ms", 1),
    ):
        padded, packed = (median(getattr(trip, attribute) for trip in trips[way]) / scale for way in WAYS)
        ratio = "" if attribute in ("model", "whole") else f"{padded / packed:>17,.1f} x"  # of what differs
        lines.append(f"{name:<20}{padded:>11,.1f} {unit}{packed:>11,.1f} {unit}{ratio}")
    return "\n".join(lines)
