"""$ python examples/reinforcement_learning.py --observers 2
mean reward 453 (20 at first; 2 observers, 40960 steps), batches 1.4 times as fast, picture: out/reinforcement.png

The first line is the command, the second its last line of output (your digits differ a little). An agent learns to
balance a pole on a cart (CartPole of gymnasium; every step that the pole stands is a reward of 1). The observers own
the poles: each plays several at once, one coroutine per pole, and asks the agent for every action. The agent holds a
reference to every observer, and each observer one to the agent.

`--select batched` (the default) collects the questions of all poles and answers them with one run of the network:
`select_batched` returns a future, so no thread waits meanwhile (`rpc.functions.async_execution`). `--select single`
answers each question by a run of its own. At the end both are timed on the same poles, without learning. The learning
itself is PPO (Schulman et al., 2017).

It starts its processes itself. Under torchrun rank 0 is the agent, and all other ranks are observers:

    $ torchrun --nproc-per-node 3 examples/reinforcement_learning.py
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.futures import Future
from torch.nn.functional import mse_loss

import rpcdist.rpc as rpc
from rpcdist import launch, placement_from_environment

STATE_SIZE = 4  # of a cart with its pole: position, velocity, angle, angular velocity
NUM_ACTIONS = 2  # push left, push right
DISCOUNT = 0.99
SMOOTHING = 0.95  # lambda of the advantage estimate (Schulman et al., 2016)
CLIP = 0.2  # of the probability ratio in PPO
NUM_PASSES = 6  # through the steps of a round
MINIBATCH = 256
LAST_EPISODES = 40  # the result is the mean reward of this many episodes at the end


@dataclass(frozen=True)
class Options:
    """The options of the command line; every process gets a copy."""

    observers: int
    poles: int
    rounds: int
    steps: int
    width: int
    select: str
    lr: float
    seed: int
    min_reward: float
    device: str
    picture: Path

    @property
    def num_poles(self) -> int:
        return self.observers * self.poles


class ActorCritic(nn.Module):
    """States (n, 4) -> a score for each action (n, 2), and the expected future reward (n)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.actor = layers(width, NUM_ACTIONS)
        self.critic = layers(width, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states).squeeze(1)


def layers(width: int, num_outputs: int) -> nn.Module:
    last = nn.Linear(width, num_outputs)
    nn.init.zeros_(last.bias)
    last.weight.data *= 0.1  # all actions are nearly equally likely at the start
    return nn.Sequential(nn.Linear(STATE_SIZE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), last)


# ---- observers: the agent calls their methods through remote references


@dataclass
class Played:
    """The steps of one observer's poles in a round."""

    states: Tensor  # (steps + 1, poles, 4): the next round begins with the last one
    actions: Tensor  # (steps, poles) int64
    ends: Tensor  # (steps, poles) bool: the episode ended with this step
    episodes: list[tuple[int, int]]  # the step after which each episode ended, and its reward


class Observer:
    """Owns some poles, and asks the agent for their actions."""

    def __init__(self, number: int, agent: rpc.RRef[Agent], options: Options) -> None:
        import gymnasium

        self.agent = agent
        self.first_pole = number * options.poles
        self.poles = [gymnasium.make("CartPole-v1") for _ in range(options.poles)]
        seeds = (options.seed * 10_000 + self.first_pole + index for index in range(options.poles))
        self.states = [torch.from_numpy(pole.reset(seed=seed)[0]) for pole, seed in zip(self.poles, seeds, strict=True)]
        self.rewards = [0] * options.poles

    async def play(self, steps: int, select: str) -> Played:
        """A coroutine that starts one per pole: one thread serves any number of poles that wait for an answer."""
        played = Played(
            states=torch.empty(steps + 1, len(self.poles), STATE_SIZE),
            actions=torch.empty(steps, len(self.poles), dtype=torch.int64),
            ends=torch.empty(steps, len(self.poles), dtype=torch.bool),
            episodes=[],
        )
        await asyncio.gather(*(self.play_one(index, steps, select, played) for index in range(len(self.poles))))
        return played

    async def play_one(self, index: int, steps: int, select: str, played: Played) -> None:
        """Takes exactly `steps` steps, in any number of episodes, so that all poles stay synchronous."""
        agent = self.agent.rpc_async(timeout=60)
        ask = agent.select_batched if select == "batched" else agent.select_single
        pole = self.poles[index]
        for step in range(steps):
            played.states[step, index] = self.states[index]
            action = await ask(self.first_pole + index, self.states[index])
            state, _, fell, ran_out, _ = pole.step(action)
            self.rewards[index] += 1
            if fell or ran_out:
                played.episodes.append((step + 1, self.rewards[index]))
                self.rewards[index] = 0
                state, _ = pole.reset()
            self.states[index] = torch.from_numpy(state)
            played.actions[step, index] = action
            played.ends[step, index] = fell or ran_out
        played.states[steps, index] = self.states[index]


