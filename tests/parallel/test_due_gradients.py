"""The state machine that decides which gradients an iteration waits for: events in, decisions out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcdist.parallel._ddp._due_gradients import DueGradients, DueRule, UnexpectedGradient


def test_every_parameter_once_in_any_number_of_passes() -> None:
    due = DueGradients(3, DueRule.EVERY)
    due.open()
    assert [due.add(1), due.end_pass()] == [True, False]
    assert due.missing == {0, 2}
    with pytest.raises(UnexpectedGradient) as caught:
        due.add(1)
    assert (caught.value.index, caught.value.count, caught.value.allowed) == (1, 2, None)
    assert [due.add(0), due.add(2), due.end_pass()] == [True, True, True]
    due.add_outside(1)
    assert not due.unaveraged and all(due.uses(index) for index in range(3))


def test_found_ends_with_the_pass_and_waits_for_nothing_that_it_does_not_reach() -> None:
    due = DueGradients(4, DueRule.FOUND)
    due.add_outside(3)  # under no_sync
    due.open()
    assert due.begin_pass([0, 1]) == {2, 3}
    assert due.add(0)
    assert due.missing == {1}  # its gradient is undefined: the pass reaches it and adds nothing
    assert due.end_pass()
    assert [due.uses(index) for index in range(4)] == [True, False, False, True]
    due.close()
    due.settle()
    assert not any(due.uses(index) for index in range(4))


def test_what_a_distributed_pass_captured_is_no_gradient_of_the_next_iteration() -> None:
    due = DueGradients(2, DueRule.FOUND)
    due.add_outside(1)
    due.open()
    due.begin_pass([0, 1])
    due.add(0, captured=True)
    assert due.end_pass() and due.uses(0) and due.uses(1)
    due.close()
    due.open()
    assert not due.uses(0) and due.uses(1)


def test_static_counts_once_and_then_expects_as_many() -> None:
    due = DueGradients(3, DueRule.STATIC)
    due.open()
    assert due.begin_pass([0]) == set()
    assert [due.add(0), due.add(0), due.add(1)] == [False, False, False]
    assert due.end_pass() and due.in_graph == {0, 1}
    due.static_use = frozenset({0, 1})
    due.close()
    due.settle()
    due.open()
    assert due.missing == {0, 1} and not due.ends_with_pass
    assert [due.add(0), due.add(1), due.end_pass(), due.add(0), due.end_pass()] == [False, True, False, True, True]
    for index, count, allowed in ((0, 3, 2), (2, 1, 0)):
        with pytest.raises(UnexpectedGradient) as caught:
            due.add(index)
        assert (caught.value.count, caught.value.allowed) == (count, allowed)
    due.close()
    with pytest.raises(UnexpectedGradient):
        due.add_outside(2)  # no iteration would average it
    due.restart()
    due.add_outside(2)
    assert due.ends_with_pass and due.unaveraged == {0, 1, 2}


def test_a_graph_could_be_static_until_a_pass_uses_other_parameters() -> None:
    due = DueGradients(3, DueRule.FOUND)

    def iterate(reaches: set[int], adds: set[int]) -> bool:
        due.open()
        due.begin_pass(reaches)
        for index in adds:
            due.add(index)
        assert due.end_pass()
        due.close()
        return due.could_be_static

    assert iterate({0, 1}, {0, 1}) and iterate({0, 1}, {0, 1})
    assert iterate({0, 1, 2}, {0, 1})  # it reaches one more, and adds nothing there
    assert not iterate({0, 1}, {0})
    assert not iterate({0, 1}, {0})


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
    due, added = DueGradients(4, DueRule.FOUND), set[object]()
    for kind, what in events:
        if kind == "outside":
            due.add_outside(what)  # type: ignore[arg-type]
            added.add(what)
            continue
        assert isinstance(what, set)
        arrives = data.draw(
            st.permutations(sorted(data.draw(st.sets(st.sampled_from(sorted(what))) if what else st.just(what))))
        )
        due.open()
        assert due.begin_pass(what) == set(range(4)) - what
        assert all(due.add(index) for index in arrives)
        added.update(arrives)
        assert due.end_pass() and not due.missing
        assert {index for index in range(4) if due.uses(index)} == added
        due.close()
        due.settle()
        added.clear()
    assert due.unaveraged == added
