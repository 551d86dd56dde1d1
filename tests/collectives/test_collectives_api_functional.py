"""Collectives with gradients, against the same sums in one process, and steps that fail together; ranks are threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from collectives_ranks import run_ranks

import rpcdist.collectives as c
from rpcdist.collectives import ReduceOp, collective_utils, functional
from rpcdist.errors import ConfigError, DistBackendError

SIZE = 3
ROOT = 1
SPLITS = [[1, 0, 2], [0, 3, 1], [2, 1, 1]]  # rows that rank i sends to rank j

Tensors = list[torch.Tensor]
Distributed = Callable[[int, torch.Tensor], torch.Tensor]
Plain = Callable[[Tensors], Tensors]


def shape(name: str, rank: int) -> tuple[int, ...]:
    return (sum(SPLITS[rank]), 2) if name == "all_to_all_single" else (SIZE, 4)


def split_rows(inputs: Tensors) -> Tensors:
    parts = [tensor.split(SPLITS[rank]) for rank, tensor in enumerate(inputs)]
    return [torch.cat([parts[source][rank] for source in range(SIZE)]) for rank in range(SIZE)]


def received_rows(rank: int) -> list[int]:
    return [SPLITS[source][rank] for source in range(SIZE)]


def all_to_all_single(rank: int, x: torch.Tensor) -> torch.Tensor:
    output = x.new_empty(sum(received_rows(rank)), 2)
    return functional.all_to_all_single(output, x, received_rows(rank), SPLITS[rank])


def at_root(inputs: Tensors, value: torch.Tensor) -> Tensors:
    """Elsewhere than at the root the result does not matter: zero times what the rank has."""
    return [value if rank == ROOT else x.detach() for rank, x in enumerate(inputs)]


CASES: dict[str, tuple[Distributed, Plain]] = {
    "broadcast": (lambda _, x: functional.broadcast(x, ROOT), lambda xs: [xs[ROOT]] * SIZE),
    "all_reduce": (lambda _, x: functional.all_reduce(x), lambda xs: [torch.stack(xs).sum(0)] * SIZE),
    "average": (lambda _, x: functional.all_reduce(x, ReduceOp.AVG), lambda xs: [torch.stack(xs).mean(0)] * SIZE),
    "reduce": (lambda _, x: functional.reduce(x, ROOT), lambda xs: at_root(xs, torch.stack(xs).sum(0))),
    "reduce by average": (
        lambda _, x: functional.reduce(x, ROOT, ReduceOp.AVG),
        lambda xs: at_root(xs, torch.stack(xs).mean(0)),
    ),
    "gather": (
        lambda _, x: torch.stack(functional.gather(x, ROOT)),
        lambda xs: [torch.stack(xs) if rank == ROOT else torch.zeros(SIZE, SIZE, 4).double() for rank in range(SIZE)],
    ),
    "scatter": (lambda _, x: functional.scatter(x.unbind(), ROOT), lambda xs: list(xs[ROOT].unbind())),
    "all_gather": (lambda _, x: torch.stack(functional.all_gather(x.t())), lambda xs: [torch.stack(xs).mT] * SIZE),
    "reduce_scatter": (
        lambda _, x: functional.reduce_scatter(x.new_empty(4), list(x.unbind())),
        lambda xs: list(torch.stack(xs).sum(0).unbind()),
    ),
    "reduce_scatter by average": (
        lambda _, x: functional.reduce_scatter(x.new_empty(4), list(x.unbind()), ReduceOp.AVG),
        lambda xs: list(torch.stack(xs).mean(0).unbind()),
    ),
    "all_to_all": (
        lambda _, x: torch.stack(functional.all_to_all(list(x.new_empty(SIZE, 4).unbind()), x.unbind())),
        lambda xs: list(torch.stack(xs).transpose(0, 1).unbind()),
    ),
    "all_to_all_single": (all_to_all_single, split_rows),
}


def values(name: str, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.rand(shape(name, rank), generator=generator, dtype=torch.float64)


def loss(output: torch.Tensor, rank: int) -> torch.Tensor:
    """Not linear, and different on each rank, so that first and second derivatives tell."""
    return ((rank + 2) * output).sin().sum()


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_process(name: str) -> None:
    distributed, plain = CASES[name]

    def on_rank(rank: int) -> Tensors:
        x = values(name, rank, 1).requires_grad_()
        output = distributed(rank, x)
        (first,) = torch.autograd.grad(loss(output, rank), x, create_graph=True)
        (second,) = torch.autograd.grad((first * values(name, rank, 2)).sum(), x)
        return [output, first, second]

    inputs = [values(name, rank, 1).requires_grad_() for rank in range(SIZE)]
    outputs = plain(inputs)
    total = torch.stack([loss(output, rank) for rank, output in enumerate(outputs)]).sum()
    first = torch.autograd.grad(total, inputs, create_graph=True, materialize_grads=True)
    product = torch.stack([(g * values(name, rank, 2)).sum() for rank, g in enumerate(first)]).sum()
    second = torch.autograd.grad(product, inputs, materialize_grads=True)
    for rank, found in enumerate(run_ranks(SIZE, on_rank)):
        for actual, expected in zip(found, (outputs[rank], first[rank], second[rank]), strict=True):
            torch.testing.assert_close(actual, expected)


def test_outputs_that_the_caller_brings_are_filled() -> None:
    def on_rank(rank: int) -> None:
        x = torch.full((SIZE, 2), float(rank), requires_grad=True)
        output, outputs = torch.empty(2), [torch.empty(2) for _ in range(SIZE)]
        assert functional.reduce_scatter(output, list(x.unbind())).tolist() == output.tolist() == [3.0, 3.0]
        got = functional.all_to_all(outputs, x.unbind())
        assert [each.tolist() for each in got] == [each.tolist() for each in outputs] == [[0, 0], [1, 1], [2, 2]]
        assert not output.requires_grad and got[0].requires_grad

    run_ranks(SIZE, on_rank)


def test_what_has_no_gradient_is_refused_where_one_is_wanted() -> None:
    def on_rank(rank: int) -> None:
        x = torch.full((2,), float(rank), requires_grad=True)
        with pytest.raises(ConfigError, match="MAX has no gradient in rpcdist"):
            functional.all_reduce(x, ReduceOp.MAX)
        with torch.no_grad():
            assert functional.all_reduce(x, ReduceOp.MAX).tolist() == [1, 1]
        assert x.tolist() == [rank, rank]
        with pytest.raises(ConfigError, match="scatter needs 2 tensors of one shape"):
            functional.scatter([x], 0)

    run_ranks(2, on_rank)


def test_in_a_group_of_some_ranks() -> None:
    def on_rank(rank: int) -> None:
        pair = c.new_group([2, 1])
        if rank == 0:
            return
        x = torch.tensor([float(rank)], requires_grad=True)
        functional.broadcast(x, 2, pair).backward()
        assert x.grad is not None and x.grad.item() == (2 if rank == 2 else 0)

    run_ranks(3, on_rank)


# ---------------------------------------------------------------- steps that all ranks take, or none


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


def fails(rank: int, who: int, error: Exception) -> Callable[[], str]:
    def function() -> str:
        if rank == who:
            raise error
        return f"from {rank}"

    return function


def test_values_of_one_and_of_all_ranks() -> None:
    def on_rank(rank: int) -> None:
        pg = c.group.WORLD
        assert collective_utils.broadcast(lambda: {"from": rank}, rank=1, pg=pg) == {"from": 1}
        assert collective_utils.broadcast(rank, pg=pg) == 0
        assert collective_utils.all_gather(lambda: rank * 2, "stage", pg) == [0, 2, 4]

    run_ranks(3, on_rank)
    assert collective_utils.broadcast(lambda: 5, rank=1) == 5 and collective_utils.all_gather("alone") == ["alone"]
    with pytest.raises(DistBackendError, match="rank 0 failed: KeyError: 'x'"):
        collective_utils.all_gather(fails(0, 0, KeyError("x")))


@pytest.mark.parametrize(
    ("error", "cause"), [(KeyError("lost"), KeyError), (Unpicklable("strange", "one"), DistBackendError)]
)
def test_an_exception_reaches_all_ranks(error: Exception, cause: type[Exception]) -> None:
    def on_rank(rank: int) -> None:
        pg = c.group.WORLD
        expected = f"rank 1 failed in stage 'load': .*{type(error).__name__}: "
        with pytest.raises(DistBackendError, match=expected) as caught:
            collective_utils.broadcast(fails(rank, 1, error), stage_name="load", rank=1, pg=pg)
        assert type(caught.value.__cause__) is cause
        with pytest.raises(DistBackendError, match=expected) as caught:
            collective_utils.all_gather(fails(rank, 1, error), "load", pg)
        assert type(caught.value.__cause__) is cause
        assert collective_utils.broadcast(rank, pg=pg) == 0  # and the group goes on

    run_ranks(2, on_rank)


def test_failing_by_hand_and_being_in_different_stages() -> None:
    def on_rank(rank: int) -> None:
        pg = c.group.WORLD
        with pytest.raises(DistBackendError, match=r"rank 0 failed in stage 'save'$"):
            collective_utils.broadcast(None, success=False, stage_name="save", pg=pg)
        with pytest.raises(ConfigError, match="must be None"):
            collective_utils.broadcast("value", success=False, pg=pg)
        with pytest.raises(DistBackendError, match="rank 0 is in 'stage 0', rank 1 is in 'stage 1'"):
            collective_utils.all_gather(rank, f"stage {rank}", pg)
        with pytest.raises(DistBackendError, match=r"rank 0 failed.*; rank 1 failed"):
            collective_utils.all_gather(unpicklable, pg=pg)

    run_ranks(2, on_rank)


def unpicklable() -> object:
    return lambda: None