# ---- the agent: the observers call its methods


class Agent:
    """Owns the network; chooses actions, and learns from their results."""

    def __init__(self, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.network = ActorCritic(options.width).to(options.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=options.lr)
        self.lock = threading.Lock()
        self.waiting: dict[int, tuple[Tensor, Future[int]]] = {}  # by pole

    @rpc.functions.async_execution
    def select_batched(self, pole: int, state: Tensor) -> Future[int]:
        """Returns a future: the call waits, without a thread, until all poles have asked."""
        answer: Future[int] = Future()
        with self.lock:
            self.waiting[pole] = (state, answer)
            if len(self.waiting) < self.options.num_poles:
                return answer
            batch, self.waiting = [self.waiting[asked] for asked in sorted(self.waiting)], {}
        # Outside the lock: this sends the answers, and the next questions may come before the last of them has left.
        actions = self.choose(torch.stack([state for state, _ in batch]))
        for (_, waiting), action in zip(batch, actions, strict=True):
            waiting.set_result(action)
        return answer

    def select_single(self, pole: int, state: Tensor) -> int:
        (action,) = self.choose(state[None])
        return action

    @torch.no_grad()
    def choose(self, states: Tensor) -> list[int]:
        scores = self.network.actor(states.to(self.options.device))
        actions: list[int] = Categorical(logits=scores, validate_args=False).sample().tolist()
        return actions

    def learn(self, played: list[Played], done: float) -> None:
        """One round of PPO; `done` is the completed fraction of all rounds."""
        states = torch.cat([part.states for part in played], dim=1).to(self.options.device)
        actions = torch.cat([part.actions for part in played], dim=1).to(self.options.device).flatten()
        ends = torch.cat([part.ends for part in played], dim=1).to(self.options.device)
        with torch.no_grad():
            scores, values = self.network(states.flatten(0, 1))
            values = values.unflatten(0, states.shape[:2])
            chances = Categorical(logits=scores[: len(actions)]).log_prob(actions)
        advantages = estimate_advantages(values, ends).flatten()
        goals = advantages + values[:-1].flatten()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        self.optimizer.param_groups[0]["lr"] = self.options.lr * (1 - done)
        steps = states[:-1].flatten(0, 1)
        for _ in range(NUM_PASSES):
            for chosen in torch.randperm(len(actions)).split(MINIBATCH):
                loss = self.loss(steps[chosen], actions[chosen], chances[chosen], advantages[chosen], goals[chosen])
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.network.parameters(), 0.5)
                self.optimizer.step()

    def loss(self, states: Tensor, actions: Tensor, chances: Tensor, advantages: Tensor, goals: Tensor) -> Tensor:
        scores, values = self.network(states)
        policy = Categorical(logits=scores)
        ratio = (policy.log_prob(actions) - chances).exp()
        gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss: Tensor = -gain.mean() + 0.5 * mse_loss(values, goals) - 0.01 * policy.entropy().mean()
        return loss


def estimate_advantages(values: Tensor, ends: Tensor) -> Tensor:
    """How much better each step went than expected, (steps, poles); values (steps + 1, poles), ends (steps, poles)."""
    advantages = torch.zeros_like(values)
    for step in reversed(range(len(ends))):
        goes_on = (~ends[step]).float()
        surprise = 1 + DISCOUNT * goes_on * values[step + 1] - values[step]
        advantages[step] = surprise + DISCOUNT * SMOOTHING * goes_on * advantages[step + 1]
    return advantages[:-1]


