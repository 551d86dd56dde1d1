"""What a worker gets for input that cannot work: a clear error for that call, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rpc_victim_functions as functions
import torch
from leak_guard import LeakGuard
from rpc_victims import UNIT_S, Victims, World, forkserver_pid

from rpcdist import rpc
from rpcdist.errors import CallRefused, FunctionNotFound, RemoteError, SerializationError

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def victims(leak_guard: LeakGuard) -> Iterator[Victims]:
    leak_guard.exempt_child(forkserver_pid())
    with Victims() as victims:
        yield victims


@pytest.fixture(scope="module")
def world(victims: Victims, leak_guard: LeakGuard) -> Iterator[World]:
    """These workers outlive each of the tests here: that is what they test."""
    world = victims.world("a", "b", peer_timeout=20 * UNIT_S)
    yield world
    world.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_lost(world: World) -> Iterator[None]:
    """The same processes, the same connection, nothing in flight, no reference left."""
    before = world["a"].run(functions.connection_to, "b")
    yield
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    assert world["a"].run(functions.connection_to, "b") == before
    assert [worker.run(functions.wait_until_empty) for worker in world] == ["", ""]


# ---------------------------------------------------------------- values


ADVICE = "rpcdist could not pickle a value that was to be sent"


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_an_unpicklable_argument(world: World, how: str) -> None:
    for value in functions.UNPICKLABLE:
        error = world["a"].begin(functions.send_unpicklable, how, "b", value).error(Exception)
        assert ADVICE in text_of(error), (value, error)


def test_an_unpicklable_result(world: World) -> None:
    for value in functions.UNPICKLABLE:
        error = world["a"].begin(rpc.rpc_sync, "b", functions.make_unpicklable, (value,)).error(Exception)
        assert ADVICE in text_of(error) and "On worker 'b'" in text_of(error), (value, error)
        # With `remote` the value stays where it is, and only asking for it fails.
        error = world["a"].begin(functions.fetch_remote, "b", functions.make_unpicklable, value).error(Exception)
        assert ADVICE in text_of(error), (value, error)


def test_a_result_that_cannot_be_rebuilt(world: World) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.make_unbuildable).error(SerializationError)
    assert "Unbuildable" in str(error) or "cannot be rebuilt" in str(error)


def test_an_argument_that_cannot_be_rebuilt(world: World) -> None:
    error = world["a"].begin(functions.send_unbuildable, "b").error(SerializationError)
    assert "on purpose" in str(error) or "rebuilt" in str(error)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("local class", "LocalError"),
        ("needs two arguments", "NeedsTwo"),
        ("holds a lock", "HoldsALock"),
        ("breaks when rebuilt", "Unbuildable"),
        ("str fails", "StrFails"),
    ],
)
def test_an_exception_that_cannot_travel(world: World, kind: str, says: str) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.raise_odd, (kind,)).error(Exception)
    assert isinstance(error, RemoteError) or type(error).__name__ == says
    if isinstance(error, RemoteError):
        assert error.type_name.endswith(says) and error.worker == "b" and "raise_odd" in error.traceback
    error = world["a"].begin(functions.fetch_remote, "b", functions.raise_odd, kind).error(Exception)
    assert says in f"{type(error)} {error}"


def test_a_huge_exception_text_is_cut(world: World) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.raise_huge).error(Exception)
    assert len(str(error)) < 4_000_000


def test_a_stream_item_that_cannot_be_sent(world: World) -> None:
    error = world["a"].begin(functions.read_stream, "b", functions.stream_unpicklable).error(Exception)
    assert ADVICE in text_of(error)


# ---------------------------------------------------------------- functions


def test_a_function_that_is_missing_at_the_callee(world: World) -> None:
    error = world["a"].begin(functions.call_a_function_that_only_exists_here, "b").error(FunctionNotFound)
    assert "only_here" in str(error) and "rpc_victim_functions" in str(error) and error.worker == "b"
    error = world["a"].begin(functions.call_a_module_that_only_exists_here, "b").error(FunctionNotFound)
    assert "module_only_here" in str(error) and error.worker == "b"


def test_functions_that_have_no_name(world: World) -> None:
    for kind in ("lambda", "nested"):
        error = world["a"].begin(functions.call_nameless, "b", kind).error(Exception)
        assert isinstance(error, SerializationError) and "by_value" in str(error), (kind, error)


def test_what_is_no_function(world: World) -> None:
    for wrong in (None, 1, "f"):
        world["a"].begin(rpc.rpc_sync, "b", wrong).error(TypeError)


def test_wrong_arguments_of_a_function(world: World) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.add, (1,)).error(TypeError)
    assert "missing 1 required positional argument" in str(error)
    error = world["a"].begin(rpc.rpc_sync, "b", torch.add, (torch.ones(2), torch.ones(3))).error(RuntimeError)
    assert "must match the size" in str(error)


# ---------------------------------------------------------------- policies


def test_only_allowed_functions_may_be_called(victims: Victims) -> None:
    world = victims.world("open", "strict")
    strict = victims.world("x", "y", allow_functions=["rpc_victim_functions:add", "torch:*"])
    assert strict["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    assert strict["x"].run(rpc.rpc_sync, "y", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
    for how, call in POLICY_BREAKERS.items():
        error = strict["x"].begin(call, "y").error(CallRefused)
        assert "'y'" in str(error) and "allow" in str(error), how
    assert strict["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    strict.shutdown()
    world.shutdown()


def sync_pid(to: str) -> Any:
    return rpc.rpc_sync(to, functions.pid)


def remote_pid(to: str) -> Any:
    return rpc.remote(to, functions.pid).to_here()


def stream(to: str) -> Any:
    return list(rpc.rpc_stream(to, functions.stream_and_wait, ("/nowhere",)))


def bound_method(to: str) -> Any:
    return rpc.rpc_sync(to, functions.Slow().work, ("/nowhere",))


def builtin(to: str) -> Any:
    return rpc.rpc_sync(to, eval, ("1",))


def os_system(to: str) -> Any:
    import os

    return rpc.rpc_sync(to, os.system, ("true",))


def partial_call(to: str) -> Any:
    import functools

    return rpc.rpc_sync(to, functools.partial(functions.pid))


def escape_by_qualified_name(to: str) -> Any:
    """A name under an allowed module that leads out of it."""
    return functions.call_by_name(to, "torch:os.getpid")


POLICY_BREAKERS: dict[str, Callable[[str], Any]] = {
    "rpc_sync": sync_pid,
    "remote": remote_pid,
    "stream": stream,
    "bound method": bound_method,
    "builtin": builtin,
    "os.system": os_system,
    "partial": partial_call,
}


def test_without_pickle_only_plain_values_pass(victims: Victims, tmp_path_factory: pytest.TempPathFactory) -> None:
    witness = tmp_path_factory.mktemp("witness") / "unpickled"
    world = victims.world("x", "y", allow_pickle=False)
    plain = [1, 2.5, "x", b"x", None, {"k": (1, [torch.ones(3)])}]
    got = world["x"].run(rpc.rpc_sync, "y", functions.make, (plain,))
    assert got[:-1] == plain[:-1] and torch.equal(got[-1]["k"][1][0], torch.ones(3))
    # Values that need pickle are refused, in both directions and in exceptions, and never unpickled.
    error = world["x"].begin(functions.send_touching, "y", str(witness)).error(Exception)
    assert "allow_pickle" in str(error) and isinstance(error, CallRefused | SerializationError), repr(error)
    error = world["x"].begin(rpc.rpc_sync, "y", functions.make_touching, (str(witness),)).error(Exception)
    assert "allow_pickle" in str(error), repr(error)
    error = world["x"].begin(functions.send_function_by_value, "y").error(CallRefused)
    assert "allow_pickle" in str(error)
    error = world["x"].begin(rpc.rpc_sync, "y", functions.raise_odd, ("touches", str(witness))).error(RemoteError)
    assert error.type_name == "Touching" and error.worker == "y"
    assert not witness.exists()
    assert world["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    world.shutdown()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peer_timeout": 0}, "peer_timeout"),
        ({"rpc_timeout": -5}, "timeout"),
        ({"port": 70000}, "port"),
        ({"token": "short"}, "16"),
        ({"max_worker_threads": 0}, "max_worker_threads"),
        ({"host": "203.0.113.77"}, "203.0.113.77"),
    ],
)
def test_bad_options_are_named(victims: Victims, options: dict[str, Any], says: str) -> None:
    from rpc_victims import join

    process = victims.start("bad")
    error = process.begin(join, "a", 0, 1, victims.url(), **options).error(Exception)
    assert says in str(error) and isinstance(error, ValueError | RuntimeError)
    process.run(join, "a", 0, 1, victims.url())
    process.run(rpc.shutdown)
