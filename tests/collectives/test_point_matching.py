"""Which message goes into which receive, without sockets."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.collectives._transports.p2p.message_state import Matcher, MessageState
from rpcdist.collectives._transports.p2p.requests import MESSAGE, Header

Event = tuple[str, int | None, int]  # "recv" or "msg", source, tag


@dataclass
class Played:
    """The outcome of a list of events: the pairs (index of the receive, index of the message), and the rest."""

    pairs: list[tuple[int, int]] = field(default_factory=list)
    receives: list[int] = field(default_factory=list)
    messages: list[int] = field(default_factory=list)


def play(events: list[Event]) -> Played:
    matcher: Matcher[int, int] = Matcher(100)
    played = Played()
    for index, (what, source, tag) in enumerate(events):
        if what == "recv":
            message = matcher.post(source, tag, index)
            if message is not None:
                played.pairs.append((index, message))
        else:
            assert source is not None
            receive = matcher.arrive(source, tag)
            if receive is None:
                matcher.keep(source, tag, 1, index)
            else:
                played.pairs.append((receive, index))
    matched = {index for pair in played.pairs for index in pair}
    for index, (what, _, _) in enumerate(events):
        if index not in matched:
            (played.receives if what == "recv" else played.messages).append(index)
    assert matcher.num_messages == len(played.messages)
    kept = [receive for source in (None, 0, 1, 2) for receive in matcher.receives(source)]
    assert sorted(kept) == played.receives
    return played


def reference(events: list[Event]) -> Played:
    """The rules, word for word: everything is searched from the front."""
    played = Played()
    for index, (what, source, tag) in enumerate(events):
        waiting = played.messages if what == "recv" else played.receives
        for other in waiting:
            _, other_source, other_tag = events[other]
            if tag == other_tag and (source is None or other_source is None or source == other_source):
                waiting.remove(other)
                played.pairs.append((index, other) if what == "recv" else (other, index))
                break
        else:
            (played.receives if what == "recv" else played.messages).append(index)
    return played


@pytest.mark.parametrize(
    ("events", "pairs"),
    [
        ([("recv", 0, 0), ("msg", 0, 0)], [(0, 1)]),
        ([("msg", 0, 0), ("recv", 0, 0)], [(1, 0)]),
        ([("msg", 0, 0), ("recv", 0, 1)], []),
        ([("msg", 0, 0), ("recv", 1, 0)], []),
        ([("msg", 0, 0), ("recv", None, 0)], [(1, 0)]),
        ([("msg", 0, 0), ("recv", None, 1)], []),
        ([("msg", 0, 5), ("msg", 0, 6), ("recv", 0, 6), ("recv", 0, 5)], [(2, 1), (3, 0)]),
        ([("msg", 0, 0), ("msg", 0, 0), ("recv", 0, 0), ("recv", 0, 0)], [(2, 0), (3, 1)]),
        ([("recv", 0, 0), ("recv", 0, 0), ("msg", 0, 0), ("msg", 0, 0)], [(0, 2), (1, 3)]),
        ([("recv", None, 0), ("recv", 0, 0), ("msg", 0, 0)], [(0, 2)]),
        ([("recv", 0, 0), ("recv", None, 0), ("msg", 0, 0)], [(0, 2)]),
        ([("recv", 1, 0), ("recv", None, 0), ("msg", 0, 0), ("msg", 1, 0)], [(1, 2), (0, 3)]),
        ([("msg", 1, 0), ("msg", 0, 0), ("recv", None, 0)], [(2, 0)]),
    ],
)
def test_pairs(events: list[Event], pairs: list[tuple[int, int]]) -> None:
    assert play(events).pairs == pairs


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("recv"), st.sampled_from([None, 0, 1, 2]), st.integers(0, 1)),
            st.tuples(st.just("msg"), st.sampled_from([0, 1, 2]), st.integers(0, 1)),
        ),
        max_size=30,
    )
)
def test_any_order_equals_the_rules(events: list[Event]) -> None:
    assert play(events) == reference(events)


def test_withdrawn_receives_get_nothing() -> None:
    matcher: Matcher[str, str] = Matcher(100)
    matcher.post(0, 0, "first")
    matcher.post(0, 0, "second")
    assert matcher.withdraw(0, "first")
    assert not matcher.withdraw(0, "first")
    assert matcher.arrive(0, 0) == "second"
    assert not matcher.withdraw(0, "second")
    assert not matcher.should_read(0, False)


def test_discarded_messages_go_nowhere() -> None:
    matcher: Matcher[str, str] = Matcher(100)
    matcher.keep(0, 0, 70, "broken")
    matcher.discard(0, "broken")
    matcher.discard(0, "broken")
    assert matcher.buffered_bytes(0) == 0
    assert matcher.post(0, 0, "receive") is None


def test_when_a_source_is_read() -> None:
    matcher: Matcher[str, str] = Matcher(100)
    assert not matcher.should_read(0, a_send_is_stuck=False)
    assert matcher.should_read(0, a_send_is_stuck=True)
    matcher.keep(0, 7, 60, "one")
    matcher.keep(0, 7, 40, "two")
    assert matcher.should_read(0, a_send_is_stuck=True)
    matcher.keep(0, 7, 1, "three")
    assert not matcher.should_read(0, a_send_is_stuck=True), "the limit of 100 bytes"
    assert matcher.should_read(1, a_send_is_stuck=True), "another source has its own limit"
    matcher.post(0, 8, "receive")
    assert matcher.should_read(0, a_send_is_stuck=False), "what it wants may come behind what is buffered"
    matcher.post(None, 9, "any")
    assert matcher.should_read(1, a_send_is_stuck=False)
    assert matcher.post(0, 7, "takes one") == "one"
    assert matcher.buffered_bytes(0) == 41


def test_messages_without_a_payload_count_for_what_they_take() -> None:
    """A rank whose send is stuck read any number of them, since their sizes are 0."""
    state = MessageState(0, (0, 1), 1 << 16)
    for number in range(100):
        state.begin(1, Header(MESSAGE, 0, number, number, 0))
    assert state.matcher.num_messages == 100 and not state.matcher.should_read(1, a_send_is_stuck=True)
    for number in range(100):
        assert state.matcher.post(1, number, None) is not None  # type: ignore[arg-type]
        state.matcher.withdraw(number, None)  # type: ignore[arg-type]
    assert state.matcher.buffered_bytes(1) == 0
