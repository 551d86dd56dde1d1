"""Names of torch since 2.14: `gather_single`, hooks, `set_timeout`, `weights_only`, and refused arguments; ranks are
threads. The expected values of hooks are those that torch's Gloo gives them.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_distributed
from collectives_ranks import LIMIT_S, run_ranks

import rpcdist.collectives as c
from rpcdist.collectives import HookOpName, PostHookArgs, PreHookArgs, ProcessGroup
from rpcdist.errors import CollectiveError, ConfigError, GroupAborted

SIZE = 3
HOOK = 7


def world() -> ProcessGroup:
    group = c.group.WORLD
    assert isinstance(group, ProcessGroup)
    return group


# ------------------------------------------------------------ gather_single


@pytest.mark.parametrize("gather", [c.gather_single, c.gather_into_tensor])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_gather_single(gather: Callable[..., Any], dtype: torch.dtype) -> None:
    def on_rank(rank: int) -> None:
        def tensor(of: int) -> torch.Tensor:
            return (torch.arange(6).view(2, 3) + 10 * of).to(dtype)

        everyone = torch.stack([tensor(of) for of in range(SIZE)])
        for shape in ((SIZE, 2, 3), (SIZE * 2, 3), (SIZE * 6,)):
            for root in range(SIZE):
                output = torch.zeros(shape, dtype=dtype)
                gather(tensor(rank).t().contiguous().t(), output if rank == root else None, dst=root)
                assert torch.equal(output, everyone.view(shape) if rank == root else torch.zeros(shape, dtype=dtype))
        output = torch.zeros(SIZE, 3, 2, dtype=dtype).transpose(1, 2)  # not contiguous
        work = gather(tensor(rank), output, group_dst=0, async_op=True)  # the others' output is not used
        assert work.wait() and torch.equal(output, everyone if rank == 0 else torch.zeros_like(everyone))
        assert work.result() == ([output] if rank == 0 else [])
        output = torch.zeros(SIZE * 6, dtype=dtype)
        world().gather_single(output, tensor(rank), c.GatherOptions(rootRank=1)).wait()
        assert output.tolist() == (everyone.flatten().tolist() if rank == 1 else [0] * SIZE * 6)

    run_ranks(SIZE, on_rank)


def test_what_gather_single_refuses() -> None:
    def on_rank(rank: int) -> None:
        one = torch.ones(2)
        if rank == 0:  # before anything is sent, so that the others need not come
            with pytest.raises(ConfigError, match="must be specified on the destination rank"):
                c.gather_single(one)
            with pytest.raises(ConfigError, match=r"`gather_tensor` has 5 elements .* 3 times `tensor` has 6"):
                c.gather_single(one, torch.zeros(5))
            with pytest.raises(ConfigError, match=r"dtype is torch\.int64, but the input's is torch\.float32"):
                c.gather_single(one, torch.zeros(6, dtype=torch.int64))
        with pytest.raises(TypeError, match=r"`tensor` of type torch.Tensor"):
            c.gather_single(3)  # type: ignore[arg-type]

    run_ranks(SIZE, on_rank)
    with pytest.warns(UserWarning, match="Running gather_single on global rank"):  # not on threads that share filters
        assert c.gather_single(torch.ones(2), group=c.GroupMember.NON_GROUP_MEMBER) is None


# ------------------------------------------------------------ hooks around operations

X = [1.0, 2.0]
Seen = tuple[HookOpName, bool, list[list[float]], list[list[float]], int]


def ops(rank: int) -> list[tuple[str, Callable[[], Any], Seen]]:
    """Calls on rank 0 of 3, and what torch's hooks are told of each."""
    x = torch.tensor(X)
    zeros, flat = [[0.0, 0.0]] * SIZE, [0.0] * 6
    root, pair = rank == 0, [x.clone(), x.clone()]

    def new(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape)

    def each() -> list[torch.Tensor]:
        return [new(2) for _ in range(SIZE)]

    def message(sender: int, receive: Callable[[], Any]) -> Any:
        return c.send(x, SIZE - 1 - sender) if rank == sender else receive() if rank in (0, SIZE - 1) else None

    name = HookOpName
    return [
        ("all_reduce", lambda: c.all_reduce(x.clone()), (name.ALLREDUCE, False, [X], [], -1)),
        ("async", lambda: c.all_reduce(x.clone(), async_op=True).wait(), (name.ALLREDUCE, True, [X], [], -1)),  # type: ignore[union-attr]
        ("broadcast", lambda: c.broadcast(x.clone(), 1), (name.BROADCAST, False, [X], [], 1)),
        ("reduce", lambda: c.reduce(x.clone(), 2), (name.REDUCE, False, [X], [], 2)),
        ("all_gather", lambda: c.all_gather(each(), x), (name.ALLGATHER, False, [X], zeros, -1)),
        ("single", lambda: c.all_gather_single(new(6), x), (name.ALLGATHER, False, [X], [flat], -1)),
        ("gather", lambda: c.gather(x, each() if root else None), (name.GATHER, False, [X], zeros, 0)),
        ("gather_single", lambda: c.gather_single(x, new(6) if root else None), (name.GATHER, False, [X], [flat], 0)),
        ("scatter", lambda: c.scatter(x.clone(), each() if root else None), (name.SCATTER, False, zeros, [X], 0)),
        ("reduce_scatter", lambda: c.reduce_scatter(x.clone(), each()), (name.REDUCE_SCATTER, False, zeros, [X], -1)),
        ("tensor", lambda: c.reduce_scatter_tensor(x.clone(), new(6)), (name.REDUCE_SCATTER, False, [flat], [X], -1)),
        ("all_to_all", lambda: c.all_to_all(each(), each()), (name.ALLTOALL, False, zeros, zeros, -1)),
        ("all_to_all_single", lambda: c.all_to_all_single(new(6), new(6)), (name.ALLTOALL, False, [flat], [flat], -1)),
        ("barrier", c.barrier, (name.BARRIER, False, [], [], -1)),
        ("send", lambda: message(0, lambda: c.recv(x.clone(), 0)), (name.SEND, True, [X], [], 2)),
        ("recv", lambda: message(2, lambda: c.recv(x.clone(), 2)), (name.RECV, True, [], [X], 2)),
        ("recv any", lambda: message(2, lambda: c.recv(x.clone())), (name.RECV, True, [], [X], -1)),
        ("method", lambda: world().allreduce([x.clone()]).wait(), (name.ALLREDUCE, True, [X], [], -1)),
        ("coalesced", lambda: world().allreduce_coalesced(pair).wait(), (name.ALLREDUCE, True, [X, X], [], -1)),
        ("strided", lambda: c.all_reduce(torch.tensor([X, X]).t()[0]), (name.ALLREDUCE, False, [[1.0, 1.0]], [], -1)),
    ]


