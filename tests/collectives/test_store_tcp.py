"""The store over gRPC: connecting, sharing, losing the other side, and Ctrl-C."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from forked_program import ForkedProgram
from full_sets import FULL_ONLY
from threads_at_once import WatchedThreads
from transport_nodes import unary_call

from rpcdist._proto import store_pb2
from rpcdist.collectives import DistNetworkError, DistStoreError, PrefixStore, StoreTimeout, TCPStore
from rpcdist.collectives._stores import store_service, tcp_store
from rpcdist.collectives._stores.store_service import ServedTable, request_for
from rpcdist.collectives.store import QueuePop
from rpcdist.errors import AuthenticationFailed, BlockingInLoop, ConfigError, ConnectFailed
from rpcdist.ids import Identity
from rpcdist.testing import Program, WorkerPool, eventually, free_port, wait_until_asleep
from rpcdist.transport import acquire_node
from rpcdist.transport._server import unary_services
from rpcdist.transport.keys import cut

HOST = "127.0.0.1"
LIMIT_S = 20.0


def served_tables() -> list[ServedTable]:
    """Those of the stores that this process serves."""
    return list(store_service._serving.values())


def num_waiters() -> int:
    return sum(served.table.num_waiting for served in served_tables())


# ---------------------------------------------------------------- one process


def test_attributes() -> None:
    with TCPStore(HOST, 0, None, True) as master:
        assert master.host == HOST
        assert master.port > 0
        assert master.address == f"{HOST}:{master.port}"
        assert not master.libuvBackend


def test_nobody_there() -> None:
    port = free_port()
    started = time.monotonic()
    assert issubclass(ConnectFailed, DistNetworkError)  # which torch raises here, and programs catch
    with pytest.raises(ConnectFailed, match=rf"{HOST}:{port} after 0\.4 s"):
        TCPStore(HOST, port, timeout=0.4)
    assert 0.2 < time.monotonic() - started < LIMIT_S


def test_the_master_comes_later() -> None:
    port = free_port()
    with WatchedThreads(1) as pool:
        client = pool.submit(TCPStore, HOST, port, timeout=LIMIT_S)
        time.sleep(0.3)  # long enough for an attempt that is refused, which nothing here shows
        with TCPStore(HOST, port, is_master=True) as master:
            with client.result(LIMIT_S) as store:
                store.set("k", "v")
            assert master.get("k") == b"v"


def test_a_process_that_listens_and_serves_no_store_yet() -> None:
    node = acquire_node()
    try:
        port = int(node.serve(HOST, 0).rpartition(":")[2])
        with pytest.raises(ConnectFailed, match=r"serves no store"):
            TCPStore(HOST, port, timeout=2.0)
        with WatchedThreads(1) as pool:
            client = pool.submit(TCPStore, HOST, port, timeout=LIMIT_S)
            pool.all_asleep()
            assert not client.done()
            with TCPStore(HOST, port, is_master=True) as master, client.result(LIMIT_S) as store:
                store.set("k", "v")
                assert master.get("k") == b"v"
    finally:
        node.release()


def test_a_store_that_answers_late_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the caller's own limit: what one question may take is much less."""
    monkeypatch.setattr(tcp_store, "STORE_GRACE_S", 0.2)
    answer, free = ServedTable.execute, asyncio.Event()
    asked = []

    async def late(self: ServedTable, peer: Identity, request: Any) -> Any:
        asked.append(request.WhichOneof("operation"))
        await free.wait()
        return await answer(self, peer, request)

    monkeypatch.setattr(ServedTable, "execute", late)
    with TCPStore(HOST, 0, is_master=True) as master, WatchedThreads(1) as pool:
        with pytest.raises(ConnectFailed, match=r"after 3\.0 s.* accepts connections there, but does not answer"):
            TCPStore(HOST, master.port, timeout=3.0)
        client = pool.submit(TCPStore, HOST, master.port, timeout=LIMIT_S)
        num_before = len(asked)
        eventually(lambda: len(asked) > num_before + 2, "it was asked again, and again")
        node = acquire_node()
        node.io.call_soon(free.set)
        node.release()
        with client.result(LIMIT_S) as store:
            assert store.num_keys() == 0
            free.clear()
            store.set_timeout(timedelta(seconds=0.1))
            with pytest.raises(StoreTimeout, match=r"has not answered Wait in time"):
                store.wait(["k"], 0.1)
            with pytest.raises(DistNetworkError, match="unknown whether the operation took place"):
                store.add("k", 1)


