"""Exceptions of any class arrive as what they were, constructor or not; what cannot is still caught by its class."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
from values_helpers import encode, fail

from rpcdist._proto import rpc_pb2
from rpcdist.errors import CollectiveMismatch, RemoteError, WorkerLost
from rpcdist.rpc._futures.failure import Failure
from rpcdist.rpc._values import decode
from rpcdist.rpc._values.failures import exception_of


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class KeywordsOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__("keywords")
        self.code = code


class OfFile(OSError):
    def __init__(self, path: str) -> None:
        super().__init__(2, "not there", path)
        self.path = path


class Slotted(KeyError):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__("slot")
        self.code = code


class TwoBases(RuntimeError, ConnectionError):
    def __init__(self, first: int, second: int) -> None:
        super().__init__("both")
        self.sum = first + second


class MadeByNew(Exception):
    def __new__(cls, first: int, second: int) -> MadeByNew:
        return super().__new__(cls, first)

    def __init__(self, first: int, second: int) -> None:
        self.second = second


class HoldsItself(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("circle")
        self.me = self


class SaysHow(Exception):
    """Its own way to pickle stays."""

    def __init__(self, code: int) -> None:
        super().__init__("text")
        self.code = code

    def __reduce__(self) -> Any:
        return SaysHow, (self.code + 1,)


class Locked(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()
        self.code = 3


class AtHomeOnly(LookupError):
    """Can be rebuilt where it was raised, and nowhere else: the tests change `go_home` in between."""

    def __reduce__(self) -> Any:
        return go_home, (type(self), self.args)


class AtHomeWithoutChildren(AtHomeOnly):
    """Cannot have a subclass, either."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no children")


def go_home(cls: type[Exception], args: tuple[Any, ...]) -> Exception:
    return cls(*args)


def nobody_is_home(cls: type[Exception], args: tuple[Any, ...]) -> Exception:
    raise ImportError("this class exists at home only")


class NoAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} for you")


def sent(exc: BaseException) -> tuple[BaseException, rpc_pb2.Failure]:
    failed = fail(exc)
    return failed.arrived(), failed.failure


@pytest.mark.parametrize(
    ("exc", "attributes"),
    [
        (ApiError(404, "none"), {"status": 404, "body": "none"}),
        (KeywordsOnly(code=3), {"code": 3}),
        (OfFile("/x"), {"path": "/x", "errno": 2, "strerror": "not there", "filename": "/x"}),
        (Slotted(4), {"code": 4}),
        (TwoBases(1, 2), {"sum": 3}),
        (MadeByNew(1, 2), {"second": 2}),
        (FileNotFoundError(2, "a", "b"), {"filename": "b"}),
        (WorkerLost("w", "a call", 1.0, "it died"), {"worker": "w", "reason": "it died"}),
        (CollectiveMismatch("all_reduce", "sizes"), {"operation": "all_reduce"}),
    ],
    ids=lambda part: type(part).__name__ if isinstance(part, Exception) else "",
)
def test_an_exception_arrives_as_it_was(exc: Exception, attributes: dict[str, object]) -> None:
    exc.add_note("a note")
    arrived, _ = sent(exc)
    assert type(arrived) is type(exc) and arrived.args == exc.args and str(arrived) == str(exc)
    assert {name: getattr(arrived, name) for name in attributes} == attributes
    assert arrived.__notes__ == ["a note"]
    with pytest.raises(type(exc)) as raised:
        Failure(arrived).raise_copy()  # what a future keeps and raises
    twin = raised.value
    assert twin is not arrived and twin.args == exc.args
    assert {name: getattr(twin, name) for name in attributes} == attributes


def test_exceptions_inside_of_values_and_groups_arrive_too() -> None:
    encoded = encode([ApiError(1, "a"), ExceptionGroup("g", [ApiError(2, "b")])])
    received: Any = decode(encoded.value)
    first, group = received
    assert first.status == 1 and group.exceptions[0].body == "b"


def test_a_class_that_says_how_it_pickles_is_left_to_it() -> None:
    arrived, _ = sent(SaysHow(1))
    assert isinstance(arrived, SaysHow) and arrived.code == 2


def test_circles_arrive() -> None:
    arrived, _ = sent(HoldsItself(1, 2))
    assert isinstance(arrived, HoldsItself) and arrived.me is arrived
    del arrived.me


def test_parts_that_cannot_be_sent_stay_behind_and_are_named() -> None:
    arrived, failure = sent(Locked())
    assert isinstance(arrived, Locked) and arrived.code == 3 and not hasattr(arrived, "lock")
    assert "cannot be sent: lock" in failure.traceback
    arrived, failure = sent(ValueError("locked", threading.Lock()))
    assert type(arrived) is ValueError and arrived.args[0] == "locked" and "unlocked _thread.lock" in arrived.args[1]
    assert "cannot be sent: args[1]" in failure.traceback


def test_what_cannot_be_rebuilt_is_a_remote_error_of_the_original_class(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, foreign = fail(AtHomeOnly("why")), fail(ApiError(4, "x"))
    monkeypatch.setattr(sys.modules[__name__], "go_home", nobody_is_home)
    for arrived in (broken.arrived(), foreign.arrived(may_unpickle=False)):
        for exc in (arrived, pickle.loads(pickle.dumps(arrived)), sent(arrived)[0], copy.copy(arrived)):
            assert isinstance(exc, RemoteError) and isinstance(exc, AtHomeOnly | ApiError)
            assert exc.worker == "w" and exc.type_name in ("AtHomeOnly", "ApiError")
            assert exc.text in str(exc) and "could not be rebuilt" in str(exc)


def test_a_class_that_wants_no_part_in_it_is_only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [fail(AtHomeWithoutChildren("a")), fail(NoAttributes())]
    monkeypatch.setattr(sys.modules[__name__], "go_home", nobody_is_home)
    for failed in failures:
        arrived = failed.arrived()
        assert type(arrived) is RemoteError and arrived.type_name == failed.failure.type_name


def test_a_class_whose_own_way_is_broken_arrives_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "go_home", nobody_is_home)
    arrived, _ = sent(AtHomeOnly("why"))
    assert type(arrived) is AtHomeOnly and arrived.args == ("why",)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("no.such.module", "ApiError"),
        (__name__, "NoSuchError"),
        (__name__, "sent"),
        ("builtins", "SystemExit"),
        ("builtins", "Exception"),
        ("builtins", "RuntimeError"),
        ("rpcdist.errors", "AuthenticationFailed"),
        ("antigravity", "whatever"),
        ("asyncio", "CancelledError"),
    ],
)
def test_a_peer_cannot_name_just_any_class(module: str, name: str) -> None:
    arrived = exception_of(rpc_pb2.Failure(type_module=module, type_name=name, text="t", worker="w"))
    assert type(arrived) is RemoteError
    assert "antigravity" not in sys.modules  # nothing is imported for a peer