def test_hooks_are_told_of_each_operation_as_by_torch() -> None:
    def on_rank(rank: int) -> None:
        before: list[tuple[Seen, int]] = []
        after: list[tuple[HookOpName, bool, bool, int]] = []

        def pre(args: PreHookArgs) -> None:
            inputs, outputs = ([each.tolist() for each in given] for given in (args.input_tensors, args.output_tensors))
            before.append(((args.name, args.async_op, inputs, outputs, args.root), args.op_id))

        def post(args: PostHookArgs) -> None:
            after.append((args.name, args.async_op, isinstance(args.work, c.Work), args.op_id))

        group = world()
        group.register_pre_hook(HOOK, pre)
        group.register_post_hook(HOOK, post)
        for number, (title, call, expected) in enumerate(ops(rank)):
            call()
            if rank == 0:
                assert before[-1] == (expected, number), title
                assert after[-1] == (*expected[:2], True, number), title
                assert len(before) == len(after) == number + 1, title
        c.monitored_barrier()  # not an operation of hooks, as in torch
        group.unregister_pre_hook(HOOK)
        group.unregister_pre_hook(HOOK)  # no longer there
        num_seen = len(before)
        c.barrier()
        assert len(before) == num_seen and after[-1][0] is HookOpName.BARRIER
        group.unregister_post_hook(HOOK)
        c.barrier()
        assert after[-1][3] == num_seen

    run_ranks(SIZE, on_rank)


def test_one_hook_is_told_of_a_sparse_sum_once() -> None:
    def on_rank(rank: int) -> None:
        seen: list[PreHookArgs] = []
        world().register_pre_hook(HOOK, seen.append)
        mine = torch.eye(SIZE)[rank].to_sparse()
        c.all_reduce(mine)
        assert mine.to_dense().tolist() == [1.0] * SIZE
        assert [(args.name, args.input_tensors[0].layout) for args in seen] == [
            (HookOpName.ALLREDUCE, torch.sparse_coo)
        ]

    run_ranks(SIZE, on_rank, backend="tcp")


