"""How processes find each other: env://, tcp://, file://, registered schemes, and torchrun."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from forked_program import ForkedProgram
from inside_groups import World, use_world

from rpcdist import collectives
from rpcdist.collectives import (
    DistNetworkError,
    FileStore,
    HashStore,
    Store,
    TCPStore,
    TorchStoreAdapter,
    register_rendezvous_handler,
    rendezvous,
)
from rpcdist.collectives.rendezvous import ATTEMPT_VARIABLE, job_attempt, open_rendezvous
from rpcdist.errors import BlockingInLoop, ConfigError, ConnectFailed
from rpcdist.testing import Program, WorkerPool, free_port

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def set_environment(monkeypatch: pytest.MonkeyPatch, port: int, rank: int = 0, world_size: int = 1) -> None:
    values = ("127.0.0.1", str(port), str(rank), str(world_size))
    for name, value in zip(VARIABLES, values, strict=False):
        monkeypatch.setenv(name, value)


# ---------------------------------------------------------------- one process


def test_the_function_is_not_hidden_by_its_module() -> None:
    module = importlib.import_module("rpcdist.collectives.rendezvous")
    assert collectives.rendezvous is module.rendezvous
    assert callable(collectives.rendezvous)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("env://", {}),
        ("env://", {"RANK": "0"}),
        ("env://", {"RANK": "0", "WORLD_SIZE": "1"}),
        ("env://", {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}),
        ("env://", {"RANK": "", "WORLD_SIZE": "1"}),
        ("env://?rank=0", {}),
        ("tcp://127.0.0.1", {}),
        ("tcp://127.0.0.1:1", {}),
        ("tcp://127.0.0.1:1?rank=0", {}),
        ("tcp://127.0.0.1:1?world_size=1", {}),
        ("file://", {}),
        ("file:///none", {}),
        ("file:///none?rank=0", {}),
    ],
)
def test_what_is_missing_is_said_in_torchs_words(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"Error initializing torch.distributed using") as theirs:
        next(torch.distributed.rendezvous(url))
    with pytest.raises(ConfigError) as ours:
        next(rendezvous(url))
    assert str(ours.value) == str(theirs.value).replace("torch.distributed", "rpcdist")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), "`url` must be a string"),
        (("env://", "x"), "`rank` must be an integer. x"),
        (("env://", 0, "y"), "`world_size` must be an integer. y"),
        (("none://",), "No rendezvous handler for none://"),
        (("tcp://127.0.0.1:1?rank=0", 0, 1), "has node-specific arguments"),
        (("tcp://127.0.0.1:1", 2, 2), "rank 2 is not from 0 to 1"),
        (("tcp://127.0.0.1:1?rank=a&world_size=1",), "rank must be a whole number, not 'a'"),
        (("tcp://127.0.0.1:99999", 0, 1), "not a number from 0 to 65535"),
        (
            ("tcp://127.0.0.1:0", 0, 2),
            "the port is 0, so rank 0 would listen on a port that the others do not know",
        ),
        (("tcp://127.0.0.1:0", 1, 2), "the port is 0"),
        (("file://relative/path", 0, 1), "three slashes"),
        (("file:///no/such/folder/file", 0, 1), "No such file or directory"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(text)):
        next(rendezvous(*arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MASTER_PORT", "abc"),
        ("MASTER_PORT", "70000"),
        ("RANK", "one"),
        ("MASTER_ADDR", "http://node0"),
        ("MASTER_ADDR", "node0:29500"),
    ],
)
def test_wrong_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    set_environment(monkeypatch, 1)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}.*{value}"):
        next(rendezvous("env://"))


def test_env(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_environment(monkeypatch, port)
    iterator = rendezvous("env://", timeout=20)
    store, rank, world_size = next(iterator)
    with store:
        assert (type(store), rank, world_size) == (TCPStore, 0, 1)
        assert store.address == f"127.0.0.1:{port}"
        assert store.timeout.total_seconds() == 20
        with pytest.raises(RuntimeError, match="Unable to perform re-rendezvous using env:// method"):
            next(iterator)


ADDRESSES_PROGRAM = """
import os
from rpcdist.collectives import rendezvous
from rpcdist.transport.addresses import split_address

