"""PaddedBytes counts what a computation allocates for padded tensors, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import needs
from torch import Tensor, nn

from bench.harness.padding import PaddedBytes

LENGTHS = (3, 7, 5)
ROWS, WIDTH = len(LENGTHS), max(LENGTHS)


def jagged() -> Tensor:
    return torch.nested.as_nested_tensor([torch.arange(count) for count in LENGTHS], layout=torch.jagged)


def dense() -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=torch.int64)


@pytest.mark.parametrize(
    ("makes", "expected"),
    [
        (lambda: jagged().to_padded_tensor(0), 8 * ROWS * WIDTH),
        (lambda: torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None], ROWS * WIDTH),
        (lambda: torch.empty(ROWS * WIDTH, dtype=torch.int16).view(ROWS, WIDTH), 2 * ROWS * WIDTH),
        (lambda: dense().float(), (8 + 4) * ROWS * WIDTH),
        (lambda: torch.zeros(ROWS, WIDTH + 2, 4), 4 * ROWS * (WIDTH + 2) * 4),
        (lambda: dense()[:, :WIDTH].add_(1), 8 * ROWS * WIDTH),  # in place, through a view
        (lambda: [dense() for _ in range(5)], 5 * 8 * ROWS * WIDTH),  # memory that was freed may be given again
        (lambda: jagged().float().softmax(1), 2 * 4 * ROWS * WIDTH),  # torch pads within it: the values, and the result
    ],
    ids=[
        "padded",
        "compared",
        "viewed",
        "converted",
        "wider",
        "in place",
        "one after the other",
        "within a jagged one",
    ],
)
def test_padded_tensors_are_counted(makes: Callable[[], Any], expected: int) -> None:
    with PaddedBytes(ROWS, WIDTH) as made:
        makes()
    assert made.bytes == expected
    assert all(shape[0] == ROWS and shape[1] >= WIDTH for shape in made.shapes)


@pytest.mark.parametrize(
    "makes",
    [
        lambda: jagged() + 1,
        lambda: torch.arange(WIDTH).expand(ROWS, WIDTH),
        lambda: torch.zeros(ROWS, WIDTH - 1),
        lambda: torch.zeros(1, ROWS, WIDTH),
        lambda: torch.zeros(sum(LENGTHS), WIDTH),
        lambda: jagged().offsets().diff(),
    ],
    ids=["jagged", "broadcast", "narrower", "other rows", "packed", "lengths"],
)
def test_other_tensors_are_not(makes: Callable[[], Any]) -> None:
    with PaddedBytes(ROWS, WIDTH) as made:
        makes()
    assert (made.bytes, made.shapes) == (0, [])


def test_what_a_module_makes_may_be_left_out() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    with PaddedBytes(ROWS, WIDTH) as made:
        with made.outside(layer):
            layer(torch.zeros(ROWS, WIDTH)).mul(2)
        assert made.bytes == 2 * 4 * ROWS * WIDTH  # the input, and the product
        layer(torch.zeros(ROWS, WIDTH))
    assert made.bytes == 4 * 4 * ROWS * WIDTH


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """By the ways of the benchmark of verl's engine, on its smallest batch."""
    needs("verl")
    from bench.cases import verl_engine as bench
    from bench.harness.registry import load

    sizes, device = load("verl-engine").tiny["sizes"], torch.device("cpu")
    with bench._alone(device):
        ways = bench.Stage.of(sizes, device).ways
        return {name: bench.padded_bytes(way) for name, way in ways.items()}


def test_verl_packs_without_padding_and_its_padded_path_pads(counted: dict[str, int]) -> None:
    assert counted["verl"] == 0 < counted["verl, padded"]


def test_replay_pads_nothing(counted: dict[str, int]) -> None:
    assert counted["replay"] == 0
