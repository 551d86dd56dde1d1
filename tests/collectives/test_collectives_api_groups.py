"""Groups: how they are made, named, found and destroyed. Ranks are threads on the local backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from collectives_local import LocalBackend
from collectives_ranks import LIMIT_S, run_ranks
from inside_groups import World, current_world, use_world

import rpcdist.collectives as c
from rpcdist.collectives import HashStore, ProcessGroup, Store, functional
from rpcdist.errors import CollectiveMismatch, GroupAborted, RendezvousError, StoreTimeout


def total(group: ProcessGroup | None, rank: int) -> float:
    """The sum of the members' ranks in the world: it shows the members of the group as its operations see them."""
    tensor = torch.tensor([float(rank)])
    c.all_reduce(tensor, group=group)
    return tensor.item()


def test_the_default_group() -> None:
    def on_rank(rank: int) -> None:
        group = c.group.WORLD
        assert group is not None and c.GroupMember.WORLD is group and c.is_initialized()
        assert (c.get_rank(), c.get_world_size(), c.get_pg_count()) == (rank, 3, 1)
        assert (group.rank(), group.size(), group.group_name, group.group_desc) == (rank, 3, "0", "default_pg")
        assert c.get_backend() == "local" and c.get_backend_config() == "cpu:local"
        assert c.get_process_group_ranks(None) == [0, 1, 2] and group.bound_device_id is None
        assert group.timeout == timedelta(seconds=LIMIT_S)
        assert "rank" in repr(group) and "cpu:local" in repr(group)

    run_ranks(3, on_rank)
    assert not c.is_initialized()


