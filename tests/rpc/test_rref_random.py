"""Long random runs of the reference counting among three workers, with everything that can go wrong."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from rref_world import Step, World


class ReferenceCounting(RuleBasedStateMachine):
    """Values are made, shared and dropped at random; at the end all tables are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(())

    @initialize(
        duplicates=st.integers(0, 4),
        losses=st.integers(0, 2),
        doubts=st.integers(0, 2),
        death=st.sampled_from([(), (0,), (1,), (2,)]),
        suspicions=st.lists(st.sampled_from([(a, b) for a in range(3) for b in range(3) if a != b]), max_size=1),
    )
    def choose_faults(
        self,
        duplicates: int,
        losses: int,
        doubts: int,
        death: tuple[int, ...],
        suspicions: list[tuple[int, int]],
    ) -> None:
        self.world = World((), duplicates, losses, doubts, death, tuple(suspicions))

    @rule(at=st.integers(0, 2), to=st.integers(0, 2))
    def create(self, at: int, to: int) -> None:
        kind = "value" if at == to else "remote"
        self.world.program += (Step(kind, at, f"v{len(self.world.program)}", to),)

    @precondition(lambda self: "live" in self.world.handles.values())
    @rule(data=st.data(), to=st.integers(0, 2))
    def share(self, data: st.DataObject, to: int) -> None:
        live = sorted(name for name, state in self.world.handles.items() if state == "live")
        holder = data.draw(st.sampled_from(live))
        at = self.world.holder_of(holder)
        self.world.program += (Step("share", at, f"s{len(self.world.program)}", to, holder),)

    @precondition(lambda self: self.world.moves())
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        self.world.apply(data.draw(st.sampled_from(self.world.moves())))
        self.world.check()

    def teardown(self) -> None:
        """Lets everything that is under way arrive, and drops all handles, in a random order of its own."""
        order = random.Random(len(self.world.trace))
        while moves := self.world.moves():
            self.world.apply(order.choice(moves))
            self.world.check()
        self.world.check_end()


TestReferenceCounting = ReferenceCounting.TestCase
TestReferenceCounting.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
