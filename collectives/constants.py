"""How long the operations of a group may take when nobody says otherwise."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

__all__ = ["default_pg_nccl_timeout", "default_pg_timeout"]

default_pg_timeout: Final = timedelta(minutes=30)
"""Of every operation, and of the creation of the group."""

default_pg_nccl_timeout: Final = timedelta(minutes=10)
"""The same for groups of the `nccl` backend alone."""
