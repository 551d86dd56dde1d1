"""Several agents in one process, each under its own name and with its own place on the network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from agents_here import LIMIT_S, agents_here
from inside_agents import Agent

from rpcdist import autograd, rpc
from rpcdist.errors import AlreadyInitialized, NotInitialized, RRefError
from rpcdist.rpc._current import agent_or_none, use_agent
from rpcdist.testing import eventually

NAMES = ("ada", "bob", "cy")


@pytest.fixture
def agents(job_token: str) -> Iterator[tuple[Agent, ...]]:
    with agents_here(*NAMES) as started:
        yield started


# ---------------------------------------------------------------- what the agents run


def who() -> str:
    return rpc.get_worker_info().name


async def who_async() -> str:
    await asyncio.sleep(0)
    return rpc.get_worker_info().name


def who_through(*path: str) -> list[str]:
    """The names of the workers on the way, each of which calls the next."""
    return [who(), *(rpc.rpc_sync(path[0], who_through, path[1:]) if path else [])]


async def who_through_async(*path: str) -> list[str]:
    if not path:
        return [who()]
    others: Any = await rpc.rpc_async(path[0], who_through_async, path[1:])
    return [who(), *others]


def names_of_items(count: int) -> Iterator[str]:
    for _ in range(count):
        yield who()


async def names_of_items_async(count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield who()
        await asyncio.sleep(0)


def own(value: object) -> rpc.RRef[object]:
    return rpc.RRef(value)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> tuple[str, int]:
        self.count += 1
        return who(), self.count

    async def add_async(self) -> tuple[str, int]:
        return self.add()


def count_with(counter: rpc.RRef[Counter]) -> Any:
    return counter.rpc_sync().add()


@rpc.functions.async_execution
def name_when_done(to: str) -> Any:
    return rpc.rpc_async(to, who).then(lambda done: (who(), done.value()))


def double(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).sum()


def call(to: str, function: Any, *args: object) -> Any:
    """A call whose result has another type than its function: coroutines are awaited by the worker."""
    return rpc.rpc_sync(to, function, args)


# ---------------------------------------------------------------- tests


def test_each_agent_runs_code_as_itself(agents: tuple[Agent, ...]) -> None:
    of_process = agent_or_none()
    assert of_process not in agents
    for agent in agents:
        with use_agent(agent):
            assert who() == agent.worker_name
            for name in NAMES:
                assert rpc.rpc_sync(name, who) == call(name, who_async) == name
                assert rpc.rpc_async(name, who).wait() == name
                assert list(rpc.rpc_stream(name, names_of_items, (20,))) == [name] * 20
                assert list(rpc.rpc_stream(name, names_of_items_async, (20,))) == [name] * 20
    assert agent_or_none() is of_process


def test_calls_nest_and_come_back(agents: tuple[Agent, ...]) -> None:
    ada, bob, cy = NAMES
    path = (bob, ada, cy, cy, ada, bob)
    with use_agent(agents[0]):
        assert who_through(*path) == [ada, *path]
        assert call(bob, who_through_async, *path) == [bob, *path]
        assert rpc.rpc_sync(bob, name_when_done, (cy,)) == (bob, cy)


def test_tasks_of_one_loop_use_different_agents(agents: tuple[Agent, ...]) -> None:
    async def ask(agent: Agent) -> list[str]:
        with use_agent(agent):
            await asyncio.sleep(0)
            names: list[Any] = [await rpc.rpc_async(name, who_async) for name in NAMES]
            return [who(), *names]

    async def main() -> list[list[str]]:
        return list(await asyncio.gather(*(ask(agent) for agent in agents)))

    assert asyncio.run(main()) == [[name, *NAMES] for name in NAMES]


def test_references_keep_the_agent_they_came_from(agents: tuple[Agent, ...]) -> None:
    _, bob, cy = NAMES
    with use_agent(agents[0]):
        counter = rpc.remote(bob, Counter)
        assert rpc.rpc_sync(cy, count_with, (counter,)) == (bob, 1)
        held: Any = rpc.rpc_sync(cy, own, ({"by": cy},))
    assert counter.rpc_sync().add() == (bob, 2)  # outside of `use_agent`
    with use_agent(agents[2]):
        assert counter.rpc_async().add_async().wait() == (bob, 3)
        assert counter.remote().add().to_here() == (bob, 4)
        with pytest.raises(RRefError, match="belongs to worker 'ada'"):
            rpc.rpc_sync(bob, count_with, (counter,))
    assert held.to_here() == {"by": cy} and held.owner_name() == cy
    assert [agent.rrefs.debug_info()["num_pending_users"] for agent in agents] == ["0"] * 3


def test_callbacks_run_as_the_agent_that_completes_them(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[1]):
        seen: Any = rpc.rpc_async(NAMES[2], who_async).then(lambda done: (who(), done.value()))
    assert seen.wait(LIMIT_S)[1] == NAMES[2]


def test_gradients(agents: tuple[Agent, ...]) -> None:
    x, w = torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
    with use_agent(agents[0]), autograd.context() as context:
        loss = rpc.rpc_sync(NAMES[1], double, (x, w)) + rpc.rpc_sync(NAMES[2], double, (x, w))
        autograd.backward(context, [loss])
        assert torch.equal(autograd.get_gradients(context)[w], 2 * x)


def test_one_ends_and_the_others_go_on(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[1]):
        counter = rpc.remote(NAMES[2], Counter)
        assert counter.rpc_sync().add() == (NAMES[2], 1)
        with use_agent(agents[0]):
            rpc.shutdown(graceful=False)
            with pytest.raises(NotInitialized):
                who()
        assert who_through(NAMES[2], NAMES[1]) == [NAMES[1], NAMES[2], NAMES[1]]
        assert counter.rpc_sync().add() == (NAMES[2], 2)
        futures = [rpc.rpc_async(NAMES[2], who) for _ in range(3)]
        assert torch.futures.wait_all([*futures]) == [NAMES[2]] * 3  # ours, as long as one agent is left


def test_init_rpc_inside_of_use_agent_says_that_there_is_one(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[0]), pytest.raises(AlreadyInitialized):
        rpc.init_rpc("another", rank=0, world_size=1)


# ---------------------------------------------------------------- methods called through references


def slow_counter(key: str) -> Counter:
    assert GATES[key].wait(LIMIT_S)
    return Counter()


GATES = {name: threading.Event() for name in ("late", "dropped")}


class Holder(Counter):
    def hold(self, key: str) -> int:
        assert GATES[key].wait(LIMIT_S)
        return self.count


def test_a_method_names_its_reference_and_shares_nothing(
    agents: tuple[Agent, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"shared: {args}")

    monkeypatch.setattr(agents[0].rrefs, "share", refuse)
    with use_agent(agents[0]):
        counter = rpc.remote(NAMES[1], Counter)
        assert counter.rpc_sync().add() == (NAMES[1], 1)
        assert counter.rpc_async().add().wait() == (NAMES[1], 2)
        assert counter.remote().add().to_here() == (NAMES[1], 3)
        assert counter.rpc_sync().add_async() == (NAMES[1], 4)
        assert counter.remote().add_async().to_here() == (NAMES[1], 5)
        assert counter.to_here().count == 5
        monkeypatch.undo()
        mine = rpc.RRef(Counter())
        assert mine.rpc_sync().add() == (NAMES[0], 1) and mine.local_value().count == 1


class Changing:
    def answer(self) -> str:
        return "at first"


async def answer_later(self: Changing) -> str:
    await asyncio.sleep(0)
    return "later"


def test_a_method_that_was_replaced_is_found_again(agents: tuple[Agent, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The cached knowledge of it is not used any more: a coroutine function must run on an event loop."""
    with use_agent(agents[0]):
        changing = rpc.remote(NAMES[1], Changing)
        assert [changing.rpc_sync().answer() for _ in range(3)] == ["at first"] * 3
        monkeypatch.setattr(Changing, "answer", answer_later)
        assert [changing.rpc_sync().answer() for _ in range(3)] == ["later"] * 3
        monkeypatch.delattr(Changing, "answer")
        with pytest.raises(AttributeError, match="answer"):
            changing.remote().answer().to_here()


