"""The program of `maskpack demo`: Ray workers make a step of a GRPO trainer in four ways, and the outputs are compared:
from padded rows, with rows trimmed, through maskpack, and with replay of packed rows.

A step is log-probs and entropies, then a policy update up to its optimizer: forward and backward. The model is a Qwen3
with random float32 weights, and the tokens are random; the lengths are drawn as those of rollouts are:

    prompts     . . . . x x x x         left padded to P
    responses   x x x . . . . .         right padded to R
"""

from __future__ import annotations

import argparse
import functools
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import ray
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from maskpack.adapters.transformers import replayable
from maskpack.core.difference import difference
from maskpack.dispatch.group import WorkerGroup, endpoint
from maskpack.errors import MaskpackError
from maskpack.packed.batch import decompress
from maskpack.planning import plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

PAD = 256
PROMPT_WIDTH, RESPONSE_WIDTH = 256, 768
_FIELDS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "advantages")
_ROWS_AT_ONCE = 8
_TOKENS_AT_ONCE = 4096  # fewer than _ROWS_AT_ONCE padded rows
_Tensors = Mapping[str, Tensor]
_OPTIONS = ReplayOptions(share_prefixes=True)

WAYS = {
    "padded": "micro-batches of 8 padded rows, as most trainers run them",
    "trimmed": "the same rows sent; each worker sorts its rows by length and trims micro-batches",
    "maskpack": "packed rows sent; the model runs padded rows, by the same code as above",
    "+ replay": "packed rows sent; the model runs packed rows, and a shared prompt once",
}
ROUNDS = 3
ROUNDING = 1e-5  # the most by which sums in another order may differ, as a part of the largest value


class OutputsDiffer(MaskpackError):
    """Outputs differ that should be equal."""


# -------------------------------------------------------------------- rollouts


