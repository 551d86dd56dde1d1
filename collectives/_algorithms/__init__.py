"""Plans: who sends what to whom, and when, as data that pure functions compute.

`choose.plan_for` picks the plan of one rank for an operation. See `_steps` for what a plan is.
"""

from __future__ import annotations

from rpcdist.collectives._algorithms.choose import Algorithm, choose, plan_for
from rpcdist.collectives._algorithms.steps import Plan, ReceiveStep, Region, Round, SendStep, grid

__all__ = ["Algorithm", "Plan", "ReceiveStep", "Region", "Round", "SendStep", "choose", "grid", "plan_for"]