def test_new_group_and_rank_maths() -> None:
    def on_rank(rank: int) -> tuple[str, ...]:
        group = c.new_group([3, 1], group_desc="odd")
        other = c.new_group([0, 2], timeout=timedelta(seconds=5))
        everybody = c.new_group()
        mine = group if rank % 2 else other
        assert (other if rank % 2 else group) == c.GroupMember.NON_GROUP_MEMBER
        assert c.get_process_group_ranks(mine) == [rank % 2, rank % 2 + 2]
        assert c.get_rank(mine) == rank // 2 == c.get_group_rank(mine, rank)
        assert c.get_global_rank(mine, rank // 2) == rank and c.get_world_size(mine) == 2
        assert total(mine, rank) == (4 if rank % 2 else 2)
        assert total(everybody, rank) == 6
        assert mine.group_desc == ("odd" if rank % 2 else "undefined")
        assert c.get_pg_count() == 4
        # Roots are ranks in the world, or in the group.
        for src, group_src in ((rank % 2 + 2, None), (None, 1)):
            tensor = torch.tensor([float(rank)])
            c.broadcast(tensor, src, mine, group_src=group_src)
            assert tensor.item() == rank % 2 + 2
        return mine.group_name, everybody.group_name

    names = run_ranks(4, on_rank)
    assert names == [("2", "3"), ("1", "3")] * 2


def test_order_of_ranks() -> None:
    def on_rank(rank: int) -> None:
        group = c.new_group([2, 0, 1], sort_ranks=False)
        assert c.get_process_group_ranks(group) == [2, 0, 1] and c.get_rank(group) == [1, 2, 0][rank]
        out = torch.zeros(3)
        c.all_gather_into_tensor(out, torch.tensor([float(rank)]), group=group)
        assert out.tolist() == [2, 0, 1]
        assert c.get_process_group_ranks(c.new_group([2, 0, 1])) == [0, 1, 2]

    run_ranks(3, on_rank)


def test_local_synchronization_needs_the_members_only() -> None:
    """Ranks make different numbers of groups, and yet their names agree."""

    def on_rank(rank: int) -> list[str]:
        names = []
        if rank != 2:
            first = c.new_group([0, 1], use_local_synchronization=True)
            second = c.new_group([0, 1], use_local_synchronization=True)
            assert first.group_name != second.group_name and total(second, rank) == 1
            names = [first.group_name, second.group_name]
        if rank != 0:
            assert total(c.new_group([1, 2], use_local_synchronization=True), rank) == 3
        assert c.new_group([(rank + 1) % 3], use_local_synchronization=True) is None
        return names

    names = run_ranks(3, on_rank)
    assert names[0] == names[1]


def test_subgroups() -> None:
    def on_rank(rank: int) -> None:
        mine, groups = c.new_subgroups(2)
        assert c.get_process_group_ranks(mine) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert len(groups) == 2 and groups[rank // 2] is mine and total(mine, rank) == (1 if rank < 2 else 5)
        mine, groups = c.new_subgroups_by_enumeration([[3, 0], [1]])
        assert [each if isinstance(each, int) else 1 for each in groups].count(1) == (0 if rank == 2 else 1)
        assert mine is None if rank == 2 else total(mine, rank) == [3, 1, 0, 3][rank]

    run_ranks(4, on_rank)


def test_split() -> None:
    def on_rank(rank: int) -> None:
        half = c.split_group(split_ranks=[[0, 1], [2, 3]])
        assert half is not None and total(half, rank) == (1 if rank < 2 else 5)
        assert half.group_desc == "default_pg:split" and half.name() == "local"
        alone = c.split_group(half, [[1]])  # ranks are those in the parent
        assert alone is None if rank % 2 == 0 else alone is not None and alone.ranks == (rank,)
        again = half.split_group([1, 0], group_desc="again")
        assert again is not None and again.ranks == half.ranks and again.group_desc == "again"
        wrong_splits: list[list[list[int]]] = [[], [[]], [[0, 0]], [[7]], [[0, 1, 2, 3, 4]]]
        for wrong in wrong_splits:
            with pytest.raises(ValueError):
                c.split_group(split_ranks=wrong)
        with pytest.raises(ValueError, match="Backend mismatch"):
            c.split_group(split_ranks=[[0, 1, 2, 3]], backend="cpu:tcp")

    run_ranks(4, on_rank)


def test_shrink() -> None:
    def on_rank(rank: int) -> None:
        part = c.new_group([0, 1, 2])
        if rank == 1:
            return
        if rank != 3:
            smaller = c.shrink_group([1], part)
            assert smaller.ranks == (0, 2) and total(smaller, rank) == 2
            with pytest.raises(ValueError, match="destroyed"):
                c.barrier(part)
        world = c.shrink_group([1], shrink_flags=1)
        assert c.group.WORLD is world and world.size() == 3 and world.rank() == [0, -1, 1, 2][rank]
        assert c.get_process_group_ranks(world) == [0, 1, 2] and total(None, rank) == 5
        half = c.new_group([0, 1])
        assert half == c.GroupMember.NON_GROUP_MEMBER if world.rank() == 2 else total(half, rank) == 2

    run_ranks(4, on_rank)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: c.shrink_group([0, 0]), ValueError),
        (lambda: c.shrink_group([9]), ValueError),
        (lambda: c.shrink_group(["0"]), TypeError),  # type: ignore[list-item]
        (lambda: c.shrink_group([0, 1]), ValueError),
        (lambda: c.shrink_group([c.get_rank()]), RuntimeError),
    ],
)
def test_wrong_ranks_to_exclude(call: object, error: type[Exception]) -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(error):
            call()  # type: ignore[operator]

    run_ranks(2, on_rank)


def test_a_missing_rank_is_named() -> None:
    def on_rank(rank: int) -> None:
        if rank in (0, 3):
            with pytest.raises(StoreTimeout, match=r"making group '1': ranks 1, 2 have not come within 0.2 s"):
                c.new_group(timeout=timedelta(seconds=0.2))

    run_ranks(4, on_rank)


@pytest.mark.parametrize("odd", [[2, 1, 0], [1, 0], [0, 1, 2, 3]], ids=str)
def test_groups_that_differ_are_reported_on_all_ranks(odd: list[int]) -> None:
    """Also to ranks that would have to wait for one that never comes."""

    def on_rank(rank: int) -> None:
        if rank < 3 and not (rank == 2 and len(odd) == 2):
            with pytest.raises(CollectiveMismatch, match="all ranks must pass the same arguments"):
                c.new_group(odd if rank == 1 else [0, 1, 2], sort_ranks=False, timeout=timedelta(seconds=LIMIT_S))

    run_ranks(4, on_rank)


def start(rank: int, size: int, store: Store, timeout_s: float = LIMIT_S, backend: str = "local") -> None:
    c.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


