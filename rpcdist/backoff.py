"""Pauses between attempts: they grow, and each is random.

The randomness (full jitter) keeps the survivors of one failure, or the workers of one job that starts, from all trying
at the same moments. It comes from the system and not from `random`: users seed that one, often equally on all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import SystemRandom

from rpcdist.deadline import NEVER, Deadline

_system = SystemRandom()


def backoff(
    first_s: float,
    longest_s: float,
    deadline: Deadline = NEVER,
    random: Callable[[], float] = _system.random,
) -> Iterator[float]:
    """Yields pauses in seconds without end; none reaches beyond the deadline, so that the last attempt is made at it.

    Args:
        first_s: upper bound of the first pause; it doubles with each pause.
        longest_s: upper bound of all pauses.
        deadline: when the attempts end.
        random: gives a number from 0 to 1.
    """
    bound_s = first_s
    while True:
        yield min(bound_s * random(), deadline.remaining_s())
        bound_s = min(2 * bound_s, longest_s)
