"""Defaults of the RPC layer, under the names and with the values that torch uses."""

from __future__ import annotations

from datetime import timedelta

from rpcdist.time_limits import ORPHAN_TIMEOUT_S, PEER_TIMEOUT_S, RPC_INIT_TIMEOUT_S, RPC_TIMEOUT_S

__all__ = [
    "DEFAULT_INIT_METHOD", "DEFAULT_INIT_TIMEOUT_SEC", "DEFAULT_MAX_IN_FLIGHT_BYTES", "DEFAULT_MAX_WORKER_THREADS",
    "DEFAULT_NUM_WORKER_THREADS", "DEFAULT_ORPHAN_TIMEOUT_SEC", "DEFAULT_PEER_TIMEOUT_SEC",
    "DEFAULT_PROCESS_GROUP_TIMEOUT", "DEFAULT_RPC_TIMEOUT_SEC", "DEFAULT_SHUTDOWN_TIMEOUT", "UNSET_RPC_TIMEOUT",
]  # fmt: skip

DEFAULT_RPC_TIMEOUT_SEC: float = RPC_TIMEOUT_S
"""The limit of a call, in seconds, if neither the call nor the options set one."""
DEFAULT_INIT_METHOD: str = "env://"
"""The place where the workers find each other: the environment variables of the launcher."""
DEFAULT_INIT_TIMEOUT_SEC: float = RPC_INIT_TIMEOUT_S
"""The time for which `init_rpc` waits for other workers, in seconds."""
DEFAULT_ORPHAN_TIMEOUT_SEC: float = ORPHAN_TIMEOUT_S
"""The time for which workers look for a new rank 0 after the loss of the old one, in seconds."""
DEFAULT_SHUTDOWN_TIMEOUT: float = 0
"""The default `timeout` of `shutdown`. As in torch, 0 means that none was given; then `RpcOptions.shutdown_timeout`
applies."""
DEFAULT_NUM_WORKER_THREADS: int = 16
"""Accepted and reported for torch's sake: threads start on demand, up to `DEFAULT_MAX_WORKER_THREADS`."""
DEFAULT_MAX_WORKER_THREADS: int = 1024
"""The maximum number of threads that run the calls of others."""
DEFAULT_MAX_IN_FLIGHT_BYTES: int = 256 << 20
"""The limit on the bytes of arguments of unfinished calls to one worker; a call beyond it waits."""
DEFAULT_PROCESS_GROUP_TIMEOUT: timedelta = timedelta(milliseconds=2**31 - 1)
"""torch gives this to the process group under its agent: the longest wait that fits into 31 bits of milliseconds."""
UNSET_RPC_TIMEOUT: float = -1.0
"""The default `timeout` of a call: `RpcBackendOptions.rpc_timeout` applies."""
DEFAULT_PEER_TIMEOUT_SEC: float = PEER_TIMEOUT_S
"""The time without a sign of life after which a peer is declared lost, in seconds."""