# ---- history and picture


@dataclass
class History:
    """The rewards of all episodes, and the speeds at the end."""

    episodes: list[int] = field(default_factory=list)  # rewards
    ended_at: list[int] = field(default_factory=list)  # steps that all poles had played by the end of the episode
    speeds: dict[str, list[float]] = field(default_factory=dict)  # steps per second of each timing

    def add(self, played: list[Played], num_steps: int, num_poles: int) -> None:
        """The episodes of one round, which began after `num_steps` steps of `num_poles` poles together."""
        for step, reward in sorted(episode for part in played for episode in part.episodes):
            self.episodes.append(reward)
            self.ended_at.append(num_steps + step * num_poles)

    @property
    def first(self) -> float:
        return mean(self.episodes[:LAST_EPISODES])

    @property
    def last(self) -> float:
        return mean(self.episodes[-LAST_EPISODES:])

    @property
    def speed_up(self) -> float:
        return max(self.speeds["batched"]) / max(self.speeds["single"])


def mean(values: list[int]) -> float:
    return sum(values) / max(1, len(values))


def draw(history: History, options: Options) -> None:
    """Writes the picture: the rewards while it learned, and the steps per second of both ways to choose actions."""
    import matplotlib

    matplotlib.use("Agg")  # a file needs no display
    from matplotlib import layout_engine, pyplot

    layout = layout_engine.ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=(2, 1), layout=layout)
    left.scatter(history.ended_at, history.episodes, s=8, alpha=0.25, color="C0", label="an episode")
    smooth = [mean(history.episodes[max(0, end - LAST_EPISODES) : end]) for end in range(1, len(history.episodes) + 1)]
    left.plot(history.ended_at, smooth, color="C1", linewidth=2, label=f"mean of the last {LAST_EPISODES}")
    left.set(title="Reward: how long the pole stood (at most 500)", xlabel="steps played", ylim=(0, 510))
    left.legend(loc="upper left", frameon=False)
    names = {"single": "one question\nat a time", "batched": f"batches of\n{options.num_poles} questions"}
    for place, (key, name) in enumerate(names.items()):
        best = max(history.speeds[key])
        right.bar(name, best, color=f"C{place}", width=0.6)
        right.text(place, best, f"{best:,.0f}", ha="center", va="bottom")
    right.set(title=f"Steps per second: {history.speed_up:.1f} times as many")
    right.margins(y=0.12)
    for axes in (left, right):
        axes.grid(alpha=0.25, axis="y")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"CartPole: an agent and {options.observers} observers", fontweight="bold")
    figure.savefig(options.picture, dpi=130)


# ---- processes


def run_agent(options: Options) -> float:
    """Creates an observer on every other worker, trains, and returns the mean reward at the end."""
    agent = Agent(options)
    agent_rref = rpc.RRef(agent)
    observers = [
        rpc.remote(f"observer{number}", Observer, args=(number, agent_rref, options))
        for number in range(options.observers)
    ]
    history = History()
    num_steps = 0
    for number in range(options.rounds):
        played = play(observers, options.steps, options.select)
        agent.learn(played, number / options.rounds)
        history.add(played, num_steps, options.num_poles)
        num_steps += options.steps * options.num_poles
        print(f"round {number + 1}/{options.rounds}: {num_steps} steps, mean reward {history.last:.0f}", flush=True)
    history.speeds = measure_speeds(observers, options)
    draw(history, options)
    print(
        f"mean reward {history.last:.0f} ({history.first:.0f} at first; {options.observers} observers, "
        f"{num_steps} steps), batches {history.speed_up:.1f} times as fast, picture: {options.picture}",
        flush=True,
    )
    return history.last


def play(observers: list[rpc.RRef[Observer]], steps: int, select: str) -> list[Played]:
    """Lets all observers play at the same time; if one is lost, this fails at once and names it."""
    return rpc.wait_all([observer.rpc_async(timeout=0).play(steps, select) for observer in observers])


