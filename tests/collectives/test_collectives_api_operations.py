"""The contents of the tensors after every function, for layouts and dtypes that need care; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from collectives_ranks import run_ranks

import rpcdist.collectives as c
from rpcdist.collectives import ReduceOp
from rpcdist.collectives._api import operations
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.dense import Copies, is_ready, separate
from rpcdist.collectives._operations.lowering import Place
from rpcdist.collectives._operations.operation import describe_fingerprint
from rpcdist.errors import ConfigError

SIZE = 3

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(1, *t.shape[1:]), t])[1:],
    "empty": lambda t: t[:0].clone(),
    "leaf": lambda t: t.clone().requires_grad_() if t.is_floating_point() else t.clone(),
}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.bool,
)


def value(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Shape (4, 3); small whole numbers, so that sums are exact in every dtype."""
    numbers = (torch.arange(12).view(4, 3) + 5 * rank) % 7
    return numbers.to(dtype) + (1j * numbers.flip(0)).to(dtype) if dtype.is_complex else numbers.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one.detach(), other.detach())


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as many libraries make them."""

    wrapped: torch.Tensor

    @staticmethod
    def __new__(cls, tensor: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype)
        made.wrapped = tensor
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*[one.wrapped if isinstance(one, Wrapper) else one for one in args], **(kwargs or {}))


def test_tensors_without_memory_of_their_own() -> None:
    """A rank read, and wrote to, the address 0."""

    def on_rank(rank: int) -> None:
        mine = Wrapper(value(rank))
        assert not is_ready(mine)
        c.all_reduce(mine)
        assert same(mine.wrapped, value(0) + value(1))
        passed = Wrapper(torch.full((300_000,), float(rank)))
        if rank == 0:
            c.send(passed, 1)
        else:
            c.recv(passed, 0)
        assert not passed.wrapped.any()
        with pytest.raises(RuntimeError):  # of torch, which names what it does not allow
            torch.func.vmap(lambda row: c.all_reduce(row))(value(rank))

    run_ranks(2, on_rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_dtypes(layout: str, dtype: torch.dtype) -> None:
    make = LAYOUTS[layout]

    def on_rank(rank: int) -> None:
        def tensor(of: int) -> torch.Tensor:
            return make(value(of, dtype))

        def blank() -> torch.Tensor:
            return make(torch.zeros_like(value(0, dtype)))

        all_ranks = [tensor(each).detach() for each in range(SIZE)]
        stacked = torch.stack(all_ranks)
        total = stacked.any(0) if dtype is torch.bool else stacked.sum(0).to(dtype)

        reduced = tensor(rank)
        assert c.all_reduce(reduced) is None
        assert same(reduced, total)

        at_root = tensor(rank)
        c.reduce(at_root, 1)
        assert same(at_root, total if rank == 1 else tensor(rank))

        copy = tensor(rank)
        c.broadcast(copy, src=2)
        assert same(copy, tensor(2))

        gathered = [blank() for _ in range(SIZE)]
        c.all_gather(gathered, tensor(rank))
        assert all(map(same, gathered, all_ranks))

        gathered = [blank() for _ in range(SIZE)]
        c.gather(tensor(rank), gathered if rank == 0 else None, dst=0)
        assert rank != 0 or all(map(same, gathered, all_ranks))

        received = blank()
        c.scatter(received, [tensor(each) for each in range(SIZE)] if rank == 1 else None, src=1)
        assert same(received, tensor(rank))

        received = blank()
        c.reduce_scatter(received, [tensor(rank) for _ in range(SIZE)])
        assert same(received, total)

        swapped = [blank() for _ in range(SIZE)]
        c.all_to_all(swapped, [tensor(rank) for _ in range(SIZE)])
        assert all(map(same, swapped, all_ranks))

        single = torch.zeros_like(stacked)
        c.all_gather_single(single, tensor(rank))
        assert same(single, stacked)

        received = blank()
        c.reduce_scatter_tensor(received, stacked)
        expected = stacked[rank] if dtype is torch.bool else (stacked[rank] * SIZE).to(dtype)
        assert same(received, expected)

    run_ranks(SIZE, on_rank)


def test_no_dimensions() -> None:
    def on_rank(rank: int) -> None:
        number = torch.tensor(float(rank))
        c.all_reduce(number)
        assert number.item() == 3
        many = torch.zeros(SIZE)
        c.all_gather_into_tensor(many, torch.tensor(float(rank)))
        assert many.tolist() == [0, 1, 2]
        out = torch.tensor(0.0)
        c.reduce_scatter_tensor(out, torch.arange(3.0))
        assert out.item() == 3 * rank

    run_ranks(SIZE, on_rank)


@pytest.mark.parametrize("shape", [(SIZE * 4, 3), (SIZE, 4, 3), (36,)])
def test_single_output_is_concatenated_or_stacked(shape: tuple[int, ...]) -> None:
    def on_rank(rank: int) -> None:
        out = torch.empty(shape)
        c.all_gather_into_tensor(out, value(rank))
        assert torch.equal(out.view(SIZE, 4, 3), torch.stack([value(each) for each in range(SIZE)]))
        part = torch.empty(4, 3)
        c.reduce_scatter_tensor(part, out)
        assert torch.equal(part, value(rank) * SIZE)

    run_ranks(SIZE, on_rank)


def test_outputs_that_are_inputs() -> None:
    """Every way of using one memory for both that torch's users know."""

    def on_rank(rank: int) -> None:
        whole = torch.zeros(SIZE, 2)
        whole[rank] = rank + 1
        c.all_gather_into_tensor(whole, whole[rank])
        assert whole[:, 0].tolist() == [1, 2, 3]
        chunks = list(torch.arange(6.0).view(3, 2).unbind())
        c.reduce_scatter(chunks[rank], chunks)
        assert torch.equal(chunks[rank], torch.arange(6.0).view(3, 2)[rank] * SIZE)
        ring = [torch.full((2,), 10.0 * rank + each) for each in range(SIZE)]
        c.all_to_all(ring, ring)
        assert [each[0].item() for each in ring] == [10.0 * each + rank for each in range(SIZE)]
        parts = [torch.full((2,), float(each)) for each in range(SIZE)]
        c.scatter(parts[0], parts if rank == 0 else None, src=0)
        assert parts[0][0].item() == rank
        flat = torch.arange(3.0) + 10 * rank
        c.all_to_all_single(flat, flat)
        assert flat.tolist() == [rank, 10 + rank, 20 + rank]
        same_place = [torch.full((2,), float(rank)) for _ in range(SIZE)]
        c.all_gather(same_place, same_place[0])
        assert [each[0].item() for each in same_place] == [0, 1, 2]

    run_ranks(SIZE, on_rank)


