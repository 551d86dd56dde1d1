"""Jobs that fail: what their workers write, and what `python -m rpcdist report` makes of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hang_functions as hangs
import pytest

from rpcdist import rpc
from rpcdist._inspect.flight_report import FlightFile, Incident, read_folder, report_text, story
from rpcdist.errors import CheckpointError, ConfigError, WorkerLost
from rpcdist.inspection import MemberFacts, WorkerFacts
from rpcdist.rpc._inspection import flight_log
from rpcdist.testing import InProcessCluster, RpcWorld, WorkerPool, eventually

NAMES = ("w0", "w1", "w2")
SECOND_NS = 1_000_000_000


@pytest.fixture
def flight_folder(tmp_path: Path) -> Path:
    return tmp_path / "flight"


@pytest.fixture
def world(worker_pool: WorkerPool, flight_folder: Path) -> Iterator[RpcWorld]:
    worker_pool.environment["RPCDIST_FLIGHT_RECORDER_DIR"] = str(flight_folder)
    yield worker_pool.world(*NAMES)


def written_by(folder: Path, *names: str) -> bool:
    try:
        return {*names} <= {file.worker for file in read_folder(folder)[0]}
    except ConfigError:
        return False


@pytest.mark.multiproc
def test_a_killed_worker(world: RpcWorld, flight_folder: Path) -> None:
    world["w0"].run(hangs.call_along, ["w2"], "release")
    world["w2"].run(hangs.renew)
    world["w1"].run(hangs.refuse_threads, True)  # as at the end of the interpreter: it writes all the same
    caller = world["w0"].begin(hangs.call_along, ["w1", "w2"], "wait_released")
    eventually(lambda: world["w2"].run(hangs.num_served) > 0, "the call has come")
    world["w2"].kill()
    caller.error()
    eventually(lambda: written_by(flight_folder, "w0", "w1"), "the survivors have written")
    world["w1"].run(hangs.refuse_threads, False)
    text = report_text(flight_folder)
    assert "no file from w2" in text
    assert "w2 wrote nothing: the process was killed (SIGKILL), crashed" in text
    first = next(line for line in text.splitlines() if line.startswith("first, at"))
    assert "the connection with 'w2' ended" in first
    # The activity of the others at that moment: the call that was on its way there, and those behind it.
    assert "hang_functions:wait_released at w2" in text
    assert "w1: runs hang_functions:call_along for w0" in text
    assert "hang_functions:release at w2 ended after" in text, "the last calls of w0"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (flight_folder, *flight_folder.iterdir()))
    world.shutdown("w0", "w1")


class MemoryCgroup:
    """A control group whose processes the kernel kills when they use more memory than the limit; takes root."""

    def __init__(self, limit_bytes: int) -> None:
        one, two = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        parent, limit = (one, "memory.limit_in_bytes") if (one / "cgroup.procs").exists() else (two, "memory.max")
        self.folder = parent / f"rpcdist-test-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / limit).write_text(str(limit_bytes))
        except OSError as error:
            self.close()
            pytest.skip(f"memory of processes cannot be limited here: {error}")

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        if self.folder.exists():
            eventually(lambda: not (self.folder / "cgroup.procs").read_text(), "the process has ended")
            self.folder.rmdir()


@pytest.mark.multiproc
def test_a_worker_whose_memory_runs_out(world: RpcWorld, flight_folder: Path) -> None:
    """By the kernel itself: what a process uses from now on counts in its new control group."""
    caller = world["w0"].begin(hangs.call_along, ["w2"], "wait_released")
    eventually(lambda: world["w2"].run(hangs.num_served) > 0, "the call has come")
    group = MemoryCgroup(64 << 20)
    try:
        group.add(world["w2"].pid)
        world["w2"].begin(hangs.use_memory)
        caller.error()
        eventually(lambda: written_by(flight_folder, "w0", "w1"), "the survivors have written")
    finally:
        group.close()
    text = report_text(flight_folder)
    assert "w2 wrote nothing: the process was killed (SIGKILL), crashed" in text
    assert "the kernel of its host killed 1 process since the job began because memory had run out" in text
    world.shutdown("w0", "w1")


@pytest.mark.multiproc
def test_a_checkpoint_on_a_full_disk(world: RpcWorld, flight_folder: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("a small disk is mounted, which takes root")
    waiting = world["w0"].begin(hangs.call_along, ["w2"], "wait_released")
    disk = tmp_path / "disk"
    disk.mkdir()
    failing = world["w1"].begin(hangs.save_to_full_disk, str(disk))
    assert "its disk has 0.0 MiB free" in str(failing.error(CheckpointError))
    eventually(lambda: written_by(flight_folder, *NAMES), "all have written")
    text = report_text(flight_folder)
    first = next(line for line in text.splitlines() if line.startswith("first, at"))
    assert "the program of w1 failed with CheckpointError" in first and "its disk has 0.0 MiB free" in first
    assert "in save_to_full_disk" in text
    assert "w0 noticed: worker 'w1' reported its failure: CheckpointError" in text
    assert "w2: runs hang_functions:wait_released for w0" in text
    world["w2"].run(hangs.release)
    waiting.result()


@pytest.mark.multiproc
def test_a_signal_has_a_worker_write(world: RpcWorld, flight_folder: Path) -> None:
    world["w0"].run(hangs.call_along, ["w1"], "release")
    world["w0"].signal(signal.SIGUSR2)
    eventually(lambda: written_by(flight_folder, "w0"), "w0 has written")
    [file], notes = read_folder(flight_folder)
    assert [event.kind for event in file.events] == ["signal"] and not notes
    assert any("hang_functions:release at w1 ended after" in call and call.endswith(": ok") for call in file.last_calls)
    assert world["w0"].run(os.getpid) == world["w0"].pid, "it goes on"
    world.shutdown()


# ---------------------------------------------------------------- stories


def facts(worker: str, id: int, members: tuple[str, ...] = NAMES) -> WorkerFacts:
    found = tuple(MemberFacts(name, rank, f"127.0.0.1:{1000 + rank}") for rank, name in enumerate(members))
    return WorkerFacts(
        worker, id, "1", "default/1", "", "host", 100 + id, f"127.0.0.1:{1000 + id}", 0, 1.0, "working", found
    )


def file_of(worker: str, id: int, *events: Incident, num_kills: int = 0) -> FlightFile:
    return FlightFile(
        Path(worker), worker, id, "default/1", "host", 100 + id, SECOND_NS, num_kills, events, facts(worker, id)
    )


def first_of(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("first, at")).partition(": ")[2]


def test_a_worker_that_the_kernel_has_killed_for_memory() -> None:
    broke = Incident(5 * SECOND_NS, "w0", "broken", "the connection with 'w2' ended: the process there is gone")
    text = story([file_of("w0", 0, broke, num_kills=1), file_of("w1", 1)])
    assert first_of(text) == "w0 noticed: the connection with 'w2' ended: the process there is gone"
    assert "the kernel of its host killed 1 process since the job began because memory had run out" in text


@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_program_that_fails_since_a_worker_was_killed_echoes_that(is_noticed: bool) -> None:
    """As in a `LocalCluster`, where the other processes are ended at once, and write nothing."""
    broke = Incident(5 * SECOND_NS, "w0", "broken", "the connection with 'w2' ended: the process there is gone")
    failed = Incident(5 * SECOND_NS + 9_000_000, "w0", "failed", "WorkerLost: worker 'w2' was lost during f")
    events = [broke, failed] if is_noticed else [failed]
    text = story([file_of("w0", 0, *events, num_kills=1)])
    assert ("the connection with 'w2' ended" in first_of(text)) == is_noticed
    assert "w2 wrote nothing" in text and "the kernel of its host killed 1 process" in text


def test_a_program_that_fails_comes_before_the_connections_that_break_by_it() -> None:
    failed = Incident(5 * SECOND_NS + 9_000_000, "w1", "failed", "ValueError: seven", "File x\nValueError: seven")
    broke = Incident(5 * SECOND_NS, "w0", "broken", "the connection with 'w1' ended: broke")
    lost = Incident(6 * SECOND_NS, "w2", "lost", "worker 'w1' is lost")
    text = story([file_of("w0", 0, broke), file_of("w1", 1, failed), file_of("w2", 2, lost)])
    assert first_of(text) == "the program of w1 failed with ValueError: seven"
    assert "   +0.991 s  w2 noticed: worker 'w1' is lost" in text


def test_calls_that_failed_long_before_are_no_part_of_the_story() -> None:
    early = Incident(1 * SECOND_NS, "w0", "call", "f at w1 ended after 0.1 s: KeyError")
    late = Incident(49 * SECOND_NS, "w0", "call", "g at w1 ended after 0.1 s: KeyError")
    failed = Incident(50 * SECOND_NS, "w0", "failed", "KeyError: 1")
    text = story([file_of("w0", 0, early, late, failed)])
    assert "f at w1" not in text and "-1.000 s  w0: the call g at w1" in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "{}",
        json.dumps({"worker": 7}),
        json.dumps({"worker": "w", "id": 1, "job": "j", "host": "h", "pid": 1, "time_ns": 1, "num_kills": 0})
        + '\n{"facts": {"pool": 3}}',
        "[" * 100_000,
        '{"worker": "w", "id": 1, "job": "j", "host": "h", "pid": 1, "time_ns": 1e999, "num_kills": 0}',
    ],
    ids=["empty", "text", "no-fields", "wrong-type", "wrong-facts", "nested", "no-number"],
)
def test_a_file_that_is_no_good_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "calls0-x-1.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=r"calls0-x-1\.jsonl cannot be read"):
        read_folder(tmp_path)


def test_pipes_and_damaged_files_of_groups_stop_no_report(tmp_path: Path) -> None:
    """A pipe in the place of a file, in a folder that others may write to, held the report up for ever."""
    head = {"worker": "w", "id": 1, "job": "j", "host": "h", "pid": 1, "time_ns": 1, "num_kills": 0}
    (tmp_path / "calls1-x-1.jsonl").write_text(json.dumps(head))
    for name in ("calls0-x-1.jsonl", "rank0.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "rank1.json").write_text("[" * 100_000)
    entry = '{"state": "failed", "operation": "", "sequence": 1, "group": "", "error": "", "ended_ns": 1e999}'
    (tmp_path / "rank2.json").write_text(f'{{"pid": 1, "entries": [{entry}]}}')
    assert "calls0-x-1.jsonl cannot be read: ValueError('it is not a regular file" in report_text(tmp_path)


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        read_folder(tmp_path / "missing")


def test_many_workers_of_one_process_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the stacks of all threads: when 15 of 300 workers in one process ended, the others took 70 s."""
    monkeypatch.setenv("RPCDIST_FLIGHT_RECORDER_DIR", str(tmp_path))
    monkeypatch.setattr(flight_log.FlightLog, "_written_at", float("-inf"))
    monkeypatch.setattr(flight_log, "SLOW_CHECK_INTERVAL_S", 1000.0)
    with InProcessCluster(*NAMES, "w3", "w4") as cluster:
        for name in (*NAMES, "w3"):
            assert cluster.run(name, rpc.rpc_sync, "w4", abs, (-1,)) == 1
        cluster.kill("w4")
        for name in (*NAMES, "w3"):
            with pytest.raises(WorkerLost):
                cluster.run(name, rpc.rpc_sync, "w4", abs, (1,))
        eventually(lambda: list(tmp_path.glob("calls*")), "a file")
    assert len(list(tmp_path.glob("calls*"))) == 1