def test_the_port_is_in_use() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistNetworkError, match=rf"{HOST} port {port}.*in use.*MASTER_PORT"):
            TCPStore(HOST, port, is_master=True)
    with TCPStore(HOST, port, is_master=True) as store:  # nothing is left of the failure
        store.set("k", "v")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"port": 70000}, "from 0 to 65535 but was 70000"),
        ({"port": -1}, "from 0 to 65535 but was -1"),
        ({"port": 0}, "port of the store at 127.0.0.1 is unknown"),
        ({"port": 1, "master_listen_fd": 3}, "master_listen_fd is not supported"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        TCPStore(HOST, **arguments)


def test_tenants_share_a_table_and_the_last_ends_it() -> None:
    first = TCPStore(HOST, 0, is_master=True)
    with pytest.raises(DistNetworkError, match="address already in use"):
        TCPStore(HOST, first.port, is_master=True)
    second = TCPStore(HOST, first.port, is_master=True, multi_tenant=True)
    first.set("k", "v")
    first.close()
    assert second.get("k") == b"v"
    with pytest.raises(DistStoreError, match="was closed by this process"):
        first.get("k")
    second.close()
    with TCPStore(HOST, 0, is_master=True) as fresh:
        assert fresh.num_keys() == 0


@pytest.mark.parametrize("multi_tenant", [False, True])
def test_each_port_has_a_table_of_its_own(multi_tenant: bool) -> None:
    """Here, and for clients, each of which looks at one of the ports."""
    ports = (0, free_port(), 0)
    with ExitStack() as stack:
        masters = [
            stack.enter_context(TCPStore(HOST, port, is_master=True, multi_tenant=multi_tenant)) for port in ports
        ]
        clients = [stack.enter_context(TCPStore(HOST, master.port, timeout=LIMIT_S)) for master in masters]
        twins = [stack.enter_context(master.clone()) for master in masters]
        for number, client in enumerate(clients):
            client.set("k", str(number))
        for stores in (masters, clients, twins):
            assert [store.get("k") for store in stores] == [b"0", b"1", b"2"]
        assert len({store.port for store in masters}) == 3
    assert not served_tables()


@pytest.mark.parametrize("closed", [0, 1])
def test_a_store_ends_without_the_others_of_its_process(closed: int) -> None:
    """Its waits end, its port is free, and so it is when the process serves there again."""
    with ExitStack() as stack:
        pool = stack.enter_context(WatchedThreads(2))  # ends last: closed stores wait for nothing
        masters = [stack.enter_context(TCPStore(HOST, 0, is_master=True)) for _ in range(2)]
        clients = [stack.enter_context(TCPStore(HOST, master.port, timeout=LIMIT_S)) for master in masters]
        port, living = masters[closed].port, 1 - closed
        gets = [pool.submit(client.get, "k") for client in clients]
        eventually(lambda: num_waiters() == 2, "both wait")
        masters[closed].close()
        with pytest.raises(DistNetworkError, match="closed by the process that serves it"):
            gets[closed].result(LIMIT_S)
        with pytest.raises(ConnectFailed):
            TCPStore(HOST, port, timeout=0.3)
        socket.create_server((HOST, port)).close()
        with TCPStore(HOST, port, is_master=True) as again:
            assert again.num_keys() == 0
            masters[living].set("k", "v")
            assert gets[living].result(LIMIT_S) == b"v"
            assert again.num_keys() == 0


def test_a_store_at_the_address_of_something_else_ends_alone() -> None:
    """As at that of an RPC worker, which goes on to serve there."""
    node = acquire_node()
    try:
        port = int(node.serve(HOST, 0).rpartition(":")[2])
        with TCPStore(HOST, port, is_master=True), TCPStore(HOST, port) as client, TCPStore(HOST, 0, is_master=True):
            client.set("k", "v")
        with pytest.raises(ConnectFailed, match="serves no store"):
            TCPStore(HOST, port, timeout=2.0)
        with TCPStore(HOST, port, is_master=True) as again:
            assert again.num_keys() == 0
    finally:
        node.release()


def test_threads_that_open_and_close_stores_at_once() -> None:
    ports = [free_port() for _ in range(4)]

    def use(number: int) -> int:
        for round in range(5):
            with TCPStore(HOST, ports[number], is_master=True) as master, TCPStore(HOST, master.port) as client:
                client.set(f"{number} {round}", "")
                assert master.list_keys() == [f"{number} {round}"]
        return number

    with WatchedThreads(4) as pool:
        assert list(pool.map(use, range(4), timeout=LIMIT_S * 3)) == [0, 1, 2, 3]
    assert not served_tables()


def test_a_store_that_was_dropped_frees_its_port_when_the_next_is_made() -> None:
    store = TCPStore(HOST, 0, is_master=True)
    port = store.port
    del store
    with TCPStore(HOST, port, is_master=True) as again:
        assert again.num_keys() == 0


@pytest.mark.parametrize("failure", ["", "rank 2 has not come."])
def test_closing_the_master_ends_the_waits_of_clients(failure: str) -> None:
    """And says what has failed there, if anything has."""
    says = f"serves it, where this had failed: {failure} It is" if failure else "serves it. It is"
    with TCPStore(HOST, 0, is_master=True) as master, TCPStore(HOST, master.port, timeout=5.0) as client:
        with WatchedThreads(1) as pool:
            wait = pool.submit(client.wait, ["never"], LIMIT_S)
            eventually(lambda: num_waiters() == 1, "the client waits")
            PrefixStore("part", master).note_failure(failure)
            master.close()
            with pytest.raises(DistNetworkError, match=re.escape(says)):
                wait.result(LIMIT_S)
        # Which of the two depends on whether this side has noticed the end of its connection.
        with pytest.raises((ConnectFailed, DistNetworkError), match="no process listens there"):
            client.set("k", "v")


def test_the_master_waits_for_the_workers() -> None:
    port = free_port()
    with WatchedThreads(2) as pool:
        master = pool.submit(TCPStore, HOST, port, 3, True, LIMIT_S)
        with TCPStore(HOST, port, 3, timeout=LIMIT_S) as first:
            pool.all_asleep()
            assert not master.done()
            with TCPStore(HOST, port, 3, timeout=LIMIT_S), master.result(LIMIT_S) as served:
                served.set("k", "v")
                assert first.get("k") == b"v"


def test_a_worker_does_not_come() -> None:
    with pytest.raises(StoreTimeout, match=r"Timed out after 0\.2 seconds waiting for clients\. 1/2 clients joined"):
        TCPStore(HOST, 0, 2, True, timeout=0.2)


def test_a_blocking_call_on_a_loop_says_so() -> None:
    async def use(store: TCPStore) -> None:
        store.get("k")

    with TCPStore(HOST, 0, is_master=True) as master, TCPStore(HOST, master.port) as client:
        for store in (master, client):
            with pytest.raises(BlockingInLoop):
                asyncio.run(use(store))


def test_many_waits_at_once() -> None:
    with TCPStore(HOST, 0, is_master=True) as master, TCPStore(HOST, master.port, timeout=LIMIT_S) as client:
        with WatchedThreads(20) as pool:
            calls = [pool.submit(client.get, f"k{number}") for number in range(20)]
            eventually(lambda: num_waiters() == 20, "all wait")
            master.multi_set([f"k{number}" for number in range(20)], [str(number) for number in range(20)])
            assert [int(call.result(LIMIT_S)) for call in calls] == list(range(20))
        assert num_waiters() == 0


@pytest.mark.parametrize("size_bytes", [100_000, 3 << 20], ids=["whole", "in pieces"])
def test_a_popped_value_that_its_caller_may_not_have_now_stays_the_first(
    size_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller with 192 MiB of unread replies lost it."""
    with TCPStore(HOST, 0, None, True) as master, TCPStore(HOST, master.port) as client:
        values = [bytes(size_bytes), b"second"]
        for value in values:
            master.queue_push("q", value)
        with monkeypatch.context() as patched:
            patched.setattr(unary_services, "MAX_BYTES_UNDER_WAY", 40 << 10)
            with pytest.raises(DistNetworkError, match=r"did not answer QueuePop: .*the limit is") as error:
                client.queue_pop("q")
            assert "network is broken" not in str(error.value)  # nor has rank 0 ended
            assert client.queue_len("q") == 2 and client.add("n", 1) == 1  # there is room for small replies
        assert [client.queue_pop("q"), client.queue_pop("q")] == values


def test_a_popped_value_of_which_its_caller_reads_a_part_stays_in_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "IDLE_LIMIT_S", LIMIT_S)  # the store does not count the call below
    node = acquire_node()
    with TCPStore(HOST, 0, None, True) as master, TCPStore(HOST, master.port) as client, WatchedThreads(1) as other:
        master.queue_push("q", bytes(64 << 20))
        access: Any = client._access

        async def read_a_part() -> None:
            link = await access._connected(LIMIT_S)
            path = "/rpcdist.Store/ExecuteLarge"
            request: Any = cut(request_for(QueuePop("q"), LIMIT_S).SerializeToString(), store_pb2.Piece)
            with unary_call(link, path) as begin:
                call = begin(request)
                assert len(await call.read()) > 1000
                assert await asyncio.wrap_future(other.submit(master.queue_len, "q")) == 0
                call.cancel()

        node.run(read_a_part(), LIMIT_S)
        eventually(lambda: master.queue_len("q") == 1)
    node.release()


# ---------------------------------------------------------------- several processes

CONNECT = """
    import sys
    from rpcdist.collectives import TCPStore
    store = TCPStore("127.0.0.1", int(sys.argv[1]), timeout=30)
"""

SERVE = """
    import sys
    from rpcdist.collectives import TCPStore
    store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True)
    print(store.port)
    store.set_timeout(600)
    store.get("end")
"""


@pytest.mark.multiproc
def test_processes_count_together(worker_pool: WorkerPool) -> None:
    code = (
        CONNECT
        + """
    store.barrier("start", 3)
    print(sorted(store.add("n", 1) for _ in range(100))[-1] <= 300)
    """
    )
    with (
        TCPStore(HOST, 0, is_master=True) as master,
        ForkedProgram(worker_pool, code, master.port) as a,
        ForkedProgram(worker_pool, code, master.port) as b,
        ForkedProgram(worker_pool, code, master.port) as c,
    ):
        assert [script.line() for script in (a, b, c)] == ["True"] * 3
        assert [script.end() for script in (a, b, c)] == [0] * 3
        assert master.add("n", 0) == 300


@pytest.mark.multiproc
def test_a_client_that_is_killed_leaves_no_waiter(worker_pool: WorkerPool) -> None:
    code = (
        CONNECT
        + """
    import threading
    threading.Thread(target=lambda: store.queue_pop("q"), daemon=True).start()
    threading.Thread(target=lambda: store.wait(["a", "b"]), daemon=True).start()
    store.get("never")
    """
    )
    with (
        TCPStore(HOST, 0, is_master=True, timeout=LIMIT_S) as master,
        ForkedProgram(worker_pool, code, master.port) as client,
    ):
        eventually(lambda: num_waiters() == 3, "the client waits")
        client.signal(signal.SIGKILL)
        eventually(lambda: num_waiters() == 0, "the waiters are gone")
        master.queue_push("q", "1")
        assert master.queue_len("q") == 1


@pytest.mark.multiproc
def test_the_process_that_serves_is_killed_and_another_takes_its_place(worker_pool: WorkerPool) -> None:
    port = free_port()  # none that the system gives to others meanwhile
    with ForkedProgram(worker_pool, SERVE, port) as server:
        assert int(server.line()) == port
        with TCPStore(HOST, port, timeout=LIMIT_S) as client, WatchedThreads(1) as pool:
            client.set("k", "v")
            get = pool.submit(client.get, "never")
            pool.all_asleep()
            started = time.monotonic()
            server.signal(signal.SIGKILL)
            with pytest.raises(DistNetworkError, match=rf"store at {HOST}:{port} was lost during Get"):
                get.result(LIMIT_S)
            assert time.monotonic() - started < LIMIT_S / 2
            server.end()
            with ForkedProgram(worker_pool, SERVE, port) as successor:
                assert int(successor.line()) == port
                assert client.num_keys() == 0
                client.set("end", "")
                assert successor.end() == 0


@pytest.mark.multiproc
@pytest.mark.parametrize("closing", ["store.close()", "pass", "del store"])
def test_the_reply_to_the_last_client_leaves_before_the_server_ends(closing: str) -> None:
    code = f"""
        from rpcdist.collectives import TCPStore
        store = TCPStore("127.0.0.1", 0, is_master=True)
        print(store.port)
        store.get("last")
        {closing}
    """
    with Program(code) as server, TCPStore(HOST, int(server.line()), timeout=LIMIT_S) as client:
        client.set("last", "")
        assert server.end() == 0, server.output


@pytest.mark.multiproc
def test_another_token(worker_pool: WorkerPool) -> None:
    code = """
        import sys
        from rpcdist.collectives import TCPStore
        from rpcdist.errors import AuthenticationFailed
        try:
            TCPStore("127.0.0.1", int(sys.argv[1]), timeout=30)
        except AuthenticationFailed as error:
            print("refused:", error)
    """
    with TCPStore(HOST, 0, is_master=True) as master:
        token = {"RPCDIST_TOKEN": "some-other-token-of-good-length"}
        with ForkedProgram(worker_pool, code, master.port, environment=token) as script:
            line = script.line()
            assert line.startswith("refused:") and "RPCDIST_TOKEN" in line
            assert script.end() == 0


@pytest.mark.multiproc
def test_random_bytes_do_no_harm() -> None:
    with TCPStore(HOST, 0, is_master=True) as master:
        with socket.create_connection((HOST, master.port), timeout=5) as stranger:
            stranger.sendall(bytes(range(256)) * 64)
            stranger.settimeout(5)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
        with TCPStore(HOST, master.port, timeout=LIMIT_S) as client:
            client.set("k", "v")


STORES = {
    "master": "TCPStore('127.0.0.1', 0, is_master=True)",
    "client": "TCPStore('127.0.0.1', int(sys.argv[2]))",
    "hash": "HashStore()",
    "file": "FileStore(sys.argv[1])",
    "prefix": "PrefixStore('p', HashStore())",
    "torch": "TorchStoreAdapter(torch_store())",
}


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("kind", "call"),
    [
        pytest.param(kind, call, marks=FULL_ONLY if kind in seldom else [])
        for call, seldom in (("get('never')", ()), ("queue_pop('never')", ("hash", "file", "prefix", "torch")))
        for kind in STORES
    ],
)
def test_ctrl_c_interrupts_a_wait(worker_pool: WorkerPool, tmp_path: Path, kind: str, call: str) -> None:
    code = f"""
        import sys
        from rpcdist.collectives import FileStore, HashStore, PrefixStore, TCPStore
        if "{kind}" == "torch":
            import torch.distributed
            from rpcdist.collectives import TorchStoreAdapter
            def torch_store():
                return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = {STORES[kind]}
        print("ready")
        try:
            store.{call}
        except KeyboardInterrupt:
            print("interrupted")
    """
    with (
        TCPStore(HOST, 0, is_master=True) as master,
        ForkedProgram(worker_pool, code, tmp_path / "store", master.port) as script,
    ):
        assert script.line() == "ready"
        if kind == "client":
            eventually(lambda: num_waiters() == 1, "the client waits")
        else:
            wait_until_asleep(script.worker.pid)
        script.signal(signal.SIGINT)
        assert script.line() == "interrupted"
        assert script.end() == 0, script.output
        if kind == "client":
            eventually(lambda: num_waiters() == 0, "the waiter is gone")


@pytest.mark.multiproc
def test_a_forked_child_gets_an_error_and_does_not_hang() -> None:
    code = """
        import os, sys, time
        from rpcdist.collectives import TCPStore
        store = TCPStore("127.0.0.1", 0, is_master=True)
        other = TCPStore("127.0.0.1", store.port)
        child = os.fork()
        if child == 0:
            try:
                store.get("k")
            except RuntimeError as error:
                print(type(error).__name__)
            store.close()
            other.close()
            sys.exit(0)
        print(os.waitpid(child, 0)[1])
        store.set("k", "v")
        print(other.get("k").decode())
        other.close()
        store.close()
    """
    with Program(code) as script:
        found: list[str] = []
        while len(found) < 3:  # another test's process may come to the port, if it was in use before
            found += [line for line in [script.line()] if not line.startswith("refused a connection")]
        assert found == ["ForkedProcess", "0", "v"], script.output
        assert script.end() == 0


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())  # a pool of workers that other tests share may have some
    with TCPStore(HOST, 0, is_master=True) as master, TCPStore(HOST, master.port):
        assert any(thread.name.startswith("rpcdist") for thread in threading.enumerate())
    assert not {thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("rpcdist")}


def test_a_failed_handshake_is_no_connect_failure() -> None:
    assert not issubclass(AuthenticationFailed, ConnectFailed)