def tiny_model(seed: int) -> Any:
    """A Qwen3ForCausalLM of 35 000 float32 weights over 256 bytes and PAD; the same weights for the same seed."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes: dict[str, Any] = {
        "vocab_size": PAD + 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        **heads,
    }
    longest = PROMPT_WIDTH + RESPONSE_WIDTH
    config = Qwen3Config(**sizes, max_position_embeddings=longest, initializer_range=0.3, pad_token_id=PAD)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return cast("Any", Qwen3ForCausalLM(config)).float().eval()


def rollout_batch(prompts: int, responses: int, seed: int) -> TensorDict:
    """The padded batch of B = prompts * responses rows, with the fields of a GRPO trainer: random tokens of log-normal
    lengths, and a reward of 0 or 1 at the last one. The responses to a prompt follow each other."""
    rng = torch.Generator().manual_seed(seed)
    rows = prompts * responses

    def lengths(count: int, median: int, deviation: float, most: int) -> Tensor:
        return (median * torch.empty(count).log_normal_(0, deviation, generator=rng)).long().clamp(1, most)

    ids = torch.randint(PAD, (rows, PROMPT_WIDTH + RESPONSE_WIDTH), generator=rng)
    ids[:, :PROMPT_WIDTH] = ids[::responses, :PROMPT_WIDTH].repeat_interleave(responses, 0)
    before = lengths(prompts, 128, 0.5, PROMPT_WIDTH).repeat_interleave(responses)[:, None]
    after = lengths(rows, 128, 1, RESPONSE_WIDTH)[:, None]
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


class Trainer:
    """One data-parallel rank. Its steps take rows as a TensorDict, or packed, and return float32 [B, R] or jagged."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        self._model, self._packed = tiny_model(seed), tiny_model(seed)
        self._replay = replayable(self._packed)
        self._last = 0.0, 0.0, self._model

    def report(self) -> tuple[float, float, Tensor]:
        """When the work of the last step began and ended, by the clock of the machine, and its gradients [weights]."""
        begin, end, model = self._last
        return begin, end, torch.cat([weights.grad.flatten() for weights in model.parameters()])

    @endpoint(fields=_FIELDS)
    def step(self, batch: TensorDictBase, trim: bool) -> TensorDict:
        """A step on padded rows. `trim`: rows are sorted by length, and micro-batches have no columns of padding."""
        begin = time.monotonic()
        old, entropy = torch.zeros(2, *batch["responses"].shape)
        self._model.zero_grad()
        with torch.no_grad():
            for numbers, rows in _micro_batches(batch, trim):
                log_probs, scores = self._log_probs(rows)
                width = log_probs.shape[1]
                old[numbers, :width] = log_probs
                entropy[numbers, :width] = -(scores.exp() * scores).sum(-1).masked_fill(rows["response_mask"] == 0, 0)
        for numbers, rows in _micro_batches(batch, trim):
            log_probs, _ = self._log_probs(rows)
            _policy_loss(log_probs, old[numbers, : log_probs.shape[1]], rows["advantages"]).backward()
        self._last = begin, time.monotonic(), self._model
        return TensorDict({"old_log_probs": old, "entropys": entropy}, batch_size=batch.batch_size)

    def _log_probs(self, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probs of the response [B, R], 0 after its end, and of all ids [B, R, V]."""
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits: Tensor = self._model(**inputs, use_cache=False).logits
        scores = logits[:, -rows["responses"].shape[1] - 1 : -1].log_softmax(-1)
        following = scores.gather(-1, rows["responses"][..., None])[..., 0]
        return following.masked_fill(rows["response_mask"] == 0, 0), scores

    @endpoint(format="nested", fields=_FIELDS)
    def replayed_step(self, batch: TensorDictBase) -> TensorDict:
        begin = time.monotonic()
        tree = prefix_tree(batch, options=_OPTIONS)
        plan = plan_micro_batches(tree.lengths, _TOKENS_AT_ONCE, tree=tree)
        self._packed.zero_grad()
        with torch.no_grad():
            old, entropy = response_log_probs(self._replay, batch, entropy=True, plan=plan, options=_OPTIONS)
        batch["old_log_probs"] = old
        for rows in plan.apply(batch):
            log_probs = response_log_probs(self._replay, rows, options=_OPTIONS).values()
            _policy_loss(log_probs, rows["old_log_probs"].values(), rows["advantages"].values()).backward()
        self._last = begin, time.monotonic(), self._packed
        return TensorDict({"old_log_probs": old, "entropys": entropy}, batch_size=batch.batch_size)


def _micro_batches(batch: TensorDictBase, trim: bool) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """The numbers and the fields of the rows of each micro-batch."""
    lengths: Tensor = batch["attention_mask"].sum(1)
    order = lengths.argsort() if trim else torch.arange(len(lengths))
    for numbers in cast("Sequence[Tensor]", order.split(_ROWS_AT_ONCE)):
        rows: dict[str, Tensor] = {name: batch[name][numbers] for name in _FIELDS}
        if trim:
            used = rows["attention_mask"].any(0).nonzero()
            first, end = int(used[0]), int(used[-1]) + 1
            ends = {PROMPT_WIDTH + RESPONSE_WIDTH: (first, end), RESPONSE_WIDTH: (0, end - PROMPT_WIDTH)}
            rows = {name: value[:, slice(*ends[value.shape[1]])] for name, value in rows.items()}
        yield numbers, rows


def _policy_loss(log_probs: Tensor, old: Tensor, advantages: Tensor) -> Tensor:
    """The sum over tokens: gradients of micro-batches and ranks add up."""
    return -((log_probs - old).exp() * advantages).sum()


# -------------------------------------------------------------------- the ways, measured


class Trip(NamedTuple):
    """One call on all ranks: the outputs, the bytes each way, and milliseconds in the model and outside it."""

    output: dict[str, Tensor]
    sent: int
    returned: int
    model: float
    moving: float


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
    if way in ("padded", "trimmed"):
        least, more = divmod(batch.shape[0], len(taps))
        sizes = [least + (rank < more) for rank in range(len(taps))]
        # Cloned, because a view of the batch would be pickled with the storage of all its rows.
        refs = [ray.put(part.clone()) for part in batch.split(sizes)]
        results: Any = ray.get([tap.step.remote(ref, way == "trimmed") for tap, ref in zip(taps, refs, strict=True)])
        output: Any = torch.cat(results)
    else:
        group = WorkerGroup(taps, pad_token_id=PAD)
        rows = group.pack(batch)
        output = group.call("replayed_step", rows) if way == "+ replay" else group.call("step", rows, False)
    end = time.monotonic()
    reports: list[tuple[float, float, Tensor]] = ray.get([tap.actor.report.remote() for tap in taps])
    first, last, _ = max(reports, key=lambda report: report[1])
    arguments: list[Any] = [argument for tap in taps for argument in tap.arguments]
    refs = list(dict.fromkeys(value for value in arguments if isinstance(value, cast("Any", ray.ObjectRef))))
    sent = [*ray.get(refs), *(value for value in arguments if not isinstance(value, ray.ObjectRef))]
    returned = ray.get([result for tap in taps for result in tap.results])
    sent_bytes, returned_bytes = (sum(map(wire_bytes, values)) for values in (sent, returned))
    output = {**_named(output), "gradients": torch.stack([gradients for _, _, gradients in reports]).sum(0)}
    return Trip(output, sent_bytes, returned_bytes, 1e3 * (last - first), 1e3 * (end - begin - last + first))


def _named(output: TensorDictBase) -> dict[str, Tensor]:
    """The tensors of a TensorDict, by the names that the comparison reports."""
    return {str(name): value for name, value in output.items() if isinstance(value, Tensor)}


def wire_bytes(value: Any) -> int:
    """Bytes that Ray carries for `value`: the pickle stream (protocol 5) and its out-of-band buffers."""
    buffers: list[Any] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def compare(padded: _Tensors, other: _Tensors, way: str = "maskpack", rounding: float = 0) -> None:
    """Compares the tensors of two ways: bit for bit, or within `rounding` times the largest value of each tensor.

    Raises:
        OutputsDiffer: other names, dtypes or shapes, or a value that differs; names the field, the place, both values.
    """
    forms = [{name: (x.dtype, tuple(x.shape)) for name, x in values.items()} for values in (padded, other)]
    if forms[0] != forms[1]:
        raise OutputsDiffer(f"the padded way gave {forms[0]}; {way} gave {forms[1]}.")
    for name, value in padded.items():
        seen = other[name]
        if rounding:
            seen = torch.where((value - seen).abs() <= rounding * value.abs().max(), value, seen)
        found = difference(value, seen)
        if found is not None:
            raise OutputsDiffer(
                f'"{name}" differs {"by more than rounding " if rounding else ""}in {found.count} of {value.numel()} '
                f"values, first in {found.place}: {found.values[0]} the padded way; {found.values[1]} through {way}."
            )


# -------------------------------------------------------------------- the run


def run(prompts: int, responses: int, seed: int, ranks: int, progress: Callable[[str], None]) -> tuple[str, int]:
    """Runs the demo with `prompts` x `responses` rows; returns its text and the exit status: 1 if outputs differ."""
    threads, alone = torch.get_num_threads(), not ray.is_initialized()
    torch.set_num_threads(1)  # as in the workers: threads that wait for a core would be measured too
    # Without it Ray warns of a coming change in how it hides GPUs, of which the demo uses none.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        progress(f"{ranks} workers start")
        taps = [_Tap(actor) for actor in WorkerGroup.launch(Trainer, ranks, seed).actors]
        batch = rollout_batch(prompts, responses, seed)
        trips = _measure(taps, batch, progress)
    except OutputsDiffer as error:
        return f"THE OUTPUTS DIFFER\n{error}", 1
    finally:
        torch.set_num_threads(threads)
        if alone:
            ray.shutdown()
    return _report(batch, ranks, trips), 0


def _measure(taps: Sequence[_Tap], batch: TensorDict, progress: Callable[[str], None]) -> dict[str, list[Trip]]:
    progress("first steps, with 2 rows for each worker")  # imports, and memory that is touched the first time
    for way in WAYS:
        _trip(way, taps, batch[: 2 * len(taps)])
    compare(_named(batch), _named(decompress(WorkerGroup(taps, pad_token_id=PAD).pack(batch))))
    trips: dict[str, list[Trip]] = {way: [] for way in WAYS}
    for number in range(ROUNDS):
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {ROUNDS}, {way}")
            trips[way].append(_trip(way, taps, batch))
        padded, trimmed, maskpack, replay = (trips[way][-1].output for way in WAYS)
        compare(padded, maskpack)
        compare(padded, trimmed, "trimmed", ROUNDING)
        compare(padded, replay, "replay", ROUNDING)
    return trips


def _medians(trips: Mapping[str, Sequence[Trip]], *attributes: str) -> dict[str, float]:
    """The median over the rounds of the sum of the attributes, for each way."""
    return {way: median(sum(getattr(trip, name) for name in attributes) for trip in trips[way]) for way in WAYS}


def _report(batch: TensorDict, ranks: int, trips: Mapping[str, Sequence[Trip]]) -> str:
    valid = batch["attention_mask"].float().mean().item()
    lines = [
        f"\n{batch.shape[0]} rows of {PROMPT_WIDTH} + {RESPONSE_WIDTH} tokens, {valid:.0%} valid, on {ranks} workers: "
        "log-probs, entropies and a policy update",
        f"(forward, backward). Medians of {ROUNDS} rounds; bytes are those that Ray carried.\n",
        *(f"{way:<10}{meaning}" for way, meaning in WAYS.items()),
        "\n" + " " * 22 + "".join(f"{way:>14}" for way in WAYS),
    ]
    for name, attributes, unit, same in (
        ("to the workers, kB", ["sent"], 1e3, "trimmed"),
        ("back, kB", ["returned"], 1e3, "trimmed"),
        ("the model, ms", ["model"], 1, "maskpack"),
        ("all but the model, ms", ["moving"], 1, "trimmed"),
        ("whole, ms", ["model", "moving"], 1, "maskpack"),
    ):
        values = _medians(trips, *attributes)
        # No ratio where both sides run the same code.
        ratios = ("" if way in ("padded", same) else f"{values['padded'] / values[way]:,.1f} x" for way in WAYS)
        lines.append(f"{name:<22}" + "".join(f"{value / unit:>14,.1f}" for value in values.values()))
        lines.append(f"{'  padded / this':<22}" + "".join(f"{ratio:>14}" for ratio in ratios))
    sent, model, moving = (_medians(trips, name) for name in ("sent", "model", "moving"))
    wire = {way: 8e3 * count / 10e9 for way, count in _medians(trips, "sent", "returned").items()}
    fewer, both = sent["padded"] / sent["maskpack"], wire["padded"] / wire["maskpack"]
    faster = {way: model[way] / model["+ replay"] for way in WAYS}
    compared = sum(value.numel() for trip in trips["maskpack"] for value in trip.output.values())
    exact, replayed = ([trip.output["old_log_probs"] for trip in trips[way]] for way in ("padded", "+ replay"))
    apart = max((x - y).abs().max().item() for x, y in zip(exact, replayed, strict=True))
    scale = 60 / max(model[way] + moving[way] for way in WAYS)
    lines += [
        "\nwhere the time goes   # the model   - all but the model",
        *(f"{way:<10}{'#' * round(scale * model[way])}{'-' * round(scale * moving[way])}" for way in WAYS),
        f"\nAt 10 Gbit/s, the bytes of both ways: {wire['padded']:.2f} ms -> {wire['maskpack']:.2f} ms (calculated).",
        f"All outputs of maskpack were bitwise equal to padded: {compared:,} values in {ROUNDS} rounds.",
        "Not in these times: the first call of a model, which also compares a row with the model's own pass.",
        "A model as small as this one gains from about 400 tokens a call on (docs/benchmarks.md).",
        f"\nmaskpack sent {fewer:.0f} times fewer bytes to the workers ({both:.0f} times both ways), the same bits;",
        f"with replay, the model ran {faster['padded']:.1f} times as fast as padded, {faster['trimmed']:.1f} times as "
        f"fast as trimmed (log-probs within {apart:.0e}).",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns 1 if maskpack changes a bit of the outputs, or replay more than rounding does."""
    parser = argparse.ArgumentParser(
        prog="maskpack demo",
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--prompts", type=int, default=6, help="prompts")
    parser.add_argument("--responses", type=int, default=8, help="responses to each prompt")
    parser.add_argument("--ranks", type=int, default=2, help="Ray workers")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batch")
    args = parser.parse_args(argv)
    rows = args.prompts * args.responses
    if not 1 <= args.ranks <= rows:
        parser.error(f"{rows} rows for {args.ranks} ranks; each rank needs at least one row")
    begin = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - begin:5.1f} s  {text} ...", flush=True)

    text, status = run(args.prompts, args.responses, args.seed, args.ranks, progress)
    print(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