def in_threads(size: int, function: object) -> list[BaseException | None]:
    """Runs `function(rank)` on threads with worlds of their own; returns the errors."""
    errors: list[BaseException | None] = [None] * size

    def main(rank: int) -> None:
        try:
            with use_world(World()):
                function(rank)  # type: ignore[operator]
        except BaseException as exc:
            errors[rank] = exc

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return errors


def test_again_with_the_same_store() -> None:
    store = HashStore(LIMIT_S)

    def on_rank(rank: int) -> None:
        for _ in range(20):
            start(rank, 3, store)
            assert total(None, rank) == 3 and total(c.new_group(), rank) == 3
            c.destroy_process_group()
            assert c.group.WORLD is None and c.get_pg_count() == 0

    assert in_threads(3, on_rank) == [None] * 3


def test_an_attempt_that_failed_can_be_repeated() -> None:
    """One rank comes late, after the others gave up; all meet when they try again, however often each has tried."""
    store = HashStore(LIMIT_S)
    gave_up = threading.Barrier(3)

    def on_rank(rank: int) -> None:
        if rank < 2:
            with pytest.raises(StoreTimeout, match=r"the default group: rank 2 has not come within 0.1 s"):
                start(rank, 3, store, 0.1)
        gave_up.wait(LIMIT_S)
        start(rank, 3, store)
        assert total(None, rank) == 3
        c.destroy_process_group()

    assert in_threads(3, on_rank) == [None] * 3


@pytest.mark.parametrize("shared", [0, 1])
def test_two_processes_of_one_rank_are_told_so(shared: int) -> None:
    """Without waiting where the first rank came twice: the earlier process may be left from an earlier start."""
    store = HashStore(LIMIT_S)

    def on_rank(place: int) -> None:
        start(shared if place < 2 else 0, 3 if shared else 2, store, LIMIT_S if place == 0 and not shared else 0.4)

    errors = in_threads(3 if shared else 2, on_rank)
    late = [str(error) for error in errors if isinstance(error, StoreTimeout)]
    earlier = [str(error) for error in errors if isinstance(error, RendezvousError)]
    assert len(late) + len(earlier) == len(errors) and len(earlier) <= 1, errors
    assert all(f"rank {1 + shared} has not come" in text for text in late)
    assert all(f"another process joined as rank {shared} after this one" in text for text in earlier)
    several = [text for text in late if text.endswith(f"Several processes came as rank {shared}: each needs its own.")]
    assert (earlier and several) if not shared else (earlier or several), errors


def test_a_new_process_takes_the_place_of_one_that_died() -> None:
    store = HashStore(LIMIT_S)
    met = threading.Barrier(2)

    def on_rank(rank: int) -> None:
        start(rank, 2, store)
        assert total(None, rank) == 1
        met.wait(LIMIT_S)
        c.destroy_process_group()
        with use_world(World()) if rank == 1 else nullcontext():  # rank 1 is a new process now
            start(rank, 2, store)
            assert total(None, rank) == 1
            c.destroy_process_group()

    assert in_threads(2, on_rank) == [None] * 2


def test_ranks_in_one_process_share_nothing() -> None:
    def on_rank(rank: int) -> World:
        c.barrier()
        assert len(current_world().process.recorder.entries()) == 1
        with ThreadPoolExecutor(1) as pool:  # a thread without a world of its own is in that of the process
            assert not pool.submit(c.is_initialized).result()
        return current_world()

    worlds = run_ranks(2, on_rank, backend="tcp")
    assert len({id(world.process) for world in worlds}) == 2
    assert current_world() not in worlds and not c.is_initialized()


def test_another_world_size_is_reported() -> None:
    store = HashStore(LIMIT_S)

    def on_rank(rank: int) -> None:
        start(rank, 2 if rank == 0 else 3, store)

    first, second = in_threads(2, on_rank)
    assert isinstance(first, CollectiveMismatch) and "of 3 ranks" in str(first)
    assert isinstance(second, CollectiveMismatch) and "of 2 ranks" in str(second)  # it does not wait for rank 2


def test_abort_and_a_new_beginning() -> None:
    store = HashStore(LIMIT_S)

    def on_rank(rank: int) -> None:
        start(rank, 2, store)
        group = c.group.WORLD
        assert group is not None
        if rank == 0:
            with pytest.raises(GroupAborted):
                c.barrier()
        else:
            group.abort()
        c.destroy_process_group()
        start(rank, 2, store)
        assert total(None, rank) == 1
        c.destroy_process_group()

    assert in_threads(2, on_rank) == [None] * 2


