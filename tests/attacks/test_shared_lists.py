"""Lists that are in each other twice, and so on: a value of 500 bytes whose text, or comparison, has no end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rpcdist import rpc, tracing
from rpcdist.errors import CallRefused, RpcdistError, TransportError, abridged
from rpcdist.parallel._published._hosts import check_description
from rpcdist.parallel._published._layout import VersionLayout
from rpcdist.rpc._actors.turn_queue import CallNumber
from rpcdist.rpc._api.named_groups import _where_is
from rpcdist.rpc._membership.barrier import CONTRIBUTE, MISSING, names_in
from rpcdist.rpc._membership.shutdown import DEPART, STOP
from rpcdist.testing import LIMIT_S, InProcessCluster

ENDLESS = 50
LONG = 14  # a text of some ten thousand characters, if somebody makes it
SHORT_CHARS = 1000


def lists_in_lists(depth: int) -> list[object]:
    """A list that has 2**depth lists in it, which are `depth` objects."""
    found: list[object] = []
    for _ in range(depth):
        found = [found, found]
    return found


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster("a", "b", allow_pickle=False) as cluster:
        yield cluster


def test_the_text_of_what_a_peer_sent_is_short() -> None:
    for value in (lists_in_lists(ENDLESS), {0: lists_in_lists(ENDLESS)}, "x" * 10**6, b"x" * 10**6, 1 << 10**6):
        assert len(abridged(value)) < SHORT_CHARS
    assert abridged(("a", 1, None, [2.5, [3]])) == "('a', 1, None, (2.5, a list))"
    assert abridged(list(range(9))) == "(0, 1, 2, 3, ...)"


CALLS: dict[str, tuple[object, ...]] = {
    CONTRIBUTE: (["a", "b"], lists_in_lists(LONG), None, False),
    DEPART: (lists_in_lists(LONG), True),
    STOP: (lists_in_lists(LONG),),
}


@pytest.mark.parametrize("function", CALLS)
def test_who_speaks_under_no_name_is_refused_in_few_words(cluster: InProcessCluster, function: str) -> None:
    """One such message held the interpreter's lock for ever, also of a worker that takes no pickles."""
    with cluster.use("b") as agent, pytest.raises(CallRefused, match="cannot speak for worker") as caught:
        agent.caller.gather(0, function, CALLS[function], LIMIT_S)
    assert len(str(caught.value)) < SHORT_CHARS


def test_nothing_but_names_is_compared(cluster: InProcessCluster) -> None:
    assert names_in([lists_in_lists(ENDLESS), "x", 3, lists_in_lists(ENDLESS)]) == ["x"]
    assert names_in(lists_in_lists(ENDLESS)) == names_in({"x": 1}) == names_in("x") == []
    with cluster.use("b") as agent:
        twice = [lists_in_lists(ENDLESS), lists_in_lists(ENDLESS), 2**61 - 1]
        assert agent.caller.gather(0, MISSING, (twice,), LIMIT_S) == []
        with pytest.raises(CallRefused, match="it is not one of them"):
            agent.caller.gather(0, CONTRIBUTE, (twice, "b", None, False), LIMIT_S)


def test_members_of_a_group_are_texts_and_numbers(cluster: InProcessCluster) -> None:
    with cluster.use("b"):
        for members in ([[lists_in_lists(ENDLESS), 1]], [["b", float("inf")]], lists_in_lists(ENDLESS)):
            with pytest.raises(CallRefused, match="the members of a group must be"):
                rpc.rpc_sync("a", _where_is, (members, 0), timeout=LIMIT_S)


def test_damaged_numbers_are_shown_in_few_words() -> None:
    endless = lists_in_lists(ENDLESS)
    with pytest.raises(RpcdistError, match="stream, number, floor") as caught:
        CallNumber.checked(endless)
    assert len(str(caught.value)) < SHORT_CHARS
    descriptions: list[Any] = [("a/1", endless, 0, 0, [], 1), endless, None, ("a/1", endless, 1, 0, 3, 1)]
    for description in descriptions:
        with pytest.raises(TransportError, match="an invalid description"):
            check_description(description)
    with pytest.raises(ValueError, match="is not a time"):
        tracing._time(endless)
    damaged: list[Any] = [(["a"], ["float32"], [endless], []), ([endless], ["float32"], [[1]], [])]
    for plain in damaged:
        with pytest.raises(TransportError, match="an invalid layout"):
            VersionLayout.from_plain(plain)


def test_a_shape_has_as_many_dimensions_as_torch_can_have() -> None:
    """The product of 40,000 numbers took 14 s."""
    with pytest.raises(TransportError, match="an invalid layout"):
        VersionLayout.from_plain((["a"], ["float32"], [[1] * 65], []))