def test_what_a_hook_raises_reaches_the_caller() -> None:
    def on_rank(rank: int) -> None:
        def refuse(args: object) -> None:
            raise ValueError("no more of these")

        group, one = world(), torch.ones(1)
        group.register_pre_hook(HOOK, refuse)
        with pytest.raises(ValueError, match="no more of these"):
            c.all_reduce(one)  # it does not start, on any rank
        group.unregister_pre_hook(HOOK)
        group.register_post_hook(HOOK, refuse)
        with pytest.raises(ValueError, match="no more of these"):
            c.all_reduce(one)
        group.unregister_post_hook(HOOK)
        assert one.item() == SIZE  # it went on
        c.all_reduce(one)
        assert one.item() == SIZE**2

    run_ranks(SIZE, on_rank)


def test_abort_hooks_run_once_and_before_operations_fail() -> None:
    all_looked = threading.Barrier(SIZE)

    def on_rank(rank: int) -> list[str]:
        events: list[str] = []
        assert world().supports_abort_hooks and not world().supports_completion_hooks

        def fail() -> None:
            events.append("second")
            raise ValueError("ignored, and logged")

        group = world()
        group.register_abort_hook(1, lambda: events.append("first"))
        group.register_abort_hook(2, fail)
        group.register_abort_hook(3, lambda: events.append("never"))
        group.unregister_abort_hook(3)
        group.unregister_abort_hook(4)
        c.barrier()
        assert not events
        all_looked.wait(LIMIT_S)
        if rank == 0:
            group.abort()
        with pytest.raises((GroupAborted, CollectiveError)):
            c.all_reduce(torch.ones(1))
        events.append("the operation")
        group.abort()
        return events

    outcome = run_ranks(SIZE, on_rank, backend="tcp")
    assert outcome == [["first", "second", "the operation"]] * SIZE


def test_backends_without_abort_hooks_say_so() -> None:
    def on_rank(rank: int) -> None:
        assert not world().supports_abort_hooks
        with pytest.raises(ConfigError, match="Backend local does not support register_abort_hook"):
            world().register_abort_hook(1, lambda: None)

    run_ranks(1, on_rank)


# ------------------------------------------------------------ limits and backends


def test_set_timeout_and_the_limit_of_an_operation() -> None:
    def on_rank(rank: int) -> None:
        def limit(**named: Any) -> timedelta:
            work = c.barrier(async_op=True, **named)
            assert work is not None and work.wait()
            return work.timeout

        assert limit() == world().timeout
        c.set_timeout(timedelta(seconds=33))
        assert limit() == timedelta(seconds=33) == world().timeout
        assert limit(timeout=timedelta(seconds=5)) == timedelta(seconds=5)
        other = c.new_group(list(range(SIZE)))
        c.set_timeout(timedelta(seconds=44), other)
        assert limit(group=other) == timedelta(seconds=44) and limit() == timedelta(seconds=33)
        sent = c.isend(torch.ones(1), (rank + 1) % SIZE)
        received = c.irecv(torch.ones(1), (rank - 1) % SIZE)
        assert sent is not None and received is not None and sent.wait() and received.wait()
        assert sent.timeout == received.timeout == timedelta(seconds=33)
        with pytest.raises(TypeError, match=r"of type datetime.timedelta, got 3"):
            c.set_timeout(3)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="Invalid process group specified"):
            c.set_timeout(timedelta(seconds=1), c.GroupMember.NON_GROUP_MEMBER)

    run_ranks(SIZE, on_rank)


def test_the_backend_of_a_group() -> None:
    def on_rank(rank: int) -> None:
        group = world()
        backend = c.get_backend_impl()
        assert isinstance(backend, c.BackendBase) and backend.name == "local"
        for same in (c.get_backend_impl(group), c.get_backend_impl(group.group_name), c.get_backend_impl(device="cpu")):
            assert same is backend
        assert group.get_backend(torch.device("cpu")) is backend
        with pytest.raises(ConfigError, match="No backend type associated with device type cuda"):
            c.get_backend_impl(device=torch.device("cuda"))
        with pytest.raises(ConfigError, match="no group with the name 'nobody'"):
            c.get_backend_impl("nobody")

    run_ranks(1, on_rank)


def test_a_group_of_several_backends_asks_for_the_device() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(ConfigError, match=r"multiple backend implementations .*cpu:local,cuda:tcp"):
            c.get_backend_impl()
        assert c.get_backend_impl(device="cuda").name == "tcp"

    run_ranks(1, on_rank, backend="cpu:local,cuda:tcp")


# ------------------------------------------------------------ objects


class Stranger:
    """Not one of the types that `torch.load(weights_only=True)` makes."""


SAFE = {"step": 3, "lr": 0.1, "names": ["a", ("b", None)]}