def test_timeouts_can_be_changed() -> None:
    def on_rank(rank: int) -> None:
        group = c.group.WORLD
        assert group is not None
        group.set_timeout(timedelta(seconds=0.1))
        assert group.timeout == timedelta(seconds=0.1)
        with pytest.raises(TypeError):
            group.set_timeout(3)  # type: ignore[arg-type]
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"ranks \[1\] did not arrive in time"):
                c.barrier()

    run_ranks(2, on_rank)


def test_destroying_frees_the_backends() -> None:
    def on_rank(rank: int) -> None:
        groups = [c.group.WORLD, c.new_group()]
        backends = [group.backend("cpu") for group in groups if group is not None]
        c.destroy_process_group(groups[1])
        assert [isinstance(each, LocalBackend) and each._closed for each in backends] == [False, True]
        c.barrier()

    run_ranks(2, on_rank)


def test_messages() -> None:
    def on_rank(rank: int) -> None:
        group = c.new_group([2, 1, 0], sort_ranks=False)
        if rank == 0:
            c.send(torch.ones(2), 1)
            c.send(torch.full((2,), 2.0).expand(3, 2).t(), group_dst=1, group=group, tag=7)
            work = c.isend(torch.zeros(0), dst=1, tag=9)
            assert work is not None and work.wait()
        elif rank == 1:
            tensor = torch.zeros(3, 2).t()
            assert c.recv(tensor, tag=7, group=group) == 0 and tensor.sum().item() == 12
            assert c.recv(torch.zeros(0), src=0, tag=9) == 0
            other = torch.zeros(2)
            assert c.recv(other, group_src=0) == 0 and other.tolist() == [1, 1]

    run_ranks(3, on_rank)


def test_batches() -> None:
    def on_rank(rank: int) -> None:
        received = torch.zeros(2)
        operations = [
            c.P2POp(c.irecv, received, (rank - 1) % 3),
            c.P2POp(c.isend, torch.full((2,), float(rank)), group_peer=(rank + 1) % 3),
        ]
        works = c.batch_isend_irecv(operations)
        assert len(works) == 2 and all(work.wait() for work in works)
        assert received[0].item() == (rank - 1) % 3
        backend = c.group.WORLD.backend("cpu") if c.group.WORLD else None
        assert isinstance(backend, LocalBackend) and backend.batches == ["start", "end"]
        assert repr(operations[1]).startswith(f"P2POp(isend pg=0, group_src={rank}, group_dst={(rank + 1) % 3},")

    run_ranks(3, on_rank)


def test_objects() -> None:
    def on_rank(rank: int) -> None:
        group = c.new_group([0, 2])
        everything: list[object] = [None] * 3
        c.all_gather_object(everything, {"rank": rank, "text": "x" * (rank * 1000)})
        assert [each["rank"] for each in everything if isinstance(each, dict)] == [0, 1, 2]
        gathered: list[object] | None = [None] * 3 if rank == 1 else None
        c.gather_object(torch.full((2,), float(rank)), gathered, dst=1)
        assert gathered is None or [each.sum().item() for each in gathered if isinstance(each, torch.Tensor)] == [
            0,
            2,
            4,
        ]
        shared: list[object] = [1, "two", None] if rank == 2 else [None] * 3
        c.broadcast_object_list(shared, src=2)
        assert shared == [1, "two", None]
        mine: list[object] = [None, "stays"]
        c.scatter_object_list(mine, [(each, "y" * each) for each in range(3)] if rank == 0 else None)
        assert mine == [(rank, "y" * rank), "stays"]
        if rank != 1:
            pair: list[object] = [rank] if rank == 2 else [None]
            c.broadcast_object_list(pair, group=group, group_src=1)
            assert pair == [2]
        for use_batch in (False, True):
            if rank == 0:
                c.send_object_list(["a", {"b": 1}], 1, use_batch=use_batch)
            elif rank == 1:
                received: list[object] = [None, None]
                assert c.recv_object_list(received, 0 if use_batch else None, use_batch=use_batch) == 0
                assert received == ["a", {"b": 1}]

    run_ranks(3, on_rank)


# ---------------------------------------------------------------- a world of one, with the real backend and rendezvous