def test_all_to_all_single_with_splits() -> None:
    def on_rank(rank: int) -> None:
        rows = [each + 1 for each in range(SIZE)]  # rank i sends j + 1 rows to rank j
        out = torch.zeros((rank + 1) * SIZE, 2)
        c.all_to_all_single(out, torch.full((6, 2), float(rank)), [rank + 1] * SIZE, rows)
        assert out[:, 0].tolist() == [float(each) for each in range(SIZE) for _ in range(rank + 1)]
        nothing = torch.zeros(0, 2)
        c.all_to_all_single(nothing, torch.zeros(0, 2))
        some = torch.zeros(SIZE if rank == 1 else 0)
        c.all_to_all_single(some, torch.ones(1), [1] * SIZE if rank == 1 else [0] * SIZE, [0, 1, 0])
        assert some.sum().item() == some.numel()

    run_ranks(SIZE, on_rank)


def test_lazily_conjugated_and_negated_tensors() -> None:
    def on_rank(rank: int) -> None:
        conjugated = torch.full((2,), 1 + 2j).conj()
        c.all_reduce(conjugated)
        assert torch.equal(conjugated, torch.full((2,), 3 - 6j))
        negated = torch.full((2,), 1 + 2j).conj().imag
        assert negated.is_neg()
        c.all_reduce(negated)
        assert negated.tolist() == [-6, -6]

    run_ranks(SIZE, on_rank)