def test_a_method_waits_for_the_value_and_no_thread_waits_with_it(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[0]):
        counter = rpc.remote(NAMES[1], slow_counter, ("late",))
        calls = [counter.rpc_async().add() for _ in range(50)]
        assert rpc.rpc_sync(NAMES[1], who) == NAMES[1]
        assert agents[1].pool.facts().threads < 20
        GATES["late"].set()
        assert sorted(call.wait()[1] for call in calls) == list(range(1, 51))


def test_a_call_holds_the_reference_until_its_reply(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[0]):
        holder = rpc.remote(NAMES[1], Holder)
        assert holder.rpc_sync().add()[1] == 1
        held = holder.rpc_async().hold("dropped")
        del holder
        agents[0].rrefs.drain()
        assert rpc.rpc_sync(NAMES[1], who) == NAMES[1]  # whatever was sent before this has arrived
        GATES["dropped"].set()
        assert held.wait() == 1
        del held
    eventually(lambda: agents[1].rrefs.debug_info()["num_owner_rrefs"] == "0", "the end of the value")


def test_a_method_of_a_value_that_was_never_made_raises_what_its_function_raised(agents: tuple[Agent, ...]) -> None:
    with use_agent(agents[0]):
        broken = rpc.remote(NAMES[1], int, ("no number",))
        with pytest.raises(Exception, match="no number"):
            broken.rpc_sync().bit_length()
