"""For the tests of a trainer: exact comparison, and coverage by a registry.

    exact.py       assert_exact    two batches are equal bit for bit
    covered.py     assert_covered  no field of a batch stays padded

`pytest --maskpack-strict` is an option of the plugin `pytest_maskpack.py`, beside this package.
"""

from maskpack.testing.covered import assert_covered
from maskpack.testing.exact import assert_exact

__all__ = ["assert_covered", "assert_exact"]
