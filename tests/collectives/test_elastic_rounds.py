"""The rounds of an elastic group: the awaited ranks, the members, the rank whose state counts, and the texts of
strangers.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
from inside_groups import World, use_world

from rpcdist.collectives import HashStore
from rpcdist.collectives._group.elastic_rounds import Candidate, ClosedRound, awaited, close, is_complete
from rpcdist.collectives.elastic_group import ElasticGroup
from rpcdist.errors import AuthenticationFailed, ConfigError, JobEnded, RendezvousError


def old(identity: str, progress: int = 5, description: str = "a net") -> Candidate:
    return Candidate(identity, f"127.0.0.1:1/{identity}", progress, False, description)


def new(identity: str, progress: int = 0, description: str = "a net") -> Candidate:
    return Candidate(identity, f"127.0.0.1:1/{identity}", progress, True, description)


def identities(outcome: ClosedRound) -> str:
    return "".join(each.identity for each in outcome.members)


@pytest.mark.parametrize(
    ("came", "previous", "members"),
    [
        ([new("b"), new("a")], "", "ba"),
        ([new("d"), old("c"), old("a")], "abc", "acd"),
        ([old("x"), old("b"), new("n")], "ab", "bxn"),
    ],
)
def test_ranks_keep_their_order_and_newcomers_follow(came: list[Candidate], previous: str, members: str) -> None:
    outcome = close(came, [old(identity) for identity in previous])
    assert identities(outcome) == members
    assert [outcome.rank_of(identity) for identity in members] == list(range(len(members)))
    assert outcome.rank_of("nobody") is None
    assert ClosedRound.from_json(outcome.to_json()) == outcome


@pytest.mark.parametrize(
    ("members", "source", "behind"),
    [
        ([old("a"), old("b")], 0, ()),
        ([old("a", 4), old("b", 5), old("c", 5)], 1, (0,)),
        ([old("a", 4), new("b", 9)], 0, (1,)),  # its checkpoint is newer; the others have trained
        ([new("a"), new("b")], 0, (1,)),
        ([new("a", 3), new("b", 7), new("c", 7)], 1, (0, 2)),
    ],
)
def test_whose_state_counts(members: list[Candidate], source: int, behind: tuple[int, ...]) -> None:
    outcome = ClosedRound(tuple(members), {})
    assert (outcome.source, outcome.behind) == (source, behind)


def test_who_is_waited_for() -> None:
    assert awaited([old("a"), old("b")], [old("b"), new("c")]) == [old("a")]
    assert not awaited([], [new("c")])


@pytest.mark.parametrize(
    ("came", "complete"),
    [
        ([], False),
        ([new("a"), new("b")], False),  # three are needed at the start
        ([new("a"), new("b"), new("c")], True),
        ([old("a")], False),
        ([old("a"), new("b")], True),
        ([old("a"), new("b", description="another net")], False),
    ],
)
def test_how_many_are_enough(came: list[Candidate], complete: bool) -> None:
    assert is_complete(came, num_ranks=3, min_ranks=2) is complete


def test_who_does_something_else_is_refused() -> None:
    outcome = close([new("n", description="another net"), old("a")], [old("a")])
    assert identities(outcome) == "a" and outcome.refused == {"n": "a net"}


@pytest.mark.usefixtures("job_token")
def test_one_rank_alone_and_what_strangers_write() -> None:
    store = HashStore()
    with use_world(World()) as world:
        elastic = ElasticGroup(store, num_ranks=1, timeout=timedelta(seconds=5))
        try:
            assert elastic.form(0, is_new=True).size() == 1
            assert world.default is not None and not elastic.others_wait()
            store.set("elastic/1/candidate/stranger", b"{}")
            store.append("elastic/1/came", "stranger ")
            assert elastic.others_wait()
            with pytest.raises(AuthenticationFailed, match="not signed"):
                elastic.form(1, is_new=False)
        finally:
            elastic.leave()
        assert world.default is None
        elastic.leave()


@pytest.mark.usefixtures("job_token")
def test_after_the_end() -> None:
    store = HashStore()
    for _ in range(2):
        with use_world(World()):
            elastic = ElasticGroup(store, num_ranks=1)
            try:
                elastic.form(0, is_new=True)
                elastic.end()
            except JobEnded as exc:
                assert isinstance(exc, RendezvousError)
                return
            finally:
                elastic.leave()
    raise AssertionError("the second process came in")


@pytest.mark.parametrize(("num_ranks", "min_ranks"), [(2, 3), (0, 0), (2, 0)])
def test_wrong_numbers(num_ranks: int, min_ranks: int) -> None:
    with pytest.raises(ConfigError, match="min_ranks"):
        ElasticGroup(HashStore(), num_ranks=num_ranks, min_ranks=min_ranks)
