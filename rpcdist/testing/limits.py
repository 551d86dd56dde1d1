"""The time limits of tests: multiples of one unit, which `RPCDIST_TEST_SCALE` stretches on slow machines.

A limit decides only how long a test that fails takes to do so; a test that passes never waits for one. Limits that a
test is *about* (a lease that ends, a peer that is silent) are small multiples of `UNIT_S`.
"""

from __future__ import annotations

import os

__all__ = ["END_LIMIT_S", "LIMIT_S", "STACKS_LIMIT_S", "UNIT_S"]

UNIT_S = 0.1 * float(os.environ.get("RPCDIST_TEST_SCALE", "1"))
"""Seconds. The shortest time in which every worker of a loaded machine runs at least once."""

LIMIT_S = 600 * UNIT_S
"""For a call of a worker, and for everything else that a test waits for unless it says otherwise."""

END_LIMIT_S = 20 * UNIT_S
"""For a worker that was told to end: after that it is killed."""

STACKS_LIMIT_S = 20 * UNIT_S
"""For the stacks of a worker that did not answer in time."""