for address in ("[::1]", " ::1 ", "localhost ", "\\t127.0.0.1\\n"):
    os.environ["MASTER_ADDR"] = address
    with next(rendezvous("env://", timeout=20))[0] as store:
        store.set("key", "value")
        found = split_address(store.address)[0]
    assert found == address.strip("[] \\t\\n"), (found, address)
"""


def test_spaces_and_brackets_around_the_address_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, since one that serves for other reasons would go on listening at these hosts."""
    set_environment(monkeypatch, free_port())
    subprocess.run([sys.executable, "-c", ADDRESSES_PROGRAM], check=True, timeout=60)


async def test_groups_in_coroutines(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in the cells of a notebook: what waits for other processes names its form; operations and ends work."""
    set_environment(monkeypatch, free_port())
    with use_world(world := World()):
        with pytest.raises(
            BlockingInLoop, match=r"^init_process_group would .*to_thread\(init_process_group, \.\.\.\)"
        ):
            collectives.init_process_group()
        await asyncio.to_thread(collectives.init_process_group)
        with pytest.raises(BlockingInLoop, match=r"^new_group would .*to_thread\(new_group, \.\.\.\)"):
            collectives.new_group([0])
        with pytest.raises(BlockingInLoop, match=r"^TCPStore would .*to_thread\(TCPStore, \.\.\.\)"):
            TCPStore("127.0.0.1", free_port(), 1, True)
        value = torch.ones(2)
        collectives.all_reduce(value)
        collectives.destroy_process_group()
        world.close_store()
    assert not caplog.records
    await asyncio.get_running_loop().shutdown_default_executor()


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, free_port(), rank=5, world_size=7)
    store, rank, world_size = next(rendezvous("env://", rank=0, world_size=1, timeout=20))
    with store:
        assert (rank, world_size) == (0, 1)


def test_no_timeout_given_means_the_default() -> None:
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{free_port()}", 0, 1, timeout=None))
    with store:
        assert store.timeout == timedelta(minutes=30)


def test_tcp() -> None:
    port = free_port()
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size=1", timeout=20))
    with store:
        assert (store.address, rank, world_size) == (f"127.0.0.1:{port}", 0, 1)


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    store, rank, world_size = next(rendezvous(f"file://{path}", 0, 1))
    with store:
        assert isinstance(store, FileStore)
        assert (store.path, rank, world_size) == (f"{path}.rpcdist", 0, 1)
    assert not Path(f"{path}.rpcdist").exists()


def test_a_group_without_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    store, rank, world_size = next(open_rendezvous(f"tcp://127.0.0.1:{port}", 0, None, timeout=20))
    with store:
        assert (rank, world_size) == (0, -1)
    set_environment(monkeypatch, port)
    monkeypatch.delenv("WORLD_SIZE")
    store, rank, world_size = next(open_rendezvous("env://", -1, None, timeout=20))
    with store:
        assert (rank, world_size) == (0, -1)


def test_a_process_group_needs_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, free_port())
    monkeypatch.setenv("WORLD_SIZE", "-1")
    with use_world(World()):
        with pytest.raises(ConfigError, match="the world size must be at least 1, but is -1"):
            collectives.init_process_group("gloo")
        collectives.close_stores()


def test_two_users_of_one_host_and_port_share_the_store() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    first, _, _ = next(rendezvous(url, 0, 1, timeout=20))
    second, _, _ = next(rendezvous(url, 0, 1, timeout=20))
    first.set("k", "v")
    first.close()
    with second:
        assert second.get("k") == b"v"
    third, _, _ = next(rendezvous(url, 0, 1, timeout=20))
    with third:
        assert not third.check(["k"])


def test_the_coordinator_does_not_come() -> None:
    port = free_port()
    with pytest.raises(ConnectFailed, match=rf"127\.0\.0\.1:{port} after 0\.5 s"):
        next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=0.5))


def test_the_port_of_rank_0_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DistNetworkError, match=rf"port {port}.*in use"):
            next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, timeout=5))


def test_a_registered_scheme() -> None:
    store = HashStore()

    def handler(url: str, **options: object) -> Iterator[tuple[Store, int, int]]:
        assert (url, options) == ("test-scheme://place?rank=3&world_size=4", {"timeout": 7})
        yield store, 3, 4

    register_rendezvous_handler("test-scheme", handler)
    assert next(rendezvous("test-scheme://place", 3, 4, timeout=7)) == (store, 3, 4)
    with pytest.raises(RuntimeError, match="Rendezvous handler for test-scheme:// already registered"):
        register_rendezvous_handler("test-scheme", handler)


# ---------------------------------------------------------------- torchrun


def test_the_store_of_torchruns_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_environment(monkeypatch, agent.port, rank=0, world_size=2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store, rank, world_size = next(rendezvous("env://", timeout=20))
    with store:
        assert (type(store), rank, world_size) == (TorchStoreAdapter, 0, 2)
        assert store.address == f"127.0.0.1:{agent.port}"
        store.set("k", "v")
        assert agent.get("k") == b"v"


def test_torchruns_agent_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_environment(monkeypatch, port)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConnectFailed, match=rf"127\.0\.0\.1:{port} after 0\.3 s.*torchrun's agent"):
        next(rendezvous("env://", timeout=0.3))


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "0"),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "0"),  # the other node's may be 2
        ({"TORCHELASTIC_RESTART_COUNT": "3", "SLURM_RESTART_COUNT": "2"}, "2"),
        ({"SLURM_RESTART_COUNT": "3", ATTEMPT_VARIABLE: "run-7"}, "run-7"),
        ({ATTEMPT_VARIABLE: ""}, "0"),
    ],
)
def test_the_attempt_is_named_by_whoever_starts_the_job(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT", ATTEMPT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert job_attempt() == expected


# ---------------------------------------------------------------- several processes

MEMBER = """
    import sys
    from rpcdist.collectives import rendezvous
    arguments = [int(number) for number in sys.argv[2:]]
    store, rank, world_size = next(rendezvous(sys.argv[1], *arguments, timeout=60))
    store.set(f"rank{rank}", str(rank))
    got = store.multi_get([f"rank{number}" for number in range(world_size)])
    store.barrier("end", world_size)
    print(rank, world_size, b"".join(got).decode())
    if rank == 0:  # it serves: the others first
        store.wait([f"left{number}" for number in range(1, world_size)])
    else:
        store.set(f"left{rank}", "")
    store.close()
"""


@pytest.mark.multiproc
@pytest.mark.parametrize("scheme", ["env", "tcp", "file"])
def test_three_processes(worker_pool: WorkerPool, tmp_path: Path, scheme: str) -> None:
    port = free_port()
    url = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/store"}[scheme]

    def member(rank: int) -> ForkedProgram:
        if scheme != "env":
            return ForkedProgram(worker_pool, MEMBER, url, rank, 3)
        values = ("127.0.0.1", str(port), str(rank), "3")
        return ForkedProgram(worker_pool, MEMBER, url, environment=dict(zip(VARIABLES, values, strict=False)))

    with member(2) as two, member(1) as one, member(0) as zero:
        assert [script.line() for script in (zero, one, two)] == ["0 3 012", "1 3 012", "2 3 012"]
        assert [script.end() for script in (zero, one, two)] == [0, 0, 0], [zero.output, one.output, two.output]
    assert not os.path.exists(tmp_path / "store")


def test_import_is_cheap() -> None:
    code = "import sys, rpcdist.collectives; print([name for name in ('grpc', 'torch') if name in sys.modules])"
    with Program(code) as script:
        assert script.line() == "[]"
        assert script.end() == 0