def measure_speeds(observers: list[rpc.RRef[Observer]], options: Options) -> dict[str, list[float]]:
    """Steps per second of both ways to choose, measured three times each, alternately."""
    speeds: dict[str, list[float]] = {"single": [], "batched": []}
    for _ in range(3):
        for select, found in speeds.items():
            started = time.monotonic()
            play(observers, options.steps // 4, select)
            found.append(options.steps // 4 * options.num_poles / (time.monotonic() - started))
    return speeds


def run_process(rank: int, options: Options) -> None:
    """What each process does: rank 0 is the agent, the others are observers, which it calls."""
    torch.set_num_threads(1)  # the processes share the cores already
    name = "agent" if rank == 0 else f"observer{rank - 1}"
    rpc.init_rpc(name)
    reward = run_agent(options) if rank == 0 else None
    rpc.shutdown()  # waits for all workers: an observer serves calls until the agent has finished
    if reward is not None and reward < options.min_reward:
        sys.exit(f"mean reward {reward:.0f} is below --min-reward {options.min_reward:g}")


# ---- the command line


def parse_options() -> Options:
    parser = argparse.ArgumentParser(
        description="An agent learns to balance poles, which several observers show to it.",
        epilog="Under torchrun, rank 0 is the agent, all other ranks are observers, and --observers may be left out.",
    )
    add = partial(parser.add_argument, metavar="N")
    add("--observers", type=positive(int), help="number of observers (default: 2)")
    add("--poles", type=positive(int), default=8, help="poles of each observer (default: %(default)s)")
    add("--rounds", type=positive(int), default=20, help="rounds of playing and learning (default: %(default)s)")
    add("--steps", type=positive(int), default=128, help="steps of each pole in a round (default: %(default)s)")
    add("--width", type=positive(int), default=64, help="width of the network (default: %(default)s)")
    parser.add_argument("--select", choices=("batched", "single"), default="batched", help="one run of the network for "
                        "all poles, or one for each (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lr", type=positive(float), default=0.003, help="learning rate at the start (default: "
                        "%(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--min-reward", type=float, default=0.0, metavar="STEPS", help="exit with status 1 when the "
                        "mean reward at the end is below (default: %(default)s)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="device of the agent's network (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("out/reinforcement.png"), metavar="FILE",
                        help="file for the rewards and the speed-up (default: %(default)s)")  # fmt: skip
    arguments = vars(parser.parse_args())
    try:
        arguments["observers"] = choose_num_observers(arguments["observers"])
        options = Options(**arguments)
        check(options)
        return options
    except ValueError as error:
        parser.error(str(error))


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """A parser of numbers above zero, for argparse."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if 0 < (number := kind(text)) < math.inf:
                return number
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive {'whole ' if kind is int else ''}number")

    return parse


def choose_num_observers(wanted: int | None) -> int:
    """The value of --observers, or all ranks but one of torchrun's."""
    place = placement_from_environment()
    if place is None:
        return wanted or 2
    num_observers = place.world_size - 1
    if num_observers < 1:
        raise ValueError("torchrun must start at least 2 processes, an agent and an observer: --nproc-per-node 2")
    if wanted not in (None, num_observers):
        raise ValueError(f"--observers {wanted} does not fit torchrun's {num_observers + 1} processes: leave it out")
    return num_observers


def check(options: Options) -> None:
    """Raises `ValueError` for options that would fail late, or with a message that is hard to understand."""
    for module in ("gymnasium", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the package {module} is missing: pip install 'rpcdist[examples]'")
    if options.steps < 4:
        raise ValueError(f"--steps {options.steps}: at least 4")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {options.device}: torch finds no GPU here")
    if options.picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {options.picture}: the name must end in .png, .pdf or .svg")
    options.picture.parent.mkdir(parents=True, exist_ok=True)


def main() -> None:
    options = parse_options()
    if placement_from_environment() is None:
        # Importing torch takes each process seconds, in which nothing else would be seen.
        print(f"starting the agent and {options.observers} observer{'s' * (options.observers > 1)} ...", flush=True)
    launch(run_process, (options,), workers=options.observers + 1)


if __name__ == "__main__":
    main()
