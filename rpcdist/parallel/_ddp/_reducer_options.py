"""The options of a reducer."""

from __future__ import annotations

from rpcdist.parallel._ddp._bucket_assignment import BucketCaps
from rpcdist.parallel._ddp._due_gradients import DueRule
from rpcdist.parallel._ddp._finite_check import CheckFinite


class ReducerOptions:
    """The choices of the user that the reducer needs.

    Args:
        caps: size limits of the buckets.
        find_unused: whether parameters may stay without gradients, different ones in each iteration.
        static: whether every iteration uses the same parameters as the first one.
        view: whether gradients become views of the buckets.
        skip_unused: whether buckets without used parameters are not reduced; these must be the same on all ranks.
        check_finite: see [Note: probes].
    """

    def __init__(
        self,
        caps: BucketCaps,
        *,
        find_unused: bool = False,
        static: bool = False,
        view: bool = False,
        skip_unused: bool = False,
        check_finite: CheckFinite = "probes",
    ) -> None:
        self.caps = caps
        self.find_unused = find_unused
        self.static = static
        self.view = view
        self.skip_unused = skip_unused
        self.check_finite = check_finite

    @property
    def rule(self) -> DueRule:
        """Which parameters get gradients in an iteration."""
        if self.static:
            return DueRule.STATIC
        return DueRule.FOUND if self.find_unused else DueRule.EVERY

    @property
    def dynamic_unused(self) -> bool:
        """Whether each iteration determines its unused parameters."""
        return self.find_unused and not self.static
