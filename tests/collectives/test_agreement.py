"""How the ranks of a group agree on who takes part: every order of steps, deaths at every step, random histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, cast

import pytest
from full_sets import FULL, num_examples
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcdist.collectives._group.agreement import (
    Disagreement,
    Displaced,
    Incomplete,
    JoinRequest,
    Made,
    Result,
    Steps,
    _Complete,
    _outcome,
    agreement,
)
from rpcdist.collectives._stores.store_operations import Contents
from rpcdist.collectives.store import Add, Check, CompareSet, Get, Missing, StoreOperation
from rpcdist.errors import RendezvousError

INTERRUPTIONS = 10 if FULL else 2
"""How often a process may be interrupted by another one, where every order is tried."""


def wish(rank: int, size: int = 2, text: str = "a group") -> JoinRequest:
    return JoinRequest(rank, tuple(range(size)), text)


FOREIGN = [
    b"", b"{", b"7", b"[" * 9000, b'["next"]', b'["next", null, "x"]', b'["made", ["x"]]', b'["made", 7]',
    b'["differ", [], []]', b'["next", [0, [[0, 99999999999999999999]], "a group", 1], null]',
    b'["next", [5, [[0, 1]], "a group", 1], null]', b'["next", [0, [[0]], "a group", 1], null]',
    b'["next", [0, [[0, 1]], 7, 1], null]', b'["next", [0, [[0, 65535], [0, 65535]], "a group", 1], null]',
    b'[1, [[0, 99999999999999999999]], "a group", 1]', b'[1, [[0, 1]], "a group", "1"]',
]  # fmt: skip


@pytest.mark.parametrize("text", FOREIGN, ids=range(len(FOREIGN)))
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_begun", [True, False])
def test_what_a_stranger_writes_ends_an_agreement_by_name(rank: int, is_begun: bool, text: bytes) -> None:
    """torchrun's store has no token; a range of 10^20 ranks took all memory, in a call that no signal ends."""
    steps = agreement(wish(rank), fresh=False)
    result: object = None
    with pytest.raises(RendezvousError, match=r"^the store has .* where the ranks of a group find each other"):
        while True:
            match steps.send(result):
                case Add():
                    result = 1
                case Check():
                    result = is_begun
                case Get():
                    result = (text,)
                case CompareSet():
                    result = text


@dataclass(eq=False)
class Process:
    """One process: its next operation, or its result."""

    wish: JoinRequest
    steps: Steps[Result]
    operation: StoreOperation[object] | None
    result: Result | None = None
    ticket: int = 0
    came: int = 0  # when it drew its ticket
    died: int | None = None

    @property
    def runs(self) -> bool:
        return self.result is None and self.died is None


def other_wish(process: Process) -> JoinRequest:
    """The wish from which the process differs, as it was before its owner arrived."""
    assert isinstance(process.result, Disagreement)
    return replace(process.result.other, ticket=0)


@dataclass(eq=False)
class Job:
    """Processes on one store. A step carries out one operation; `time` counts them."""

    contents: Contents = field(default_factory=Contents)
    processes: list[Process] = field(default_factory=list)
    time: int = 0

    def start(self, wished: JoinRequest, fresh: bool = False) -> Process:
        steps = agreement(wished, fresh)
        process = Process(wished, steps, next(steps))
        self.processes.append(process)
        return process

    def can_step(self, process: Process) -> bool:
        if not process.runs or process.operation is None:
            return False
        return not isinstance(process.operation, Get) or not self._is_missing(process.operation)

    def _is_missing(self, operation: StoreOperation[object]) -> bool:
        return isinstance(operation.decide(self.contents)[0], Missing)

    def step(self, process: Process, time_is_over: bool = False) -> None:
        self.time += 1
        assert process.operation is not None
        result, changes = process.operation.decide(self.contents)
        for change in changes:
            self.contents.apply(change)
        if isinstance(result, Missing):
            assert time_is_over or not isinstance(process.operation, Get)
            result = Missing(tuple(f"prefix/{key}" for key in result.keys))
        if process.operation == Add("tickets", 1):
            process.ticket, process.came = cast(int, result), self.time
        try:
            process.operation = process.steps.send(result)
        except StopIteration as done:
            process.operation, process.result = None, done.value

    def die(self, process: Process) -> None:
        process.died = self.time

    def run(
        self,
        processes: Sequence[Process],
        choose: Callable[[int], int],
        interruptions: int = 10**6,
        impatient: Process | None = None,
    ) -> None:
        """Until each is done, or none can go on.

        `choose(n)` says which of n goes on; the first is the one that ran last, which is interrupted only so often. The
        time of `impatient` is over whenever it would have to wait and is chosen.
        """
        last: Process | None = None
        for _ in range(200 * len(processes)):
            able = [
                process for process in processes if self.can_step(process) or (process is impatient and process.runs)
            ]
            if not able:
                return
            if last in able:
                able.sort(key=lambda process: process is not last)
                able = able if interruptions else able[:1]
            process = able[choose(len(able)) if len(able) > 1 else 0]
            interruptions -= last in able and process is not last
            last = process
            self.step(process, time_is_over=process is impatient)
        raise AssertionError("the agreement does not come to an end")

    def check(self) -> None:
        """The invariants of the docstring, on all that has happened."""
        by_ticket = {process.ticket: process for process in self.processes}
        for process in self.processes:
            if isinstance(process.result, Made):
                made = self.outcome(process.result.number)
                assert isinstance(made, _Complete)
                assert made.tickets[process.wish.ranks.index(process.wish.rank)] == process.ticket
        for key in self.contents.values:
            if key.endswith("/outcome") and isinstance(made := _outcome(bytes(self.contents.values[key])), _Complete):
                members = [by_ticket[ticket] for ticket in made.tickets]
                assert [member.wish.rank for member in members] == list(members[0].wish.ranks)
                for member in members:
                    assert member.wish.fits(members[0].wish)
                    assert not isinstance(member.result, Incomplete)
                    assert member.died is None or member.died > members[0].came

    def outcome(self, number: int) -> object:
        return _outcome(bytes(self.contents.values[f"{number}/outcome"]))