def test_complex_with_its_parts() -> None:
    """As in torch: a complex tensor goes with real ones of twice as many numbers."""

    def on_rank(rank: int) -> None:
        out = [torch.zeros(2, 2) for _ in range(SIZE)]
        c.all_gather(out, torch.full((2,), complex(rank, 1)))
        assert [each[0].tolist() for each in out] == [[0, 1], [1, 1], [2, 1]]

    run_ranks(SIZE, on_rank)


def test_dtypes_that_are_only_moved() -> None:
    dtype = torch.float8_e4m3fnuz

    def on_rank(rank: int) -> None:
        tensor = torch.full((4,), float(rank + 1)).to(dtype)
        c.broadcast(tensor, 1)
        assert tensor.float().tolist() == [2.0] * 4
        out = [torch.zeros(2, 3).to(dtype).t() for _ in range(SIZE)]
        c.all_gather(out, torch.full((2, 3), float(rank)).to(dtype).t())
        assert [each.float().sum().item() for each in out] == [0, 6, 12]

    run_ranks(SIZE, on_rank)


def test_expanded_and_inference_tensors() -> None:
    def on_rank(rank: int) -> None:
        wide = torch.full((1, 2), float(rank)).expand(4, 2)
        c.all_reduce(wide)
        assert wide.tolist() == [[3, 3]] * 4
        with torch.inference_mode():
            frozen = torch.full((2, 3), float(rank)).t()
        c.all_reduce(frozen)
        assert frozen[0, 0].item() == 3

    run_ranks(SIZE, on_rank)


@pytest.mark.parametrize("op", list(ReduceOp)[:8], ids=lambda op: op.name)
def test_reduce_operations_of_both_packages(op: ReduceOp) -> None:
    dtype = torch.int64 if op.name.startswith("B") else torch.float64

    def on_rank(rank: int) -> None:
        one, other = value(rank, dtype), value(rank, dtype)
        c.all_reduce(one, op)
        c.all_reduce(other, getattr(theirs.ReduceOp, op.name))
        assert torch.equal(one, other)
        wrapped = value(rank, dtype)
        c.all_reduce(wrapped, theirs.ReduceOp(getattr(theirs.ReduceOp, op.name)))
        assert torch.equal(one, wrapped)

    run_ranks(SIZE, on_rank)


@pytest.mark.parametrize("tensor_factor", [False, True])
@pytest.mark.parametrize("make", [c._make_nccl_premul_sum, theirs._make_nccl_premul_sum], ids=["ours", "theirs"])
def test_premultiplied_sum(make: Callable[[object], object], tensor_factor: bool) -> None:
    def on_rank(rank: int) -> float:
        tensor = torch.ones(2)
        factor = rank + 0.5
        c.all_reduce(tensor, make(torch.tensor([factor]) if tensor_factor else factor))
        return tensor[0].item()

    assert run_ranks(SIZE, on_rank) == [4.5] * SIZE


def test_asynchronous_calls_return_work() -> None:
    def on_rank(rank: int) -> None:
        tensors = [value(rank).t() for _ in range(4)]
        works = [c.all_reduce(tensor, async_op=True) for tensor in tensors]
        total = torch.stack([value(each) for each in range(SIZE)]).sum(0).t()
        for work, tensor in zip(works, tensors, strict=True):
            assert work is not None and work.wait() and work.is_success()
            assert work.result()[0] is tensor  # the caller's own, not the temporary one
            assert torch.equal(tensor, total)
        work = c.barrier(async_op=True)
        assert work is not None and work.wait()
        other = value(rank)
        last = c.all_reduce(other, async_op=True)
        assert last is not None and torch.equal(last.get_future().wait()[0], total.t())

    run_ranks(SIZE, on_rank)