@pytest.fixture
def closed_stores() -> Iterator[None]:
    yield
    c.close_stores()


@pytest.mark.parametrize("backend", ["tcp", "gloo", None])
def test_a_world_of_one(backend: str | None) -> None:
    c.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        tensor = torch.arange(3.0)
        c.all_reduce(tensor)
        assert tensor.tolist() == [0, 1, 2]
        out = torch.zeros(1, 3)
        c.all_gather_into_tensor(out, tensor)
        assert out[0].tolist() == [0, 1, 2]
        name = backend or "tcp"
        assert c.get_backend() == name and c.get_backend_config() == f"cpu:{name},cuda:{name}"
        with pytest.raises(ValueError, match="still uses the store"):
            c.close_stores()
    finally:
        c.destroy_process_group()


def test_file_rendezvous(tmp_path: Path, closed_stores: None) -> None:
    for _ in range(2):
        c.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        c.barrier()
        c.destroy_process_group()


def test_store_of_torch() -> None:
    c.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    c.barrier()
    c.destroy_process_group()


def test_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert c.get_node_local_rank() == 3
    monkeypatch.delenv("LOCAL_RANK")
    assert c.get_node_local_rank(1) == 1
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        c.get_node_local_rank()


def test_members_of_several_groups_cut_them_at_once() -> None:
    """Each parent names its own subgroups, however many it makes; the world's next group is the same for all."""

    def on_rank(rank: int) -> list[object]:
        own, _ = c.new_subgroups_by_enumeration([[0, 2, 4], [1, 3]])
        cut, every = c.new_subgroups(1, group=own)
        again, _ = c.new_subgroups(own.size(), group=own)
        both, _ = c.new_subgroups(5)
        totals = [total(group, 1) for group in (own, cut, again, both, c.new_group())]
        return [cut.ranks, len(every), *totals]

    outcomes = run_ranks(5, on_rank)
    assert outcomes == [[(rank,), 3 - rank % 2, 3 - rank % 2, 1, 3 - rank % 2, 5, 5] for rank in range(5)]


def test_who_is_through_finds_the_default_group_on_all_ranks() -> None:
    store = HashStore(LIMIT_S)
    worlds = [World() for _ in range(4)]

    def on_rank(rank: int) -> None:
        for _ in range(10):
            with use_world(worlds[rank]):
                start(rank, 4, store)
                assert all(world.default is not None for world in worlds)
                c.barrier()
                c.destroy_process_group()

    assert in_threads(4, on_rank) == [None] * 4


def test_a_rank_that_is_not_through_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore(LIMIT_S)
    begin = World.begin

    def fail_on_rank_1(world: World, default: ProcessGroup, own: Store) -> None:
        if default.rank() == 1:
            raise KeyboardInterrupt
        begin(world, default, own)

    monkeypatch.setattr(World, "begin", fail_on_rank_1)

    def on_rank(rank: int) -> None:
        start(rank, 2, store, 0.5)

    first, second = in_threads(2, on_rank)
    assert isinstance(first, StoreTimeout) and "it is not set on rank 1 after 0.5 s" in str(first)
    assert isinstance(second, KeyboardInterrupt)


@pytest.mark.parametrize("gives_up", [True, False])
def test_the_ranks_of_a_tcp_group_hear_of_one_that_is_not_through(
    monkeypatch: pytest.MonkeyPatch, gives_up: bool
) -> None:
    """They meet through the group and not in the store."""
    store = HashStore(LIMIT_S)
    begin = World.begin
    first_is_done = threading.Event()

    def be_late_on_rank_1(world: World, default: ProcessGroup, own: Store) -> None:
        if default.rank() == 1:
            if gives_up:
                raise KeyboardInterrupt
            assert first_is_done.wait(LIMIT_S)
        begin(world, default, own)

    monkeypatch.setattr(World, "begin", be_late_on_rank_1)

    def on_rank(rank: int) -> None:
        try:
            start(rank, 2, store, LIMIT_S if gives_up else 3.0, "tcp")  # in which both come, also on a busy machine
        finally:
            if rank == 0:
                first_is_done.set()

    first, second = in_threads(2, on_rank)
    if gives_up:
        assert isinstance(first, GroupAborted) and "rank 1 aborted the group" in str(first)
        assert isinstance(second, KeyboardInterrupt)
    else:
        assert isinstance(first, StoreTimeout) and "these ranks did not join within 3 s: 1. " in str(first)
        assert isinstance(second, StoreTimeout) and str(second) == str(first)


