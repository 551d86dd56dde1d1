"""Parts of a pass whose order is known, and those that need verdicts, say the same: any mixture gives the gradients."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from full_sets import num_examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside_agents import agent_of
from torch import Tensor

import rpcdist.autograd as autograd
import rpcdist.rpc as rpc
from rpcdist.autograd import _autograd_worker
from rpcdist.autograd._autograd_worker import make_part
from rpcdist.autograd._backward_pass import BackwardPass
from rpcdist.autograd._context import make_id
from rpcdist.autograd._direct_part import DirectPart, find_sources
from rpcdist.autograd._general_part import GeneralPart
from rpcdist.autograd._pass_message import PassMessage
from rpcdist.testing import LIMIT_S, InProcessCluster

WORKERS = ("a", "b", "c")
rpc_sync: Any = rpc.rpc_sync


def product(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).tanh()


def swap(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Passes tensors on as they are."""
    return y, x


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x + 2 * y  # what results share cannot run twice
    return hidden.sin(), hidden * x


def apart(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().clamp(max=3.0), y.cos()


FUNCTIONS = {one.__name__: one for one in (product, swap, both, apart)}


def nested(to: str, name: str, x: Tensor, y: Tensor) -> Any:
    """The function on another worker, with a share of this one."""
    found = call(to, name, x * 0.5, y)
    return (found[0] * x, *found[1:]) if isinstance(found, tuple) else found * x


def call(to: str | None, name: str, x: Tensor, y: Tensor) -> Any:
    return FUNCTIONS[name](x, y) if to is None else rpc_sync(to, FUNCTIONS[name], (x, y))


Step = tuple[str | None, str, str | None, int, int]
"""On which worker (None: here), which function, on which further worker, and the numbers of its arguments."""


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Step], list[int]]:
    steps: list[Step] = []
    num_values = 3
    for _ in range(draw(st.integers(1, 6))):
        name = draw(st.sampled_from(sorted(FUNCTIONS)))
        numbers = st.integers(0, num_values - 1)
        worker, further = draw(st.sampled_from((None, *WORKERS))), draw(st.sampled_from((None, None, *WORKERS)))
        steps.append((worker, name, further, draw(numbers), draw(numbers)))
        num_values += 1 if name == "product" else 2
    used = draw(st.lists(st.integers(3, num_values - 1), min_size=1, max_size=4, unique=True))
    return steps, used


def run(program: tuple[list[Step], list[int]], leaves: list[Tensor], is_remote: bool) -> Tensor:
    steps, used = program
    values = list(leaves)
    for worker, name, further, first, second in steps:
        x, y = values[first], values[second]
        if further is not None:
            is_far = is_remote and worker is not None
            found = rpc_sync(worker, nested, (further, name, x, y)) if is_far else nested_here(name, x, y)
        else:
            found = call(worker if is_remote else None, name, x, y)
        values += found if isinstance(found, tuple) else (found,)
    return torch.stack([values[number].sum() for number in used]).sum()


def nested_here(name: str, x: Tensor, y: Tensor) -> Any:
    found = call(None, name, x * 0.5, y)
    return (found[0] * x, *found[1:]) if isinstance(found, tuple) else found * x


@pytest.fixture
def cluster(no_agent: None) -> Iterator[InProcessCluster]:
    with InProcessCluster(*WORKERS) as made:
        yield made


