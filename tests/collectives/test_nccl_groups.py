"""Groups with the backend `nccl`, on a stand-in for NCCL, and machines that have no NCCL. Ranks are threads."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from collectives_ranks import run_ranks
from inside_groups import GroupContext
from nccl_stand_in import StandInRuntime, StandInWorld

import rpcdist.collectives as c
from rpcdist.collectives import HashStore, ProcessGroup, flight_recorder, nccl
from rpcdist.collectives._nccl.communicator_calls import CudaRuntime, nccl_is_usable
from rpcdist.collectives.backends import default_backend
from rpcdist.collectives.nccl import NcclBackend
from rpcdist.errors import ConfigError

# ------------------------------------------------------------ groups


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[StandInRuntime]:
    """The devices that backends of this process were given, in the order of their making."""
    world, made = StandInWorld(), []

    def make(device: torch.device) -> StandInRuntime:
        made.append(StandInRuntime(world))
        return made[-1]

    monkeypatch.setattr(nccl, "CudaRuntime", make)
    return made


def backend_of(group: ProcessGroup) -> NcclBackend:
    found = group.backend("cpu")
    assert isinstance(found, NcclBackend)
    return found


def total(group: ProcessGroup, rank: int) -> int:
    tensor = torch.tensor([rank])
    c.all_reduce(tensor, group=group)
    return int(tensor.item())


def test_split_group_splits_the_communicator(stand_ins: list[StandInRuntime]) -> None:
    """Also on the rank that is in no new group: without it the others would wait."""

    def on_rank(rank: int) -> None:
        world = c.group.WORLD
        assert world is not None
        half = c.split_group(split_ranks=[[0, 3], [1, 2]])
        if rank == 4:
            assert half is None
        else:
            assert half is not None and half.ranks == ((0, 3) if rank in (0, 3) else (1, 2))
            assert total(half, rank) == 3 and half.group_desc == "default_pg:split"
            assert backend_of(half)._runtime is backend_of(world)._runtime
        assert total(world, rank) == 10

    run_ranks(5, on_rank, backend="cpu:nccl")
    # Only the communicator of the default group was connected; the others were split from it.
    assert len(stand_ins) == 5 and [len(runtime.communicators) for runtime in stand_ins] == [1] * 5


def test_a_part_made_by_its_members_alone_connects_anew(stand_ins: list[StandInRuntime]) -> None:
    def on_rank(rank: int) -> None:
        world = c.group.WORLD
        assert world is not None
        if rank < 2:
            part = world.split_group([0, 1])
            assert part is not None and total(part, rank) == 1
        assert total(world, rank) == 3

    run_ranks(3, on_rank, backend="cpu:nccl")
    assert len(stand_ins) == 5


def test_split_group_of_other_backends_only_needs_the_members(stand_ins: list[StandInRuntime]) -> None:
    def on_rank(rank: int) -> None:
        if rank < 2:
            part = c.split_group(split_ranks=[[0, 1]])
            assert part is not None and total(part, rank) == 1

    run_ranks(3, on_rank, backend="cpu:tcp")
    assert not stand_ins


def test_messages_are_recorded(stand_ins: list[StandInRuntime]) -> None:
    def on_rank(rank: int) -> list[flight_recorder.Record]:
        if rank == 0:
            c.send(torch.ones(3), 1)
        else:
            c.recv(torch.zeros(3), 0)
        c.barrier()
        return flight_recorder.entries()

    records = [record for rank in run_ranks(2, on_rank, backend="cpu:nccl") for record in rank]
    points = [each for each in records if each.family == "point"]
    assert sorted((each.operation, each.sequence, each.detail, each.state) for each in points) == [
        ("recv", 1, "from rank 0, tag 0", "done"),
        ("send", 1, "to rank 1, tag 0", "done"),
    ]


def test_sparse_tensors(stand_ins: list[StandInRuntime]) -> None:
    def on_rank(rank: int) -> None:
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[rank, 2]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
        )
        work = c.all_reduce(tensor, async_op=True)
        assert work is not None and work.wait() and tensor.to_dense().tolist() == [1, 1, 4, 0]

    run_ranks(2, on_rank, backend="cpu:nccl")


# ------------------------------------------------------------ machines without NCCL


@pytest.fixture
def a_gpu_is_claimed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    yield


def cupy(version: str, available: bool) -> dict[str, types.ModuleType]:
    package, cuda, nccl = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    vars(package).update(__version__=version, __path__=[])
    vars(cuda).update(__path__=[])
    vars(nccl).update(available=available)
    return {"cupy": package, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs a GPU.*pip install 'rpcdist\[cuda\]' nvidia-nccl-cu12"):
        NcclBackend(GroupContext("g", 0, (0,), HashStore(), 1.0))


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"cupy": None}, r"needs CuPy with NCCL.*pip install 'rpcdist\[cuda\]'"),
        (cupy("14.0.0", False), "found CuPy 14.0.0 but no NCCL library"),
        (cupy("13.6.0", True), "needs CuPy 14 or newer, not 13.6.0"),
        (cupy("13.6.0", False), "needs CuPy 14 or newer, not 13.6.0"),
    ],
)
def test_without_cupy_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    a_gpu_is_claimed: None,
    modules: dict[str, types.ModuleType | None],
    expected: str,
) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigError, match=expected):
        CudaRuntime(torch.device("cuda", 0))
    nccl_is_usable.cache_clear()
    assert not c.is_nccl_available() and not c.is_backend_available("nccl") and default_backend() == "tcp"
    nccl_is_usable.cache_clear()


def test_it_is_the_default_where_it_can_be_used(monkeypatch: pytest.MonkeyPatch, a_gpu_is_claimed: None) -> None:
    for name, module in cupy("14.0.0", True).items():
        monkeypatch.setitem(sys.modules, name, module)
    nccl_is_usable.cache_clear()
    assert c.is_nccl_available() and default_backend() == "cpu:tcp,cuda:nccl"
    nccl_is_usable.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not c.is_nccl_available() and default_backend() == "tcp"
