"""Works that torch's C++ code holds after the program has dropped them: they end, and with the right error."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import rpcdist.collectives.torch_backend
from rpcdist.collectives._group.callbacks import Callbacks, fail_future
from rpcdist.collectives._torch_side import held
from rpcdist.collectives.torch_backend import TorchProcessGroup, TorchWork
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveTimeout
from rpcdist.testing import wait_until_asleep

c10d: Any = torch._C._distributed_c10d
ops: Any = torch.ops._c10d_functional
LIMIT_S = 20.0


def wait_for_tensor(work: Work) -> Callable[[], object]:
    tensor = torch.zeros(1)
    c10d._register_work(tensor, TorchWork(work))
    return lambda: ops.wait_tensor(tensor)


def wait_for_box(work: Work) -> Callable[[], object]:
    box = TorchWork(work).boxed()
    return lambda: c10d.Work.unbox(box).wait()


def wait_in_reducer(work: Work) -> Callable[[], object]:
    """Of a DDP, which divides by the number in it, and waits for it in the backward pass."""
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    net.reducer._set_forward_pass_work_handle(TorchWork(work), False)
    return lambda: net(torch.ones(1, 2)).sum().backward()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("rpcdist", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


KEEPERS = [wait_for_tensor, wait_for_box, wait_in_reducer]


@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("done_first", [True, False])
def test_work_that_only_torch_holds_is_waited_for(
    keep: Callable[[Work], Callable[[], object]], done_first: bool, alone: None
) -> None:
    work = Work("kept", [torch.ones(1)])
    if done_first:
        work.complete()
    wait = keep(work)
    gc.collect()
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(wait()), daemon=True)
    thread.start()
    if not done_first:
        wait_until_asleep(thread)
        assert thread.is_alive()
        work.complete()
    thread.join(LIMIT_S)
    assert len(answers) == 1, "it waits, or has raised"


@pytest.mark.parametrize("keep", KEEPERS)
def test_work_that_only_torch_holds_raises_its_error(keep: Callable[[Work], Callable[[], object]], alone: None) -> None:
    work = Work("kept", [torch.ones(1)])
    wait = keep(work)
    gc.collect()
    work.fail(CollectiveTimeout("kept", "late"))
    with pytest.raises(CollectiveTimeout, match="kept failed: late"):
        wait()


def test_work_is_freed_when_torch_drops_it() -> None:
    freed: list[bool] = []

    class Watched(TorchWork):
        def __del__(self) -> None:
            freed.append(True)

    keeper = held(Watched(Work.finished("a")))
    gc.collect()
    assert not freed and keeper.wait()
    del keeper
    assert freed


def test_every_function_of_torch_that_takes_a_work_is_known() -> None:
    """One that a later torch adds has to be added to `keep_what_torch_holds`."""
    found = {name for name, arguments in signatures(c10d) if re.search(r": (\S*[:.])?Work\b", arguments)}
    assert found == {"Reducer._set_forward_pass_work_handle", "_register_work"}
    for owner, name in ((c10d.Reducer, "_set_forward_pass_work_handle"), (c10d, "_register_work")):
        assert hasattr(getattr(owner, name), "__wrapped__")


def signatures(owner: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Functions of C++, methods too, and their arguments without `self`, by their docstrings."""
    for name, value in vars(owner).items():
        if isinstance(value, type) and value.__module__.startswith("torch._C"):
            yield from signatures(value, f"{prefix}{name}.")
        for line in (getattr(value, "__doc__", None) or "").splitlines():
            if match := re.match(r"\s*(?:\d+\. )?\w+\((?:self: [\w.:]+,? ?)?(.*)\) -> ", line):
                yield prefix + name, match[1]


def lost(_self: object, tensors: list[torch.Tensor], _opts: object = None) -> TorchWork:
    work = Work("all_reduce", tensors, callbacks=Callbacks("test"))
    work.fail(CollectiveTimeout("all_reduce", "the other rank was lost"))
    return TorchWork(work)


# torch refuses hooks whose annotations are text.
HOOKS: dict[str, Any] = {
    "none": None,
    "future": lambda _state, bucket: lost(None, [bucket.buffer()]).get_future(),
    "callback": lambda _state, bucket: lost(None, [bucket.buffer()]).get_future().then(lambda done: done.value()[0]),
}


@pytest.mark.parametrize("name", HOOKS)
def test_a_reduction_that_failed_fails_the_backward_pass_of_ddp(
    name: str, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took the error for tensors, and ended the process with a segmentation fault."""
    net = DistributedDataParallel(torch.nn.Linear(2, 2))
    if HOOKS[name] is not None:
        net.register_comm_hook(None, HOOKS[name])
    monkeypatch.setattr(TorchProcessGroup, "allreduce", lost)
    with pytest.raises(RuntimeError, match="the other rank was lost"):
        net(torch.ones(1, 2)).sum().backward()


def test_a_future_that_failed_raises_where_python_asks() -> None:
    future: torch.futures.Future[int] = torch.futures.Future()
    fail_future(future, CollectiveTimeout("a", "late"))
    for ask in (future.wait, future.value, future.then(lambda done: done.value()).wait):
        with pytest.raises(RuntimeError, match="late"):
            ask()


def test_a_group_that_only_torch_holds_lives_until_it_is_destroyed(alone: None) -> None:
    world = dist.group.WORLD
    assert isinstance(world, TorchProcessGroup)
    lent = TorchProcessGroup(dist.HashStore(), world.group, "lent")
    kept = weakref.ref(lent)
    parameter = torch.nn.Parameter(torch.ones(2))
    c10d._register_process_group("lent", lent)
    reducer = c10d.Reducer([parameter], [[0]], [2**20, 2**20], lent)
    del lent
    gc.collect()
    assert ops.wait_tensor(ops.all_reduce(torch.ones(1), "sum", "lent")).item() == 1.0
    reducer.prepare_for_forward()
    loss = parameter.sum()
    reducer.prepare_for_backward([loss])
    loss.backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0]
    world.group.shutdown()
    c10d._unregister_process_group("lent")
    del reducer
    TorchProcessGroup(dist.HashStore(), world.group, "another")
    gc.collect()
    assert kept() is None


assert rpcdist.collectives.torch_backend.NAME == "rpcdist"
