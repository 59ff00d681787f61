from __future__ import annotations

import pytest

from backend.engine.block_pool import BlockPool, OutOfBlocksError
from backend.engine.sequence import InvariantError


def test_blocks_are_free_or_used() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    assert len(set(taken)) == 3
    assert (pool.num_free, pool.num_used, pool.num_cached, pool.num_available) == (1, 3, 0, 1)
    pool.check_invariants([taken])
    pool.release(taken)
    assert (pool.num_free, pool.num_used) == (4, 0)
    pool.check_invariants([])


def test_nothing_is_taken_when_too_much_is_asked_for() -> None:
    pool = BlockPool(2)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 available"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.share(taken)
    pool.check_invariants([taken, taken])
    pool.release(taken)
    assert pool.num_used == 1
    pool.release(taken)
    assert pool.num_used == 0


def test_a_second_release_is_an_error() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(InvariantError):
        pool.release(taken)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 0]], [[1]]])
def test_the_check_sees_wrong_counts(tables: list[list[int]]) -> None:
    pool = BlockPool(2)
    assert pool.take(1) == [0]
    with pytest.raises(InvariantError):
        pool.check_invariants(tables)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)
