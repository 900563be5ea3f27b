"""The output layer on scored tokens alone: log-probs of agent rows, of which tools wrote a part of the response.

The model is an embedding and an output layer, so that the time is that of packing, the output layer and the gradients
of both. Its rival scores all response tokens, as the trainers do that multiply the loss by the mask.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness.measure import NotExact
from bench.harness.passes import the_device, timed
from bench.harness.registry import case
from bench.harness.report import Row, RowGroups
from bench.workloads import batch_of
from maskpack.replay import PackedInputs, ReplayOptions, response_log_probs

ALL, OURS = "all response tokens", "scored tokens"
_IDS = 4096
_CLOSE = 1e-3  # of float32 sums in another order, in nats


class _Head:
    """A model without layers."""

    def __init__(self, vocabulary: int, hidden: int, device: torch.device) -> None:
        source = torch.Generator(device).manual_seed(0)
        self.device = device
        self.table, self.head = (
            torch.randn(rows, hidden, generator=source, device=device, dtype=torch.bfloat16).mul_(hidden**-0.25)
            for rows in (_IDS, vocabulary)
        )
        self.weights = [self.table.requires_grad_(), self.head.requires_grad_()]

    def hidden(self, inputs: PackedInputs) -> Tensor:
        return self.table[inputs.input_ids[0] % _IDS]

    def dense_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor) -> Tensor:
        raise NotImplementedError("rows are packed")

    def self_check(self, inputs: PackedInputs, hidden: Tensor, again: bool) -> None:
        raise NotImplementedError("the case compares by itself")


@case(
    "scored",
    help="log-probs of scored tokens alone",
    on="gpu",
    rows=64,
    tiny={"rows": 4, "vocabulary": 512, "hidden": 16, "scale": 0.02},
)
def run(rows: int, rounds: int, *, vocabulary: int = 151_936, hidden: int = 2_560, scale: float = 1.0) -> RowGroups:
    """Raises NotExact if log-probs of scored tokens differ, or others are not 0."""
    device, model = the_device(), _Head(vocabulary, hidden, the_device())
    batch = (
        batch_of("tau", rows, scale=scale)
        .select("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
        .to(device)
    )
    for name in ("prompts", "responses", "input_ids"):
        batch[name] %= vocabulary
    options = {ALL: ReplayOptions(), OURS: ReplayOptions(scored=("response_mask",))}

    def forward(name: str) -> Tensor:
        return response_log_probs(model, batch, self_check=False, options=options[name])

    with torch.no_grad():
        whole, ours = (forward(name).values() for name in (ALL, OURS))
    prompt = batch["prompts"].shape[1]
    scored = batch["response_mask"][batch["attention_mask"][:, prompt:].bool()].bool()
    if float((whole - ours)[scored].abs().max()) > _CLOSE or ours[~scored].any():
        raise NotExact("log-probs of scored tokens differ, or those of others are not 0")

    def without_graph(name: str) -> Callable[[], object]:
        def work() -> object:
            with torch.no_grad():
                return forward(name)

        return work

    def with_backward(name: str) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(name).values()[scored].sum(), model.weights)

    title, count = f"tau, {rows} rows, V {vocabulary:,}, H {hidden:,}", int(scored.sum())
    yield [Row(title, "scored / response tokens", 100 * count / scored.numel(), "%")]
    for step, wrapped in (("forward", without_graph), ("forward + backward", with_backward)):
        runs = {name: wrapped(name) for name in options}
        yield timed(f"{title}, {step}", runs, rounds, device, [(ALL, OURS, None)])[0]
