"""200 trajectories of an agent with tools, four of each task of tau-bench's airline. Lengths of messages, and which of
them are equal, are real (`tau_airline.json`); tokens are random, Zipf-like.
"""

from __future__ import annotations

import numpy as np
from tensordict import TensorDict

from bench.workloads.rows import (
    Array,
    Lengths,
    as_batch,
    mask_of,
    padded,
    padded_to_longest,
    recorded,
    scaled,
    token_fields,
    token_ids,
)

ROWS, TRIALS = 200, 4
"""That there are, and of each task."""


def trajectories(vocabulary: int, *, tasks: int = 50, scale: float = 1.0, seed: int = 0) -> TensorDict:
    """Trajectories of an agent with tools, padded: four trials of each task of tau-bench's airline, which begin alike.
    The lengths of messages, and which of them are equal, are real (`tau_airline.json`); tokens are random, Zipf-like.

    Prompts, padded on the left, are the messages before the first one of the assistant; responses are all others, and
    `response_mask` is 1 at those of the assistant. The pad is the last id of the vocabulary. `uid` [rows] is the task.

    Args:
        vocabulary: ids are below it. Texts that differ do so in their first token, which is the number of the text
            modulo `vocabulary - 1`. There are 3,674 texts; with fewer ids, some begin alike.
        tasks: the first so many, of 50.
        scale: of the tokens of each text, at least one.
        seed: of the tokens. A text has the same ones whatever the number of tasks.

    Raises ValueError for tasks that do not exist.
    """
    most = ROWS // TRIALS
    if not 1 <= tasks <= most:
        raise ValueError(f"trajectories: tasks is {tasks}; expected 1 to {most}.")
    return as_batch(trajectory_fields(vocabulary, TRIALS * tasks, scale, seed))


def trajectory_fields(vocabulary: int, rows: int, scale: float, seed: int) -> dict[str, Array]:
    trials, counts, of = trials_of(scale, rows)
    starts = np.cumsum(counts) - counts
    ids = token_ids(np.random.default_rng(seed), counts.sum(), vocabulary - 1)
    ids[starts] = np.arange(counts.size) % (vocabulary - 1)
    texts = np.split(ids, starts[1:])
    mask, p = mask_of(of), of.prompt_width
    ids = padded(np.concatenate([texts[text] for _, _, numbers in trials for text in numbers]), mask, vocabulary - 1)
    sampled = [np.repeat(np.array(list(roles)) == "a", counts[numbers]) for _, roles, numbers in trials]
    return {
        **token_fields(ids, mask, p),
        "response_mask": padded(np.concatenate(sampled).astype(np.int64), mask, 0)[:, p:].copy(),
        "uid": np.array([task for task, _, _ in trials]),
    }


def trials_of(scale: float, rows: int) -> tuple[list[tuple[int, str, list[int]]], Array, Lengths]:
    """The first rows of tau: task, roles and numbers of the texts of each; the tokens of every text; the lengths."""
    data = recorded("tau_airline")
    trials, counts = data["rows"][:rows], scaled(np.array(data["tokens"]), scale)
    prompt = np.array([counts[numbers[: roles.index("a")]].sum() for _, roles, numbers in trials])
    total = np.array([counts[numbers].sum() for _, _, numbers in trials])
    return trials, counts, padded_to_longest(prompt, total - prompt)
