"""torch's functions on our groups, in processes of their own; its engines are in tests/torch_engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch_backend_ranks

from rpcdist.collectives import HashStore, _torch_side, torch_backend
from rpcdist.collectives.torch_backend import TorchWork, register, torch_group
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveTimeout, ConfigError
from rpcdist.testing import RankPool


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "name",
    [
        "collectives",
        "objects_and_messages",
        "hooks_and_limits",
        "subgroups",
        "groups_of_groups",
        "functional",
        "marked_while_it_waits",
        "mismatch",
        "watched_barrier",
        "again",
        "ddp_compiled",
        "ddp_joined",
        "ddp_with_builtin_hooks",
    ],
)
def test_torch_runs_on_our_groups(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(2, torch_backend_ranks.run, name, rank_pool.new_file())


def test_functional_operations_that_an_older_torch_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no `batch_p2p_ops`; here is a torch that has none of them."""
    libraries: list[torch.library.Library] = []
    monkeypatch.setattr(_torch_side, "_libraries", libraries)
    monkeypatch.setattr(_torch_side, "_NAMESPACE", "operations_of_an_older_torch")
    _torch_side.serve_functional_ops(TorchWork, ["cpu"])
    assert [library._op_impls for library in libraries] == [set()]


@pytest.mark.multiproc
def test_a_group_is_made_from_a_store(rank_pool: RankPool) -> None:
    rank_pool.run(2, torch_backend_ranks.run_made_from_stores, rank_pool.new_file())


@pytest.mark.multiproc
@pytest.mark.parametrize("size", [2, 3])
def test_a_group_from_a_store_ends_when_it_is_dropped(rank_pool: RankPool, size: int) -> None:
    rank_pool.run(size, torch_backend_ranks.run_dropped, rank_pool.new_file())


def test_a_group_from_a_store_needs_sound_arguments() -> None:
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.group_id = dist.HashStore(), 3, 2, "5"
    with pytest.raises(ConfigError, match="torch 5 got rank 3 of 2"):
        torch_backend._make_group(options)
    for rank, size in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"rank {rank} of {size}"):
            torch_group(dist.HashStore(), rank, size)
    with pytest.raises(ConfigError, match="wraps a store of torch"):
        torch_group(HashStore(), 0, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="timedelta"):
        torch_group(dist.HashStore(), 0, 1, timeout=3.0)  # type: ignore[arg-type]


def test_a_world_of_one_in_this_process(tmp_path: Path) -> None:
    dist.init_process_group("rpcdist", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0] * 3 and "rpcdist" in repr(dist.get_backend())
        with pytest.warns(UserWarning, match="timeout arg as a timedelta"):
            dist.monitored_barrier(timeout=5.0)  # as torch's own groups do
    finally:
        dist.destroy_process_group()


def test_registering_again_changes_nothing() -> None:
    register()
    assert dist.is_backend_available("rpcdist") and os.getpid()


def test_work_of_several_operations_is_done_when_all_are() -> None:
    first, second = Work("a", [torch.zeros(1)]), Work("b", [torch.ones(1)])
    both = TorchWork(first, second)
    future, outcome = both.get_future(), both.get_future_result()
    first.complete(source=3)
    assert not both.is_completed() and not future.done() and both.source_rank() == 3
    with pytest.raises(CollectiveTimeout, match="b failed"):
        both.wait(0.01)
    second.complete()
    assert both.wait() and both.is_success() and both.exception() is None
    assert [tensor.item() for tensor in future.wait()] == [0.0, 1.0] and outcome.wait() == 0
    assert len(both.result()) == 2


def test_work_that_failed_says_so() -> None:
    good, bad = Work.finished("a"), Work("b")
    both = TorchWork(good, bad)
    bad.fail(CollectiveTimeout("b", "late"))
    assert both.is_completed() and not both.is_success() and isinstance(both.exception(), CollectiveTimeout)
    with pytest.raises(CollectiveTimeout):
        both.wait()
    assert both.get_future_result().wait() == 1
