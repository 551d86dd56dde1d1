"""Workers that die, hang or end themselves while others wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import rpc_victim_forks as forks
import rpc_victim_functions as functions
import rpc_victim_waits as waits
import torch
from full_sets import FULL_ONLY
from peer_timeouts import CALM_S, LIMIT_S, PROMPT_S, UNIT_S

from rpcdist import rpc
from rpcdist.errors import OwnerLost, RemoteError, SerializationError, WorkerLost
from rpcdist.testing import WorkerPool, eventually, wait_until_asleep

pytestmark = pytest.mark.multiproc

CALLS = [
    ("rpc_sync", WorkerLost, "announce_and_wait"),
    ("rpc_sync of a coroutine", WorkerLost, "announce_and_wait_async"),
    ("rpc_async", WorkerLost, "announce_and_wait"),
    ("wait_all", WorkerLost, "announce_and_wait"),
    ("await", WorkerLost, "announce_and_wait"),
    ("stream", WorkerLost, "stream_and_wait"),
    ("async stream", WorkerLost, "stream_and_wait_async"),
    ("to_here", OwnerLost, "to_here"),
    ("rref.rpc_sync", WorkerLost, "the method work()"),
    ("large", WorkerLost, "clone"),
    ("rpc.wait_all", WorkerLost, "announce_and_wait"),
    ("wait_any", WorkerLost, "announce_and_wait"),
    ("as_completed", WorkerLost, "announce_and_wait"),
    ("stream on a loop", WorkerLost, "stream_and_wait"),
]
# The channel decides how an end is noticed, but not its consequences: so the channels take turns.
CHANNELS = ("auto", "tcp", "grpc")


@pytest.mark.parametrize(
    ("how", "kind", "call", "channels"),
    [(*case, CHANNELS[number % len(CHANNELS)]) for number, case in enumerate(CALLS)],
    ids=[f"{how}, {CHANNELS[number % len(CHANNELS)]}" for number, (how, _, _) in enumerate(CALLS)],
)
def test_calls_to_a_killed_worker_fail_and_name_it(
    worker_pool: WorkerPool, tmp_path: Path, how: str, kind: type[WorkerLost], call: str, channels: str
) -> None:
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("a", "b", "c", peer_timeout=CALM_S)
    address = world["b"].run(functions.address)
    running = tmp_path / "running"
    pending = world["a"].begin(functions.call, how, "b", str(running))
    eventually(running.exists, "the call runs")
    world["b"].kill()
    error = pending.error(WorkerLost)
    assert type(error) is kind and error.worker == "b" and call in error.what
    assert 0 <= error.last_seen_s < PROMPT_S
    assert error.reason.startswith(f"the connection with {address} broke")
    # Those who live go on, and later calls to the dead one fail before silence could tell.
    assert world["a"].run(rpc.rpc_sync, "c", functions.add, (1, 2)) == 3
    name, text, waited_s = world["a"].run(functions.error_of, rpc.rpc_sync, "b", functions.pid)
    assert name == "WorkerLost" and "'b'" in text and waited_s < PROMPT_S


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with forked DataLoader workers"])
def test_a_death_is_noticed_at_once_although_forked_children_live(
    worker_pool: WorkerPool, tmp_path: Path, forked: bool, channels: str
) -> None:
    """A long peer timeout: only the end of the connection tells, and forked children must not hold it open."""
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    world["a"].run(rpc.rpc_sync, "b", functions.pid)
    children = world["b"].run(forks.fork_data_loader_workers) if forked else []
    running = tmp_path / "running"
    pending = world["a"].begin(functions.call, "rpc_sync", "b", str(running))
    eventually(running.exists, "the call runs")
    killed = time.monotonic()
    world["b"].kill()
    try:
        error = pending.error(WorkerLost)
        assert time.monotonic() - killed < PROMPT_S
        assert error.worker == "b"
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


WAITS_FOR_A_HUNG_ONE = [
    ("rpc_sync", "tcp"),
    ("stream", "grpc"),
    ("to_here", "auto"),
    ("wait_any", "tcp"),
    pytest.param("rpc.wait_all", "grpc", marks=FULL_ONLY),
    pytest.param("as_completed", "auto", marks=FULL_ONLY),
    pytest.param("stream on a loop", "tcp", marks=FULL_ONLY),
]


@pytest.mark.parametrize(("how", "channels"), WAITS_FOR_A_HUNG_ONE)
def test_a_worker_that_hangs_is_given_up_within_the_peer_timeout(
    worker_pool: WorkerPool, tmp_path: Path, how: str, channels: str
) -> None:
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("a", "b", "c", peer_timeout=UNIT_S)
    running = tmp_path / "running"
    pending = world["a"].begin(functions.call, how, "b", str(running))
    eventually(running.exists, "the call runs")
    world["b"].stop()
    error = pending.error(WorkerLost)  # the call itself has no limit that is this short
    assert error.worker == "b" and "no sign of life" in error.reason and error.last_seen_s >= UNIT_S
    assert world["a"].run(rpc.rpc_sync, "c", functions.add, (1, 2)) == 3
    name, text, _ = world["a"].run(functions.error_of, rpc.rpc_sync, "b", functions.pid)
    assert name == "WorkerLost" and "'b'" in text
    # When it comes back, calls reach it again.
    world["b"].resume()
    eventually(lambda: _answers(world["a"].run(functions.outcome_of, rpc.rpc_sync, "b", functions.pid)), "b answers")


@pytest.mark.parametrize("channels", ["tcp", pytest.param("auto", marks=FULL_ONLY)])
def test_no_wait_for_a_worker_that_hangs_outlives_its_deadline(worker_pool: WorkerPool, channels: str) -> None:
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    world["a"].run(rpc.rpc_sync, "b", functions.pid)
    world["b"].stop()
    for how in waits.WAYS:
        name, text, late_s = world["a"].run(waits.wait_with_deadline, how, "b", 0.25 * UNIT_S)
        assert name == "DeadlineExceeded" and "'b'" in text, f"{how}: {name}: {text}"
        assert late_s < PROMPT_S, how
    world["b"].resume()
    assert world["a"].run(rpc.rpc_sync, "b", functions.add, (1, 2)) == 3


def _answers(outcome: object) -> bool:
    return isinstance(outcome, int)


@pytest.mark.parametrize(("how", "channels"), [("os._exit", "grpc"), ("abort", "auto"), ("SIGKILL", "tcp")])
def test_a_handler_that_ends_its_process_fails_its_call(worker_pool: WorkerPool, how: str, channels: str) -> None:
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    started = time.monotonic()
    error = world["a"].begin(rpc.rpc_sync, "b", functions.exit_at_once, (how,)).error(WorkerLost)
    assert time.monotonic() - started < PROMPT_S
    assert error.worker == "b" and "exit_at_once" in error.what
    assert world["b"].wait() == {"os._exit": 3, "abort": -signal.SIGABRT, "SIGKILL": -signal.SIGKILL}[how]


@pytest.mark.parametrize("how", ["sys.exit", "KeyboardInterrupt"])
def test_a_handler_cannot_end_worker_or_caller_by_an_exception(worker_pool: WorkerPool, how: str) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    error = world["a"].begin(rpc.rpc_sync, "b", functions.exit_at_once, (how,)).error(RemoteError)
    assert error.worker == "b"
    assert error.type_name == {"sys.exit": "SystemExit", "KeyboardInterrupt": "KeyboardInterrupt"}[how]
    assert world["a"].run(rpc.rpc_sync, "b", functions.pid) == world["b"].pid
    world.shutdown()


# ---------------------------------------------------------------- forked children


USES = ["rpc_sync", "rpc_async", "remote", "RRef", "to_here", "shutdown", "init_rpc"]


def test_a_forked_child_cannot_use_rpc_and_harms_nobody(worker_pool: WorkerPool) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    for use in USES:
        text, status = world["a"].run(forks.in_forked_child, use, "b")
        assert status == 5 and text.startswith("ForkedProcess: this process was forked"), (use, text, status)
    assert world["a"].run(forks.in_forked_child, "drop", "b") == ("RpcdistError: dropped", 5)
    assert world["a"].run(functions.wait_until_empty) == world["b"].run(functions.wait_until_empty) == ""
    world.shutdown()


# ---------------------------------------------------------------- Ctrl-C

WAITS = ["rpc_sync", "rpc_async", "wait_all", "collect_all", "rpc.wait_all", "wait_any", "as_completed", "await"]
WAITS += ["to_here", "stream", "all_gather"]


def test_ctrl_c_ends_every_wait_of_the_main_thread(worker_pool: WorkerPool, tmp_path: Path) -> None:
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    for number, how in enumerate(WAITS):
        running = tmp_path / f"running{number}"
        pending = world["a"].begin(functions.error_of, functions.call, how, "b", str(running))
        if how != "all_gather":
            eventually(running.exists, "the call runs")
        wait_until_asleep(world["a"].pid)
        started = time.monotonic()
        os.kill(world["a"].pid, signal.SIGINT)
        name, _, _ = pending.result()
        assert (how, name) == (how, "KeyboardInterrupt")
        assert time.monotonic() - started < PROMPT_S, how
        # The worker is none the worse.
        assert world["a"].run(rpc.rpc_sync, "b", functions.add, (number, 1)) == number + 1
        if how != "rpc_sync":  # a future is still good for another wait, so its call may go on
            world["a"].run(functions.cancel_all)
        assert world["a"].run(functions.wait_until_empty) == "", how
    world["b"].kill()  # its handlers wait for ever
    world.shutdown("a", graceful=False)


def test_ctrl_c_that_comes_just_before_the_sleep_ends_the_wait(worker_pool: WorkerPool, tmp_path: Path) -> None:
    """[Note: lost Ctrl-C]"""
    world = worker_pool.world("a", "b", peer_timeout=CALM_S)
    for number, how in enumerate(how for how in WAITS if how not in ("await", "all_gather")):
        path = str(tmp_path / f"running{number}")
        name, _, waited_s = world["a"].run(functions.error_of, functions.call_and_lose_ctrl_c, how, "b", path)
        assert (how, name) == (how, "KeyboardInterrupt") and waited_s < PROMPT_S, how
        world["a"].run(functions.cancel_all)
    world["b"].kill()  # its handlers wait for ever
    world.shutdown("a", graceful=False)


INTERRUPTED = """
    import sys, time
    import torch
    from rpcdist import rpc

    async def wait():
        print("waiting", flush=True)
        await __import__("asyncio").sleep(60)

    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=rpc.RpcOptions(init_method=sys.argv[1]))
    torch.futures.wait_all([rpc.rpc_async("me", wait)])