@pytest.mark.filterwarnings("ignore:.*_coalesced:FutureWarning")
def test_coalesced_functions() -> None:
    def on_rank(rank: int) -> None:
        tensors = [torch.full((2, 3), float(rank)).t(), torch.ones(4), torch.tensor(2.0)]
        c.all_reduce_coalesced(tensors)
        assert [each.flatten()[0].item() for each in tensors] == [3, 3, 6]
        future = c.all_reduce_coalesced([torch.ones(2)], async_op=True)
        assert future is not None and future.wait()[0].tolist() == [3, 3]
        out = [[torch.zeros(2), torch.zeros(3)] for _ in range(SIZE)]
        c.all_gather_coalesced(out, [torch.full((2,), float(rank)), torch.full((3,), -float(rank))])
        assert [[each.sum().item() for each in row] for row in out] == [[0, 0], [2, -3], [4, -6]]

    run_ranks(SIZE, on_rank)


def test_lower_case_methods() -> None:
    def on_rank(rank: int) -> None:
        group = c.group.WORLD
        assert group is not None
        x = torch.full((2,), float(rank))
        assert group.allreduce(x.clone()).wait() and group.allreduce([x.clone()], ReduceOp.MAX).wait()
        for options in (c.AllreduceOptions(reduceOp=ReduceOp.MAX), torch_options(theirs.ReduceOp.MAX)):
            y = x.clone()
            group.allreduce([y], options).wait()
            assert y[0].item() == 2
        y = x.clone()
        group.broadcast([y], c.BroadcastOptions(rootRank=1)).wait()
        assert y[0].item() == 1
        y = x.clone()
        group.reduce([y], 1).wait()
        assert y[0].item() == (3 if rank == 1 else rank)
        out = [torch.zeros(2) for _ in range(SIZE)]
        group.allgather([out], [x]).wait()
        assert [each[0].item() for each in out] == [0, 1, 2]
        flat = torch.zeros(6)
        group._allgather_base(flat, x).wait()
        group._reduce_scatter_base(y, flat).wait()
        assert y[0].item() == rank * SIZE
        group.reduce_scatter([y], [out]).wait()
        group.gather([out] if rank == 0 else [], [x], c.GatherOptions(rootRank=0)).wait()
        group.scatter([y], [out] if rank == 0 else [], c.ScatterOptions(rootRank=0)).wait()
        assert y[0].item() == rank
        group.alltoall(out, [x.clone() for _ in range(SIZE)]).wait()
        group.alltoall_base(torch.zeros(3), torch.zeros(3), [], []).wait()
        group.allreduce_coalesced([torch.ones(1), torch.ones(2)]).wait()
        group.reduce_scatter_tensor_coalesced([y], [flat]).wait()
        group.allgather_into_tensor_coalesced([flat], [y]).wait()
        assert flat[::2].tolist() == [rank * SIZE for rank in range(SIZE)]
        group.allgather_coalesced([[each] for each in out], [x * 2]).wait()
        assert [each[0].item() for each in out] == [0, 2, 4]
        group.barrier().wait()
        group.barrier(c.BarrierOptions()).wait()
        group.monitored_barrier()
        if rank == 0:
            group.send([x], 1, 5).wait()
            group.send([x], 2, 5).wait()
        elif rank == 1:
            group.recv([y], 0, 5).wait()
        else:
            work = group.recv_anysource([y], 5)
            assert work.wait() and work.source_rank() == 0

    def torch_options(op: object) -> object:
        made = theirs.AllreduceOptions()
        made.reduceOp = op  # type: ignore[assignment]
        return made

    run_ranks(SIZE, on_rank)


def test_contiguous_tensors_are_used_as_they_are() -> None:
    copies = Copies()
    tensor = torch.ones(3, 2)
    assert copies.read(tensor) is tensor and copies.write(tensor) is tensor and copies.update(tensor) is tensor
    assert copies.finish() is None
    assert copies.write(tensor.t()) is not tensor and copies.finish() is not None


