"""The file store: what a killed writer leaves, several processes, and files that are not as they should be."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import zlib
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from forked_program import ForkedProgram

from rpcdist.collectives import DistStoreError, FileStore, PrefixStore, StoreTimeout
from rpcdist.collectives._stores import file_store
from rpcdist.collectives._stores.file_store import FileTable
from rpcdist.collectives._stores.store_operations import Change, Code
from rpcdist.testing import Program, WorkerPool


def test_a_tail_that_was_cut_off_at_any_byte_is_ignored_and_then_overwritten(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with FileStore(whole) as store:
        store.set("first", "1")
        size = whole.stat().st_size
        store.multi_set(["second", "third"], ["22", "333"])
    data = whole.read_bytes()
    assert len(data) > size
    for cut in range(len(data)):
        path = tmp_path / f"cut{cut}"
        path.write_bytes(data[:cut])
        with FileStore(path) as store, FileStore(path) as reader:
            assert store.num_keys() == (1 if cut >= size else 0)
            store.set("next", "x" * 50)
            assert reader.get("next") == b"x" * 50
            assert not reader.check(["second"]) and not reader.check(["third"])
        with FileStore(path) as late:
            assert late.get("next") == b"x" * 50


def test_a_reader_that_saw_the_incomplete_tail_goes_on_after_it_was_replaced(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("a", "1")
        with path.open("ab") as file:
            file.write(b"\x40\x00\x00")  # a writer that was killed
        assert store.num_keys() == 1
        with FileStore(path) as other:
            other.set("b", "2")
        assert store.get("b") == b"2"


def test_several_steps_and_a_look_at_a_file_that_has_not_grown_need_few_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[int] = []
    flock = fcntl.flock

    def counted(descriptor: int, mode: int) -> None:
        locks.append(mode & ~fcntl.LOCK_NB)
        flock(descriptor, mode)

    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        part = PrefixStore("part", store)
        monkeypatch.setattr(fcntl, "flock", counted)
        held = part._held()
        assert held is not None
        with held:
            part.set("a", "1")
            assert (part.add("n", 2), part.check(["a"]), part.get("a")) == (2, True, b"1")
            with pytest.raises(StoreTimeout):
                part.wait(["missing"], 0.0)
        assert locks == [fcntl.LOCK_EX]
        with pytest.raises(StoreTimeout):
            part.wait(["missing"], 0.0)
        assert locks == [fcntl.LOCK_EX]
        other.set("part/missing", "2")
        assert part.get("missing") == b"2"
        assert locks == [fcntl.LOCK_EX, fcntl.LOCK_EX, fcntl.LOCK_SH]


def test_changes_of_every_kind_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("ü\ud800", b"\x00\xff")
        store.append("a", "1")
        store.append("a", "2")
        store.set("gone", "")
        store.delete_key("gone")
        store.queue_push("q", "1")
        store.queue_push("q", "2")
        store.queue_pop("q")
    with FileStore(path) as store:
        assert sorted(store.list_keys()) == ["a", "ü\ud800"]
        assert (store.get("ü\ud800"), store.get("a"), store.queue_pop("q", False)) == (b"\x00\xff", b"12", b"2")


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<BII", 54, 1, 0) + b"k",  # of a later version
        struct.pack("<BII", Code.SET, 1, 0) + b"\xff",
        struct.pack("<BI", Code.SET, 1),
    ],
    ids=["code", "text", "cut"],
)
def test_a_record_of_another_program_is_an_error(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        with open(path, "ab") as file:
            file.write(struct.pack("<II", len(body), zlib.crc32(body)) + body)
        with pytest.raises(DistStoreError, match="has a record at byte 16 that this version of rpcdist cannot read"):
            store.num_keys()


@pytest.mark.parametrize("code", [Code.DELETE, Code.POP])
def test_a_record_that_removes_what_is_not_there_is_an_error(tmp_path: Path, code: Code) -> None:
    """At each use, since the contents after it are not known."""
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("before", "1")
        body = struct.pack("<BII", code, 1, 0) + b"k"
        with open(path, "ab") as file:
            file.write(struct.pack("<II", len(body), zlib.crc32(body)) + body)
        for use in (store.num_keys, lambda: store.get("before"), lambda: store.set("after", "1")):
            with pytest.raises(DistStoreError, match="no store wrote: it removes 'k', which is not there; use another"):
                use()


def test_a_damaged_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("key", "value")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with FileStore(path) as other, pytest.raises(DistStoreError, match="damaged at byte 16"):
            other.check(["key"])


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("do not lose this")
    with pytest.raises(DistStoreError, match="not the file of a store"):
        FileStore(path)
    assert path.read_text() == "do not lose this"


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match="No such file or directory"):
        FileStore(tmp_path / "none" / "store")


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_that_is_removed_or_replaced_meanwhile(tmp_path: Path, replace: bool) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        store.set("a", "1")
        path.unlink()
        if replace:
            with FileStore(path) as other:
                other.set("b", "1")
        with pytest.raises(DistStoreError, match="was replaced" if replace else "No such file"):
            store.get("a")


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    write = os.pwrite

    def half(descriptor: int, data: memoryview, offset: int) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: len(data) // 2], offset)

    with FileStore(path) as store:
        store.set("a", "1")
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", half)
            with pytest.raises(DistStoreError, match="No space left"):
                store.set("b", "x" * 100)
        assert path.read_bytes() == before
        assert store.list_keys() == ["a"]
        store.set("b", "2")
        assert store.get("b") == b"2"


def test_a_lock_that_is_never_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store"
    with FileStore(path) as store:
        monkeypatch.setattr(file_store, "SLOW_ANSWER_LIMIT_S", 0.1)
        with FileTable(str(path)).locked(writing=True), pytest.raises(DistStoreError, match=r"lock of .* was not free"):
            store.set("a", "0")
        store.set("a", "1")
        assert store.get("a") == b"1"


def test_a_record_is_all_or_nothing_for_readers(tmp_path: Path) -> None:
    table = FileTable(str(tmp_path / "log"))
    changes = [Change(Code.SET, "a", b"1"), Change(Code.DELETE, "a"), Change(Code.PUSH, "q", b"")]
    with table.locked(writing=True):
        table.change(changes)
        table.change([])
    reader = FileTable(str(tmp_path / "log"))
    for _ in range(2):
        with reader.locked(writing=False):
            assert (reader.contents.values, reader.contents.queues) == ({}, {"q": deque([b""])})


def test_a_record_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_RECORD_BYTES", 1000)
    with FileStore(tmp_path / "store") as store:
        with pytest.raises(DistStoreError, match="too large"):
            store.set("a", b"x" * 1000)
        assert store.num_keys() == 0


# ---------------------------------------------------------------- the last one removes the file


def test_the_last_of_world_size_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    stores = [FileStore(path, 3) for _ in range(3)]
    twin = stores[0].clone()
    for store in stores:
        assert path.exists()
        store.close()
        store.close()
    assert not path.exists()
    twin.close()
    with pytest.raises(DistStoreError, match="closed by this process"):
        stores[0].get("a")


def test_a_file_of_unknown_world_size_stays(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path):
        pass
    assert path.exists()


def test_the_file_stays_while_not_all_have_come(tmp_path: Path) -> None:
    path = tmp_path / "store"
    FileStore(path, 2).close()
    assert path.exists()
    FileStore(path, 2).close()
    assert not path.exists()


@pytest.mark.parametrize("kind", [FileStore, torch.distributed.FileStore])
def test_the_file_goes_with_the_last_reference_to_the_store(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / "store"
    first, second = (kind(str(path), 2) for _ in range(2))
    prefix = (PrefixStore if kind is FileStore else torch.distributed.PrefixStore)("p", first)
    prefix.set("a", "1")
    del first, second
    assert path.exists()
    del prefix
    assert not path.exists()


def test_a_store_that_is_dropped_while_its_file_is_locked_is_closed_later(
    tmp_path: Path,
) -> None:
    """A collection may run in the middle of an operation of another store on the same file."""
    path = tmp_path / "store"
    store, other = FileStore(path, 1), FileStore(path)
    with other._table.locked(writing=True):
        del store
        assert path.exists()
    with FileStore(tmp_path / "another"):
        assert not path.exists()


def test_a_file_that_a_killed_process_left_is_used_again_and_stays(tmp_path: Path) -> None:
    """Some processes that opened it have not closed it; the file does not show which of them still live."""
    path = tmp_path / "store"
    killed = FileStore(path, 2)
    killed._closer.detach()  # what a process that is killed does not do
    for _ in range(2):
        FileStore(path, 2).close()
    assert path.exists()


@pytest.mark.multiproc
def test_a_store_that_is_open_at_exit_is_closed(tmp_path: Path) -> None:
    code = """
        import sys
        from rpcdist.collectives import FileStore
        store = FileStore(sys.argv[1], 1)
        store.set("a", "1")
    """
    with Program(code, tmp_path / "store") as script:
        assert script.end() == 0, script.output
    assert not (tmp_path / "store").exists()


# ---------------------------------------------------------------- processes


@pytest.mark.multiproc
@pytest.mark.parametrize("written", ["0", "len(data) // 2", "len(data) - 1"])
def test_a_writer_killed_in_the_middle_of_a_write(worker_pool: WorkerPool, tmp_path: Path, written: str) -> None:
    code = f"""
        import os, signal, sys
        from rpcdist.collectives import FileStore
        from rpcdist.collectives._stores import file_store
        store = FileStore(sys.argv[1])
        store.set("whole", "1")
        def killed(descriptor, data, offset):
            os.pwrite(descriptor, data[:{written}], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        file_store._write_all = killed
        store.multi_set(["half", "other"], ["x" * 1000, "y"])
    """
    path = tmp_path / "store"
    with ForkedProgram(worker_pool, code, path) as script:
        assert script.end() == -signal.SIGKILL, script.output
    with FileStore(path) as store:
        assert store.list_keys() == ["whole"]
        store.set("next", "2")
        assert sorted(store.list_keys()) == ["next", "whole"]


COUNTER = """
    import sys
    from rpcdist.collectives import FileStore
    store = FileStore(sys.argv[1])
    name, turns = sys.argv[2], int(sys.argv[3])
    print("ready")
    store.get("go")
    for _ in range(turns):
        store.add("total", 1)
        store.add(name, 1)
"""


@pytest.mark.multiproc
def test_processes_count_together(worker_pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with (
        FileStore(path) as store,
        ForkedProgram(worker_pool, COUNTER, path, "a", 200) as a,
        ForkedProgram(worker_pool, COUNTER, path, "b", 200) as b,
        ForkedProgram(worker_pool, COUNTER, path, "c", 200) as c,
    ):
        assert {script.line() for script in (a, b, c)} == {"ready"}
        store.set("go", "")
        assert [script.end() for script in (a, b, c)] == [0, 0, 0]
        assert store.add("total", 0) == 600


@pytest.mark.multiproc
def test_writers_killed_at_any_moment_lose_nothing_of_others(worker_pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=30) as store:
        store.set("go", "")
        names = [f"victim{number}" for number in range(4)]
        for name in names:
            with ForkedProgram(worker_pool, COUNTER, path, name, 10**9) as victim:
                victim.line()
                while store.add(name, 0) < 20:
                    pass
                victim.signal(signal.SIGKILL)
                victim.end()
        total, each = store.add("total", 0), sum(store.add(name, 0) for name in names)
        assert 0 <= total - each <= len(names)  # each victim may have died between its two additions


@pytest.mark.multiproc
def test_a_value_of_another_process_ends_a_wait(worker_pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "store"
    code = """
        import sys
        from rpcdist.collectives import FileStore
        store = FileStore(sys.argv[1], timeout=30)
        print(store.get("question").decode())
        store.queue_push("answers", "42")
    """
    with FileStore(path, timeout=30) as store, ForkedProgram(worker_pool, code, path) as script:
        store.set("question", "why?")
        assert script.line() == "why?"
        assert store.queue_pop("answers") == b"42"
        assert script.end() == 0
        with pytest.raises(StoreTimeout, match=str(path)):
            store.wait(["never"], 0.05)
