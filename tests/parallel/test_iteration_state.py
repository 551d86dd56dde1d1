"""The state machine that decides which gradients an iteration waits for, and when it ends: events in, decisions out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.parallel._ddp._iteration_state import DueRule, IterationState, Phase, UnexpectedGradient

IDLE, PASSING, ARMED, ENTERED, AVERAGING, PARTIAL, AWAITED = Phase
Event = Callable[[IterationState], object]


def _begin(state: IterationState) -> object:
    return state.begin_pass(range(3))


def _end(state: IterationState) -> object:
    return state.end_pass(state._pass)


def _arm(state: IterationState) -> None:
    state.arm(watched=True)


def _add(state: IterationState) -> object:
    """The next gradient: the second one completes the iteration."""
    return state.add(min(state.missing))


def _leave(state: IterationState) -> object:
    """Ends the iteration, whose missing gradients come first, until the program ends it."""
    for index in sorted(state.missing):
        state.add(index)
    assert _end(state)
    return state.finish(awaits=True)


LEADS_TO: dict[Phase, tuple[Event, ...]] = {
    IDLE: (),
    PASSING: (_begin,),
    ARMED: (_arm,),
    ENTERED: (_arm, _begin),
    AVERAGING: (_arm, _begin, _add),
    PARTIAL: (_arm, _begin, _add, _end),
    AWAITED: (_arm, _begin, _leave),
}
"""How each phase is reached."""
TRANSITIONS: dict[str, tuple[Event, dict[Phase, Phase]]] = {
    "arm": (_arm, {phase: ARMED for phase in Phase if phase is not AWAITED}),
    "pause": (
        IterationState.pause,
        {IDLE: IDLE, PASSING: IDLE, ARMED: ARMED, ENTERED: ARMED, AVERAGING: PARTIAL, PARTIAL: PARTIAL},
    ),
    "begin_pass": (_begin, {IDLE: PASSING, ARMED: ENTERED, PARTIAL: AVERAGING}),
    "end_pass": (
        _end,
        {IDLE: IDLE, PASSING: IDLE, ARMED: ARMED, ENTERED: ARMED, AVERAGING: PARTIAL, PARTIAL: PARTIAL},
    ),
    "reopen": (IterationState.reopen, {IDLE: ARMED, PASSING: ENTERED}),
    "add": (_add, {ENTERED: AVERAGING, AVERAGING: AVERAGING}),
    "abandon": (
        IterationState.abandon,
        {IDLE: IDLE, PASSING: PASSING, ARMED: ARMED, ENTERED: ENTERED, AVERAGING: PASSING, PARTIAL: IDLE},
    ),
    "restart": (
        IterationState.restart,
        {IDLE: IDLE, PASSING: PASSING, ARMED: IDLE, ENTERED: PASSING, AVERAGING: PASSING, PARTIAL: IDLE, AWAITED: IDLE},
    ),
    "end_awaited": (IterationState.end_awaited, {AWAITED: IDLE}),
}
CASES = [(name, before, after) for name, (_, table) in TRANSITIONS.items() for before, after in table.items()]


@pytest.mark.parametrize(("event", "before", "after"), CASES, ids=[f"{name}-{phase.name}" for name, phase, _ in CASES])
def test_each_event_leads_from_phase_to_phase(event: str, before: Phase, after: Phase) -> None:
    state = IterationState(3, DueRule.EVERY)
    for step in LEADS_TO[before]:
        step(state)
    assert state.phase is before
    TRANSITIONS[event][0](state)
    assert state.phase is after
    assert state.phase.in_pass == (after in (PASSING, ENTERED, AVERAGING))
    assert state.phase.is_open == (after not in (IDLE, PASSING, AWAITED))


def test_iterations_are_numbered_and_forward_passes_without_backward_are_counted() -> None:
    state = IterationState(1, DueRule.EVERY)
    state.arm(watched=True)
    state.arm(watched=True)
    assert (state.iteration, state.num_unused_forwards) == (1, 1)
    _iterate(state, [0])
    state.begin_pass([])
    state.reopen()
    assert (state.iteration, state.num_unused_forwards) == (2, 0)


def test_the_end_of_a_pass_that_is_over_means_nothing() -> None:
    state = IterationState(1, DueRule.FOUND)
    state.arm(watched=True)
    lost = state.begin_pass([0])  # it raises, and its end is not called
    state.arm(watched=True)
    assert not state.end_pass(lost) and state.phase is ARMED
    running = state.begin_pass([0])
    assert not state.end_pass(lost) and state.phase is ENTERED
    assert not state.runs(lost) and state.runs(running)
    state.add(0)
    assert state.end_pass(running)
    state = IterationState(2, DueRule.EVERY)
    state.arm(watched=True)
    running = state.begin_pass([])
    state.add(0)
    state.pause()  # a forward pass under `no_sync` in it: its end is no end of a pass of this iteration
    assert not state.runs(running) and not state.end_pass(running)


def test_gradients_outside_of_iterations_are_taken_in_a_pass_or_if_outputs_were_differentiated() -> None:
    state = IterationState(1, DueRule.EVERY)
    assert not state.takes(syncs=True)
    state.arm(watched=True)
    state.begin_pass([])
    state.reach(builds_graph=True)
    _end_iteration(state, [0])
    assert state.phase is IDLE and state.takes(syncs=True) and not state.takes(syncs=False)
    state.begin_pass([])
    assert state.takes(syncs=False)
    state.pause()
    assert not state.takes(syncs=True)


def test_others_are_told_once_of_missing_gradients_and_never_if_passes_bring_them_later() -> None:
    state = IterationState(2, DueRule.EVERY)
    state.arm(watched=True)
    for index, owes in ((None, False), (0, True), (None, False)):
        state.begin_pass([])
        if index is not None:
            state.add(index)
        assert not _end(state) and state.owes_notice() is owes
    state.begin_pass([])
    _end_iteration(state, [1])
    state.arm(watched=True)
    state.begin_pass([])
    state.add(0)
    assert not _end(state) and not state.owes_notice()
    state.restart()  # other ranks
    state.arm(watched=True)
    state.begin_pass([])
    state.add(0)
    assert not _end(state) and state.owes_notice()


def test_an_iteration_that_has_begun_is_given_up_with_what_it_lacks() -> None:
    state = IterationState(3, DueRule.EVERY)
    state.arm(watched=True)
    assert state.abandon() is None
    state.begin_pass([])
    state.add(1)
    assert state.abandon() == [0, 2] and state.abandon() is None
    state.arm(watched=True)
    assert state.iteration == 2 and state.missing == {0, 1, 2}
    state.begin_pass([])
    for index in range(3):
        state.add(index)  # and then the pass raises
    assert state.abandon() == []


def test_the_program_may_end_an_iteration_in_its_pass_once_nothing_is_missing() -> None:
    for rule in DueRule:
        state = IterationState(2, rule)
        state.use_buckets([[0], [1]], keeps_last=False)
        state.arm(watched=True)
        assert not state.end_in_pass()
        number = state.begin_pass([0, 1])
        state.reach(builds_graph=False)
        assert list(state.add(1)) == [] and not state.end_in_pass()
        assert list(state.add(0)) == ([] if rule is DueRule.STATIC else [0, 1])
        assert state.end_in_pass() is (rule is not DueRule.STATIC)  # its first iteration has to count them all
        if rule is not DueRule.STATIC:
            assert state.finish() == [] and state.phase is PASSING
            assert not state.end_pass(number) and state.phase is IDLE


def test_a_closed_iteration_awaits_its_end_by_the_program() -> None:
    state = IterationState(2, DueRule.FOUND)
    state.arm(watched=True)
    state.begin_pass([1])
    state.add(1)
    assert _end(state) and state.finish(awaits=True) == [0]
    assert state.phase is AWAITED and state.unaveraged == {1} and not state.takes(syncs=True)
    state.restart()  # other ranks: nobody ends it
    assert state.phase is IDLE and state.unaveraged == {1}


# ---------------------------------------------------------------- buckets


@pytest.mark.parametrize(
    ("order", "launches"),
    [
        ([0, 1, 2, 3], [[], [0], [], [1]]),
        ([3, 2, 1, 0], [[], [], [], [0, 1]]),
        ([2, 0, 3, 1], [[], [], [], [0, 1]]),
    ],
)
def test_buckets_are_reduced_in_their_order_and_the_last_one_may_wait_for_the_end(
    order: Sequence[int], launches: Sequence[Sequence[int]]
) -> None:
    state = IterationState(5, DueRule.EVERY)
    for keeps_last in (True, False, True):
        state.use_buckets([[0, 1], [2, 3], [4]], keeps_last)
        state.arm(watched=True)
        state.begin_pass([])
        assert [list(state.add(index)) for index in order] == launches
        assert list(state.add(4)) == ([] if keeps_last else [2]) and _end(state)
        assert state.finish() == ([2] if keeps_last else []) and state.reduced == [0, 1, 2]
        assert state.ready_order == [*order, 4]


def test_buckets_without_used_parameters_may_be_skipped() -> None:
    state = IterationState(4, DueRule.FOUND, skips_unused=True)
    state.use_buckets([[0], [1, 2], [3]], keeps_last=True)
    state.arm(watched=True)
    state.begin_pass([0, 3])
    assert [list(state.add(0)), list(state.add(3))] == [[0], []]
    assert _end(state) and state.finish() == [2] and state.reduced == [0, 2]


def test_a_rank_without_data_reduces_the_same_buckets() -> None:
    state = IterationState(3, DueRule.EVERY)
    state.use_buckets([[0], [1], [2]], keeps_last=True)
    assert state.mirror() == [0, 1] and state.finish() == [2]
    assert (state.iteration, state.phase, state.reduced) == (1, IDLE, [0, 1, 2])


# ---------------------------------------------------------------- which gradients


def _end_iteration(state: IterationState, adds: Sequence[int]) -> None:
    for index in adds:
        state.add(index)
    assert _end(state)
    state.finish()
    state.settle()


def _iterate(state: IterationState, adds: Sequence[int], reaches: Sequence[int] | None = None) -> None:
    state.begin_pass(adds if reaches is None else reaches)
    state.reach(builds_graph=False)
    _end_iteration(state, adds)


def _added(state: IterationState, *indices: int) -> set[int]:
    """The parameters that have got their last gradient of the iteration after these gradients."""
    for index in indices:
        state.add(index)
    return set(state.ready_order)


def test_every_parameter_once_in_any_number_of_passes() -> None:
    state = IterationState(3, DueRule.EVERY)
    state.arm(watched=True)
    state.begin_pass([])
    assert _added(state, 1) == {1} and not _end(state)
    assert state.missing == {0, 2}
    state.begin_pass([])
    with pytest.raises(UnexpectedGradient) as caught:
        state.add(1)
    assert (caught.value.index, caught.value.count, caught.value.allowed) == (1, 2, None)
    assert _added(state, 0, 2) == {0, 1, 2} and _end(state)
    state.finish()
    state.add_outside(1)
    assert not state.unaveraged and all(state.uses(index) for index in range(3))


def test_found_ends_with_the_pass_and_waits_for_nothing_that_it_does_not_reach() -> None:
    state = IterationState(4, DueRule.FOUND)
    state.add_outside(3)  # under no_sync
    state.arm(watched=True)
    state.begin_pass([0, 1])
    assert state.missing == {0, 1}
    assert _added(state, 0) == {0}
    assert state.missing == {1}  # its gradient is undefined: the pass reaches it and adds nothing
    assert _end(state)
    assert [state.uses(index) for index in range(4)] == [True, False, False, True]
    state.finish()
    state.settle()
    assert not any(state.uses(index) for index in range(4))


def test_what_a_distributed_pass_captured_is_no_gradient_of_the_next_iteration() -> None:
    state = IterationState(2, DueRule.FOUND)
    state.add_outside(1)
    state.arm(watched=True)
    state.begin_pass([0, 1])
    state.add(0, captured=True)
    assert _end(state) and state.uses(0) and state.uses(1)
    state.finish()
    state.arm(watched=True)
    assert not state.uses(0) and state.uses(1)


def test_static_counts_once_and_then_expects_as_many() -> None:
    state = IterationState(3, DueRule.STATIC)
    state.arm(watched=True)
    state.begin_pass([0])
    state.add(2)
    assert not _end(state) and not state.owes_notice()  # a penalty of the parameters alone: it avoids the outputs
    state.arm(watched=True)
    state.begin_pass([0])
    state.reach(builds_graph=False)
    assert state.missing == {0, 1, 2} and _added(state, 0, 0, 1) == set()
    assert _end(state) and state.in_graph == {0, 1}
    state.static_use = frozenset({0, 1})
    state.finish()
    state.settle()
    state.arm(watched=True)
    assert state.missing == {0, 1} and not state.ends_with_pass
    state.begin_pass([])
    assert [_added(state, 0), _added(state, 1), _end(state)] == [set(), {1}, False]
    state.begin_pass([])
    assert _added(state, 0) == {0, 1} and _end(state)
    for index, count, allowed in ((0, 3, 2), (2, 1, 0)):
        with pytest.raises(UnexpectedGradient) as caught:
            state.add(index)
        assert (caught.value.count, caught.value.allowed) == (count, allowed)
    state.finish()
    with pytest.raises(UnexpectedGradient):
        state.add_outside(2)  # no iteration would average it
    state.restart()
    state.add_outside(2)
    assert state.ends_with_pass and state.unaveraged == {0, 1, 2}


def test_a_graph_could_be_static_until_a_pass_uses_other_parameters() -> None:
    state = IterationState(3, DueRule.FOUND)

    def iterate(reaches: list[int], adds: list[int]) -> bool:
        state.arm(watched=True)
        _iterate(state, adds, reaches)
        return state.could_be_static

    assert iterate([0, 1], [0, 1]) and iterate([0, 1], [0, 1])
    assert iterate([0, 1, 2], [0, 1])  # it reaches one more, and adds nothing there
    assert not iterate([0, 1], [0])
    assert not iterate([0, 1], [0])


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("outside"), st.integers(0, 3)),
        st.tuples(st.just("iteration"), st.sets(st.integers(0, 3))),
    ),
    max_size=8,
)


@given(EVENTS, st.data())
def test_nothing_that_was_added_stays_unaveraged(events: list[tuple[str, object]], data: st.DataObject) -> None:
    """After an iteration everything that was added since the last one is averaged; nothing else is."""
    state, added = IterationState(4, DueRule.FOUND), set[object]()
    for kind, what in events:
        if kind == "outside":
            state.add_outside(what)  # type: ignore[arg-type]
            added.add(what)
            continue
        assert isinstance(what, set)
        arrives = data.draw(
            st.permutations(sorted(data.draw(st.sets(st.sampled_from(sorted(what))) if what else st.just(what))))
        )
        state.arm(watched=True)
        state.begin_pass(what)
        assert state.missing == what
        assert _added(state, *arrives) == set(arrives)
        added.update(arrives)
        assert _end(state) and not state.missing
        assert {index for index in range(4) if state.uses(index)} == added
        state.finish()
        state.settle()
        added.clear()
    assert state.unaveraged == added


@given(st.lists(st.sampled_from(["arm", "pause", "begin_pass", "end_pass", "add", "abandon", "reach"]), max_size=30))
def test_any_order_of_events_keeps_what_the_phases_say(events: list[str]) -> None:
    state = IterationState(3, DueRule.EVERY)
    state.use_buckets([[0], [1], [2]], keeps_last=False)
    for event in events:
        if event == "reach":
            state.reach(builds_graph=False)
        elif event == "add":  # as the reducer does
            if not state.phase.in_pass:
                _begin(state)
            if not state.phase.is_open:
                state.reopen()
            if state.missing:
                _add(state)
        elif TRANSITIONS[event][0](state) is True:
            assert state.finish() == [] and state.reduced == [0, 1, 2] and state.phase is IDLE
        begun = state.phase in (AVERAGING, PARTIAL)
        assert begun == (state.phase.is_open and bool(state.ready_order))
        assert not state.phase.is_open or set(state.ready_order) | state.missing == {0, 1, 2}
        assert state.reduced == list(range(len(state.reduced)))  # in their order, whatever the order of gradients
