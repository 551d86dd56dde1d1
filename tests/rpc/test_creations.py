"""What becomes of the call of a `remote()`: who is told, and the future for those who ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rpcdist._proto import rpc_pb2
from rpcdist.errors import RemoteError
from rpcdist.rpc._calling.creations import Creation
from rpcdist.rpc._rref.identifiers import ReferenceShare, UniqueId

SHARE = ReferenceShare(UniqueId(1, 2, 3), UniqueId(1, 4, 3))


class Told:
    """A listener, and a pool that runs what it is given when it is asked to."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.jobs: list[tuple[Callable[..., object], tuple[object, ...]]] = []
        self.creation = Creation(SHARE, self, self.submit, may_unpickle=True)

    def on_created(self, share: ReferenceShare) -> None:
        self.heard.append(share)

    def on_creation_failed(self, share: ReferenceShare, exc: BaseException) -> None:
        self.heard.append((share, exc))

    def submit(self, function: Callable[..., object], /, *arguments: object) -> None:
        self.jobs.append((function, arguments))

    def run(self) -> None:
        while self.jobs:
            function, arguments = self.jobs.pop()
            function(*arguments)


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_creation_that_nobody_asks_about_needs_no_pool_and_no_future(told: Told) -> None:
    told.creation.replied(None, None, told.jobs)
    assert told.heard == [SHARE] and told.jobs == [] and told.creation._future is None


def test_the_future_that_was_asked_for_before_is_completed_in_the_pool(told: Told) -> None:
    future, seen = told.creation.future(), list[object]()
    future.add_done_callback(lambda done: seen.append(done.value()))
    told.creation.replied(None, None, told.jobs)
    assert told.heard == [SHARE] and not future.done()
    told.run()
    assert seen == [None] and told.creation.future() is future


def test_the_future_that_is_asked_for_afterwards_is_done(told: Told) -> None:
    told.creation.replied(None, None, told.jobs)
    assert told.creation.future().wait() is None and told.creation.future() is told.creation.future()


@pytest.mark.parametrize("asked_before", [False, True])
def test_a_failure_is_told_in_the_pool(told: Told, asked_before: bool) -> None:
    future = told.creation.future() if asked_before else None
    failure = rpc_pb2.Failure(type_name="ValueError", text="bad", worker="w1")
    told.creation.replied(failure, None, told.jobs)
    assert told.heard == []
    told.run()
    [(share, error)] = told.heard
    assert share == SHARE and isinstance(error, RemoteError)
    with pytest.raises(RemoteError, match="bad"):
        (future or told.creation.future()).wait()


def test_a_call_that_ends_otherwise_fails_in_the_pool(told: Told) -> None:
    error = ValueError("lost")
    told.creation.failed(error)
    assert told.heard == []
    told.run()
    assert told.heard == [(SHARE, error)]
    with pytest.raises(ValueError, match="lost"):
        told.creation.future().wait()
