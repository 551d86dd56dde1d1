"""Exceptions of any class arrive unchanged, with or without a constructor; those that cannot are still caught by their
class.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from typing import Any

import pytest
import torch
from values_helpers import encode, fail

from rpcdist._proto import rpc_pb2
from rpcdist.errors import CollectiveMismatch, RemoteError, WorkerLost
from rpcdist.rpc._futures.failure import Failure, raise_failure
from rpcdist.rpc._values.codec import decode
from rpcdist.rpc._values.exceptions import copied
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
        raise_failure(Failure(arrived))  # what a future keeps and raises
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


class Logged(Exception):
    def __init__(self, message: str, log: Any) -> None:
        super().__init__(message)
        self.log = log


@pytest.mark.parametrize("size", [100, 32_000, 33_000, 200_000, 3_000_000])
def test_texts_of_any_everyday_length_arrive_whole(size: int) -> None:
    logs: list[Any] = ["x" * size, b"x" * size, ["x" * size], {"log": "x" * size}, torch.zeros(size)]
    for log in logs:
        arrived, failure = sent(Logged("y" * size, log))
        assert type(arrived) is Logged and str(arrived) == "y" * size
        assert torch.equal(arrived.log, log) if isinstance(log, torch.Tensor) else arrived.log == log
        assert len(failure.text) < 70_000 and len(failure.traceback) < 140_000


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("x" * (20 << 20), "xxx... [19922944 characters cut]"),
        (b"x" * (20 << 20), b"xxx... [19922944 bytes cut]"),
        (bytearray(b"x" * (20 << 20)), b"xxx... [19922944 bytes cut]"),
    ],
    ids=["str", "bytes", "bytearray"],
)
def test_what_is_too_long_is_cut_with_a_mark(log: Any, says: Any) -> None:
    arrived, _ = sent(Logged("m", log))
    assert type(arrived) is Logged and type(arrived.log) is type(log) and arrived.log.endswith(says)
    assert len(arrived.log) < 1_100_000 and arrived.log[:1000] == log[:1000]
    arrived, _ = sent(ValueError("m", log))
    assert arrived.args[0] == "m" and arrived.args[1].endswith(says)


def test_long_containers_are_cut_item_by_item() -> None:
    arrived, _ = sent(Logged("m", {"names": ["x" * (1 << 20)] * 100, "few": [1, 2], "lock": threading.Lock()}))
    assert type(arrived) is Logged and arrived.log["few"] == [1, 2] and "unlocked _thread.lock" in arrived.log["lock"]
    names = arrived.log["names"]
    assert names[0].startswith("xxx") and "items cut]" in names[-1] and sum(map(len, names)) < 3_000_000


def test_so_many_parts_that_each_is_cut_short() -> None:
    exc = ValueError("m")
    for index in range(100):
        setattr(exc, f"part{index}", "x" * (1 << 20))
    arrived, _ = sent(exc)
    assert type(arrived) is ValueError and vars(arrived)["part99"].endswith("characters cut]")
    assert sum(len(part) for part in vars(arrived).values()) < (16 << 20)


def test_a_text_for_those_who_cannot_have_the_exception_is_cut_with_a_mark() -> None:
    arrived = fail(ValueError("x" * 200_000)).arrived(may_unpickle=False)
    assert isinstance(arrived, RemoteError) and isinstance(arrived, ValueError)
    assert arrived.text.startswith("xxx") and arrived.text.endswith("... [134464 characters cut]")
    try:
        deep_in_the_program("x" * 200_000)
    except ValueError as exc:
        assert "deep_in_the_program" in fail(exc).failure.traceback  # the frames are not what is cut


def deep_in_the_program(text: str) -> None:
    raise ValueError(text)


def test_members_of_groups_are_cut_one_by_one() -> None:
    class Unknown(Exception):
        pass

    members = [Locked(), Unknown("local"), ValueError("plain"), ExceptionGroup("inner", [Locked(), KeyError("k")])]
    arrived, failure = sent(ExceptionGroup("outer", members))
    assert type(arrived) is ExceptionGroup and arrived.message == "outer"
    locked, unknown, plain, inner = arrived.exceptions
    assert type(locked) is Locked and locked.code == 3 and not hasattr(locked, "lock")
    assert isinstance(unknown, RemoteError) and unknown.worker == "w" and unknown.text == "local"
    assert type(plain) is ValueError and plain.args == ("plain",)
    assert isinstance(inner, ExceptionGroup) and type(inner.exceptions[0]) is Locked
    assert repr(inner.exceptions[1]) == "KeyError('k')" and "cannot be sent: lock" in failure.traceback


class GrownUp(Exception):
    """Its text would grow if its constructor were called with it."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(f"[{code}] {text}")
        self.code = code


