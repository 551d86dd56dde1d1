"""Plans: which rank sends which data to which rank, and when, as data that pure functions compute.

`choose.plan_for` picks the plan of one rank for an operation. See `steps` for the parts of a plan.
"""

from __future__ import annotations

from rpcdist.collectives._algorithms.choose import Algorithm, choose, plan_for
from rpcdist.collectives._algorithms.steps import Plan, ReceiveStep, Region, Round, SendStep, grid

__all__ = ["Algorithm", "Plan", "ReceiveStep", "Region", "Round", "SendStep", "choose", "grid", "plan_for"]
