"""For the tests of a trainer: exact comparison, coverage by a registry, and random batches.

    exact.py       assert_exact    two batches are equal bit for bit
    covered.py     assert_covered  no field of a batch stays padded
    strategies.py  batches         random batches of PPO, GRPO and DAPO, for hypothesis

`pytest --maskpack-strict` is an option of the plugin `pytest_maskpack.py`, beside this package.
"""

from maskpack.testing.covered import assert_covered
from maskpack.testing.exact import assert_exact
from maskpack.testing.strategies import batches

__all__ = ["assert_covered", "assert_exact", "batches"]
