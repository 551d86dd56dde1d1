"""Default limits of the operations of a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from rpcdist.time_limits import GROUP_TIMEOUT_S, NCCL_GROUP_TIMEOUT_S

__all__ = ["default_pg_nccl_timeout", "default_pg_timeout"]

default_pg_timeout: Final = timedelta(seconds=GROUP_TIMEOUT_S)
"""Limit of every operation, and of making the group."""

default_pg_nccl_timeout: Final = timedelta(seconds=NCCL_GROUP_TIMEOUT_S)
"""The limit for groups with the `nccl` backend alone."""