@pytest.mark.parametrize("base", [Store, torch.distributed.Store], ids=["ours", "torchs"])
def test_a_programs_own_store_with_few_methods_is_enough(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table: dict[str, bytes] = {}
            self.lock = threading.Lock()

        def set(self, key: str, value: bytes) -> None:
            self.table[key] = value

        def get(self, key: str) -> bytes:
            return self.table[key]

        def add(self, key: str, amount: int) -> int:
            with self.lock:
                total = int(self.table.get(key, b"0")) + amount
                self.table[key] = str(total).encode()
                return total

    store = Own()

    def on_rank(rank: int) -> None:
        for _ in range(3):
            start(rank, 2, store)
            assert total(c.new_group(), rank) == 1
            c.destroy_process_group()

    assert in_threads(2, on_rank) == [None] * 2


@pytest.mark.parametrize("whole", [np.int64, np.int32, torch.tensor], ids=["int64", "int32", "tensor"])
def test_ranks_and_tags_may_be_integers_of_numpy_and_torch(whole: Callable[[int], Any]) -> None:
    """Programs take ranks from arrays and meshes; torch accepts whatever has `__index__`."""

    def on_rank(rank: int) -> None:
        group = c.new_group([whole(1), whole(0)])
        assert c.get_process_group_ranks(group) == [0, 1]
        assert all(type(member) is int for member in c.get_process_group_ranks(group))
        assert c.get_group_rank(group, whole(1)) == 1 == c.get_global_rank(group, whole(1))
        assert total(c.new_group(whole_tensor_or_array(whole, [0, 1])), rank) == 1
        _, groups = c.new_subgroups_by_enumeration([[whole(0)], [whole(1)]])
        assert len(groups) == 2
        split = c.split_group(split_ranks=[[whole(0)], [whole(1)]])
        assert split is not None and split.size() == 1
        value = torch.tensor([float(rank)])
        c.broadcast(value, whole(1))
        c.reduce(value, dst=whole(0))
        c.broadcast(value, group_src=whole(0))
        assert value.item() == 2
        objects: list[object] = [rank]
        c.broadcast_object_list(objects, whole(1))
        assert objects == [1]
        other = whole(1 - rank)
        received = torch.empty(1)
        sending, receiving = c.isend(value, other, tag=whole(3)), c.irecv(received, other, tag=whole(3))
        assert sending is not None and receiving is not None
        sending.wait(), receiving.wait()
        operations = [c.P2POp(c.isend, value, other), c.P2POp(c.irecv, received, other, tag=whole(0))]
        for work in c.batch_isend_irecv(operations):
            work.wait()
        assert received.item() == 2
        sizes, parts = whole_tensor_or_array(whole, [1, 1]), torch.zeros(2)
        c.all_to_all_single(parts, torch.arange(2.0) + 10 * rank, sizes, sizes)
        assert parts.tolist() == [rank, 10 + rank]
        with pytest.raises(TypeError, match=r"`output_split_sizes` must be a whole number, not 1\.0"):
            c.all_to_all_single(parts, parts, [1.0, 1.0], sizes)  # type: ignore[list-item]
        world = cast(Any, c.group.WORLD)
        for sent in (world.send([value], other, whole(4)), world.recv([received], other, whole(4))):
            sent.wait()
        world.broadcast([value], whole(1)).wait()
        assert functional.broadcast(value, whole(1)).item() == value.item() == 2
        for method in (world.broadcast, world.reduce):
            with pytest.raises(TypeError, match=r"`root` must be a whole number, not 1\.0"):  # and the group goes on
                method([value], 1.0)
        with pytest.raises(TypeError, match=r"`rank` must be a whole number, not 0\.0"):
            c.broadcast(value, 0.0)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="`rank` must be a whole number, not '0'"):
            c.new_group(["0", "1"])  # type: ignore[list-item]

    run_ranks(2, on_rank)


def whole_tensor_or_array(whole: Callable[[int], Any], ranks: list[int]) -> Any:
    return torch.tensor(ranks) if whole is torch.tensor else np.array([whole(rank) for rank in ranks])
