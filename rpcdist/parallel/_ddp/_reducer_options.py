"""How a reducer works: the choices that its user made."""

from __future__ import annotations

from rpcdist.parallel._ddp._buckets import BucketCaps
from rpcdist.parallel._ddp._finite import CheckFinite

__all__ = ["ReducerOptions"]


class ReducerOptions:
    """How a reducer works.

    Args:
        caps: of the buckets.
        find_unused: whether parameters may stay without gradients, different ones in each iteration.
        static: whether every iteration does the same as the first one.
        view: whether gradients become views of the buckets.
        skip_unused: whether buckets without any used parameter are left out, on all ranks the same ones.
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
    def dynamic_unused(self) -> bool:
        """Whether each iteration finds out which parameters it does not use."""
        return self.find_unused and not self.static
