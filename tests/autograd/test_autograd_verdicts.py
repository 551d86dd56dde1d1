"""The pure half of a backward pass: verdicts, order of gates, and its end, in every order and merging of messages."""

from __future__ import annotations

import pytest
from autograd_world import Hop, World, build
from full_sets import FULL_ONLY
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist.autograd._verdicts import LocalGraph, LocalRecv, LocalSend, PassState, Run, Tell


def test_a_call_and_its_result_as_a_table() -> None:
    """Worker 0 sent message 1 to worker 1, whose result 2 the root needs. No verdict has to be sent."""
    caller = PassState(0)
    graph = LocalGraph(1, (LocalSend(1, 1, 1, 1, 1),), (LocalRecv(2, 1, 2, (0b01,)),), (0b01, 0b10))
    first, second = Run((0,), 0b01, (), (), (2,)), Run((1,), 0b10, (1,), (), ())
    assert caller.start_part(graph, {1}) == [Tell(1, {2: None}, True), first]
    caller.ended(first)
    assert caller.take(1, True, True, {1: None}) == []
    assert caller.take(1, used={1: 1}) == [second]
    caller.ended(second)
    assert not caller.is_done
    assert caller.take(1, is_done=True) == []
    assert caller.is_done


def test_what_the_receiver_does_not_name_is_unused() -> None:
    state = PassState(0)
    graph = LocalGraph(1, (LocalSend(7, 1, 3, 1, 2),), (), (0b001, 0b010, 0b100))
    [_, run] = state.start_part(graph, {1})
    assert isinstance(run, Run)
    state.ended(run)
    assert not state.is_done
    assert state.take(1, True) == []
    assert state.is_done


def test_one_of_two_tensors() -> None:
    state = PassState(1)
    graph = LocalGraph(
        0, (LocalSend(2, 0, 2, 0, 2),), (LocalRecv(1, 0, 1, (0b01,)), LocalRecv(9, 0, 1, (0b10,))), (0b01, 0b10)
    )
    state.take(0, True, False, {2: 0b01})
    assert state.start_part(graph, {0}, 0) == [Tell(0, {1: 1, 9: 0}, True, True)]
    assert state.take(0, used={2: 0b01}) == [Run((0,), 0b01, (2,), (), (1,))]


def test_a_cycle_through_another_worker_blocks_at_a_gate() -> None:
    """x goes to worker 1 and comes back; the root uses both x and what came back."""
    state = PassState(0)
    graph = LocalGraph(1, (LocalSend(1, 1, 1, 1, 1),), (LocalRecv(2, 1, 2, (0b01,)),), (0b11,))
    assert state.start_part(graph, {1}) == [Tell(1, {2: 1}, True)]
    assert state.take(1, True, True, {1: 1}) == [Run((0,), 0b11, (), (1,), (2,))]


def test_gates_wait_in_decreasing_stamp() -> None:
    state = PassState(0)
    sends = tuple(LocalSend(10 + n, 1, 2 * n + 1, n + 1, 1) for n in range(3))
    recvs = tuple(LocalRecv(20 + n, 1, 2 * n + 2, (0b1111,)) for n in range(3))
    state.take(1, True, True, {10: 1, 11: 1, 12: 1})
    actions = state.start_part(LocalGraph(1, sends, recvs, (0b1111,)), {1})
    assert actions[-1] == Run((0,), 0b1111, (), (12, 11, 10), (20, 21, 22))


def test_verdicts_run_ahead_of_gradients() -> None:
    """The messages that worker 1 got from worker 2 went on to worker 0; worker 0 says "used" before any gradient
    moves.
    """
    state = PassState(1)
    graph = LocalGraph(0, (LocalSend(5, 0, 4, 0, 1),), (LocalRecv(4, 2, 3, (0b1,)),), (0b1,))
    state.take(0, True, False, {5: None})
    state.start_part(graph, {0, 2}, 0)
    assert state.take(0, verdicts={5: 1}) == [Tell(2, {4: 1})]


