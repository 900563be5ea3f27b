"""Log-probs of rows with images by replay, packed and padded, on a model of Qwen2.5-VL's kind.

    ours                       response_log_probs over micro-batches of a token budget, from a nested batch
    ours, images seen once     the same with share_prefixes=True: prompts and images of a group are computed once
    padded                     micro-batches of a few rows at full width, the model's own forward with pixels and mask

Each row has one image of 16 x 16 to 32 x 32 patches in its prompt; rows of a group share it. Forward, and forward +
backward with the layers of both parts checkpointed, in all alike. Weights, tokens and pixels are random. Synchronised
wall time, interleaved, medians. Before anything is timed ours is compared with a float32 model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict
from torch import Tensor

from bench.harness.measure import progress
from bench.harness.passes import ALONE, BOTH, FORWARD, OURS, errors, once, timed
from bench.harness.replay import replayed
from bench.harness.report import Row, RowGroups
from bench.rivals.attention import Media, lone_log_probs, padded_log_probs
from bench.workloads.models import Counts, checkpointed
from bench.workloads.rows import log_normal
from maskpack import nest_batch_by_mask
from maskpack.adapters.transformers import Replayable, replayable
from maskpack.planning import MicroBatchPlan, plan_micro_batches
from maskpack.replay import ReplayOptions, prefix_tree, response_log_probs

ONCE, PADDED = "ours, images of a group seen once", "padded"
_MERGED = 2  # patches a side of a token


@dataclass(frozen=True)
class Shape:
    """Of a Qwen2.5-VL model whose output layer is its embedding."""

    hidden: int = 1536
    layers: int = 12
    heads: int = 12
    kv_heads: int = 2
    intermediate: int = 8960
    vocabulary: int = 151_936
    vision_hidden: int = 1280
    vision_layers: int = 6
    vision_heads: int = 16
    vision_intermediate: int = 3420
    patch: int = 14
    dtype: torch.dtype = torch.bfloat16

    @property
    def image_token(self) -> int:
        return self.vocabulary - 2

    @property
    def numbers(self) -> int:
        """Of a patch: of three colours in two frames."""
        return 3 * 2 * self.patch**2

    def model(self, device: torch.device) -> Any:
        from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig

        half = self.hidden // self.heads // 2
        config = Qwen2_5_VLConfig(
            text_config={
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "intermediate_size": self.intermediate,
                "max_position_embeddings": 40_960,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8],
                },
            },
            vision_config={
                "depth": self.vision_layers,
                "hidden_size": self.vision_hidden,
                "num_heads": self.vision_heads,
                "intermediate_size": self.vision_intermediate,
                "out_hidden_size": self.hidden,
                "patch_size": self.patch,
                "window_size": 8 * self.patch,
                "fullatt_block_indexes": [self.vision_layers - 1],
            },
            image_token_id=self.image_token,
            video_token_id=self.vocabulary - 3,
            tie_word_embeddings=True,
            attn_implementation="sdpa",
        )
        return checkpointed(config, device, self.dtype, AutoModelForImageTextToText)


@dataclass(frozen=True)
class Sizes:
    """Of the batch and its micro-batches: `sides` of images in patches, the least and the most, even numbers; `fill` is
    the real share of responses; `padded_run` of the padded micro-batches are run."""

    rows: int = 64
    group: int = 8
    sides: tuple[int, int] = (16, 32)
    text_width: int = 64
    response_width: int = 2048
    fill: float = 0.25
    padded_rows: int = 4
    padded_run: int = 4
    compared: int = 4
    shape: Shape = Shape()

    @property
    def prompt_width(self) -> int:
        return self.text_width + (self.sides[1] // _MERGED) ** 2

    @property
    def token_budget(self) -> int:
        """As many tokens as padded micro-batches have."""
        return self.padded_rows * (self.prompt_width + self.response_width)


TINY = Sizes(
    rows=9,
    group=4,
    sides=(2, 6),
    text_width=20,
    response_width=21,
    padded_run=2,
    shape=Shape(32, 2, 4, 2, 48, 97, 32, 2, 2, 48, patch=2, dtype=torch.float32),
)


def measured(sizes: Sizes, rounds: int, device: torch.device) -> RowGroups:
    """The rows of the report. Raises NotExact if ours is further from float32 than each row alone is."""
    name = "replay of images, shape of Qwen2.5-VL"
    progress(name)
    stage = Stage(sizes, device)
    patches = sum(len(image["pixel_values"]) for image in stage.images)
    yield [
        Row(name, "rows", sizes.rows, "rows"),
        Row(name, "real tokens", int(stage.lengths.sum()), "tokens"),
        Row(name, "patches of all rows", patches, "patches"),
        Row(name, "real share of positions", stage.lengths.sum() / stage.padded["input_ids"].numel(), "x"),
        *_errors(name, stage),
    ]
    for step, backward in ((FORWARD, False), (BOTH, True)):
        progress(f"{name}, {step}")
        yield _timed(f"{name}, {step}", stage, backward, rounds)


@dataclass(frozen=True)
class Stage:
    """A model on the device, and the rows, whose pixels stay on the host until they are used."""

    sizes: Sizes
    device: torch.device

    @cached_property
    def model(self) -> Any:
        return self.sizes.shape.model(self.device)

    @cached_property
    def replay(self) -> Replayable:
        return replayable(self.model)

    @cached_property
    def images(self) -> list[dict[str, Tensor]]:
        """Of each row; one object for a group."""
        sizes, random = self.sizes, np.random.default_rng(2)
        least, most = (side // _MERGED for side in sizes.sides)
        out: list[dict[str, Tensor]] = []
        for _ in range(-(-sizes.rows // sizes.group)):
            height, width = (_MERGED * int(side) for side in random.integers(least, most + 1, 2))
            pixels = torch.from_numpy(random.standard_normal((height * width, sizes.shape.numbers), np.float32))
            image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}
            out += [image] * sizes.group
        return out[: sizes.rows]

    @cached_property
    def responses(self) -> Counts:
        sizes = self.sizes
        return log_normal(
            np.random.default_rng(0), sizes.rows, 1.0, sizes.fill * sizes.response_width, sizes.response_width
        )

    @cached_property
    def lengths(self) -> Counts:
        return self.padded["attention_mask"].sum(1).cpu().numpy()

    @cached_property
    def padded(self) -> TensorDict:
        """Prompts padded on the left, of text, an image and text; responses on the right."""
        sizes, random = self.sizes, np.random.default_rng(1)
        pad, width = sizes.shape.vocabulary - 1, sizes.prompt_width + sizes.response_width
        ids = np.full((sizes.rows, width), pad, np.int64)
        positions = np.zeros((sizes.rows, 3, width), np.int64)
        for row, (image, response) in enumerate(zip(self.images, self.responses.tolist(), strict=True)):
            _, height, wide = image["image_grid_thw"][0].tolist()
            if row % sizes.group == 0:
                before, after = np.split(random.integers(0, sizes.shape.image_token - 1, sizes.text_width), 2)
                places = np.full(height * wide // _MERGED**2, sizes.shape.image_token)
                prompt = np.concatenate([before, places, after])
            here = slice(sizes.prompt_width - prompt.size, sizes.prompt_width + response)
            ids[row, here] = np.append(prompt, random.integers(0, sizes.shape.image_token - 1, response))
            positions[row, :, here] = places_of(before.size, height, wide, after.size + response)
        fields = {
            "responses": ids[:, sizes.prompt_width :],
            "input_ids": ids,
            "attention_mask": (ids != pad).astype(np.int64),
            "position_ids": positions,
        }
        batch = TensorDict({name: torch.from_numpy(value.copy()) for name, value in fields.items()}, [sizes.rows])
        return batch.to(self.device)

    @cached_property
    def nested(self) -> TensorDict:
        batch = self.padded.copy()
        batch["multi_modal_inputs"] = NonTensorStack(*self.images)
        return nest_batch_by_mask(batch, pad_token_id=self.sizes.shape.vocabulary - 1)

    def plan(self, once: bool) -> MicroBatchPlan:
        if not once:
            return plan_micro_batches(self.lengths, self.sizes.token_budget)
        tree = prefix_tree(self.nested)
        return plan_micro_batches(tree.lengths, self.sizes.token_budget, tree=tree)

    def works(self) -> dict[str, tuple[float, Callable[[], Iterable[Tensor]]]]:
        """By name: the share of all rows, and the log-probs of their micro-batches."""
        few = self.sizes.padded_run * self.sizes.padded_rows
        plans = {OURS: self.plan(False), ONCE: self.plan(True)}
        return {
            OURS: (1.0, lambda: replayed(self.replay, self.nested, plans[OURS])),
            ONCE: (
                1.0,
                lambda: replayed(self.replay, self.nested, plans[ONCE], options=ReplayOptions(share_prefixes=True)),
            ),
            PADDED: (
                min(few, self.sizes.rows) / self.sizes.rows,
                lambda: padded_log_probs(
                    self.replay.release(), self.padded[:few], self.sizes.padded_rows, media=self.images
                ),
            ),
        }


def places_of(before: int, height: int, width: int, after: int) -> Any:
    """int64 [3, n]: position ids of text, an image of patches, and text."""
    high, wide = height // _MERGED, width // _MERGED
    image = before + np.stack([np.zeros(high * wide, np.int64), *np.indices((high, wide)).reshape(2, -1)])
    rest = before + max(high, wide) + np.arange(after)
    return np.concatenate([np.tile(np.arange(before), (3, 1)), image, np.tile(rest, (3, 1))], 1)


@torch.no_grad()
def _errors(name: str, stage: Stage) -> list[Row]:
    """How far log-probs of a few rows are off those of a float32 model that sees each row alone."""
    model = stage.model.eval()
    chosen = stage.lengths.argsort()[np.linspace(0, stage.sizes.rows - 1, stage.sizes.compared).astype(np.int64)]
    few, images = stage.padded[torch.from_numpy(chosen).to(stage.device)], [stage.images[row] for row in chosen]
    counts = stage.responses[chosen].tolist()

    def alone(model: Any) -> Tensor:
        rows = zip(few.unbind(0), images, counts, strict=True)
        return torch.cat([_lone(model, row, image, count) for row, image, count in rows])

    truth, seen = alone(copy.deepcopy(stage.replay.release()).float()).double(), {ALONE: alone(model)}
    batch = few.copy()
    batch["multi_modal_inputs"] = NonTensorStack(*images)
    ours: Any = response_log_probs(stage.replay, batch)
    parts = padded_log_probs(stage.replay.release(), few, stage.sizes.padded_rows, media=images)
    padded = [row for part in parts for row in part]
    seen |= {
        OURS: ours.values(),
        PADDED: torch.cat([row[:count] for row, count in zip(padded, counts, strict=True)]),
    }
    return errors(name, seen, truth, (OURS, ALONE), 1.05)


def _lone(model: Any, row: TensorDict, image: Media, response: int) -> Tensor:
    real = row["attention_mask"].bool()
    positions = row["position_ids"][:, real][:, None]
    return lone_log_probs(model, row["input_ids"][real], response, media=image, positions=positions)


def _timed(name: str, stage: Stage, backward: bool, rounds: int) -> list[Row]:
    works = stage.works()
    runs = {kind: once(stage.model, parts, backward) for kind, (_, parts) in works.items()}
    shares = {kind: share for kind, (share, _) in works.items()}
    pairs = [(PADDED, OURS, ">= 2"), (PADDED, ONCE, ">= 2")]
    return timed(name, runs, rounds, stage.device, pairs, shares=shares)[0]
