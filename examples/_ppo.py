"""PPO (Schulman et al., 2017) for a pole on a cart: what the agent of `reinforcement_learning.py` learns with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

STATE_SIZE = 4  # of a cart with its pole: position, velocity, angle, angular velocity
NUM_ACTIONS = 2  # push left, push right
WIDTH = 64
DISCOUNT = 0.99
SMOOTHING = 0.95  # lambda of the advantage estimate (Schulman et al., 2016)
CLIP = 0.2  # of the probability ratio
NUM_PASSES = 6  # through the steps of a round
MINIBATCH = 256
LEARNING_RATE = 0.003  # at the start


@dataclass
class Played:
    """The steps of one observer's poles in a round."""

    states: Tensor  # (steps + 1, poles, 4): the next round begins with the last one
    actions: Tensor  # (steps, poles) int64
    ends: Tensor  # (steps, poles) bool: the episode ended with this step
    episodes: list[tuple[int, int]]  # the step after which each episode ended, and its reward

    @classmethod
    def empty(cls, steps: int, poles: int) -> Played:
        actions = torch.empty(steps, poles, dtype=torch.int64)
        return cls(torch.empty(steps + 1, poles, STATE_SIZE), actions, torch.empty(steps, poles, dtype=torch.bool), [])


class Pole:
    """A pole on a cart; where it has fallen, or stood long enough, another episode begins."""

    def __init__(self, seed: int) -> None:
        import gymnasium  # slow to import, and the agent needs none

        self.cart = gymnasium.make("CartPole-v1")
        self.state = torch.from_numpy(self.cart.reset(seed=seed)[0])
        self.reward = 0  # of this episode

    def act(self, action: int, played: Played, step: int, index: int) -> None:
        """Takes the step, and notes it as that of pole `index`."""
        played.states[step, index] = self.state
        state, _, fell, ran_out, _ = self.cart.step(action)
        self.reward += 1
        if fell or ran_out:
            played.episodes.append((step + 1, self.reward))
            self.reward = 0
            state, _ = self.cart.reset()
        self.state = torch.from_numpy(state)
        played.states[step + 1, index] = self.state  # the last one is that after the round
        played.actions[step, index] = action
        played.ends[step, index] = fell or ran_out


class ActorCritic(nn.Module):
    """States (n, 4) -> a score for each action (n, 2), and the expected future reward (n)."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = layers(NUM_ACTIONS)
        self.critic = layers(1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(states), self.critic(states).squeeze(1)


def layers(num_outputs: int) -> nn.Module:
    last = nn.Linear(WIDTH, num_outputs)
    nn.init.zeros_(last.bias)
    last.weight.data *= 0.1  # all actions are nearly equally likely at the start
    return nn.Sequential(nn.Linear(STATE_SIZE, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), last)


class Learner:
    """The network, and what it learns from."""

    def __init__(self) -> None:
        self.network = ActorCritic()
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=LEARNING_RATE)

    def learn(self, played: Sequence[Played], done: float) -> None:
        """One round; `done` is the completed fraction of all rounds."""
        states = torch.cat([part.states for part in played], dim=1)
        actions = torch.cat([part.actions for part in played], dim=1).flatten()
        ends = torch.cat([part.ends for part in played], dim=1)
        with torch.no_grad():
            scores, values = self.network(states.flatten(0, 1))
            values = values.unflatten(0, states.shape[:2])
            chances = Categorical(logits=scores[: len(actions)]).log_prob(actions)
        advantages = estimate_advantages(values, ends).flatten()
        goals = advantages + values[:-1].flatten()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - done)
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
