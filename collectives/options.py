"""Options of the lower-case methods of `ProcessGroup`, and the debug level; names and defaults are torch's."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum, IntEnum
from typing import Final

import torch

from rpcdist.collectives._operations.operation import ReduceOp
from rpcdist.collectives.constants import default_pg_timeout
from rpcdist.errors import ConfigError

__all__ = [
    "AllToAllOptions", "AllgatherOptions", "AllreduceCoalescedOptions", "AllreduceOptions", "BarrierOptions",
    "BroadcastOptions", "DebugLevel", "GatherOptions", "ReduceOptions", "ReduceScatterOptions", "ScatterOptions",
    "get_debug_level", "set_debug_level", "set_debug_level_from_env",
]  # fmt: skip

UNSET_TIMEOUT: Final = timedelta(milliseconds=-1)
"""The timeout of the group, as in torch."""


@dataclass
class OperationOptions:
    """The options of all operations; a `timeout` that is not positive selects the timeout of the group."""

    timeout: timedelta = UNSET_TIMEOUT
    asyncOp: bool = True  # torch's spelling

    @property
    def timeout_s(self) -> float | None:
        """The timeout in seconds; None for the group's."""
        seconds = self.timeout.total_seconds()
        return seconds if seconds > 0 else None


@dataclass
class GlooOptions:
    """torch's `ProcessGroupGloo._Options`. Of these, a group made by `ProcessGroupGloo(...)` uses the timeout."""

    _timeout: timedelta = default_pg_timeout
    _threads: int = 2
    _devices: list[str] = field(default_factory=list)
    backend: str = "gloo"
    group_name: str = ""
    global_ranks_in_group: list[int] = field(default_factory=list)


@dataclass
class BroadcastOptions(OperationOptions):
    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class AllreduceOptions(OperationOptions):
    reduceOp: object = ReduceOp.SUM


@dataclass
class AllreduceCoalescedOptions(OperationOptions):
    reduceOp: object = ReduceOp.SUM


@dataclass
class ReduceOptions(OperationOptions):
    reduceOp: object = ReduceOp.SUM
    rootRank: int = 0
    rootTensor: int = 0


@dataclass
class AllgatherOptions(OperationOptions):
    pass


@dataclass
class GatherOptions(OperationOptions):
    rootRank: int = 0


@dataclass
class ScatterOptions(OperationOptions):
    rootRank: int = 0


@dataclass
class ReduceScatterOptions(OperationOptions):
    reduceOp: object = ReduceOp.SUM


@dataclass
class AllToAllOptions(OperationOptions):
    pass


@dataclass
class BarrierOptions(OperationOptions):
    device_ids: list[int] = field(default_factory=list)
    device: torch.device | None = None


class DebugLevel(IntEnum):
    """The amount of additional checks and reports."""

    OFF = 0
    INFO = 1
    DETAIL = 2

    __str__ = Enum.__str__  # "DebugLevel.OFF", as torch's


_debug_level: DebugLevel | None = None


def get_debug_level() -> DebugLevel:
    """Returns the level that was set, otherwise that of the environment variable TORCH_DISTRIBUTED_DEBUG.

    Ranks compare operations at every level, so DETAIL is not needed to find a mismatch.
    """
    if _debug_level is None:
        set_debug_level_from_env()
    assert _debug_level is not None
    return _debug_level


def set_debug_level(level: DebugLevel) -> None:
    """Sets the level of this process."""
    global _debug_level
    _debug_level = DebugLevel(int(level))  # torch's has the same numbers


def set_debug_level_from_env() -> None:
    """Reads TORCH_DISTRIBUTED_DEBUG again: OFF (the default), INFO or DETAIL."""
    global _debug_level
    text = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() or "OFF"
    if text not in DebugLevel.__members__:
        raise ConfigError(f"TORCH_DISTRIBUTED_DEBUG must be OFF, INFO or DETAIL, not {text!r}")
    _debug_level = DebugLevel[text]
