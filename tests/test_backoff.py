"""Pauses between attempts; see `backoff` in `rpcdist/deadline.py`."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from rpcdist.deadline import NEVER, Deadline, backoff


@pytest.mark.parametrize(
    ("first_s", "longest_s", "bounds_s"),
    [
        (1.0, 8.0, [1.0, 2.0, 4.0, 8.0, 8.0]),
        (0.5, 3.0, [0.5, 1.0, 2.0, 3.0, 3.0]),
        (2.0, 2.0, [2.0, 2.0]),
    ],
)
def test_the_bound_of_a_pause_doubles(first_s: float, longest_s: float, bounds_s: list[float]) -> None:
    longest = backoff(first_s, longest_s, random=lambda: 1.0)
    assert list(itertools.islice(longest, len(bounds_s))) == bounds_s
    shortest = backoff(first_s, longest_s, random=lambda: 0.0)
    assert list(itertools.islice(shortest, len(bounds_s))) == [0.0] * len(bounds_s)


def test_the_jitter_is_full() -> None:
    given = iter([0.25, 0.5, 0.75])
    assert list(itertools.islice(backoff(1.0, 8.0, NEVER, lambda: next(given)), 3)) == [0.25, 1.0, 3.0]


def test_no_pause_reaches_beyond_the_deadline() -> None:
    deadline = Deadline.after(0.5)
    pauses = backoff(100.0, 100.0, deadline, lambda: 1.0)
    assert 0.0 < next(pauses) <= 0.5
    assert next(backoff(100.0, 100.0, Deadline(time.monotonic() - 1.0), lambda: 1.0)) == 0.0


def test_workers_with_equal_seeds_pause_differently_and_keep_their_sequences() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    one, other = (list(itertools.islice(backoff(1.0, 64.0), 8)) for _ in range(2))
    assert one != other
    assert random.random() == expected
