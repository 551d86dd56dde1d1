"""The error for input that cannot work: a clear one for that call, and nothing else is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rpc_victim_bad_input as bad_input
import rpc_victim_functions as functions
import torch
from peer_timeouts import CALM_S

from rpcdist import rpc
from rpcdist.errors import CallRefused, FunctionNotFound, RemoteError, SerializationError
from rpcdist.testing import RpcWorld, WorkerPool
from rpcdist.testing.worker_pool import join

pytestmark = pytest.mark.multiproc


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool) -> Iterator[RpcWorld]:
    """These workers outlive each of the tests here: that is what they test."""
    world = module_pool.world("a", "b", peer_timeout=CALM_S)
    yield world
    world.shutdown()


@pytest.fixture(autouse=True)
def nothing_is_lost(world: RpcWorld) -> Iterator[None]:
    """The same processes, the same connection, nothing in flight, no reference left."""
    before = world["a"].run(functions.connection_to, "b")
    yield
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    assert world["a"].run(functions.connection_to, "b") == before
    assert [worker.run(functions.wait_until_empty) for worker in world] == ["", ""]


# ---------------------------------------------------------------- values


ADVICE = "rpcdist could not pickle a value"


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_an_unpicklable_argument(world: RpcWorld, how: str) -> None:
    for value in bad_input.UNPICKLABLE:
        error = world["a"].begin(bad_input.send_unpicklable, how, "b", value).error(Exception)
        assert ADVICE in text_of(error), (value, error)


def test_an_unpicklable_result(world: RpcWorld) -> None:
    for value in bad_input.UNPICKLABLE:
        error = world["a"].begin(rpc.rpc_sync, "b", bad_input.make_unpicklable, (value,)).error(Exception)
        assert ADVICE in text_of(error) and "On worker 'b'" in text_of(error), (value, error)
        # With `remote` the value stays where it is, and only asking for it fails.
        error = world["a"].begin(bad_input.fetch_remote, "b", bad_input.make_unpicklable, value).error(Exception)
        assert ADVICE in text_of(error), (value, error)


def test_a_result_that_cannot_be_rebuilt(world: RpcWorld) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", bad_input.make_unbuildable).error(SerializationError)
    assert "cannot be unpickled here: ValueError: on purpose" in str(error)


def test_an_argument_that_cannot_be_rebuilt(world: RpcWorld) -> None:
    error = world["a"].begin(bad_input.send_unbuildable, "b").error(SerializationError)
    assert "cannot be unpickled here: ValueError: on purpose" in str(error)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("local class", "LocalError"),
        ("needs two arguments", "NeedsTwo"),
        ("holds a lock", "LockedError"),
        ("breaks when rebuilt", "UnbuildableError"),
        ("str fails", "StrFails"),
    ],
)
def test_an_exception_that_does_not_pickle(world: RpcWorld, kind: str, says: str) -> None:
    for call in (rpc.rpc_sync, bad_input.fetch_remote_with):
        if kind == "local class":
            error = world["a"].begin(call, "b", bad_input.raise_odd, (kind,)).error(RemoteError)
            assert error.type_name.endswith(says) and error.worker == "b"
            assert call is not rpc.rpc_sync or "raise_odd" in error.traceback
        else:  # without what cannot be sent, and without its constructor
            assert world["a"].run(bad_input.type_of_error, call, "b", kind) == says


def test_a_huge_exception_text_is_cut(world: RpcWorld) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", bad_input.raise_huge).error(Exception)
    assert len(str(error)) < 4_000_000


def test_a_stream_item_that_cannot_be_sent(world: RpcWorld) -> None:
    error = world["a"].begin(bad_input.read_stream, "b", bad_input.stream_unpicklable).error(Exception)
    assert ADVICE in text_of(error)


# ---------------------------------------------------------------- functions


def test_a_function_that_is_missing_at_the_callee(world: RpcWorld) -> None:
    error = world["a"].begin(bad_input.call_a_function_that_only_exists_here, "b").error(FunctionNotFound)
    assert "only_here" in str(error) and "rpc_victim_bad_input" in str(error) and error.worker == "b"
    error = world["a"].begin(bad_input.call_a_module_that_only_exists_here, "b").error(FunctionNotFound)
    assert "module_only_here" in str(error) and error.worker == "b"


def test_functions_that_have_no_name(world: RpcWorld) -> None:
    for kind in ("lambda", "nested"):
        error = world["a"].begin(bad_input.call_nameless, "b", kind).error(Exception)
        assert "sends a function by its name" in (text := text_of(error)) and "RpcOptions(by_value=True)" in text, text


def test_what_is_no_function(world: RpcWorld) -> None:
    for wrong in (None, 1, "f"):
        world["a"].begin(rpc.rpc_sync, "b", wrong).error(TypeError)


@pytest.mark.parametrize("call", [rpc.rpc_sync, rpc.rpc_async, rpc.remote], ids=lambda call: call.__name__)
@pytest.mark.parametrize("args", [5, "text", torch.ones(2), torch.ones(1)], ids=["int", "str", "tensor", "one number"])
def test_arguments_that_are_no_sequence(world: RpcWorld, call: Any, args: Any) -> None:
    error = world["a"].begin(call, "b", functions.make, args).error(TypeError)
    assert f"but it is a {type(args).__name__}; to pass one value, write args=(value,)" in str(error)
    error = world["a"].begin(call, "b", functions.make, (), [1]).error(TypeError)
    assert "kwargs must be a dict" in str(error) and "list" in str(error)
    assert world["a"].run(rpc.rpc_sync, "b", functions.make, [args]) is not None


def test_wrong_arguments_of_a_function(world: RpcWorld) -> None:
    error = world["a"].begin(rpc.rpc_sync, "b", functions.add, (1,)).error(TypeError)
    assert "missing 1 required positional argument" in str(error)
    error = world["a"].begin(rpc.rpc_sync, "b", torch.add, (torch.ones(2), torch.ones(3))).error(RuntimeError)
    assert "must match the size" in str(error)


# ---------------------------------------------------------------- policies


def test_only_allowed_functions_may_be_called(module_pool: WorkerPool) -> None:
    world = module_pool.world(
        "x", "y", allow_functions=["rpc_victim_functions:add", "torch:*", "rpc_victim_bad_input:*"]
    )
    assert world["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    assert world["x"].run(rpc.rpc_sync, "y", torch.add, (torch.ones(2), 1)).tolist() == [2.0, 2.0]
    for how, call in POLICY_BREAKERS.items():
        error = world["x"].begin(call, "y").error(CallRefused)
        assert "'y'" in str(error) and "allow" in str(error), how
    assert world["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    world.shutdown()  # what this needs is allowed


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


def through_an_import(to: str) -> Any:
    """A name below an allowed module that leads out of it."""
    return bad_input.call_by_name(to, "rpc_victim_bad_input:os.getpid")


def through_a_package(to: str) -> Any:
    return bad_input.call_by_name(to, "torch:os.getpid")


def through_a_name_that_was_imported(to: str) -> Any:
    return bad_input.call_by_name(to, "rpc_victim_bad_input:Iterator")


def through_a_method(to: str) -> Any:
    return rpc.remote(to, functions.add, (1, 2)).rpc_sync().bit_length()


POLICY_BREAKERS: dict[str, Callable[[str], Any]] = {
    "rpc_sync": sync_pid,
    "remote": remote_pid,
    "stream": stream,
    "bound method": bound_method,
    "builtin": builtin,
    "os.system": os_system,
    "partial": partial_call,
    "through an import": through_an_import,
    "through a package": through_a_package,
    "through a name that was imported": through_a_name_that_was_imported,
    "through a method": through_a_method,
}


def test_without_pickle_only_plain_values_pass(
    module_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    witness = tmp_path_factory.mktemp("witness") / "unpickled"
    world = module_pool.new_world(2, allow_pickle=False)
    joining = [world.begin_join("x", 0, by_value=True), world.begin_join("y", 1)]
    for pending in joining:
        pending.result()
    world["y"].run(exec, f"import {functions.__name__}, {bad_input.__name__}")  # nothing is imported for x
    plain = [1, 2.5, "x", b"x", None, {"k": (1, [torch.ones(3)])}]
    got = world["x"].run(rpc.rpc_sync, "y", functions.make, (plain,))
    assert got[:-1] == plain[:-1] and torch.equal(got[-1]["k"][1][0], torch.ones(3))
    assert world["x"].run(rpc.rpc_sync, "y", functions.make, (list(range(100)),)) == list(range(100))
    # Values that need pickle are not even sent, in both directions; in exceptions they are never unpickled.
    error = world["x"].begin(bad_input.send_touching, "y", str(witness)).error(SerializationError)
    assert "pickle is off here" in str(error)
    error = world["x"].begin(rpc.rpc_sync, "y", bad_input.make_touching, (str(witness),)).error(Exception)
    assert "pickle is off here" in str(error)
    error = world["x"].begin(bad_input.send_function_by_value, "y").error(SerializationError)
    assert "has no name under which the callee can find it, and pickle is off here" in str(error)
    assert not witness.exists()
    error = world["x"].begin(rpc.rpc_sync, "y", bad_input.raise_odd, ("touches", str(witness))).error(RemoteError)
    assert error.type_name == "Touching" and error.worker == "y"
    tried = witness.read_text().split() if witness.exists() else []  # y may try its own exception, but x may not
    assert str(world["x"].pid) not in tried
    assert world["x"].run(rpc.rpc_sync, "y", functions.add, (1, 2)) == 3
    world.shutdown()


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"peer_timeout": 0}, "peer_timeout"),
        ({"rpc_timeout": -5}, "RPC Timeout must be non-negative"),
        ({"port": 70000}, "port"),
        ({"token": "short"}, "16"),
        ({"max_worker_threads": 0}, "max_worker_threads"),
        ({"host": "203.0.113.77"}, "203.0.113.77"),
    ],
)
def test_bad_options_are_named(module_pool: WorkerPool, options: dict[str, Any], says: str) -> None:
    process = module_pool.start("bad")
    error = process.begin(join, "a", 0, 1, module_pool.new_url(), **options).error(Exception)
    assert says in str(error) and isinstance(error, ValueError | RuntimeError)
    process.run(join, "a", 0, 1, module_pool.new_url())
    process.run(rpc.shutdown)
