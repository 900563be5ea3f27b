"""examples/grpo_gpus.py with the arms of bench/rivals/grpo_arms.py beside its own:

python -m bench.all_arms --gpus 2 --steps 100 --runs record replay
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.passes import the_device
from bench.rivals import grpo_arms
from examples import grpo_gpus


def main(given: Sequence[str] | None = None) -> None:
    by_hand, _ = grpo_arms.by_hand(the_device())
    grpo_gpus.ARMS |= {"trimmed": grpo_arms.Trimmed, "by hand": next(iter(by_hand.values()))}
    grpo_gpus.main(given)


if __name__ == "__main__":
    main()