def every_order(run: Callable[[Callable[[int], int]], None], limit: int) -> int:
    """Calls `run` with a `choose` for every sequence of choices; returns how many there were."""
    prefix: list[int] = []
    for number in range(1, limit + 1):
        path: list[tuple[int, int]] = []

        def choose(count: int) -> int:
            pick = prefix[len(path)] if len(path) < len(prefix) else 0  # noqa: B023
            path.append((pick, count))  # noqa: B023
            return pick

        run(choose)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return number
        prefix = [pick for pick, _ in path[:-1]] + [path[-1][0] + 1]
    raise AssertionError("there are more orders than expected")


def meet(job: Job, processes: Sequence[Process], choose: Callable[[int], int], interruptions: int = 10**6) -> None:
    job.run(processes, choose, interruptions)
    assert {process.result for process in processes} == {processes[0].result}, processes
    assert isinstance(processes[0].result, Made)
    job.check()


def dead_pasts() -> Iterator[tuple[int, ...]]:
    """How many steps each of rank 0, rank 1, and once more rank 0 took before it died."""
    longest = 9
    if FULL:
        yield from product(range(longest), range(longest), range(0, longest, 3))
    else:
        yield from ((steps, 0, 0) for steps in range(longest))
        yield from ((4, steps, 0) for steps in range(1, longest))
        yield from ((0, steps, 5) for steps in range(1, longest))


@pytest.mark.parametrize("past", list(dead_pasts()), ids=str)
def test_two_ranks_meet_in_every_order_of_their_steps_whatever_the_dead_left(past: tuple[int, ...]) -> None:
    def run(choose: Callable[[int], int]) -> None:
        job = Job()
        for rank, num_steps in zip((0, 1, 0), past, strict=True):
            dead = job.start(wish(rank))
            for _ in range(num_steps):
                if job.can_step(dead):
                    job.step(dead)
            job.die(dead)
        meet(job, [job.start(wish(0)), job.start(wish(1))], choose, INTERRUPTIONS)

    every_order(run, 20_000)


def test_nobody_is_counted_in_who_gave_up() -> None:
    """Every order of two ranks, the time of each of which may be over at any of its waits: both are in, or none is."""

    def run(choose: Callable[[int], int]) -> None:
        job = Job()
        both = [job.start(wish(0)), job.start(wish(1))]
        impatient = choose(2)
        job.run(both, choose, INTERRUPTIONS + 1, both[impatient])
        if both[1 - impatient].runs:
            job.step(both[1 - impatient], time_is_over=True)
            job.run(both, choose, 0)
        job.check()
        results = [process.result for process in both]
        seen.add((impatient, isinstance(results[0], Made)))
        assert isinstance(results[0], Made) == isinstance(results[1], Made), results
        assert all(isinstance(result, Made | Incomplete) for result in results), results

    seen: set[tuple[int, bool]] = set()
    every_order(run, 60_000)
    assert seen == set(product(range(2), (True, False)))


