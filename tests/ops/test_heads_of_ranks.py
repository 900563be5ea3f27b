"""Which heads of the keys each rank of a context-parallel group receives; ranks themselves are in the second tier."""

from __future__ import annotations

import itertools

import pytest

from maskpack.ops.context_parallel import _heads_to_send

CASES = [
    (queries, keys, ranks)
    for queries, keys, ranks in itertools.product(range(1, 25), repeat=3)
    if queries % keys == 0 and queries % ranks == 0
]


@pytest.mark.parametrize("queries", sorted({case[0] for case in CASES}))
def test_a_rank_receives_the_heads_that_its_queries_read(queries: int) -> None:
    """Attention takes the heads of the keys for groups of queries of one size, on a rank as in the whole."""
    for _, keys, ranks in (case for case in CASES if case[0] == queries):
        sent, own = _heads_to_send(queries, keys, ranks), queries // ranks
        each = len(sent) // ranks
        assert own % each == 0
        for rank, head in itertools.product(range(ranks), range(own)):
            assert sent[rank * each + head // (own // each)] == (rank * own + head) // (queries // keys)
