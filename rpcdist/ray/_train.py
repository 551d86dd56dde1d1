"""Runs Ray Train's workers on our collectives and, on request, as RPC workers."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import ray
from ray.exceptions import RayError
from ray.train.backend import Backend
from ray.train.torch import TorchConfig

from rpcdist.rpc._current import agent_or_none
from rpcdist.time_limits import CLOSE_LIMIT_S
from rpcdist.transport.token import job_token, set_job_token


def _own_token() -> str:
    return job_token().decode("utf-8", "surrogateescape")


@dataclass
class RpcdistConfig(TorchConfig):  # type: ignore[misc]  # Ray has no types where it is not installed
    """For `TorchTrainer(train, torch_config=RpcdistConfig(rpc=True), ...)`.

    In `train`, `torch.distributed` runs on rpcdist's collectives, so `prepare_model` makes a DDP over them. With `rpc`,
    each worker has called `init_rpc`: the worker of rank 0 is `worker0`. If one is lost, Ray Train restarts all of them
    according to its `FailureConfig`.

    Args:
        rpc: whether the workers are RPC workers, too.
        token: the job's secret; by default this process's token. It travels in a call of Ray's workers.
    """

    rpc: bool = False
    token: str = field(default_factory=_own_token, repr=False)

    @property
    def backend_cls(self) -> type[Backend]:
        return _RpcdistBackend


class _RpcdistBackend(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: RpcdistConfig) -> None:
        places = worker_group.execute(_place)
        host, port, rpc_port = places[0]
        variables = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "RPCDIST_ATTEMPT": secrets.token_hex(8)}
        size = len(places)
        hosts = [place[0] for place in places]
        local_ranks = [hosts[:rank].count(hosts[rank]) for rank in range(size)]
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _start,
                    rank,
                    size,
                    {**variables, "RPCDIST_HOST": hosts[rank], "LOCAL_RANK": str(local_ranks[rank])},
                    backend_config.token,
                    f"tcp://{host}:{rpc_port}" if backend_config.rpc else None,
                    backend_config.timeout_s,
                )
                for rank in range(size)
            ]
        )

    def on_shutdown(self, worker_group: Any, backend_config: RpcdistConfig) -> None:
        try:
            ray.get(worker_group.execute_async(_stop), timeout=2 * CLOSE_LIMIT_S)
        except (RayError, TimeoutError) as exc:  # lost workers have nothing to end; Ray ends the others
            print(f"rpcdist: some workers did not shut down: {type(exc).__name__}")


_held: list[socket.socket] = []
"""In a worker: reserves these ports of rank 0 until the process ends, so that no other program gets them."""


def _place() -> tuple[str, int, int]:
    """A worker's address and two ports: torch's group takes one for its own store, and RPC takes the other."""
    host = ray.util.get_node_ip_address()
    holders = [socket.socket() for _ in range(2)]
    for holder in holders:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
    _held.extend(holders)
    return host, holders[0].getsockname()[1], holders[1].getsockname()[1]


def _start(
    rank: int, size: int, variables: Mapping[str, str], token: str, rpc_url: str | None, timeout_s: float
) -> None:
    os.environ.update(variables, RANK=str(rank), WORLD_SIZE=str(size))
    set_job_token(token)
    import torch.distributed as torch_distributed

    import rpcdist.collectives.torch_backend  # noqa: F401  # registers the backend

    if rpc_url is not None:
        from rpcdist import rpc as ours

        # Functions of the program that called the trainer cannot be imported here: Ray sends them by value.
        options = ours.RpcOptions(init_method=rpc_url, init_timeout=timeout_s, by_value=True)
        ours.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    torch_distributed.init_process_group("rpcdist", timeout=timedelta(seconds=timeout_s))


def _stop() -> None:
    import torch.distributed as torch_distributed

    from rpcdist import rpc

    if agent_or_none() is not None:
        rpc.shutdown(timeout=CLOSE_LIMIT_S)
    if torch_distributed.is_initialized():
        torch_distributed.destroy_process_group()