def test_what_came_with_the_first_message_runs_at_once() -> None:
    """Two calls with results, of which one has an unused tensor, and a call whose result is unused."""
    state = PassState(1)
    sends = (LocalSend(11, 0, 2, 0, 1), LocalSend(12, 0, 4, 1, 2), LocalSend(13, 0, 6, 3, 1))
    recvs = tuple(LocalRecv(id, 0, 2 * id - 1, (feeders,)) for id, feeders in ((1, 0b1), (2, 0b10), (3, 0b1000)))
    assert state.take(0, True, False, {11: None, 12: None}, {11: 1, 12: 1}) == []
    graph = LocalGraph(0, sends, recvs, (0b0001, 0b0010, 0b0100, 0b1000))
    begin, *runs = state.start_part(graph, {0}, 0)
    assert begin == Tell(0, {1: None, 2: None, 3: 0}, True, True)
    first, second = Run((0,), 0b01, (11,), (), (1,)), Run((1,), 0b10, (12,), (), (2,))
    assert runs == [first, second]
    assert not state.is_done
    state.ended(first.with_(second))
    assert state.is_done
    assert state.take(0, verdicts={11: 1}, used={11: 1}) == []  # what comes later changes nothing


def test_nothing_used_is_done_at_once() -> None:
    state = PassState(1)
    state.take(0, True)
    graph = LocalGraph(0, (LocalSend(2, 0, 2, 0, 1),), (LocalRecv(1, 0, 1, (0b1,)),), (0b1,))
    assert state.start_part(graph, {0}, 0) == [Tell(0, {1: 0}, True, True)]
    assert state.is_done


# Shapes of up to 7 messages on 3 workers; the last hop is the root. Needs are (message, tensor).
def need(*messages: int) -> tuple[tuple[int, int], ...]:
    return tuple((message, 0) for message in messages)


def hop(sender: int, to: int, *needs: int, shares: bool = False) -> Hop:
    return Hop(sender, to, (need(*needs),), shares)


def root(*needs: int, shares: bool = False) -> Hop:
    return Hop(0, 0, (need(*needs),), shares)


SHAPES = {
    "call": (hop(0, 1), hop(1, 0, 0), root(1)),
    "unused result": (hop(0, 1), hop(1, 0, 0), root()),
    "one of two calls used": (hop(0, 1), hop(1, 0, 0), hop(0, 2), hop(2, 0, 2), root(1)),
    "one of two tensors": (
        hop(0, 1),
        hop(0, 1),
        Hop(1, 0, (need(0), need(1))),
        Hop(0, 0, (((2, 1),),)),
    ),
    "self call": (hop(0, 0), hop(0, 0, 0), root(1)),
    "self call, shared": (hop(0, 0, shares=True), hop(0, 0, 0), root(1, shares=True)),
    "ABAB": (hop(0, 1), hop(1, 0, 0), hop(0, 1, 1), hop(1, 0, 2), root(3)),
    "ABAB, all shared": (
        hop(0, 1, shares=True),
        hop(1, 0, 0, shares=True),
        hop(0, 1, 1, shares=True),
        hop(1, 0, 2, shares=True),
        root(3, shares=True),
    ),
    "three hops, all shared": (
        hop(0, 1, shares=True),
        hop(1, 0, 0),
        hop(0, 1, 1, shares=True),
        hop(1, 0, 2),
        hop(0, 1, 3, shares=True),
        hop(1, 0, 4),
        root(5, shares=True),
    ),
    "nested": (hop(0, 1), hop(1, 2, 0), hop(2, 1, 1), hop(1, 0, 0, 2), root(3)),
    "nested, inner result unused": (hop(0, 1), hop(1, 2, 0), hop(2, 1, 1), hop(1, 0, 0), root(3)),
    "nested call back": (hop(0, 1), hop(1, 0, 0), hop(0, 1, 1), hop(1, 0, 2), root(3)),
    "diamond": (hop(0, 1), hop(0, 2), hop(1, 0, 0), hop(2, 0, 1), root(2, 3)),
    "diamond, shared ends": (
        hop(0, 1, shares=True),
        hop(0, 2, shares=True),
        hop(1, 0, 0),
        hop(2, 0, 1),
        root(2, 3, shares=True),
    ),
    "ring": (hop(0, 1), hop(1, 2, 0), hop(2, 0, 1), root(2)),
    "ring twice, shared": (
        hop(0, 1, shares=True),
        hop(1, 2, 0, shares=True),
        hop(2, 0, 1, shares=True),
        hop(0, 1, 2, shares=True),
        hop(1, 2, 3, shares=True),
        hop(2, 0, 4, shares=True),
        root(5, shares=True),
    ),
    "two workers talk, shared": (
        hop(0, 1),
        hop(1, 2, 0, shares=True),
        hop(2, 1, 1, shares=True),
        hop(1, 2, 2, shares=True),
        hop(2, 1, 3, shares=True),
        hop(1, 0, 4, shares=True),
        root(5),
    ),
    "nothing remote": (root(),),
    "a result that was not looked at": (hop(0, 1), Hop(1, 0, (need(0),), is_lost=True), root()),
    "one that a third worker did not look at": (
        hop(0, 1),
        hop(1, 2, 0),
        Hop(2, 0, (need(1),), is_lost=True),
        hop(2, 1, 1),
        hop(1, 0, 3),
        root(4),
    ),
    "an argument that was not looked at": (
        hop(0, 1),
        Hop(1, 2, (need(0),), is_lost=True),
        Hop(1, 2, (need(0),), shares=True),
        hop(2, 0, 2),
        hop(1, 0, 0, shares=True),
        root(3),
    ),
    "seven": (
        hop(0, 1),
        hop(0, 2),
        hop(1, 2, 0),
        hop(2, 0, 1, 2),
        hop(2, 1, 2),
        hop(1, 0, 4),
        hop(1, 2, 4),
        root(3, 5),
    ),
}


