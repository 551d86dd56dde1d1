"""`peer_timeout` of workers in tests: after how much silence the others give one up."""

from __future__ import annotations

from rpcdist import testing
from rpcdist.testing import LIMIT_S

__all__ = ["CALM_S", "LIMIT_S", "PROMPT_S", "UNIT_S"]

UNIT_S = 8 * testing.UNIT_S
"""Where a test is about silence or leases; the other times of such a test are multiples of it."""

CALM_S = 300 * testing.UNIT_S
"""Where silence must play no part."""

PROMPT_S = CALM_S / 2
"""Where something must end sooner than by silence, or by the limit of a call: this is less than either. A busy machine
takes seconds for what takes milliseconds, so a shorter limit would measure the machine.
"""
