"""Wrong arguments: the same calls in torch and here, and the exception here is one that torch's callers catch."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as theirs
from collectives_ranks import run_ranks
from inside_groups import World, use_world
from threads_at_once import WatchedThreads
from torch._subclasses.fake_tensor import FakeTensorMode

import rpcdist.autograd
import rpcdist.collectives as ours
from rpcdist.errors import CollectiveError, CollectiveTimeout, ConfigError, StoreTimeout
from rpcdist.parallel import DistributedDataParallel
from rpcdist.testing import UNIT_S

one = torch.ones


@pytest.fixture
def both() -> Iterator[None]:
    """A world of one rank in each package."""
    theirs.init_process_group("gloo", store=theirs.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=5))
    try:
        with use_world(World()):
            ours.init_process_group("local", store=ours.HashStore(), rank=0, world_size=1)
            try:
                yield
            finally:
                ours.destroy_process_group()
    finally:
        theirs.destroy_process_group()


# Called with each package.
WRONG: dict[str, Callable[[ModuleType], object]] = {
    "all_reduce of a list": lambda c: c.all_reduce([1]),
    "all_reduce op": lambda c: c.all_reduce(one(2), "sum"),
    "all_reduce of complex": lambda c: c.all_reduce(one(2, dtype=torch.complex64), c.ReduceOp.MAX),
    "all_reduce of float": lambda c: c.all_reduce(one(2), c.ReduceOp.BAND),
    "all_reduce of float8": lambda c: c.all_reduce(one(2).to(torch.float8_e4m3fn)),
    "broadcast without src": lambda c: c.broadcast(one(2)),
    "broadcast with both": lambda c: c.broadcast(one(2), 0, group_src=0),
    "broadcast src": lambda c: c.broadcast(one(2), 9),
    "broadcast negative src": lambda c: c.broadcast(one(2), -1),
    "broadcast group_src": lambda c: c.broadcast(one(2), group_src=9),
    "broadcast src type": lambda c: c.broadcast(one(2), "0"),
    "reduce dst": lambda c: c.reduce(one(2), 9),
    "all_gather length": lambda c: c.all_gather([one(2), one(2)], one(2)),
    "all_gather tuple": lambda c: c.all_gather((one(2),), one(2)),
    "all_gather of numbers": lambda c: c.all_gather([1], one(2)),
    "all_gather dtype": lambda c: c.all_gather([one(2)], one(2, dtype=torch.int64)),
    "all_gather size": lambda c: c.all_gather([one(2)], one(3)),
    "all_gather_single type": lambda c: c.all_gather_single([one(2)], one(2)),
    "all_gather_single size": lambda c: c.all_gather_single(one(3), one(2)),
    "all_gather_single dtype": lambda c: c.all_gather_single(one(2), one(2, dtype=torch.int64)),
    "gather without list": lambda c: c.gather(one(2)),
    "gather length": lambda c: c.gather(one(2), [one(2), one(2)]),
    "gather size": lambda c: c.gather(one(2), [one(3)]),
    "gather dst": lambda c: c.gather(one(2), dst=9),
    "gather both": lambda c: c.gather(one(2), [one(2)], dst=0, group_dst=0),
    "scatter without list": lambda c: c.scatter(one(2)),
    "scatter length": lambda c: c.scatter(one(2), [one(2), one(2)]),
    "scatter size": lambda c: c.scatter(one(2), [one(3)]),
    "scatter list type": lambda c: c.scatter(one(2), (one(2),)),
    "reduce_scatter length": lambda c: c.reduce_scatter(one(2), [one(2), one(2)]),
    "reduce_scatter size": lambda c: c.reduce_scatter(one(3), [one(2)]),
    "reduce_scatter dtype": lambda c: c.reduce_scatter(one(2), [one(2, dtype=torch.int64)]),
    "reduce_scatter_single size": lambda c: c.reduce_scatter_single(one(3), one(4)),
    "reduce_scatter_single dtype": lambda c: c.reduce_scatter_single(one(2), one(2, dtype=torch.int64)),
    "all_to_all length": lambda c: c.all_to_all([one(2), one(2)], [one(2), one(2)]),
    "all_to_all type": lambda c: c.all_to_all(one(2), one(2)),
    "all_to_all_single splits": lambda c: c.all_to_all_single(one(4), one(4), [2, 2], [2, 2]),
    "all_to_all_single sum": lambda c: c.all_to_all_single(one(4), one(4), [3], [3]),
    "all_to_all_single dtype": lambda c: c.all_to_all_single(one(4), one(4, dtype=torch.int64)),
    "send to itself": lambda c: c.send(one(2), 0),
    "send of a list": lambda c: c.isend([1], 0),
    "send without dst": lambda c: c.send(one(2)),
    "isend with both": lambda c: c.isend(one(2), 0, group_dst=0),
    "irecv of a list": lambda c: c.irecv([1], 0),
    "batch of numbers": lambda c: c.batch_isend_irecv([1]),
    "P2POp op": lambda c: c.P2POp(c.broadcast, one(2), 0),
    "P2POp tensor": lambda c: c.P2POp(c.isend, 1, 0),
    "P2POp peer": lambda c: c.P2POp(c.isend, one(2)),
    "monitored_barrier timeout": lambda c: c.monitored_barrier(timeout="x"),
    "monitored_barrier seconds": lambda c: c.monitored_barrier(timeout=3),
    "init twice": lambda c: c.init_process_group("gloo", store=c.HashStore(), rank=0, world_size=1),
    "new_group duplicates": lambda c: c.new_group([0, 0]),
    "new_group range": lambda c: c.new_group([1]),
    "new_group size": lambda c: c.new_group([0, 1]),
    "new_group negative": lambda c: c.new_group([-1]),
    "new_group timeout": lambda c: c.new_group([0], timeout=3),
    "new_group negative timeout": lambda c: c.new_group([0], timeout=timedelta(seconds=-1)),
    "new_subgroups size": lambda c: c.new_subgroups(3),
    "new_subgroups zero": lambda c: c.new_subgroups(0),
    "new_subgroups nothing": lambda c: c.new_subgroups_by_enumeration([]),
    "new_subgroups twice": lambda c: c.new_subgroups_by_enumeration([[0], [0]]),
    "backend of a stranger": lambda c: c.get_backend(c.GroupMember.NON_GROUP_MEMBER),
    "group rank": lambda c: c.get_group_rank(c.new_group([0]), 7),
    "global rank": lambda c: c.get_global_rank(c.new_group([0]), 7),
    "destroy": lambda c: c.destroy_process_group("x"),
    "shrink type": lambda c: c.shrink_group(0),
    "shrink nothing": lambda c: c.shrink_group([]),
    "shrink flags": lambda c: c.shrink_group([0], shrink_flags=7),
    "gather_object": lambda c: c.gather_object(1),
    "scatter_object_list empty": lambda c: c.scatter_object_list([], [1]),
    "scatter_object_list None": lambda c: c.scatter_object_list(None, [1]),
    "scatter_object_list input": lambda c: c.scatter_object_list([None]),
    "broadcast_object_list empty": lambda c: c.broadcast_object_list([], 0),
    "LOCAL_RANK": lambda c: c.get_node_local_rank(),
    "unknown backend": lambda c: c.new_group([0], backend="nope"),
}


def outcome(call: Callable[[ModuleType], object], package: ModuleType) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(package)
        except Exception as exc:
            return exc
    return None


@pytest.mark.parametrize("what", WRONG)
def test_exceptions_are_those_of_torch(what: str, both: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    expected, found = outcome(WRONG[what], theirs), outcome(WRONG[what], ours)
    assert expected is not None, "torch accepts this"
    if isinstance(expected, AttributeError) and "has no attribute" in str(expected):
        pytest.skip(f"torch {torch.__version__}: {expected}")
    assert isinstance(found, type(expected)), f"torch: {expected!r}\nhere: {found!r}"


Kinds = type[Exception] | tuple[type[Exception], ...]

DIFFERENT: dict[str, tuple[Callable[[ModuleType], object], Kinds, type[Exception]]] = {
    "empty batch": (lambda c: c.batch_isend_irecv([]), IndexError, ConfigError),
    "all_gather_object places": (lambda c: c.all_gather_object([], 1), IndexError, ConfigError),
    "quantized": (
        lambda c: c.all_reduce(torch.quantize_per_tensor(one(2), 0.1, 0, torch.qint8)),
        NotImplementedError,
        ConfigError,
    ),
    # torch's is an assertion since 2.14
    "empty group": (lambda c: c.new_group([]), (TypeError, AssertionError), ConfigError),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_exceptions_that_differ_on_purpose(what: str, both: None) -> None:
    call, expected, found = DIFFERENT[what]
    assert type(outcome(call, theirs)) in (expected if isinstance(expected, tuple) else (expected,))
    assert isinstance(outcome(call, ours), found)


ACCEPTED: dict[str, Callable[[ModuleType], object]] = {
    "stacked output": lambda c: c.all_gather_into_tensor(torch.zeros(1, 2), one(2)),
    "other shape of the same size": lambda c: c.all_gather([torch.zeros(4)], one(2, 2)),
    "all_to_all_single of transposed": lambda c: c.all_to_all_single(torch.zeros(4, 2), one(2, 4).t()),
    "average of integers": lambda c: c.all_reduce(one(2, dtype=torch.int64), c.ReduceOp.AVG),
    "int16": lambda c: c.all_reduce(one(2, dtype=torch.int16)),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_what_gloo_refuses_and_this_accepts(what: str, both: None) -> None:
    assert outcome(ACCEPTED[what], theirs) is not None
    assert outcome(ACCEPTED[what], ours) is None


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"store": 3, "rank": 0, "world_size": 1}, TypeError),
        ({"store": "hash", "rank": 0}, AssertionError),
        ({"store": "hash", "world_size": 1}, AssertionError),
        ({"store": "hash", "rank": 1, "world_size": 1}, AssertionError),
        ({"store": "hash", "init_method": "env://", "rank": 0, "world_size": 1}, AssertionError),
        ({"store": "hash", "rank": 0, "world_size": 1, "timeout": 3}, TypeError),
        ({"store": "hash", "rank": 0, "world_size": 1, "timeout": timedelta(seconds=-1)}, ValueError),
        ({"store": "hash", "rank": "0", "world_size": 1}, TypeError),
        ({"store": "hash", "rank": 0, "world_size": 1, "backend": "nope"}, AssertionError),
        ({"store": "hash", "rank": 0, "world_size": 1, "device_id": torch.device("cuda")}, ConfigError),
        ({"init_method": "env://"}, ConfigError),
    ],
)
def test_arguments_of_init(
    arguments: dict[str, object], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    given = {**arguments, "store": ours.HashStore()} if arguments.get("store") == "hash" else arguments
    with use_world(World()), pytest.raises(error):
        ours.init_process_group(**{"backend": "local", **given})  # type: ignore[arg-type]
    assert not ours.is_initialized()


def test_two_threads_that_make_the_default_group() -> None:
    """The second one would replace the group of the first, whose threads and sockets would then stay."""
    store, short = ours.HashStore(), timedelta(seconds=3 * UNIT_S)
    with WatchedThreads(1) as threads:
        first = threads.submit(ours.init_process_group, "tcp", store=store, rank=0, world_size=2, timeout=short)
        threads.all_asleep()
        with pytest.raises(ConfigError, match="another thread of this process is in init_process_group"):
            ours.init_process_group("tcp", store=ours.HashStore(), rank=0, world_size=1)
        with pytest.raises(StoreTimeout):
            first.result()
    ours.init_process_group("tcp", store=ours.HashStore(), rank=0, world_size=1)
    ours.destroy_process_group()


def test_without_a_default_group() -> None:
    with use_world(World()):
        calls: tuple[Callable[[], object], ...] = (
            lambda: ours.all_reduce(one(1)),
            ours.get_rank,
            ours.get_backend,
            ours.destroy_process_group,
            ours.new_group,
            ours.barrier,
        )
        for call in calls:
            with pytest.raises(ValueError, match="Default process group has not been initialized"):
                call()
        with pytest.raises(AssertionError):  # torch's
            ours.destroy_process_group()
        assert ours.group.WORLD is None and not ours.is_initialized()


NOT_MINE = ours.GroupMember.NON_GROUP_MEMBER
OUTSIDE: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: ours.all_reduce(one(1), group=NOT_MINE),
    "reduce": lambda: ours.reduce(one(1), 0, group=NOT_MINE),
    "broadcast": lambda: ours.broadcast(one(1), 0, group=NOT_MINE),
    "all_gather": lambda: ours.all_gather([one(1)], one(1), group=NOT_MINE),
    "all_gather_single": lambda: ours.all_gather_into_tensor(one(1), one(1), group=NOT_MINE),
    "gather": lambda: ours.gather(one(1), group=NOT_MINE),
    "scatter": lambda: ours.scatter(one(1), group=NOT_MINE),
    "reduce_scatter": lambda: ours.reduce_scatter(one(1), [one(1)], group=NOT_MINE),
    "reduce_scatter_single": lambda: ours.reduce_scatter_tensor(one(1), one(1), group=NOT_MINE),
    "all_to_all": lambda: ours.all_to_all([one(1)], [one(1)], group=NOT_MINE),
    "all_to_all_single": lambda: ours.all_to_all_single(one(1), one(1), group=NOT_MINE),
    "barrier": lambda: ours.barrier(NOT_MINE),
    "monitored_barrier": lambda: ours.monitored_barrier(NOT_MINE),
    "isend": lambda: ours.send(one(1), 0, NOT_MINE),
    "irecv": lambda: None if ours.recv(one(1), 0, NOT_MINE) == -1 else 1,
    "all_gather_object": lambda: ours.all_gather_object([], 1, NOT_MINE),
    "gather_object": lambda: ours.gather_object(1, group=NOT_MINE),
    "broadcast_object_list": lambda: ours.broadcast_object_list([], 0, NOT_MINE),
    "scatter_object_list": lambda: ours.scatter_object_list([], group=NOT_MINE),
    "send_object_list": lambda: ours.send_object_list([], 0, NOT_MINE),
    "recv_object_list": lambda: None if ours.recv_object_list([], 0, NOT_MINE) == -1 else 1,
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_outside_of_the_group_calls_warn_and_do_nothing(what: str) -> None:
    with pytest.warns(UserWarning, match=f"^Running {what} on global rank -1 which does not belong"):
        assert OUTSIDE[what]() is None
    assert ours.get_rank(NOT_MINE) == ours.get_world_size(NOT_MINE) == -1
    with pytest.raises(ValueError, match="this rank is not in the group"):
        ours.get_process_group_ranks(NOT_MINE)
    ours.destroy_process_group(NOT_MINE)


def test_sizes_in_a_world_of_two() -> None:
    """Mistakes that are impossible in a world of one."""

    with FakeTensorMode():
        fake = one(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a prototype, once for each process
        nested = torch.nested.nested_tensor([one(2), one(3)])
    jagged = torch.nested.nested_tensor([one(2), one(3)], layout=torch.jagged)

    def on_rank(rank: int) -> None:
        other, shared = 1 - rank, one(5)
        calls: tuple[tuple[Callable[[], object], str], ...] = (
            (lambda: ours.gather(one(2), [one(2), one(2)], dst=other), "NOT be specified on non-destination"),
            (lambda: ours.scatter(one(2), [one(2), one(2)], src=other), "NOT be specified on non-source"),
            (lambda: ours.all_to_all_single(one(3), one(3)), "cannot divide equally"),
            (lambda: ours.all_to_all_single(one(2), torch.tensor(1.0)), "no dimension to split"),
            (lambda: ours.all_to_all([one(2), one(2)], [one(3), one(3)]), "the numbers must be equal"),
            (lambda: ours.reduce_scatter_tensor(one(2), one(5)), "the numbers must be equal"),
            (lambda: ours.all_gather([one(2)] * 2, one(2)), "output tensors 0 and 1 share memory"),
            (lambda: ours.all_to_all([shared[:3], shared[2:]], [one(3), one(3)]), "share memory"),
            (lambda: ours.isend(one(2), rank), "should not be the same"),
            (lambda: ours.irecv(one(2), rank), "should not be the same"),
            (lambda: ours.send(one(2), other, tag=-1), "Tag must be nonnegative"),
            (lambda: ours.all_gather([one(1), one(1, device="meta")], one(1)), "on one device"),
            (lambda: ours.all_reduce(one(1, device="meta")), "a tensor on the device meta has none"),
            (lambda: ours.broadcast(torch.eye(2).to_sparse(), 0), "groups carry dense tensors"),
            (lambda: ours.all_reduce(nested), "this one is nested"),  # it has no strides
            (lambda: ours.all_gather([one(2), one(2)], nested), "this one is nested"),
            (lambda: ours.isend(nested, other), "this one is nested"),
            (lambda: ours.irecv(jagged, other), "this one is nested"),
            (lambda: ours.broadcast(jagged, 0), "this one is nested"),
            (lambda: ours.all_reduce(fake), "a FakeTensor has none"),  # its address is 0
            (lambda: ours.all_gather([one(2), one(2)], fake), "a FakeTensor has none"),
            (lambda: ours.broadcast(fake, rank), "a FakeTensor has none"),
            (lambda: ours.isend(fake, other), "a FakeTensor has none"),
            (lambda: ours.irecv(fake, other), "a FakeTensor has none"),
            (lambda: ours.scatter_object_list([None], [1], src=rank), "1 objects for 2 ranks"),
        )
        for call, text in calls:
            with pytest.raises(ValueError, match=text):
                call()
        ours.barrier()  # nothing was sent, so the group works

    run_ranks(2, on_rank)


def test_monitored_barrier_names_who_is_missing() -> None:
    def on_rank(rank: int) -> None:
        if rank == 1:
            return
        with pytest.raises(RuntimeError, match=r"ranks \[1\] did not arrive"):
            ours.monitored_barrier(timeout=timedelta(seconds=0.2))
        with pytest.raises(CollectiveTimeout):
            ours.barrier(timeout=timedelta(seconds=0.01))

    run_ranks(3, on_rank)


def test_operations_on_a_destroyed_group() -> None:
    def on_rank(rank: int) -> None:
        group = ours.new_group()
        ours.destroy_process_group(group)
        with pytest.raises(ValueError, match="was destroyed"):
            ours.all_reduce(one(1), group=group)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            ours.destroy_process_group(group)

    run_ranks(2, on_rank)


FOLDERS = [Path(folder).resolve() for package in (rpcdist, ours, rpcdist.autograd) for folder in package.__path__]


def frames_of_ours(error: BaseException) -> int:
    """How many frames of its traceback lie in this package, those of causes included."""
    shown: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    files = list[Path]()
    while shown is not None:
        files += [Path(frame.filename).resolve() for frame in shown.stack]
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return sum(any(file.is_relative_to(folder) for folder in FOLDERS) for file in files)


MISMATCHED: dict[str, Callable[[int], object]] = {
    "size": lambda rank: ours.all_reduce(one(2 + rank)),
    "root": lambda rank: ours.broadcast(one(2), rank),
    "operation": lambda rank: ours.barrier() if rank else ours.all_reduce(one(2)),
    "a gathering": lambda rank: ours.all_gather([one(2), one(2)], one(2)) if rank else ours.barrier(),
    "not waited for": lambda rank: (ours.all_reduce(one(2 + rank), async_op=True) or ours.Work("")).wait(),
    "objects": lambda rank: ours.all_gather_object([None, None], 1) if rank else ours.barrier(),
    "a message": lambda rank: ours.recv(one(3), 0) if rank else ours.send(one(2), 1),
    "a gradient bucket": lambda rank: gradients(2 + rank),
}


def gradients(size: int) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2), check_reduction=False)
    for _ in range(size):
        model(one(2)).sum().backward()
    ours.barrier()


@pytest.mark.parametrize("case", MISMATCHED)
def test_the_traceback_of_a_mismatch_shows_the_program_and_one_line_of_ours(case: str) -> None:
    def on_rank(rank: int) -> int | None:
        try:
            for _ in range(3):
                MISMATCHED[case](rank)
        except CollectiveError as error:
            return frames_of_ours(error)
        return None  # a message that was sent before it was refused

    frames = run_ranks(2, on_rank, backend="tcp")
    assert frames == [1, 1] or (case == "a message" and frames == [None, 1])


def test_a_premultiplied_sum_without_a_factor_is_refused_and_the_group_goes_on() -> None:
    def on_rank(rank: int) -> float:
        for op in (ours.ReduceOp.PREMUL_SUM, theirs.ReduceOp.PREMUL_SUM):
            for call in (ours.all_reduce, lambda tensor, op: ours.reduce(tensor, 0, op)):
                with pytest.raises(ConfigError, match="PREMUL_SUM needs a factor"):
                    call(one(2), op=op)
        total = torch.tensor([rank + 1.0])
        ours.all_reduce(total)
        return total.item()

    assert run_ranks(2, on_rank) == [3, 3]