def check_the_end(world: World) -> None:
    assert world.finished, f"stuck: {[state.waits_for() for state in world.states.values()]}"
    assert all(state.is_done for state in world.states.values() if state.is_started)
    used = world.used_tensors()
    assert world.gradients == {message: 1 for message, mask in used.items() if mask}
    for worker, state in world.states.items():
        for recv in world.graphs[worker].recvs:
            if state.is_started:
                assert state._verdicts.get(recv.id, 0) == used[recv.id]


def explore(start: World, limit: int, in_order: bool) -> int:
    """Every order and merging of messages; states that are reached twice are looked at once. Returns their number."""
    start.begin()
    seen = {start.key()}
    todo = [start]
    while todo:
        world = todo.pop()
        steps = list(world.steps(in_order))
        if not steps:
            check_the_end(world)
        for step in steps:
            following = world.fork()
            following.take(step)
            key = following.key()
            if key not in seen:
                seen.add(key)
                todo.append(following)
                assert len(seen) < limit
    return len(seen)


def has_points(hops: tuple[Hop, ...]) -> bool:
    """Whether a worker exchanged messages with worker 0 and nobody else, as at the points of a star."""
    pairs = [{hop.sender, hop.to} for hop in hops[:-1]]
    return any({0, worker} in pairs and {1, 2} not in pairs for worker in (1, 2))


@pytest.mark.parametrize("name", [pytest.param(name, marks=FULL_ONLY if name == "seven" else []) for name in SHAPES])
def test_every_interleaving(name: str) -> None:
    # Of these there are very many; sessions keep the order of messages between two workers.
    assert explore(build(SHAPES[name], 3), 40_000, in_order=name == "seven") >= 1


@st.composite
def forward_passes(draw: st.DrawFn, max_hops: int = 14, max_workers: int = 4) -> tuple[tuple[Hop, ...], int]:
    num_workers = draw(st.integers(2, max_workers))
    workers = st.integers(0, num_workers - 1)
    reached = {0}  # a worker takes part when it was called
    here: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(num_workers)}
    hops = []
    for id in range(draw(st.integers(0, max_hops))):
        sender, to = draw(st.sampled_from(sorted(reached))), draw(workers)
        reached.add(to)
        count = draw(st.integers(1, 2))
        needs = tuple(draw(_needs(here[sender])) for _ in range(count))
        is_lost = draw(st.integers(0, 4)) == 4
        hops.append(Hop(sender, to, needs, draw(st.booleans()), is_lost))
        here[to] += [] if is_lost else [(id, tensor) for tensor in range(count)]
    hops.append(Hop(0, 0, (draw(_needs(here[0])),), draw(st.booleans())))
    return tuple(hops), num_workers


def _needs(available: list[tuple[int, int]]) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    if not available:
        return st.just(())
    return st.lists(st.sampled_from(available), max_size=3, unique=True).map(tuple)


@given(forward_passes(), st.data())
def test_random_graphs_in_random_orders(forward: tuple[tuple[Hop, ...], int], data: st.DataObject) -> None:
    world = build(*forward)
    world.begin()
    while steps := list(world.steps()):
        world.take(data.draw(st.sampled_from(steps)))
    check_the_end(world)


@settings(max_examples=40)
@given(forward_passes(max_hops=5, max_workers=3))
def test_random_graphs_in_every_order(forward: tuple[tuple[Hop, ...], int]) -> None:
    explore(build(*forward), 40_000, in_order=True)
