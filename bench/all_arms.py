"""examples/grpo_gpus.py with the arms of bench/rivals/grpo_arms.py beside its own:

python -m bench.all_arms --gpus 2 --steps 100 --runs record replay

`by hand` has the first head of bench/rivals/heads.py that this machine has, named on stderr with those that it has not.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.harness.measure import progress
from bench.harness.passes import the_device
from bench.rivals import grpo_arms
from examples import grpo_gpus


def main(given: Sequence[str] | None = None) -> None:
    by_hand, missing = grpo_arms.by_hand(the_device())
    for head, reason in missing.items():
        progress(f"missing, {head}: {reason}")
    head, arm = next(iter(by_hand.items()))
    progress(f"by hand: {head}")
    grpo_gpus.main(given, {**grpo_gpus.ARMS, "trimmed": grpo_arms.Trimmed, "by hand": arm})


if __name__ == "__main__":
    main()
