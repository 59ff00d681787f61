from __future__ import annotations

import pytest

from backend.engine.block_pool import BlockPool
from backend.engine.messages import SamplingParams, SequenceRequest
from backend.engine.prefix_cache import PrefixCache, block_digest, root_digest
from backend.engine.sequence import InvariantError, Sequence

SIZE = 4


def sequence_of(
    tokens: list[int], salt: bytes = b"", extras: dict[int, bytes] | None = None, sequence_id: int = 1
) -> Sequence:
    return Sequence(
        SequenceRequest(
            sequence_id=sequence_id,
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=1),
            cache_salt=salt,
            block_extras=extras or {},
        )
    )


def computed(cache: PrefixCache, sequence: Sequence, blocks: list[int]) -> None:
    sequence.block_table = blocks
    sequence.num_computed_tokens = len(blocks) * SIZE
    cache.register_full_blocks(sequence)


def test_the_digests_are_pinned() -> None:
    """Other tiers and replicas derive the same names; they change only with the version in the tag."""
    root = root_digest(b"account salt")
    assert root.hex() == "0a388a43be3babccaf7484b8257df94c5f1232f91210d213e2b064d75432705a"
    assert (
        block_digest(root, [1, 2, 3, -1]).hex()
        == "6a6c3a9b89af567f0aea59516430330779cfd4cb0a31b80295156a8b71984c1b"
    )
    assert (
        block_digest(root, [1, 2, 3, -1], b"image").hex()
        == "6368e3036b15bdd67bae088a41c25509d7e54e29bba0a2e8e81386d5cb9f9f7d"
    )


def test_no_two_framings_give_the_same_digest() -> None:
    root = root_digest(b"")
    digests = {
        root_digest(b""),
        root_digest(b"\x00"),
        root_digest(b"a"),
        root_digest(b"a\x00"),
        block_digest(root, [1, 2]),
        block_digest(root, [1], (2).to_bytes(4, "little")),
        block_digest(root, [1, 2, 0]),
        block_digest(root, [1, 2], b"\x00"),
        block_digest(block_digest(root, [1]), [2]),
        block_digest(root_digest(b"a"), [1, 2]),
    }
    assert len(digests) == 10


def test_a_prefix_is_found_block_by_block() -> None:
    cache = PrefixCache(SIZE)
    computed(cache, sequence_of(list(range(12))), [5, 6, 7])
    assert cache.match(sequence_of([*range(8), 99, 99, 99, 99, 99])) == [5, 6]
    assert cache.match(sequence_of([99, *range(1, 12)])) == []


@pytest.mark.parametrize(("length", "expected"), [(8, [5]), (9, [5, 6]), (4, []), (5, [5]), (1, [])])
def test_one_token_is_always_left_to_compute(length: int, expected: list[int]) -> None:
    cache = PrefixCache(SIZE)
    computed(cache, sequence_of(list(range(12))), [5, 6, 7])
    assert cache.match(sequence_of(list(range(length)))) == expected


def test_the_same_account_reuses_and_another_does_not() -> None:
    cache = PrefixCache(SIZE)
    computed(cache, sequence_of(list(range(12)), salt=b"a"), [5, 6, 7])
    assert cache.match(sequence_of(list(range(12)), salt=b"a")) == [5, 6]
    assert cache.match(sequence_of(list(range(12)), salt=b"b")) == []
    assert cache.match(sequence_of(list(range(12)))) == []


def test_a_match_ends_before_the_first_block_with_other_extras() -> None:
    cache = PrefixCache(SIZE)
    computed(cache, sequence_of(list(range(12)), extras={1: b"cat"}), [5, 6, 7])
    assert cache.match(sequence_of(list(range(12)), extras={1: b"cat"})) == [5, 6]
    assert cache.match(sequence_of(list(range(12)), extras={1: b"dog"})) == [5]
    assert cache.match(sequence_of(list(range(12)))) == [5]


def test_a_duplicate_is_not_registered_twice() -> None:
    cache = PrefixCache(SIZE)
    computed(cache, sequence_of(list(range(8))), [1, 2])
    computed(cache, sequence_of(list(range(8)), sequence_id=2), [3, 4])
    assert cache.match(sequence_of(list(range(9)))) == [1, 2]
    assert not cache.is_registered(3)
    cache.check_invariants([])


def test_a_sequence_waits_for_a_prefix_that_is_being_computed() -> None:
    cache = PrefixCache(SIZE)
    first, second = sequence_of(list(range(9))), sequence_of([*range(8), 77, 78], sequence_id=2)
    assert cache.match(first) == []
    cache.claim(first)
    assert cache.match(second) is None
    computed(cache, first, [1, 2])
    assert cache.match(second) == [1, 2]
    cache.check_invariants([])


def test_a_withdrawn_claim_holds_nobody_up() -> None:
    cache = PrefixCache(SIZE)
    first, second = sequence_of(list(range(9))), sequence_of(list(range(9)), sequence_id=2)
    cache.claim(first)
    with pytest.raises(InvariantError):
        cache.check_invariants([])
    cache.disclaim(first)
    assert cache.match(second) == []
    cache.check_invariants([])


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def counting(parent: bytes, token_ids: list[int], extra: bytes = b"") -> bytes:
        nonlocal count
        count += 1
        return block_digest(parent, token_ids, extra)

    monkeypatch.setattr("backend.engine.prefix_cache.block_digest", counting)
    cache = PrefixCache(SIZE)
    sequence = sequence_of(list(range(400)))
    for _ in range(5):
        assert cache.match(sequence) == []
    assert count == 1, "a miss ends the hashing"
    cache.claim(sequence)
    sequence.block_table = list(range(100))
    for computed_tokens in range(0, 401, 50):
        sequence.num_computed_tokens = computed_tokens
        cache.register_full_blocks(sequence)
    assert count == 100


def test_the_tail_of_the_least_recently_used_is_evicted_first() -> None:
    cache = PrefixCache(SIZE)
    pool = BlockPool(7, cache)
    for base in (0, 100):
        sequence = sequence_of(list(range(base, base + 12)))
        computed(cache, sequence, pool.take(3))
        pool.release(sequence.block_table)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 6, 0)
    first, second = sequence_of(list(range(13))), sequence_of(list(range(100, 113)))
    pool.take(3)  # the free one, then the tail of the first
    assert len(cache.match(first) or []) == 1
    assert len(cache.match(second) or []) == 3
    assert cache.num_evictions == 2


def test_a_block_in_use_is_not_evicted() -> None:
    cache = PrefixCache(SIZE)
    pool = BlockPool(4, cache)
    sequence = sequence_of(list(range(12)))
    computed(cache, sequence, pool.take(3))
    pool.release(sequence.block_table)
    again = sequence_of(list(range(9)), sequence_id=2)
    matched = cache.match(again)
    assert matched is not None
    pool.share(matched)
    assert pool.num_available == 2
    assert set(pool.take(2)).isdisjoint(matched)
    assert cache.match(again) == matched
