"""Defaults of the RPC layer, under the names and with the values that torch uses."""

from __future__ import annotations

from datetime import timedelta

from rpcdist.time_limits import ORPHAN_TIMEOUT_S, PEER_TIMEOUT_S, RPC_INIT_TIMEOUT_S, RPC_TIMEOUT_S

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_INIT_TIMEOUT_SEC",
    "DEFAULT_MAX_IN_FLIGHT_BYTES",
    "DEFAULT_MAX_WORKER_THREADS",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_ORPHAN_TIMEOUT_SEC",
    "DEFAULT_PEER_TIMEOUT_SEC",
    "DEFAULT_PROCESS_GROUP_TIMEOUT",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "DEFAULT_SHUTDOWN_TIMEOUT",
    "UNSET_RPC_TIMEOUT",
]

DEFAULT_RPC_TIMEOUT_SEC: float = RPC_TIMEOUT_S
DEFAULT_INIT_METHOD: str = "env://"
DEFAULT_INIT_TIMEOUT_SEC: float = RPC_INIT_TIMEOUT_S
DEFAULT_ORPHAN_TIMEOUT_SEC: float = ORPHAN_TIMEOUT_S

# The `timeout` of `shutdown` when none is given. As in torch, 0 means "none was given"; the bound that then applies is
# `RpcOptions.shutdown_timeout`.
DEFAULT_SHUTDOWN_TIMEOUT: float = 0

# Accepted and reported for torch's sake: our threads start on demand, up to the cap below.
DEFAULT_NUM_WORKER_THREADS: int = 16
DEFAULT_MAX_WORKER_THREADS: int = 1024
DEFAULT_MAX_IN_FLIGHT_BYTES: int = 256 << 20

# torch gives this to the process group under its agent: the longest wait that 31 bits of milliseconds can say.
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)

# The `timeout` of a call that names none; `RpcBackendOptions.rpc_timeout` then applies.
UNSET_RPC_TIMEOUT: float = -1.0

# A peer that has been silent for this long is declared lost.
DEFAULT_PEER_TIMEOUT_SEC: float = PEER_TIMEOUT_S