def test_objects_of_plain_types_only() -> None:
    def on_rank(rank: int) -> None:
        mine, root = {**SAFE, "rank": rank}, rank == 0
        everyone = [{**SAFE, "rank": of} for of in range(SIZE)]
        places: list[Any] = [None] * SIZE
        c.all_gather_object(places, mine, weights_only=True)
        assert places == everyone
        places = [None] * SIZE
        c.gather_object(mine, places if root else None, weights_only=True)
        assert places == (everyone if root else [None] * SIZE)
        both: list[Any] = [mine, torch.full((2,), float(rank))]
        c.broadcast_object_list(both, 1, weights_only=True)
        assert both[0] == everyone[1] and both[1].tolist() == [1.0, 1.0]
        out: list[Any] = [None]
        c.scatter_object_list(out, everyone if root else None, weights_only=True)
        assert out == [everyone[rank]]
        if rank < 2:
            sent: list[Any] = [mine, ValueError("as an error")]
            if root:
                c.send_object_list(sent, 1, weights_only=True)
            else:
                assert c.recv_object_list(sent, 0, weights_only=True) == 0
                assert sent[0] == everyone[0] and type(sent[1]) is ValueError and sent[1].args == ("as an error",)

    run_ranks(SIZE, on_rank)


def test_other_objects_are_refused_where_they_arrive() -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises(pickle.UnpicklingError, match="Stranger"):
            c.all_gather_object([None] * SIZE, Stranger(), weights_only=True)
        places: list[Any] = [None] * SIZE
        c.all_gather_object(places, Stranger())
        assert all(isinstance(each, Stranger) for each in places)

    run_ranks(SIZE, on_rank)


@pytest.mark.parametrize("receiver", [False, True])
def test_both_sides_have_to_say_the_same(receiver: bool) -> None:
    def on_rank(rank: int) -> None:
        values: list[Any] = [3]
        if rank == 0:
            c.broadcast_object_list(values, 0, weights_only=not receiver)
        else:
            with pytest.raises(ConfigError, match=f"weights_only={not receiver} and is received with {receiver}"):
                c.broadcast_object_list(values, 0, weights_only=receiver)

    run_ranks(2, on_rank)


# ------------------------------------------------------------ what is refused, by name


def test_refusals_name_what_to_do() -> None:
    def on_rank(rank: int) -> None:
        group = world()
        assert not group.supports_reconfigure and not group.supports_window
        with pytest.raises(ConfigError, match="Backend local does not support reconfigure: call grow_group"):
            group.reconfigure(object())
        with pytest.raises(ConfigError, match="does not support get_reconfigure_handle: call grow_group"):
            group.get_reconfigure_handle()
        with pytest.raises(ConfigError, match="Backend local does not support new_window; use send and recv"):
            group.new_window()

    run_ranks(1, on_rank)
    with pytest.raises(ConfigError, match="enable_reconfigure is not supported"):
        c.init_process_group("tcp", store=c.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
    assert not c.is_initialized()


def test_what_gloo_of_this_torch_refuses() -> None:
    """The table in docs/coming_from_torch.md: there is a reason beside what we refuse and Gloo does not."""
    torch_distributed.init_process_group("gloo", store=torch_distributed.HashStore(), rank=0, world_size=1)
    try:
        gloo: Any = torch_distributed.group.WORLD
        if not hasattr(gloo, "new_window"):
            pytest.skip("torch has had these methods since 2.14")
        with pytest.raises(RuntimeError, match="Backend gloo does not support new_window"):
            gloo.new_window()
        with pytest.raises(RuntimeError, match="Backend gloo does not support gather_single"):
            gloo.gather_single(torch.ones(1), torch.ones(1))
        with pytest.raises(RuntimeError, match="Backend gloo does not support registerAbortHook"):
            gloo.register_abort_hook(HOOK, lambda: None)
        assert gloo.get_reconfigure_handle()  # ours keeps its ranks
    finally:
        torch_distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupNCCLLazy"])
def test_classes_of_torch_for_isinstance_alone(name: str) -> None:
    kind = getattr(c, name)

    def on_rank(rank: int) -> None:
        assert not isinstance(world(), kind)

    run_ranks(1, on_rank)
    with pytest.raises(ConfigError, match=rf"torch's class {name}; create .*init_process_group\('nccl'\)"):
        kind(None, 0, 1)
    with pytest.raises(ConfigError, match=r"pg_options of rpcdist are rpcdist\.collectives\.nccl\.NcclOptions"):
        kind.Options()
