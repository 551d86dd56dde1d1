"""The pure state of a group: events in, actions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.collectives._group.state import (
    GroupActions,
    GroupFailure,
    GroupState,
    timeout_verdict,
)
from rpcdist.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, GroupAborted, RankLost

Event = tuple[object, ...]
"""The name of a method of the state, and its arguments."""
WORLD = (10, 11, 12)
LOST = GroupFailure(RankLost, "rank 12 was lost: its process ended", (2,))
ABORTED = GroupFailure(GroupAborted, "rank 10 aborted the group: enough")


def found(failure: GroupFailure) -> Event:
    return "found", failure


def heard(failure: GroupFailure) -> Event:
    return "heard", failure


def rank_left(rank: int, last_sequence: int) -> Event:
    return "leave", rank, last_sequence


OPEN: Event = ("open",)
CLOSE: Event = ("close",)


def handle(state: GroupState, event: Event) -> GroupActions:
    name, *arguments = event
    if name in ("found", "heard"):
        return state.fail(*arguments, heard=name == "heard")  # type: ignore[arg-type]
    if name == "leave":
        return state.leave(*arguments)  # type: ignore[arg-type]
    if name == "open":
        return state.open()
    state.close()
    return GroupActions()


@dataclass
class Running:
    """An operation, as the state sees it."""

    sequence: int
    title: str = "all_reduce #3 of group 'g'"


def new_state(opened: bool = True) -> GroupState:
    state = GroupState("g", 1, WORLD)
    if opened:
        handle(state, OPEN)
    return state


def left(rank: int, after: int) -> tuple[int, str]:
    how = "destroy_process_group, or the end of its program"
    when = f"after collective #{after}" if after else "before its first collective"
    return rank, f"rank {WORLD[rank]} left the group ({how}) {when}"


@pytest.mark.parametrize(
    ("events", "actions"),
    [
        pytest.param([OPEN], GroupActions(), id="nothing happened"),
        pytest.param([OPEN, found(LOST)], GroupActions(fails=LOST, reports=LOST), id="found: told"),
        pytest.param([OPEN, heard(LOST)], GroupActions(fails=LOST), id="heard: not told"),
        pytest.param([OPEN, heard(LOST), found(ABORTED)], GroupActions(), id="the first is final"),
        pytest.param([OPEN, found(ABORTED), found(LOST)], GroupActions(), id="the first is final, and told once"),
        pytest.param(
            [OPEN, rank_left(0, 4)], GroupActions(departed=(left(0, 4),)), id="a departure harms nobody by itself"
        ),
        pytest.param([heard(LOST)], GroupActions(), id="while the group is made nothing is acted on"),
        pytest.param([rank_left(2, 0), heard(LOST)], GroupActions(), id="likewise"),
        pytest.param([found(LOST)], GroupActions(reports=LOST), id="while the group is made a failure is told"),
        pytest.param(
            [heard(LOST), rank_left(2, 0), rank_left(0, 0), OPEN],
            GroupActions(departed=(left(2, 0), left(0, 0)), fails=LOST),
            id="opening acts on what was heard",
        ),
        pytest.param([OPEN, CLOSE, heard(LOST)], GroupActions(fails=LOST), id="closing may fail"),
    ],
)
def test_the_last_event_in_actions_out(events: list[Event], actions: GroupActions) -> None:
    state = GroupState("g", 1, WORLD)
    assert [handle(state, event) for event in events][-1] == actions


@pytest.mark.parametrize(
    ("running", "wakes"),
    [
        pytest.param(None, False, id="idle"),
        pytest.param(Running(2), False, id="it took part in the running operation"),
        pytest.param(Running(3), True, id="it left before the running operation"),
        pytest.param(Running(0), False, id="a message has no number"),
    ],
)
def test_a_departure_wakes_what_cannot_be_finished(running: Running | None, wakes: bool) -> None:
    state = new_state()
    state.current = running
    assert handle(state, rank_left(0, 2)) == GroupActions(wakes, (left(0, 2),))


def test_a_departure_names_the_error_of_the_rank() -> None:
    state = new_state()
    state.leave(0, 2, "ValueError: no data")
    assert state.departure(0).reason == "rank 10 left the group (its error was ValueError: no data) after collective #2"


def test_operations_are_accepted_until_they_are_refused() -> None:
    state = new_state()
    assert state.refusal is None
    handle(state, CLOSE)
    assert state.refusal is not None and "destroyed on this rank" in str(state.refusal) and state.failure is None
    handle(state, heard(LOST))
    assert state.refusal is LOST and state.failure is LOST
    handle(state, CLOSE)
    assert state.refusal is LOST


@pytest.mark.parametrize(
    ("departures", "sequence", "lost", "reason"),
    [
        ([], 5, 2, "the connection of rank 11 with rank 12 broke: end of stream"),
        (
            [(2, 3)],
            5,
            2,
            "rank 12 left the group (destroy_process_group, or the end of its program) after collective #3",
        ),
        (
            [(0, 4)],
            5,
            2,
            "rank 10 left the group (destroy_process_group, or the end of its program) after collective #4",
        ),  # rank 2 gave up because of that
        (
            [(0, 4), (2, 4)],
            5,
            2,
            "rank 10 left the group (destroy_process_group, or the end of its program) after collective #4",
        ),
        ([(0, 5)], 5, 2, "the connection of rank 11 with rank 12 broke: end of stream"),
        (
            [(2, 5)],
            5,
            2,
            "rank 12 left the group (destroy_process_group, or the end of its program) after collective #5",
        ),
    ],
)
def test_why_a_connection_broke(departures: list[tuple[int, int]], sequence: int, lost: int, reason: str) -> None:
    state = new_state()
    for rank, last_sequence in departures:
        handle(state, rank_left(rank, last_sequence))
    failure = state.lost_connection(lost, "end of stream", sequence)
    assert (failure.kind, failure.reason) == (RankLost, reason)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], None),
        ([rank_left(2, 0), rank_left(0, 0)], "rank 12 gave up; see what it raised"),
        ([rank_left(2, 0), heard(LOST)], LOST.reason),
        ([heard(LOST)], LOST.reason),
    ],
)
def test_why_a_group_cannot_be_made(events: list[Event], reason: str | None) -> None:
    state = new_state(opened=False)
    for event in events:
        handle(state, event)
    failure = state.setup_failure()
    assert (None if failure is None else failure.reason) == reason


def test_what_this_rank_says_of_itself() -> None:
    state = new_state()
    assert state.timed_out(frozenset()).reason == "Timed out waiting"
    assert state.timed_out(frozenset({0, 2})) == GroupFailure(
        CollectiveTimeout, "Timed out waiting on rank 11 for ranks 10, 12", (0, 2)
    )
    assert state.mismatch({2: "b", 0: "a"}).reason == (
        "the ranks called different operations: rank 10 called a; rank 12 called b"
    )
    assert state.raised(KeyError("x")).reason == "rank 11 raised KeyError: 'x'"
    assert state.aborted("enough").reason == "rank 11 aborted the group: enough"


def test_which_ranks_are_gone() -> None:
    state = new_state()
    assert state.lost_ranks() == {}
    handle(state, rank_left(0, 3))
    handle(state, heard(LOST))
    assert state.lost_ranks() == {2: LOST.reason, 0: "it left the default group"}
    assert state.explains(None) and state.explains(0) and state.explains(1)


def test_where_a_rank_is() -> None:
    state = new_state(opened=False)
    assert state.where(7.0) == (0, "is making the group")
    handle(state, OPEN)
    assert state.where(7.0) == (0, "has called nothing yet")
    state.sequence, state.current = 1, Running(1)
    assert state.where(7.0) == (1, "is in all_reduce #3 of group 'g'")
    state.current, state.last, state.last_ended = None, "barrier #1", 5.0
    assert state.where(7.0) == (1, "finished barrier #1 2.0 s ago and has called nothing since")


KINDS = [RankLost, CollectiveMismatch, CollectiveTimeout, GroupAborted, CollectiveError]
FAILURES = st.builds(GroupFailure, st.sampled_from(KINDS), st.text(max_size=3))
EVENTS = st.one_of(
    st.builds(found, FAILURES),
    st.builds(heard, FAILURES),
    st.builds(rank_left, st.integers(0, 2), st.integers(0, 5)),
    st.just(CLOSE),
)


@given(st.lists(EVENTS, max_size=8), st.integers(0, 8), st.integers(1, 6))
def test_the_invariants_hold_in_every_order(events: list[Event], opened_at: int, running: int) -> None:
    state = new_state(opened=False)
    state.current = Running(running)
    opened_at = min(opened_at, len(events))
    per_event = [handle(state, event) for event in [*events[:opened_at], OPEN, *events[opened_at:]]]
    failures = [cast(GroupFailure, event[1]) for event in events if event[0] in ("found", "heard")]

    # 1, 2: the first failure is final; it ends the operations once, and is told if it was found here.
    assert state.failure == (failures[0] if failures else None)
    assert [actions.fails for actions in per_event if actions.fails] == failures[:1]
    first = next((event for event in events if event[0] in ("found", "heard")), None)
    told = [actions.reports for actions in per_event if actions.reports]
    assert told == (failures[:1] if first is not None and first[0] == "found" else [])

    # 3: every rank that left is noted, and only later operations fail because of it.
    departures = [event for event in events if event[0] == "leave"]
    noted = {rank for actions in per_event for rank, _ in actions.departed}
    assert noted == {event[1] for event in departures} == set(state.departed)
    for sequence in range(1, 8):
        failure = state.departure_before(sequence)
        assert (failure is None) == all(sequence <= last for last in state.departed.values())

    # 4: nothing but telling happens before the group is open.
    assert all(actions._replace(reports=None) == GroupActions() for actions in per_event[:opened_at])

    # 5: operations are refused once the group failed or closes.
    assert (state.refusal is None) == (not failures and not any(event == CLOSE for event in events))


ANSWERS = {0: (5, "is in it"), 1: (5, "is in it"), 2: (4, "finished all_reduce #4 2.0 s ago")}


@pytest.mark.parametrize(
    ("answers", "missing", "text"),
    [
        (ANSWERS, (2,), "Timed out waiting in x #5; rank 12 did not arrive: rank 12 finished all_reduce #4 2.0 s ago"),
        ({0: ANSWERS[0]}, (1, 2), "ranks 11, 12 did not arrive: rank 11 does not answer; rank 12 does not answer"),
        ({1: ANSWERS[1], 2: ANSWERS[2]}, (0, 2), "rank 12 finished all_reduce #4 2.0 s ago; rank 10 does not answer"),
        (
            dict.fromkeys(range(3), (5, "is in it")),
            (),
            "Timed out waiting in x #5, although all ranks have called it: rank 10 is in it; rank 11 is in it; "
            "rank 12 is in it",
        ),
    ],
)
def test_the_verdict_on_a_timeout(answers: dict[int, tuple[int, str]], missing: tuple[int, ...], text: str) -> None:
    failure = timeout_verdict("x #5", 5, answers, WORLD)
    assert (failure.kind, failure.ranks) == (CollectiveTimeout, missing)
    assert text in failure.reason