"""


def test_ctrl_c_ends_a_program_that_does_not_expect_it(tmp_path: Path) -> None:
    script = tmp_path / "waiting.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    command = [sys.executable, str(script), f"file://{tmp_path}/store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
            took_s = time.monotonic() - started
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT and "KeyboardInterrupt" in errors, errors
    assert took_s < LIMIT_S / 2  # the coroutine goes on for as long as the limit


def send_too_much(to: str, size: int) -> tuple[str, int]:
    """The error of a call whose argument does not fit, and the number of calls beside it that came back."""
    beside = [rpc.rpc_async(to, functions.make, (torch.full((1 << 18,), float(i)),)) for i in range(4)]
    with pytest.raises(SerializationError) as caught:
        rpc.rpc_sync(to, functions.make, (torch.ones(size),))
    results = rpc.wait_all(beside)
    return str(caught.value), sum(bool((result == i).all()) for i, result in enumerate(results))


def get_too_much(to: str, size: int) -> str:
    with pytest.raises(SerializationError) as caught:
        rpc.rpc_sync(to, torch.ones, (size,))
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"share_payloads": False}], ids=["shared memory", "socket"])
@pytest.mark.parametrize("channels", ["local", "tcp", "grpc"])
def test_a_payload_that_does_not_fit_fails_its_call_alone(
    worker_pool: WorkerPool, channels: str, options: dict[str, Any]
) -> None:
    limit = 8 << 20
    worker_pool.environment["RPCDIST_CHANNELS"] = channels
    world = worker_pool.world("x", "y", max_incoming_bytes=limit, peer_timeout=CALM_S, **options)
    before = world["x"].run(functions.connection_to, "y")
    for _ in range(2):
        text, num_beside = world["x"].run(send_too_much, "y", limit)
        assert str(4 * limit) in text and f"accepts {limit} from one peer" in text and "max_incoming_bytes" in text
        assert num_beside == 4
        text = world["x"].run(get_too_much, "y", limit)
        assert str(4 * limit) in text and f"accepts {limit} from one peer" in text
    assert world["x"].run(functions.connection_to, "y") == before
    world.shutdown()