class GrownUpGroup(ExceptionGroup[Exception]):
    def __new__(cls, what: str, count: int) -> GrownUpGroup:
        return super().__new__(cls, f"{count} {what}", [GrownUp(what, index) for index in range(count)])

    def __init__(self, what: str, count: int) -> None:
        self.count = count


@pytest.mark.parametrize("make", [lambda: GrownUp("page", 4), lambda: GrownUpGroup("pages", 2), lambda: SaysHow(1)])
def test_a_copy_calls_no_constructor_and_grows_nothing(make: Any) -> None:
    exc: Any = make()
    exc.add_note("a note")
    twin = exc
    for _ in range(3):
        twin = copied(twin)
    assert twin is not exc and type(twin) is type(exc) and str(twin) == str(exc)
    attributes, theirs = dict(vars(exc)), dict(vars(twin))
    assert attributes == theirs
    twin.add_note("another")
    assert exc.__notes__ == ["a note"]
    arrived, _ = sent(exc)
    assert str(arrived) == str(exc) or isinstance(exc, SaysHow)


def test_a_copy_keeps_causes_and_no_frames() -> None:
    def fail_inside(rref: object) -> None:
        try:
            raise ExceptionGroup("members", [raised_with_frames()])
        except ExceptionGroup as exc:
            raise ValueError("outer") from exc

    with pytest.raises(ValueError, match="outer") as caught:
        fail_inside(object())
    twin: Any = copied(caught.value)
    assert twin.__traceback__ is None and isinstance(twin.__cause__, ExceptionGroup)
    assert twin.__cause__.__traceback__ is None and twin.__cause__.exceptions[0].__traceback__ is None
    cause = caught.value.__cause__
    assert cause is not None and cause is not twin.__cause__ and cause.__traceback__ is not None
    circle, other = ValueError(1), ValueError(2)
    circle.__cause__, other.__cause__ = other, circle
    assert str(copied(circle)) == "1"


def raised_with_frames() -> Exception:
    try:
        raise KeyError("k")
    except KeyError as exc:
        return exc


def test_what_cannot_be_rebuilt_is_a_remote_error_of_the_original_class(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, foreign = fail(AtHomeOnly("why")), fail(ApiError(4, "x"))
    monkeypatch.setattr(sys.modules[__name__], "go_home", nobody_is_home)
    for arrived in (broken.arrived(), foreign.arrived(may_unpickle=False)):
        for exc in (arrived, pickle.loads(pickle.dumps(arrived)), sent(arrived)[0], copy.copy(arrived)):
            assert isinstance(exc, RemoteError) and isinstance(exc, AtHomeOnly | ApiError)
            assert exc.worker == "w" and exc.type_name in ("AtHomeOnly", "ApiError")
            assert exc.text in str(exc) and "could not be rebuilt" in str(exc)


def test_an_error_of_a_class_that_only_the_callee_has_is_of_its_nearest_base() -> None:
    class OfTheCallee(KeywordsOnly): ...

    class AlsoOfTheCallee(OfTheCallee, KeyError): ...

    for cls, caught in ((OfTheCallee, (KeywordsOnly,)), (AlsoOfTheCallee, (KeywordsOnly,))):
        arrived, failure = sent(cls(code=3))
        assert isinstance(arrived, RemoteError) and isinstance(arrived, caught) and isinstance(arrived, ValueError)
        assert arrived.type_name.endswith(cls.__name__) and "keywords" in str(arrived)
        failure.type_bases[:] = ["no.such:Module", "builtins:RuntimeError", "builtins:SystemExit", "builtins:OSError"]
        assert isinstance(exception_of(failure), OSError)


def test_a_class_that_wants_no_part_in_it_is_only_named(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [fail(AtHomeWithoutChildren("a")), fail(NoAttributes())]
    monkeypatch.setattr(sys.modules[__name__], "go_home", nobody_is_home)
    for failed in failures:
        arrived = failed.arrived()
        assert isinstance(arrived, RemoteError) and arrived.type_name == failed.failure.type_name
        assert not isinstance(arrived, AtHomeWithoutChildren | NoAttributes)  # of a base of theirs it may be


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
