"""The texts of errors for common mistakes: each says what to do instead."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import socket
import threading
import traceback
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from inside_agents import current_agent

from rpcdist import rpc
from rpcdist.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    NotInitialized,
    RendezvousError,
    RpcdistError,
    UnknownWorker,
    WorkerLost,
)
from rpcdist.testing import InProcessCluster


def start(init_method: str) -> None:
    options = rpc.RpcOptions(init_method=init_method, init_timeout=0.2)
    rpc.init_rpc("worker1", rank=1, world_size=2, rpc_backend_options=options)


@pytest.mark.usefixtures("no_agent")
def test_an_address_without_a_scheme() -> None:
    with pytest.raises(RendezvousError, match=r"Did you mean 'tcp://127\.0\.0\.1:29500'\?$"):
        start("127.0.0.1:29500")


@pytest.mark.usefixtures("no_agent")
def test_a_host_that_nobody_knows() -> None:
    with pytest.raises(
        ConnectFailed, match=r"not resolve the name 'nohost\.invalid'.*Check MASTER_ADDR|no name server"
    ):
        start("tcp://nohost.invalid:29500")


def frames_and_message(failed: pytest.ExceptionInfo[BaseException]) -> tuple[list[str], str]:
    """The functions in the traceback, and what stands below them.

    A program that calls `init_rpc` at its top level prints four lines if nothing of ours is in the traceback: Python's
    title, two for the line of the program, and the message.
    """
    *_, message = "".join(traceback.format_exception(failed.value)).partition(traceback.format_tb(failed.tb)[-1])
    return [frame.name for frame in traceback.extract_tb(failed.tb)], message


@pytest.mark.usefixtures("no_agent")
def test_a_wrong_port_prints_no_frame_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "rpcdist.rpc")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectFailed, match="Is rank 0 running there") as caught:
            start(f"tcp://127.0.0.1:{unused.getsockname()[1]}")
    functions, message = frames_and_message(caught)
    assert functions[1:] == ["start"] and len(message.splitlines()) == 1, message
    assert "_stores" in caplog.text, "all of it is in the log"


def answer_as_a_web_server(listener: socket.socket) -> None:
    with suppress(OSError):  # the end of the test
        while True:
            with listener.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.usefixtures("no_agent")
def test_the_port_of_another_service_prints_no_frame_of_ours() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    service = threading.Thread(target=answer_as_a_web_server, args=(listener,))
    service.start()
    try:
        with pytest.raises(AuthenticationFailed, match="is not an rpcdist process") as caught:
            start(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        service.join()
    functions, message = frames_and_message(caught)
    assert functions[1:] == ["start"] and len(message.splitlines()) == 1, message


def fail() -> None:
    raise LookupError("first\nsecond")


def test_a_remote_error_is_one_line_in_the_callees_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rpcdist")
    with InProcessCluster("a", "b") as cluster:
        with pytest.raises(LookupError):
            cluster.run("a", rpc.rpc_sync, "b", fail)
        assert [record.getMessage() for record in caplog.records] == [
            f"a call of {__name__}:fail from a failed on b: LookupError: first"
        ]
        caplog.set_level(logging.DEBUG, "rpcdist.rpc._serving")
        with pytest.raises(LookupError):
            cluster.run("a", rpc.rpc_sync, "b", fail)
        assert 'LookupError("first' in caplog.records[-1].getMessage() and caplog.records[-1].levelname == "DEBUG"


class Failing:
    def fail(self) -> None:
        fail()

    async def fail_later(self) -> None:
        fail()


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("method", ["fail", "fail_later"])
def test_an_error_of_a_method_is_in_the_owners_log(serial: bool, method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rpcdist")
    with InProcessCluster("a", "b") as cluster:

        def call() -> None:
            rref = rpc.remote("b", Failing, serial=serial)
            with pytest.raises(LookupError):
                getattr(rref.rpc_sync(), method)()
            with pytest.raises(LookupError):
                getattr(rref.remote(), method)().to_here()

        cluster.run("a", call)
        said = [record.getMessage() for record in caplog.records]
        assert said == ["a call of a method of a Failing from a failed on b: LookupError: first"] * 2


async def ok() -> None:
    pass


made: list[Coroutine[Any, Any, None]] = []


def make_coroutine() -> Coroutine[Any, Any, None]:
    made.append(ok())
    return made[-1]


def test_a_coroutine_that_cannot_be_run_any_more_is_closed() -> None:
    """Python would warn that nobody awaited it."""
    with InProcessCluster("a", "b") as cluster:
        loop = cluster.run("b", current_agent).dispatcher.user_loop
        with mock.patch.object(loop, "submit", side_effect=NotInitialized), pytest.raises(NotInitialized):
            cluster.run("a", rpc.rpc_sync, "b", make_coroutine)
        assert inspect.getcoroutinestate(made.pop()) == inspect.CORO_CLOSED


@pytest.fixture
def pair() -> Iterator[InProcessCluster]:
    with InProcessCluster("worker0", "worker1") as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("timeout", "error", "says"),
    [
        ("5", TypeError, r"timeout must be a number of seconds, such as 5 or 0\.5, but got '5'"),
        (timedelta(seconds=5), TypeError, "must be a number of seconds"),
        (True, TypeError, "must be a number of seconds"),
        (None, TypeError, "must be a number of seconds"),
        (-5, ConfigError, "must be non-negative, got -5 s; write 0 for no limit"),
        (math.nan, ConfigError, "timeout must be a number of seconds, but got nan; write 0 for no limit"),
        (1e300, ConfigError, r"timeout of 1e\+300 s is longer than 1e\+09 s; write 0 for no limit"),
    ],
)
def test_a_timeout_that_is_none(pair: InProcessCluster, timeout: Any, error: type[Exception], says: str) -> None:
    rref = pair.run("worker0", rpc.remote, "worker1", list)
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(error, match=says):
            pair.run("worker0", call, "worker1", sum, ((1, 2),), timeout=timeout)
    with pytest.raises(error, match=says):
        pair.run("worker0", rref.to_here, timeout)
    if timeout is not None:
        with pytest.raises((TypeError, ConfigError)):
            rpc.RpcOptions(rpc_timeout=timeout)
        with pytest.raises((TypeError, ConfigError)):
            rpc.RpcOptions(peer_timeout=timeout)
    assert pair.run("worker0", rpc.rpc_sync, "worker1", sum, ((1, 2),), timeout=math.inf) == 3


@pytest.mark.parametrize("timeout", [np.float32(5.5), np.float64(5.5), np.int64(5), torch.tensor(5.5)], ids=repr)
def test_a_timeout_is_any_number(pair: InProcessCluster, timeout: Any) -> None:
    rref = pair.run("worker0", rpc.remote, "worker1", list)
    assert pair.run("worker0", rpc.rpc_sync, "worker1", sum, ((1, 2),), timeout=timeout) == 3
    assert pair.run("worker0", rref.to_here, timeout) == []
    assert rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout).rpc_timeout == float(timeout)


def test_numbers_of_threads_and_ids_may_be_integers_of_numpy() -> None:
    assert rpc.TensorPipeRpcBackendOptions(num_worker_threads=as_int(np.int32(3))).num_worker_threads == 3
    assert rpc.WorkerInfo("worker", as_int(np.int64(7))).id == 7


def as_int(value: Any) -> int:
    return value  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_type_hint_is_for_a_script_module(pair: InProcessCluster) -> None:
    with pytest.raises(ConfigError, match="should only be specified when the RRef being created contains a Script"):
        pair.run("worker0", rpc.RRef, 3, int)
    module = torch.jit.script(torch.nn.Identity())
    assert pair.run("worker0", lambda: rpc.RRef(module, torch.nn.Module).local_value()) is module


class Counter:
    def __init__(self) -> None:
        self.count = 3

    @property
    def double(self) -> int:
        return 2 * self.count

    def add(self, more: int) -> int:
        self.count += more
        return self.count

    async def wait_forever(self) -> None:
        await asyncio.Event().wait()


def test_a_method_called_on_the_reference_itself(pair: InProcessCluster) -> None:
    rref: Any = pair.run("worker0", rpc.remote, "worker1", Counter)
    with pytest.raises(
        AttributeError,
        match=r"on 'worker1' may have it\. Write rref\.rpc_sync\(\)\.add\(\.\.\.\).*rref\.to_here\(\)\.add",
    ):
        rref.add(1)
    with pytest.raises(AttributeError, match="no attribute '_private'"):
        _ = rref._private


def test_an_attribute_read_through_a_proxy(pair: InProcessCluster) -> None:
    rref = pair.run("worker0", rpc.remote, "worker1", Counter)
    proxy = rref.rpc_sync()
    assert "'count' of" in repr(proxy.count) and "at the owner: .rpc_sync().count()" in repr(proxy.count)
    with pair.use("worker0"):
        assert proxy.count() == 3 and proxy.double() == 6 and proxy.add(2) == 5
        with pytest.raises(TypeError, match="'int' object is not callable"):
            proxy.count(1)
        with pytest.raises(AttributeError, match="'Counter' object has no attribute 'missing'"):
            proxy.missing()


@pytest.mark.parametrize("is_actor", [False, True])
def test_a_method_that_takes_too_long(pair: InProcessCluster, is_actor: bool) -> None:
    rref: Any = pair.run("worker0", rpc.remote, "worker1", Counter, serial=is_actor)
    with (
        pair.use("worker0"),
        pytest.raises(DeadlineExceeded, match=r"wait_forever"),  # the text of whichever side notices it first
    ):
        rref.rpc_sync(timeout=0.1).wait_forever()


async def name_of_task() -> str:
    task = asyncio.current_task()
    assert task is not None
    return task.get_name()


async def names_of_task() -> AsyncIterator[str]:
    yield await name_of_task()


def name_later() -> Coroutine[Any, Any, str]:
    return name_of_task()


class Named:
    async def name_of_task(self) -> str:
        return await name_of_task()


@pytest.mark.parametrize("is_actor", [False, True])
def test_tasks_have_the_names_of_the_functions_of_the_program(pair: InProcessCluster, is_actor: bool) -> None:
    """Texts of the callee, of a deadline that it notices first for one, name a call so."""
    rref: Any = pair.run("worker0", rpc.remote, "worker1", Named, serial=is_actor)
    with pair.use("worker0"):
        for _ in range(2):  # the second call knows that it is of a coroutine function
            assert rpc.rpc_sync("worker1", name_of_task).endswith("name_of_task")
            assert rpc.rpc_sync("worker1", name_later).endswith("name_of_task")
            assert rref.rpc_sync().name_of_task().endswith("name_of_task")
            assert [name.endswith("names_of_task") for name in rpc.rpc_stream("worker1", names_of_task)] == [True]


def test_an_argument_that_does_not_pickle(pair: InProcessCluster) -> None:
    holder = Counter()
    holder.count = threading.Lock()  # type: ignore[assignment]
    rref = pair.run("worker0", rpc.remote, "worker1", list)
    for args, kwargs, path in (
        (({"cfg": [1, {"lock": threading.Lock()}]},), {}, "args[0]['cfg'][1]['lock']"),
        ((rref, [holder]), {}, "args[1][0].count"),
        ((), {"key": (threading.Lock(),)}, "kwargs['key'][0]"),
    ):
        with pytest.raises(TypeError) as caught:
            pair.run("worker0", rpc.rpc_sync, "worker1", len, args, kwargs)
        notes = "\n".join(caught.value.__notes__)
        assert f"{path} is a _thread.lock, which cannot be pickled" in notes
        assert "sent in an rpc to 'worker1' of builtins:len" in notes


def unpicklable_result() -> dict[str, list[object]]:
    return {"cfg": [1, threading.Lock()]}


def test_a_result_that_does_not_pickle(pair: InProcessCluster) -> None:
    with pytest.raises(TypeError) as caught:
        pair.run("worker0", rpc.rpc_sync, "worker1", unpicklable_result)
    notes = "\n".join(caught.value.__notes__)
    assert "result['cfg'][1] is a _thread.lock, which cannot be pickled" in notes
    assert "sent as the result of test_messages:unpicklable_result" in notes


def test_a_function_that_was_called_instead_of_named(pair: InProcessCluster) -> None:
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(TypeError, match=r"^function should be callable, .* of type int\. .*args=\(value,\)\)$"):
            pair.run("worker0", call, "worker1", sum((1, 2)))


def test_a_name_that_is_nearly_right(pair: InProcessCluster) -> None:
    with pytest.raises(UnknownWorker, match=r"could not find destination worke1\. Did you mean 'worker1'\? Known"):
        pair.run("worker0", rpc.rpc_sync, "worke1", sum)
    with pytest.raises(UnknownWorker, match=r"destination nobody\. Known workers"):
        pair.run("worker0", rpc.rpc_sync, "nobody", sum)


def test_a_worker_that_ended_says_what_it_may_have_forgotten() -> None:
    assert "If 'w' was not killed, did it end without rpc.shutdown()?" in str(WorkerLost("w", "a call", 1.0, "closed"))


def numbers() -> Iterator[int]:
    yield from range(3)


def test_a_stream_that_is_read_twice(pair: InProcessCluster) -> None:
    stream = pair.run("worker0", rpc.rpc_stream, "worker1", numbers)
    assert next(iter(stream)) == 0 and list(stream) == [1, 2]
    with pytest.raises(RpcdistError, match=r"read to its end.*items = list\(stream\)"):
        list(stream)
    assert next(stream, None) is None  # an iterator that has ended stays so
