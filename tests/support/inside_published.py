"""The state of publishers and consumers of `Published` weights that users do not see.

Tests reach it by way of the following functions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcdist.parallel import Published
from rpcdist.parallel._published._hosts import Publisher

__all__ = ["extracts_of", "host_copies_of", "hosts_of", "origin_of", "pinned_by"]


def origin_of(weights: Published) -> Publisher:
    """The side of a publisher."""
    assert weights._origin is not None
    return weights._origin


def hosts_of(origin: Publisher) -> list[str]:
    """The hosts in its chain."""
    return list(origin._hosts)


def pinned_by(origin: Publisher) -> list[str]:
    """The readers that keep one of its versions."""
    return list(origin._pins)


def extracts_of(origin: Publisher) -> Sequence[Any]:
    """The parts of its weights, or other types of them, that it keeps for readers."""
    return tuple(origin._extracts)


def host_copies_of(weights: Published) -> list[Any]:
    """For each publisher, the copy that this consumer keeps for its host; None if another one keeps it."""
    return [shard.copy for shard in weights._shards]
