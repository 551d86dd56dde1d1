"""Assigns the parameters to buckets, whose gradients are reduced together. Pure.

Gradients become ready roughly in the reverse order of the parameters. Buckets are filled in that order at first, and
after one backward pass in the order in which gradients became ready. A bucket holds one dtype and one device. Each
parameter with sparse gradients has a bucket of its own. Number and order of the buckets are those of torch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

from rpcdist.errors import ConfigError

MEBIBYTE: Final = 1 << 20
DEFAULT_FIRST_BUCKET_BYTES: Final = MEBIBYTE
DEFAULT_CAP_MB: Final = 25
NO_LIMIT: Final = sys.maxsize


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """The properties of a gradient that determine its bucket.

    Attributes:
        kind: dtype and device; a bucket holds one kind.
    """

    num_bytes: int
    kind: Hashable
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class BucketCaps:
    """Size limits of buckets. The gradient that reaches the limit is the last one of its bucket; every one reaches 0.

    Attributes:
        num_bytes: limit of all buckets but the first.
        first_bytes: limit of the first bucket; smaller by default, so that its reduction starts early.
        listed: one limit per bucket; replaces the other two.
    """

    num_bytes: int
    first_bytes: int
    listed: tuple[int, ...] = ()

    @classmethod
    def of(cls, cap_mb: float | None, cap_mb_list: Sequence[float] | None = None) -> BucketCaps:
        """Makes the limits from `bucket_cap_mb` and `bucket_cap_mb_list` of `DistributedDataParallel`.

        Raises:
            ConfigError: a cap is negative.
        """
        for cap in (cap_mb, *(cap_mb_list or ())):
            if cap is not None and not cap >= 0:
                raise ConfigError(f"a bucket cap of {cap} MiB makes no sense; give 0 or more, or None")
        if cap_mb_list:
            listed = tuple(int(cap * MEBIBYTE) for cap in cap_mb_list)
            return cls(max(listed), max(listed), listed)
        if cap_mb is None:
            return cls(DEFAULT_CAP_MB * MEBIBYTE, DEFAULT_FIRST_BUCKET_BYTES)
        return cls(int(cap_mb * MEBIBYTE), int(cap_mb * MEBIBYTE))

    def initial_limits(self, order_is_fixed: bool) -> list[int]:
        """Limits for the first iterations.

        Args:
            order_is_fixed: whether buckets are never rebuilt. If they are rebuilt, one bucket takes all gradients until
                the order of readiness is known: reductions in another order could cross other collectives of the
                backward pass.
        """
        if self.listed:
            return list(self.listed)
        return self.rebuilt_limits() if order_is_fixed else [NO_LIMIT]

    def rebuilt_limits(self) -> list[int]:
        """Limits once the order of readiness is known."""
        return list(self.listed) or [self.first_bytes, self.num_bytes]


def assign(
    facts: Sequence[GradientFacts], limits: Sequence[int], ready_order: Sequence[int] | None = None
) -> list[list[int]]:
    """Buckets, as lists of indices into `facts`.

    Args:
        facts: one per gradient.
        limits: size limits in bytes of the first bucket of each kind, the second, and so on; the last limit holds for
            all later buckets.
        ready_order: all indices, in the order in which buckets are filled and closed. Without it they are filled in
            the order of `facts`, and sorted by their smallest index.
    """
    closed: list[list[int]] = []
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    for index in range(len(facts)) if ready_order is None else ready_order:
        fact = facts[index]
        if fact.sparse:
            closed.append([index])
            continue
        filling.setdefault(fact.kind, []).append(index)
        filled_bytes[fact.kind] = filled_bytes.get(fact.kind, 0) + fact.num_bytes
        position = num_closed.get(fact.kind, 0)
        if filled_bytes[fact.kind] >= limits[min(position, len(limits) - 1)]:
            closed.append(filling.pop(fact.kind))
            filled_bytes[fact.kind] = 0
            num_closed[fact.kind] = position + 1
    closed += filling.values()
    return sorted(closed, key=min) if ready_order is None else closed


def initial_buckets(facts: Sequence[GradientFacts], caps: BucketCaps, order_is_fixed: bool) -> list[list[int]]:
    """Buckets before any backward pass, in the order in which they are expected to become ready."""
    return assign(facts, caps.initial_limits(order_is_fixed))[::-1]


def rebuilt_buckets(facts: Sequence[GradientFacts], caps: BucketCaps, ready_order: Sequence[int]) -> list[list[int]]:
    """Buckets by the order in which the gradients of a whole backward pass became ready."""
    return assign(facts, caps.rebuilt_limits(), ready_order)
