"""Who leaves first, by sequences made by hand."""

from amoeba.stream.cache.slot_table import LFRU


def after(policy: LFRU, *passes: list[int], experts: int = 6) -> LFRU:
    policy.begin(experts)
    for ids in passes:
        policy.use(ids)
    return policy


def order(policy: LFRU, candidates: list[int]) -> list[int]:
    return policy.coldest(candidates, len(candidates))


def test_lfru_keeps_a_favourite_over_a_newcomer_until_it_was_unused_for_long():
    favourite, newcomer = [0], [1]
    used_often = [favourite] * 6
    assert order(after(LFRU(), *used_often, newcomer, [2]), [0, 1]) == [1, 0], "LRU would evict 0"
    rest = [[2], [3], [4], [5]]
    assert order(after(LFRU(), *used_often, *rest, newcomer, [2]), [0, 1]) == [0, 1], "LFU would evict 1"


def test_lfru_weighs_uses_against_the_square_of_the_time_since_the_last():
    # expert 0: four uses, eight passes ago; expert 1: one use, three passes ago: 4/8² < 1/3², but 4/8 > 1/3
    passes = [[0]] * 4 + [[5]] * 4 + [[1]] + [[5]] * 2
    policy = after(LFRU(), *passes)
    assert policy.now[0] + 1 - policy.last[0] == 8 and policy.now[0] + 1 - policy.last[1] == 3
    assert order(policy, [0, 1]) == [0, 1]


def test_old_favourites_do_not_stay_for_ever():
    policy = after(LFRU(), *[[0]] * 200)
    for _ in range(12 * LFRU.half_life):
        policy.use([1])
        policy.use([2])
    assert order(policy, [0, 1, 2])[0] == 0
    policy.use([3])
    assert order(policy, [0, 3]) == [0, 3], "200 uses are worth less than one after 24 half-lives"


def test_the_order_survives_when_counts_are_rescaled(monkeypatch):
    monkeypatch.setattr(LFRU, "half_life", 2)
    monkeypatch.setattr("amoeba.stream.cache.slot_table._DOUBLINGS", 8)
    rescaled = after(LFRU(), experts=6)
    monkeypatch.setattr("amoeba.stream.cache.slot_table._DOUBLINGS", 512)
    plain = after(LFRU(), experts=6)
    for step in range(100):
        ids = [step % 3, 3 + step % 2] if step % 5 else [5]
        monkeypatch.setattr("amoeba.stream.cache.slot_table._DOUBLINGS", 8)
        rescaled.use(ids)
        monkeypatch.setattr("amoeba.stream.cache.slot_table._DOUBLINGS", 512)
        plain.use(ids)
        assert order(rescaled, list(range(6))) == order(plain, list(range(6))), step
    assert rescaled.now[0] < plain.now[0]


def test_of_equals_the_first_candidate_leaves_and_only_as_many_as_asked_for():
    policy = after(LFRU(), [3, 1, 4])
    assert policy.coldest([4, 1, 3], 2) == [4, 1]
    assert policy.coldest([4, 0, 3], 1) == [0], "never used"
    assert policy.coldest([], 0) == []