@pytest.mark.parametrize(
    ("source", "target", "copied"),
    [((0, 4), (4, 8), False), ((0, 4), (0, 4), True), ((0, 5), (4, 8), True), ((5, 6), (4, 8), True)],
)
def test_inputs_that_share_memory_with_an_output_are_copied(
    source: tuple[int, int], target: tuple[int, int], copied: bool
) -> None:
    memory = torch.arange(8.0)
    given = memory[slice(*source)]
    (found,) = separate([given], [memory[slice(*target)]])
    assert (found is not given) == copied and torch.equal(found, given)
    if source == target:
        assert separate([given], [memory[slice(*target)]], (0, 0))[0] is given


def test_aliases_are_the_same_functions() -> None:
    """The two names of one operation cannot drift apart."""

    def on_rank(rank: int) -> None:
        one, other = torch.zeros(SIZE), torch.zeros(SIZE)
        operations.all_gather_into_tensor(one, torch.ones(1))
        operations.all_gather_single(other, torch.ones(1))
        assert torch.equal(one, other)

    run_ranks(SIZE, on_rank)


def test_tensors_that_are_reduced_together_count_as_one() -> None:
    lowered = lowering.all_reduce_many(Place(0, 2), [torch.ones(3), torch.ones(0), torch.ones(2, 2)], ReduceOp.AVG)
    assert describe_fingerprint(lowered.operation.fingerprint(7)) == "all_reduce #7 (AVG, 7 elements of float32)"
    assert lowered.operation.size_bytes == 28
    with pytest.raises(ConfigError, match="have one dtype"):
        lowering.all_reduce_many(Place(0, 2), [torch.ones(3), torch.ones(3).double()], ReduceOp.SUM)


@pytest.mark.parametrize("count", [4, 400_000], ids=["small", "large"])
@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_default_device_does_not_matter(backend: str, count: int) -> None:
    """The memory that a group needs for itself is on the CPU, also if the program makes its tensors elsewhere."""

    def on_rank(rank: int) -> None:
        with torch.device("meta"):
            cpu = torch.device("cpu")
            mine = torch.full((count,), rank + 1.0, device=cpu)
            total = mine.clone()
            c.all_reduce(total)
            least = mine.double()
            c.all_reduce(least, ReduceOp.MIN)
            assert total[-1] == 6 and least[-1] == 1
            gathered = torch.zeros(SIZE * count, device=cpu)
            c.all_gather_into_tensor(gathered, mine)
            scattered, exchanged = torch.zeros_like(mine), torch.zeros_like(gathered)
            c.reduce_scatter_tensor(scattered, gathered)
            c.all_to_all_single(exchanged, gathered)
            expected = torch.tensor([1.0, 2, 3], device=cpu).repeat_interleave(count)
            assert torch.equal(gathered, expected) and torch.equal(scattered, mine * SIZE)
            assert torch.equal(exchanged, torch.full_like(exchanged, rank + 1.0))
            sent = c.isend(mine, (rank + 1) % SIZE, tag=1)
            later = c.isend(mine * 10, (rank + 1) % SIZE, tag=2)
            assert sent is not None and later is not None
            c.barrier()  # what has come until now is kept, for a receive that is still to be posted
            for tag, factor in ((2, 10), (1, 1)):
                c.recv(scattered, (rank - 1) % SIZE, tag=tag)
                assert scattered[-1] == factor * ((rank - 1) % SIZE + 1)
            sent.wait()
            later.wait()
            rows = torch.tensor([[rank]], device=cpu)
            sparse = torch.sparse_coo_tensor(rows, mine[None], (SIZE, count), device=cpu, check_invariants=True)
            c.all_reduce(sparse)
            assert torch.equal(sparse.to_dense()[:, 0], torch.tensor([1.0, 2, 3], device=cpu))
            objects: list[Any] = [None] * SIZE
            c.all_gather_object(objects, {"first": mine[:2]})
            assert [each["first"].tolist() for each in objects] == [[1, 1], [2, 2], [3, 3]]
            assert c.init_device_mesh("cpu", (SIZE,)).mesh.tolist() == [0, 1, 2]

    run_ranks(SIZE, on_rank, backend=backend)
