"""Which fault happens to which worker when, drawn from a seed, and what shows that it did happen."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from chaos_drivers import hold_the_interpreter
from chaos_world import PEER_TIMEOUT_S, ChaosWorld
from network_cable import Cable

__all__ = ["FAULTS", "NETWORK_FAULTS", "Fault", "act", "faults_from"]

FAULTS = ("kill", "stop", "long stop", "hold the interpreter", "hostile member")
NETWORK_FAULTS = ("delay", "loss", "partition", "long partition")
SHORT_S = 0.4 * PEER_TIMEOUT_S  # nobody is declared lost
LONG_S = 1.3 * PEER_TIMEOUT_S  # the others give the worker up; its lease goes on


@dataclass(frozen=True, slots=True)
class Fault:
    """The next fault.

    Attributes:
        kind: of `FAULTS` or `NETWORK_FAULTS`.
        victim: the worker, unless it happens to the network.
        pause_s: everything is well for so long before.
    """

    kind: str
    victim: str
    pause_s: float


def faults_from(
    seed: str, kinds: Sequence[str], victims: Sequence[str], not_killed: Collection[str]
) -> Iterator[Fault]:
    """Without end: each round has every kind once."""
    chance = random.Random(seed)
    while True:
        for kind in chance.sample(kinds, len(kinds)):
            possible = [victim for victim in victims if kind != "kill" or victim not in not_killed]
            yield Fault(kind, chance.choice(possible), chance.uniform(0.1, 0.4) * PEER_TIMEOUT_S)


def act(fault: Fault, world: ChaosWorld, cable: Cable | None, fired: Counter[str]) -> None:
    """Lets it happen, and puts right what it did. `fired` counts a kind when the fault has been seen to work."""
    match fault.kind:
        case "kill":
            code = world.kill(fault.victim)
            fired[fault.kind] += code == -9
            world.start(fault.victim)
        case "stop" | "long stop":
            _stop(world, fault.victim, SHORT_S if fault.kind == "stop" else LONG_S)
            fired[fault.kind] += 1  # `stop` has seen the state of the process
        case "hold the interpreter":
            fired[fault.kind] += world[fault.victim].run(hold_the_interpreter, SHORT_S) > 0.8 * SHORT_S
        case "hostile member":
            fired[fault.kind] += world.attack(fault.victim) > 0
        case "delay":
            fired[fault.kind] += _on(cable, "delay_s", 0.01, lambda on: on.num_delayed, SHORT_S) > 0
        case "loss":
            fired[fault.kind] += _on(cable, "loss", 0.05, lambda on: on.num_lost, LONG_S) > 0
        case "partition" | "long partition":
            for_s = SHORT_S if fault.kind == "partition" else LONG_S
            fired[fault.kind] += _on(cable, "is_cut", True, lambda on: on.num_cut, for_s) > 0
        case _:
            raise ValueError(fault)


def _stop(world: ChaosWorld, victim: str, for_s: float) -> None:
    worker = world[victim]
    worker.stop()
    time.sleep(for_s)  # the fault is that it stands still for this time
    worker.resume()


def _on(cable: Cable | None, what: str, value: object, count: Callable[[Cable], int], for_s: float) -> int:
    """Sets it for a time; how many packets it hit."""
    assert cable is not None, "the network has faults only between hosts"
    before, usual = count(cable), getattr(cable, what)
    setattr(cable, what, value)
    time.sleep(for_s)  # the fault is that the network is so for this time
    setattr(cable, what, usual)
    return count(cable) - before
