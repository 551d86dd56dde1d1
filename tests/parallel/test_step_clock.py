"""The admission to the next step: tables of arrivals, and several servers whose messages arrive in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial

import pytest

from rpcdist.parallel.parameter_server._shard import StepClock


def run(staleness: int, events: str) -> list[str]:
    """The steps that each event releases, with trainers a and b. A ticket is a trainer and the number of the event.

    `a` takes its next step, `=a` the same one again, `?a` one without taking part; `-a` is its death.
    """
    clock: StepClock[str] = StepClock("ab", staleness)
    steps = dict.fromkeys("ab", 0)
    released = []
    for number, event in enumerate(events.split()):
        trainer = event[-1]
        if event[0] == "-":
            del steps[trainer]
            free = clock.remove(trainer)
        else:
            takes_part = event[0] != "?"
            step = steps.get(trainer, clock.floor) + (event[0] != "=")
            if takes_part:
                steps[trainer] = step
            free = clock.arrive(trainer, step, f"{trainer}{number}", takes_part)
        released.append(" ".join(free))
    return released


@pytest.mark.parametrize(
    ("staleness", "events", "released"),
    [
        (0, "a b a b", ["", "a0 b1", "", "a2 b3"]),  # rounds
        (1, "a a b b", ["a0", "", "a1 b2", "b3"]),
        (3, "a a a a b", ["a0", "a1", "a2", "", "a3 b4"]),
        (0, "a -b a a", ["", "a0", "a2", "a3"]),  # nobody waits for the dead
        (0, "a -a b b", ["", "", "a0 b2", "b3"]),  # the call of the dead one is answered, too
        (0, "a -b c a c", ["", "a0", "", "c2 a3", ""]),  # a newcomer begins with the slowest
        (0, "a -a a b", ["", "", "", "a0 a2 b3"]),  # a replacement in the same round
        (0, "a =a b a b", ["", "", "a0 a1 b2", "", "a3 b4"]),  # a call that was given up, and its repetition
        (0, "?c a b", ["", "", "c0 a1 b2"]),  # waits for the others, not they for it
        (0, "-a -b ?c ?c", ["", "", "c2", "c3"]),  # there is nobody to wait for
    ],
)
def test_what_each_arrival_releases(staleness: int, events: str, released: list[str]) -> None:
    assert run(staleness, events) == released


def test_who_is_waited_for_is_named() -> None:
    clock: StepClock[str] = StepClock("abc", 0)
    assert clock.slowest() == {}
    clock.arrive("a", 1, "1")
    assert clock.slowest() == {"b": 0, "c": 0}
    clock.arrive("b", 1, "2")
    assert clock.slowest() == {"c": 0}
    assert clock.arrive("c", 1, "3") == ["1", "2", "3"] and clock.slowest() == {} and clock.floor == 1


class Job:
    """Trainers that begin, take steps, and die at random; each server gets their messages in an order of its own."""

    def __init__(self, seed: int, num_servers: int, staleness: int) -> None:
        self.draw = random.Random(seed)
        self.staleness = staleness
        self.clocks: list[StepClock[tuple[str, int]]] = [StepClock("ab", staleness) for _ in range(num_servers)]
        self.steps = dict.fromkeys("ab", 0)  # the last of each trainer that lives
        self.left = dict.fromkeys("ab", 10)  # that it wants to take
        self.unanswered: dict[str, set[int]] = {}  # servers, by trainer whose step is under way
        self.mail: list[dict[str, deque[tuple[str, int]]]] = [{} for _ in range(num_servers)]  # by trainer, in order

    def send(self, trainer: str, kind: str, step: int) -> None:
        for mail in self.mail:
            mail.setdefault(trainer, deque()).append((kind, step))

    def deliver(self) -> bool:
        """One message to one server; False if there is none."""
        waiting = [(server, trainer) for server, mail in enumerate(self.mail) for trainer in mail if mail[trainer]]
        if not waiting:
            return False
        server, trainer = self.draw.choice(waiting)
        kind, step = self.mail[server][trainer].popleft()
        clock = self.clocks[server]
        free = clock.remove(trainer) if kind == "ended" else clock.arrive(trainer, step, (trainer, step))
        for other, answered in free:
            if self.steps.get(other) == answered:
                self.unanswered[other].discard(server)
                assert answered <= clock.floor + self.staleness
        return True

    def act(self, names: str) -> bool:
        """One trainer that waits for nothing begins, takes a step or ends; False if none can."""
        idle = [name for name in names if not self.unanswered.get(name) and self.left.get(name, 10) >= 0]
        if not idle:
            return False
        name = self.draw.choice(idle)
        if name not in self.steps:
            self.steps[name], self.left[name] = self.clocks[0].floor, 10
        if self.left[name] == 0 or self.draw.random() < 0.03:
            del self.steps[name]
            self.left[name] = -1
            self.send(name, "ended", 0)
        else:
            self.steps[name] += 1
            self.left[name] -= 1
            self.unanswered[name] = set(range(len(self.clocks)))
            self.send(name, "step", self.steps[name])
        return True


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_servers_that_see_other_orders_never_hold_each_other_up(num_servers: int, staleness: int) -> None:
    """Trainers c and d begin at any time: one server may have ended a round without them, another not."""
    for seed in range(60):
        job = Job(seed, num_servers, staleness)
        while True:
            moves: list[Callable[[], bool]] = [job.deliver, partial(job.act, "abcd")]
            job.draw.shuffle(moves)
            if not any(move() for move in moves):
                break
        assert not job.steps, f"seed {seed}: {job.unanswered} wait for ever"
