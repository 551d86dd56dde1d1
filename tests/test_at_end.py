"""The end of objects is noted, whatever signals come meanwhile."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import signal
import time
from collections import deque
from types import FrameType

import pytest
from full_sets import num_examples

from rpcdist.at_exit import AtEnd
from rpcdist.ids import ProcessId, UniqueId
from rpcdist.rpc._rref.handles import Dropped, Handle, HandleState
from rpcdist.rpc._rref.messages import RRefId


class Struck(BaseException):
    """The error of the handler, as Python's own raises it at Ctrl-C."""


class Holder:
    """Uses what it holds in its own finalizer, perhaps as part of a cycle."""

    def __init__(self, ended: deque[str], is_cyclic: bool) -> None:
        self._me = self if is_cyclic else None
        self._ended = ended
        self._held = AtEnd(ended.append, "the held")

    def __del__(self) -> None:
        self._ended.append("the holder")


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_the_end_is_noted_once_and_after_an_older_user_of_the_object(is_cyclic: bool) -> None:
    ended: deque[str] = deque()
    gc.collect()  # none comes by itself soon, and puts the two into different generations
    holder = Holder(ended, is_cyclic)
    assert not ended
    del holder
    gc.collect()
    assert list(ended) == ["the holder", "the held"]


def test_it_cannot_be_done_twice() -> None:
    at_end = AtEnd(deque[str]().append, "it")
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="acts once"):
            copy_of(at_end)


def test_no_signal_is_lost_in_the_end_of_a_reference() -> None:
    """A `__del__` swallowed four of ten, each a Ctrl-C that nobody heard of, and three of ten references leaked."""
    state, dropped = HandleState(RRefId(0, 1, 1), UniqueId(0, 2, 1), ProcessId(0, 1), "owner", None), Dropped()
    num_made = num_caught = 0
    num_strikes = num_examples(100, 300)  # the kernel looks at the time every 4 ms at best
    chance = random.Random(3)

    def handler(number: int, frame: FrameType | None) -> None:
        raise Struck

    def drop() -> None:
        nonlocal num_made
        ends_at = time.process_time() + 0.5  # the signal comes after 1 ms of it, unless it was lost
        signal.setitimer(signal.ITIMER_VIRTUAL, chance.uniform(1e-5, 1e-3))
        while time.process_time() < ends_at:
            handle = Handle(state, dropped)
            num_made += 1  # not struck before the handle was whole
            del handle

    def drop_until_struck() -> None:
        nonlocal num_caught
        try:
            drop()  # Python 3.12 and 3.13 do not cover the jump back of a `while` loop by the `try` around it
        except Struck:
            num_caught += 1

    replaced = signal.signal(signal.SIGVTALRM, handler)  # SIGALRM belongs to pytest-timeout
    gc.collect()
    gc.disable()  # its callbacks, such as that of hypothesis, are finalizers of the same kind
    try:
        for _ in range(num_strikes):
            drop_until_struck()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, replaced)
        gc.enable()
    assert num_caught == num_strikes
    assert len(dropped) >= num_made
