"""$ python examples/reinforcement_learning.py --observers 2
mean reward 453 (20 at first; 2 observers, 40960 steps), batches 1.4 times as fast, picture: out/reinforcement.png

The first line is the command, the second its last line of output (your digits differ a little). An agent learns to
balance a pole on a cart (gymnasium's CartPole; each step that the pole stands is a reward of 1). Observers own the
poles: each plays several, one coroutine per pole, and asks the agent for every action. The agent has a reference to
every observer, and each observer one to the agent, which answers the questions of all poles with one run of the
network: `select_batched` returns a future, so no thread waits meanwhile (`rpc.functions.async_execution`).
`select_single` answers each by a run of its own; at the end both are timed. Poles and learning, PPO, are in `_ppo.py`.

It starts its processes itself. Under torchrun rank 0 is the agent, and all other ranks are observers:

    $ torchrun --nproc-per-node 3 examples/reinforcement_learning.py
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from _shared import ExampleOptions, cluster, counted, option


@dataclass(frozen=True)
class Options(ExampleOptions):
    """An agent learns to balance poles, which several observers show to it."""

    observers: int = counted(2, "number of observers")
    rounds: int = option(20, "rounds of playing and learning")
    picture: Path = option(Path("out/reinforcement.png"), "file for the rewards and the speed-up", Path)

    first_names = ("agent",)
    roles = "the agent and the observers"
    needs = ("gymnasium", "matplotlib")


if __name__ == "__main__":
    Options.parse()  # before torch is imported: help and mistakes are answered at once

import torch
from _pictures import draw_rewards
from _ppo import STATE_SIZE, Learner, Played, Pole
from torch import Tensor
from torch.distributions import Categorical

import rpcdist.rpc as rpc

POLES = 8  # of each observer
STEPS = 128  # of each pole in a round
TIMED_STEPS = 32
LAST_EPISODES = 40  # the result is the mean reward of this many episodes at the end


class Observer:
    """Owns some poles, and asks the agent for their actions. The agent calls `play`."""

    def __init__(self, number: int, agent: rpc.RRef[Agent], seed: int) -> None:
        self.agent = agent
        self.numbers = range(number * POLES, (number + 1) * POLES)  # of its poles among all
        self.poles = [Pole(10_000 * seed + each) for each in self.numbers]

    async def play(self, steps: int, select: str) -> Played:
        """A coroutine that starts one per pole: one thread serves any number of poles that wait for an answer."""
        played = Played.empty(steps, POLES)
        await asyncio.gather(*(self.play_one(index, steps, select, played) for index in range(POLES)))
        return played

    async def play_one(self, index: int, steps: int, select: str, played: Played) -> None:
        """Takes exactly `steps` steps, in any number of episodes, so that all poles stay synchronous."""
        ask = getattr(self.agent.rpc_async(timeout=60), select)
        for step in range(steps):
            action = await ask(self.numbers[index], self.poles[index].state)
            self.poles[index].act(action, played, step, index)


class Agent:
    """Owns the network, and chooses actions. The observers call `select_...`."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.num_poles = options.observers * POLES
        self.learner = Learner()
        self.lock = threading.Lock()
        self.waiting: dict[int, tuple[Tensor, torch.futures.Future[int]]] = {}  # by pole

    @rpc.functions.async_execution
    def select_batched(self, pole: int, state: Tensor) -> torch.futures.Future[int]:
        """Returns a future: the call waits, without a thread, until all poles have asked."""
        answer: torch.futures.Future[int] = torch.futures.Future()
        with self.lock:
            self.waiting[pole] = (state, answer)
            if len(self.waiting) < self.num_poles:
                return answer
            batch, self.waiting = [self.waiting[asked] for asked in sorted(self.waiting)], {}
        # Outside the lock: this sends the answers, and the next questions may come before the last of them has left.
        actions = self.choose(torch.stack([state for state, _ in batch]))
        for (_, waiting), action in zip(batch, actions, strict=True):
            waiting.set_result(action)
        return answer

    def select_single(self, pole: int, state: Tensor) -> int:
        return self.choose(state[None])[0]

    @torch.no_grad()
    def choose(self, states: Tensor) -> list[int]:
        scores = self.learner.network.actor(states.view(-1, STATE_SIZE))
        actions: list[int] = Categorical(logits=scores, validate_args=False).sample().tolist()
        return actions


def play(observers: list[rpc.RRef[Observer]], steps: int, select: str) -> list[Played]:
    """Lets all observers play at the same time; if one is lost, this fails at once and names it."""
    return rpc.wait_all([observer.rpc_async(timeout=0).play(steps, select) for observer in observers])


def measure_speeds(observers: list[rpc.RRef[Observer]], num_poles: int) -> dict[str, float]:
    """Steps per second of both ways to choose: the best of three, measured alternately."""
    speeds = {"select_single": 0.0, "select_batched": 0.0}
    for _ in range(3):
        for select, best in speeds.items():
            started = time.monotonic()
            play(observers, TIMED_STEPS, select)
            speeds[select] = max(best, TIMED_STEPS * num_poles / (time.monotonic() - started))
    return speeds


def run_agent(options: Options) -> None:
    """Creates an observer on every other worker, trains, and compares the two ways to choose actions."""
    agent = Agent(options)
    observers = [
        rpc.remote(name, Observer, (number, rpc.RRef(agent), options.seed))
        for number, name in enumerate(options.names[1:])
    ]
    episodes: list[tuple[int, int]] = []  # the steps that all poles had played by its end, and its reward
    num_steps = 0
    for number in range(options.rounds):
        played = play(observers, STEPS, "select_batched")
        agent.learner.learn(played, number / options.rounds)
        for step, reward in sorted(episode for part in played for episode in part.episodes):
            episodes.append((num_steps + step * agent.num_poles, reward))
        num_steps += STEPS * agent.num_poles
        last = fmean(reward for _, reward in episodes[-LAST_EPISODES:])
        print(f"round {number + 1}/{options.rounds}: {num_steps} steps, mean reward {last:.0f}", flush=True)
    speeds = measure_speeds(observers, agent.num_poles)
    draw_rewards(options.picture, episodes, LAST_EPISODES, speeds, agent.num_poles)
    first = fmean(reward for _, reward in episodes[:LAST_EPISODES])
    what = f"{first:.0f} at first; {options.observers} observers, {num_steps} steps"
    speed_up = speeds["select_batched"] / speeds["select_single"]
    print(
        f"mean reward {last:.0f} ({what}), batches {speed_up:.1f} times as fast, picture: {options.picture}", flush=True
    )


def main() -> None:
    options = Options.parse()
    with cluster(options):  # this process is the agent, and the observers serve its calls
        run_agent(options)


if __name__ == "__main__":
    main()
