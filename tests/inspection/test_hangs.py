"""Jobs that hang in known ways: `python -m rpcdist stacks` names the place where each one does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hang_functions as hangs
import pytest

from rpcdist._inspect.asking import Asker
from rpcdist._inspect.flight_report import text_of
from rpcdist.inspection import WorkerFacts
from rpcdist.inspection.facts import JobFacts
from rpcdist.testing import RpcWorld, Worker, WorkerPool, eventually
from rpcdist.testing.limits import LIMIT_S

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(240)]

NAMES = ("w0", "w1", "w2")
NARROW = "w2"
"""The worker with few threads."""

MAX_THREADS = 4
OLDER_THAN_S = 0.3


class HungJob:
    """A job, and what the command says about it."""

    def __init__(self, world: RpcWorld, asker: Asker) -> None:
        self._world = world
        self._asker = asker
        self.address = world["w0"].run(hangs.address)

    def __getitem__(self, name: str) -> Worker:
        return self._world[name]

    def facts(self) -> JobFacts:
        return self._asker.job_at(self.address)

    def of(self, name: str) -> WorkerFacts:
        return next(facts for facts in self.facts().workers if facts.worker == name)

    def explained(self, *parts: str, address: str | None = None) -> str:
        """The text of the command, when it has all of the parts, and the calls are no longer young."""
        texts: list[str] = []

        def look() -> bool:
            texts[:] = [text_of(self._asker.job_at(address or self.address), OLDER_THAN_S)]
            return all(part in texts[0] for part in parts) and "that has just begun" not in texts[0]

        try:
            eventually(look, f"the explanation has {parts}")
        except AssertionError as exc:
            exc.add_note(texts[0] if texts else "no answer")
            raise
        return texts[0]

    def renew(self) -> None:
        for name in NAMES:
            self[name].run(hangs.renew)


@pytest.fixture(scope="module")
def world(module_pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HungJob]:
    module_pool.environment["RPCDIST_FLIGHT_RECORDER_DIR"] = str(tmp_path_factory.mktemp("flight"))
    world = module_pool.new_world(len(NAMES), peer_timeout=LIMIT_S)  # longer than any worker is made to freeze
    options = {NARROW: {"max_worker_threads": MAX_THREADS}}
    joining = [world.begin_join(name, rank, **options.get(name, {})) for rank, name in enumerate(NAMES)]
    for pending in joining:
        pending.result()
    with Asker() as asker:
        yield HungJob(world, asker)
    world.shutdown()


@pytest.fixture
def job(world: HungJob) -> Iterator[HungJob]:
    world.renew()
    yield world


def test_a_lock_in_the_third_worker(job: HungJob) -> None:
    job["w1"].run(hangs.begin, "w2", "hold_table")
    caller = job["w0"].begin(hangs.call_along, ["w1", "w2"], "lock_table")
    text = job.explained(
        "w0: thread MainThread", "waits for the lock `table_lock`", "chains end here: w2's hang_functions:hold_table"
    )
    chain = text[text.index("w0: thread MainThread") :]
    steps = ["w1: runs hang_functions:call_along for w0", "w2: runs hang_functions:lock_table for w1", "in lock_table"]
    assert sorted(steps, key=chain.index) == steps
    assert "in hold_table" in chain
    job["w2"].run(hangs.release)
    caller.result()
    job["w1"].run(hangs.finish)


def test_a_circle_of_two_workers(job: HungJob) -> None:
    job["w0"].run(hangs.begin, "w1", "wait_released")  # a call that is not on the circle
    circle = job["w2"].begin(hangs.call_along, ["w0"], "begin_ring")
    text = job.explained("DEADLOCK: ", "take_ring")
    [line] = [line for line in text.splitlines() if line.startswith("DEADLOCK: ")]
    for step in ("w0's hang_functions:begin_ring", "w1's hang_functions:call_back", "w0's hang_functions:take_ring"):
        assert step in line
    assert "wait_released" not in line
    job["w1"].run(hangs.release)
    circle.error(TimeoutError)
    job["w0"].run(hangs.finish)


def test_a_wait_inside_a_callback(job: HungJob) -> None:
    job["w0"].run(hangs.call_in_callback, "w1", "w2")
    job["w1"].run(hangs.release)
    job.explained("w0: a callback on thread", "w2: runs hang_functions:wait_released for w0", "in call_in_callback")
    job["w2"].run(hangs.release)
    job["w0"].run(hangs.finish)


def test_an_exhausted_pool(job: HungJob) -> None:
    job["w1"].run(hangs.begin, NARROW, "wait_released", MAX_THREADS)
    # Else the next call finds a thread.
    eventually(lambda: (pool := job.of(NARROW).pool) is not None and pool.running == MAX_THREADS)
    caller = job["w0"].begin(hangs.call_along, [NARROW], "lock_table")
    text = job.explained(
        f"{NARROW}: has queued hang_functions:lock_table for w0",
        f"all {MAX_THREADS} threads of the pool are taken (max_worker_threads)",
        f"{NARROW}'s hang_functions:wait_released on thread",
    )
    assert "in wait_released" in text
    job[NARROW].run(hangs.release)
    caller.result()
    job["w1"].run(hangs.finish)


def test_a_loop_that_keeps_the_interpreter_busy(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1"], "spin")
    job.explained("w1: runs hang_functions:spin for w0", "in spin")
    assert not job.facts().silent, "the I/O loop answers beside the loop"
    job["w1"].run(hangs.release)
    caller.result()


def test_c_code_that_keeps_the_lock_of_the_interpreter(job: HungJob, tmp_path: Path) -> None:
    fifo = tmp_path / "end"
    os.mkfifo(fifo)
    caller = job["w0"].begin(hangs.call_along, ["w1"], "hold_interpreter", str(fifo))
    waits = "w0: waits"  # not at the first look, perhaps: the call is young then
    job.explained(waits, "w1: did not answer", "in code that keeps the interpreter's lock", "in hold_interpreter")
    fifo.write_text("!")
    caller.result()


def test_a_future_that_nobody_completes(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1"], "await_nothing")
    job.explained("w1: runs hang_functions:await_nothing", "it awaits an object that is not a call", "in await_nothing")
    job["w1"].run(hangs.cancel_kept)
    caller.result()


def test_a_coroutine_that_blocks_the_loop_of_coroutines(job: HungJob) -> None:
    job["w0"].run(hangs.begin, "w1", "answer")  # from the second call on, these need no thread
    job["w0"].run(hangs.finish)
    job["w0"].run(hangs.begin, "w1", "hold_table")
    blocked = job["w2"].begin(hangs.call_along, ["w1"], "lock_table_in_loop")
    job.explained("w1: thread rpcdist-user-loop waits for the lock `table_lock`", "in hold_table")
    behind = job["w0"].begin(hangs.call_along, ["w1"], "answer")
    text = job.explained("hang_functions:answer for w0", "rpcdist-user-loop waits for the lock `table_lock`")
    assert "the loop of coroutines has not started it" in text or "another coroutine blocks the loop" in text
    job["w1"].run(hangs.release)
    for caller in (blocked, behind):
        caller.result()
    job["w0"].run(hangs.finish)


def test_a_collective_that_one_rank_does_not_call(job: HungJob, tmp_path: Path) -> None:
    joining = [job[name].begin(hangs.join_group, rank, 3, str(tmp_path / "store")) for rank, name in enumerate(NAMES)]
    for pending in joining:
        pending.result()
    early = [job[name].begin(hangs.reduce_once) for name in NAMES[:2]]
    text = job.explained("w0: rank 0 is in all_reduce #", "w1: rank 1 is in all_reduce #", "which w2 has not called")
    assert "w2: thread MainThread" in text
    assert job["w2"].run(hangs.reduce_once) == 3.0
    for done in early:
        done.result()
    for leaving in [job[name].begin(hangs.leave_group) for name in NAMES]:
        leaving.result()


def test_a_message_that_nobody_sends(job: HungJob, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    joining = [job[name].begin(hangs.join_group, rank, 2, store) for rank, name in enumerate(NAMES[:2])]
    for pending in joining:
        pending.result()
    waiting = job["w0"].begin(hangs.receive_from, 1)
    text = job.explained("w0: rank 0 is in recv #")
    assert "from rank 1, tag 0, for " in text
    job["w1"].run(hangs.send_to, 0)
    waiting.result()
    for leaving in [job[name].begin(hangs.leave_group) for name in NAMES[:2]]:
        leaving.result()


def test_a_queue_into_which_nobody_puts_anything(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1"], "take_from_empty_queue")
    job.explained("w1: runs hang_functions:take_from_empty_queue for w0", "in take_from_empty_queue")
    job["w1"].run(hangs.put_into_queue)
    caller.result()


def test_the_command_finds_a_deadlock_in_the_third_worker(job: HungJob) -> None:
    """As its user types it: nothing but the address of a worker, and the token in the environment."""
    job["w1"].run(hangs.begin, "w2", "hold_table")
    caller = job["w0"].begin(hangs.call_along, ["w1", "w2"], "lock_table")
    job.explained("waits for the lock `table_lock`")
    command = [sys.executable, "-m", "rpcdist", "stacks", job.address, "--older-than", str(OLDER_THAN_S)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "here: w2's hang_functions:hold_table on thread" in done.stdout
    assert "waits for the lock `table_lock`, which another thread of this worker holds" in done.stdout
    job["w2"].run(hangs.release)
    caller.result()
    job["w1"].run(hangs.finish)


def test_a_stopped_process(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1"], "wait_released")
    job.explained("w1: runs hang_functions:wait_released for w0")
    job["w1"].stop()
    try:
        text = job.explained("w1: did not answer", f"process {job['w1'].pid} is stopped by SIGSTOP")
        assert f"kill -CONT {job['w1'].pid}" in text
    finally:
        job["w1"].resume()
    job["w1"].run(hangs.release)
    caller.result()


def test_a_barrier_that_one_worker_does_not_enter(job: HungJob) -> None:
    waiting = [job[name].begin(hangs.enter_barrier, list(NAMES)) for name in NAMES[:2]]
    text = job.explained("and waits for the workers that have not joined", "chains end here: w2, thread MainThread")
    assert "in enter_barrier" in text
    job["w2"].run(hangs.enter_barrier, list(NAMES))
    for done in waiting:
        done.result()


def test_a_stream_that_nobody_reads(job: HungJob) -> None:
    job["w0"].run(hangs.read_one, "w1")
    job.explained("w1: produces the items of hang_functions:count_up for w0", "no thread at w0 has taken an item")
    job["w0"].run(hangs.close_kept)


def test_nested_calls_through_three_workers(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1", "w2", "w0"], "wait_released")
    text = job.explained("w0: thread MainThread", "w0: runs hang_functions:wait_released for w2")
    chain = text[text.index("w0: thread MainThread") :]
    steps = [f"{name}: runs hang_functions:" for name in ("w1", "w2", "w0")]
    assert sorted(steps, key=chain.index) == steps
    job["w1"].run(hangs.call_along, ["w0"], "release")
    caller.result()


def test_an_actor_whose_method_hangs(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_actor, "w1")
    text = job.explained("w1: has queued at the actor ", "in StuckActor.hang")
    assert "chains end here" in text
    [actor] = job.of("w1").actors
    assert actor.running == "hang"
    job["w1"].run(hangs.release)
    caller.result()


def test_the_value_of_a_remote_call_that_still_runs(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.fetch_slow_value, "w1")
    job.explained("w1: runs hang_functions:slow_value for w0", "in slow_value")
    job["w1"].run(hangs.release)
    assert caller.result() == 3


def test_a_backward_pass_that_waits_for_a_hook(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.backward_with_slow_hook, "w1")
    text = job.explained("w0: is in the backward pass of autograd context", "w1", "in slow_hook")
    assert "owes a gradient" in text or "is not done" in text
    job["w1"].run(hangs.release)
    caller.result()


def test_a_handler_that_sleeps(job: HungJob) -> None:
    caller = job["w0"].begin(hangs.call_along, ["w1"], "sleep_long")
    job.explained("w1: runs hang_functions:sleep_long for w0", "in sleep_long")
    job["w1"].run(hangs.release)
    caller.result()


def test_a_shutdown_that_waits_for_a_call(worker_pool: WorkerPool, tmp_path: Path) -> None:
    worker_pool.environment["RPCDIST_FLIGHT_RECORDER_DIR"] = str(tmp_path)
    world = worker_pool.world("w0", "w1")
    world["w0"].run(hangs.begin, "w1", "wait_released")
    address = world["w1"].run(hangs.address)
    leaving = world["w0"].begin(hangs.shut_down)
    with Asker() as asker:
        job = HungJob.__new__(HungJob)
        job._asker, job.address = asker, address
        text = job.explained("w1: runs hang_functions:wait_released for w0", "for the shutdown at w0")
        assert job.of("w0").phase == "leaving"
    assert "in wait_released" in text
    world["w1"].run(hangs.release)
    world["w1"].begin(hangs.shut_down).result()
    leaving.result()
