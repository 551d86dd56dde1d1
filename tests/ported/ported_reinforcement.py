"""A program for torch's RPC: an agent that chooses actions for observers in batches, with futures of `torch.futures`.

`test_ported_scripts.py` runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
import torch.nn as nn
import torch.optim as optim
from torch import Tensor
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync
from torch.distributions import Categorical

WORLD_SIZE = 4
AGENT_NAME = "agent"
OBSERVER_NAME = "observer{}"
NUM_STEPS = 20
NUM_EPISODES = 25


class SignGame:
    """The right action says which of the two numbers is larger; each right one earns a reward."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self) -> Tensor:
        self.state = torch.randn(2, generator=self.generator)
        return self.state

    def step(self, action: int) -> tuple[Tensor, float]:
        reward = float(action == int(self.state.argmax()))
        return self.reset(), reward


class Observer:
    def __init__(self) -> None:
        self.id = rpc.get_worker_info().id - 1
        self.env = SignGame(self.id)

    def run_episode(self, agent_rref: Any, n_steps: int) -> Tensor:
        rewards = torch.zeros(n_steps)
        state = self.env.reset()
        for step in range(n_steps):
            action = rpc_sync(agent_rref.owner(), Agent.select_action_batch, args=(agent_rref, self.id, state[None]))
            state, rewards[step] = self.env.step(action)
        return rewards


class Agent:
    def __init__(self, world_size: int) -> None:
        torch.manual_seed(0)
        self.agent_rref = RRef(self)
        self.ob_rrefs = []
        for rank in range(1, world_size):
            info = rpc.get_worker_info(OBSERVER_NAME.format(rank))
            self.ob_rrefs.append(remote(info, Observer))
        self.policy = nn.Linear(2, 2)
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.05)
        self.states = torch.zeros(len(self.ob_rrefs), 1, 2)
        self.saved_log_probs: list[Tensor] = []
        self.lock = threading.Lock()
        self.pending_states = len(self.ob_rrefs)
        self.future_actions: torch.futures.Future[Tensor] = torch.futures.Future()

    @staticmethod
    @rpc.functions.async_execution  # type: ignore[untyped-decorator]
    def select_action_batch(agent_rref: Any, ob_id: int, state: Tensor) -> torch.futures.Future[int]:
        self: Agent = agent_rref.local_value()
        self.states[ob_id].copy_(state)
        future_action = self.future_actions.then(lambda future: int(future.wait()[ob_id].item()))
        with self.lock:
            self.pending_states -= 1
            if self.pending_states == 0:
                self.pending_states = len(self.ob_rrefs)
                policy = Categorical(logits=self.policy(self.states.clone()))
                actions = policy.sample()
                self.saved_log_probs.append(policy.log_prob(actions)[:, 0])
                future_actions, self.future_actions = self.future_actions, torch.futures.Future()
                future_actions.set_result(actions)
        return future_action

    def run_episode(self) -> float:
        futures = [rref.rpc_async().run_episode(self.agent_rref, NUM_STEPS) for rref in self.ob_rrefs]
        rewards = torch.stack(torch.futures.wait_all(futures)).t()
        chances = torch.stack(self.saved_log_probs)
        self.optimizer.zero_grad()
        (-chances * (rewards - 0.5)).mean().backward()
        self.optimizer.step()
        self.saved_log_probs = []
        return rewards.mean().item()


def report(name: str, wins: float) -> str:
    return f"{name} saw {wins:.2f}"


def run_worker(rank: int, world_size: int) -> None:
    if rank == 0:
        rpc.init_rpc(AGENT_NAME, rank=rank, world_size=world_size)
        agent = Agent(world_size)
        wins = [agent.run_episode() for _ in range(NUM_EPISODES)]
        told = [rpc_async(observer.owner_name(), report, args=("it", wins[-1])) for observer in agent.ob_rrefs]
        assert {future.wait() for future in told} == {f"it saw {wins[-1]:.2f}"}
        # As a loss, so that all of these programs say the same: the share of wrong actions.
        print(f"agent: loss {1 - sum(wins[:3]) / 3:.3f} -> {1 - sum(wins[-3:]) / 3:.3f}", flush=True)
    else:
        rpc.init_rpc(OBSERVER_NAME.format(rank), rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