class Choices:
    """Random numbers of a fixed list, and then turns."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = numbers
        self._next = 0

    def __call__(self, count: int) -> int:
        self._next += 1
        return (self._numbers[self._next % len(self._numbers)] + self._next // len(self._numbers)) % count


actions = st.tuples(
    st.sampled_from(["start", "step", "step", "step", "step", "die", "time is over"]), st.integers(0, 50)
)


@settings(max_examples=num_examples(150, 5000), deadline=None)
@given(
    history=st.lists(actions, max_size=80),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    order=st.lists(st.integers(0, 11), min_size=1, max_size=60),
)
def test_whatever_has_happened_the_next_start_meets(
    history: list[tuple[str, int]], sizes: list[int], order: list[int]
) -> None:
    """Ranks of worlds of several sizes come, die and give up at random; then all die, and one of each rank comes."""
    job = Job()
    for action, number in history:
        running = [process for process in job.processes if process.runs]
        if action == "start" or not running:
            size = sizes[number % len(sizes)]
            job.start(wish(number // 7 % size, size))
            continue
        process = running[number % len(running)]
        if action == "die":
            job.die(process)
        elif job.can_step(process) or action == "time is over":
            job.step(process, action == "time is over")
        job.check()
    for process in job.processes:
        if process.runs:
            job.die(process)
    size = sizes[0]
    meet(job, [job.start(wish(rank, size)) for rank in range(size)], Choices(order))


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(
    left=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=4),
    order=st.lists(st.integers(0, 11), min_size=1, max_size=60),
)
def test_processes_of_an_earlier_start_that_still_live_make_way(left: list[tuple[int, int]], order: list[int]) -> None:
    """They wait when the next start comes, and go on then: none keeps the later process of its rank from its group."""
    job = Job()
    former = [job.start(wish(rank, 3)) for rank, _ in left if rank > 0]  # with rank 0 they might meet
    for process, (_, num_steps) in zip(former, left, strict=False):
        for _ in range(max(1, num_steps)):
            if job.can_step(process):
                job.step(process)
    later = [job.start(wish(rank, 3)) for rank in range(3)]
    for process in later:
        job.step(process)  # it draws its ticket: now it has come
    job.run([*former, *later], Choices(order))
    job.check()
    in_group = [process for process in job.processes if isinstance(process.result, Made)]
    assert later[0] in in_group and len(in_group) == 3
    assert all(isinstance(process.result, Displaced | Made | None) for process in former)
    for process in later:
        # A process of the earlier start may be in, if rank 0 read that it was there before the later one said so.
        assert process in in_group or (process.result is None and process.runs)


@pytest.mark.parametrize("first", [0, 1])
def test_both_ranks_are_told_that_they_want_different_groups(first: int) -> None:
    def run(choose: Callable[[int], int]) -> None:
        job = Job()
        both = [job.start(wish(0, 2)), job.start(wish(1, 3))]
        job.step(both[first])
        job.run(both, choose)
        assert [other_wish(process) for process in both] == [wish(1, 3), wish(0, 2)]

    every_order(run, 20_000)


def test_two_who_each_want_to_lead_are_told() -> None:
    def run(choose: Callable[[int], int]) -> None:
        job = Job()
        wishes = [JoinRequest(0, (0, 1), "a"), JoinRequest(1, (1, 0), "a")]
        both = [job.start(wished, fresh=True) for wished in wishes]
        job.run(both, choose)
        assert [other_wish(process) for process in both] == [wishes[1], wishes[0]]

    every_order(run, 20_000)


def test_a_disagreement_stays_where_only_this_start_writes() -> None:
    for fresh in (True, False):
        job = Job()
        both = [job.start(wish(0, 2), fresh), job.start(wish(1, 3), fresh)]
        job.run(both, lambda _: 0)
        late = job.start(wish(2, 3), fresh)
        job.run([late], lambda _: 0)
        assert (other_wish(late) == wish(0, 2)) if fresh else (late.result is None)


def test_who_is_missing() -> None:
    """Of three ranks one does not come; the others give up one after the other, in both orders."""
    for missing, order in product(range(3), range(2)):
        job = Job()
        there = [job.start(wish(rank, 3)) for rank in range(3) if rank != missing]
        job.run(there, lambda count: count - 1)
        for process in there if order else there[::-1]:
            while process.runs:
                job.step(process, time_is_over=True)
            job.run([other for other in there if other is not process], lambda _: 0)
        assert [process.result for process in there] == [Incomplete((missing,), None)] * 2, (missing, order)


@pytest.mark.parametrize(("size", "limit_bytes"), [(1, 100), (300, 100)])
def test_what_a_rank_writes_does_not_grow_with_the_world(size: int, limit_bytes: int) -> None:
    job = Job()
    every = [job.start(wish(rank, size, "a group of a large world")) for rank in range(size)]
    for process in [*every[::-1], *every, *every]:
        while job.can_step(process):
            job.step(process)
    assert {process.result for process in every} == {Made(1)}
    values: dict[str, Any] = job.contents.values
    assert max(len(value) for key, value in values.items() if "here" in key or key == "0/outcome") < limit_bytes
    assert len(values["1/outcome"]) < 20 + 6 * size