class Chooser:
    """In place of `find_sources`: chooses the kind of each part at random, and counts them."""

    def __init__(self, seed: int, share: float) -> None:
        self._random = random.Random(seed)
        self._share = share

    def __call__(self, *arguments: Any) -> Any:
        return find_sources(*arguments) if self._random.random() < self._share else None


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0], ids=["direct", "mixed", "general"])
def test_gradients_are_those_of_one_process(cluster: InProcessCluster, share: float) -> None:
    @settings(max_examples=num_examples(25, 400), suppress_health_check=[HealthCheck.too_slow])
    @given(programs(), st.integers(0, 1000))
    def check(program: tuple[list[Step], list[int]], seed: int) -> None:
        torch.manual_seed(seed)
        leaves = [torch.rand(2, 3, requires_grad=True) for _ in range(3)]
        expected = torch.autograd.grad(run(program, leaves, False), leaves, allow_unused=True)
        with pytest.MonkeyPatch.context() as patch, cluster.use("a"):
            patch.setattr(_autograd_worker, "find_sources", Chooser(seed, share))
            for repeats in range(2):
                with autograd.context() as context_id:
                    loss = run(program, leaves, True)
                    for again in range(repeats + 1):
                        autograd.backward(context_id, [loss], retain_graph=again < repeats, timeout=5)
                    found = autograd.get_gradients(context_id)
                for leaf, gradient in zip(leaves, expected, strict=True):
                    if gradient is None:
                        assert leaf not in found or not found[leaf].any()
                    else:
                        torch.testing.assert_close(found[leaf], gradient * (repeats + 1))

    check()


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The kinds of the parts that passes have had, on all workers."""
    made: list[type] = []
    for kind in (DirectPart, GeneralPart):
        start = kind.take_part

        def counted(self: Any, *arguments: Any, start: Any = start) -> None:
            made.append(type(self))
            start(self, *arguments)

        monkeypatch.setattr(kind, "take_part", counted)
    return made


def two_layers(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() @ w


def relay(x: Tensor, w: Tensor) -> Tensor:
    found: Tensor = rpc_sync("c", two_layers, (x.relu(), w))
    return found + 1


@pytest.mark.parametrize("shape", ["call", "chain", "fan", "between", "shared"])
def test_what_training_loops_do_is_direct(cluster: InProcessCluster, kinds: list[type], shape: str) -> None:
    x, w = torch.rand(2, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    with cluster.use("a"), autograd.context() as context_id:
        if shape == "call":
            loss = rpc_sync("b", two_layers, (x, w)).sum()
        elif shape == "chain":
            loss = rpc_sync("b", two_layers, (rpc_sync("b", two_layers, (x, w)), w)).sum()
        elif shape == "fan":
            loss = (rpc_sync("b", two_layers, (x, w)) * rpc_sync("c", two_layers, (x, w))).sum()
        elif shape == "between":
            loss = rpc_sync("b", relay, (x, w)).sum()
        else:
            hidden = x.exp()
            first = rpc_sync("b", two_layers, (hidden, w))
            loss = (rpc_sync("b", two_layers, (hidden + first, w)) + hidden).sum()
        autograd.backward(context_id, [loss])
    assert (GeneralPart in kinds) == (shape == "shared"), kinds


def test_a_context_remembers_that_it_was_general(
    cluster: InProcessCluster, kinds: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[Any] = []

    def look(*arguments: Any) -> Any:
        looked.append(arguments)
        return find_sources(*arguments)

    monkeypatch.setattr(_autograd_worker, "find_sources", look)
    x, w = torch.rand(2, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    with cluster.use("a"), autograd.context() as context_id:
        hidden = x.exp()
        loss = (rpc_sync("b", two_layers, (hidden, w)) + hidden).sum()
        for _ in range(3):
            autograd.backward(context_id, [loss], retain_graph=True)
    assert kinds.count(GeneralPart) == 3 and kinds.count(DirectPart) == 3
    assert len(looked) == 4  # once here, and for each part of b


def twice(x: Tensor) -> Tensor:
    """Calls its own worker."""
    return rpc_sync("b", product, (x * 2, x * 3)) * x  # type: ignore[no-any-return]


def test_a_worker_that_calls_itself_passes_verdicts_on(cluster: InProcessCluster) -> None:
    """The part of b is direct, and that of a waits for its verdict at a gate: it came to an end at b's own message."""
    x = torch.rand(3, requires_grad=True)
    with cluster.use("a"), autograd.context() as context_id:
        hidden = x.exp()
        autograd.backward(context_id, [(rpc_sync("b", twice, (hidden,)) * hidden).sum()], timeout=LIMIT_S)
        found = autograd.get_gradients(context_id)[x]
    here = x.exp()
    [expected] = torch.autograd.grad(((here * 2 * here * 3).tanh() * here * here).sum(), [x])
    torch.testing.assert_close(found, expected)


RAN = threading.Event()


def weighted(x: Tensor) -> Tensor:
    result = x * 2
    result.register_hook(lambda gradient: RAN.set())
    return result


@pytest.mark.parametrize("size", [3, 1 << 20], ids=["small", "large"])
def test_a_callback_waits_for_what_others_do_with_the_gradient(cluster: InProcessCluster, size: int) -> None:
    """As a reducer waits for other trainers. A begin that overtook a large gradient said that it was unused."""
    RAN.clear()
    waited: list[bool] = []
    x, v = torch.rand(size, requires_grad=True), torch.ones(size, requires_grad=True)
    v.register_hook(lambda gradient: autograd.queue_callback(lambda found: waited.append(RAN.wait(LIMIT_S))))
    with cluster.use("a"), autograd.context() as context_id:
        autograd.backward(context_id, [(rpc_sync("b", weighted, (x,)) * v).sum()], timeout=LIMIT_S)
        assert autograd.get_gradients(context_id)[x].tolist() == [2.0] * size
    assert waited == [True]


def test_a_worker_that_sent_nothing_of_what_is_named_says_so(cluster: InProcessCluster) -> None:
    """As one that takes the place of another: the pass fails, and other calls of the session go on."""
    x = torch.rand(3, requires_grad=True)
    with cluster.use("a"), autograd.context() as context_id:
        loss = rpc_sync("b", product, (x, x)).sum()
        hooks: Any = agent_of(cluster, "b").autograd
        hooks.contexts.find(context_id).sends.clear()
        other = rpc.rpc_async("b", product, (x.detach(), x.detach()))
        with pytest.raises(autograd.BackwardError, match="1 messages of the autograd context are unknown here"):
            autograd.backward(context_id, [loss], timeout=LIMIT_S)
        assert other.wait().shape == (3,) and rpc_sync("b", abs, (-1,)) == 1


def test_a_pass_that_somebody_guesses_does_not_begin(cluster: InProcessCluster) -> None:
    """Another worker begins a pass in the name of this one, whose own pass of that number then ended with nothing."""
    x = torch.rand(3, requires_grad=True)
    with cluster.use("a") as agent, autograd.context() as context_id:
        loss = rpc_sync("b", product, (x, x)).sum()
        forged = PassMessage()
        forged.begins = True
        hooks: Any = agent.autograd
        jobs: list[Any] = []
        [session] = [one for one in [agent.router.session_with(1)] if one is not None]
        hooks.on_pass(session, forged.encode(context_id, make_id(0, 1))[0], [], jobs)
        assert not jobs and not hooks._passes
        autograd.backward(context_id, [loss], timeout=LIMIT_S)
        assert x in autograd.get_gradients(context_id)


def test_a_neighbour_that_begins_while_the_pass_ends_is_answered(cluster: InProcessCluster) -> None:
    with cluster.use("a") as agent, autograd.context() as context_id:
        hooks: Any = agent.autograd
        context = hooks.contexts.find(context_id)
        answered: list[int] = []
        made = BackwardPass(hooks.agent, context, 5, make_part, lambda ended: None, answered.append)
        late = PassMessage()
        late.begins = True
        made._inbox.append((1, late, None))
        made._end(None)
        made.receive(2, late, None, [])
        made._add((3, late, None))
    assert answered == [1, 2, 3]
