"""TorchRL's remote replay buffer, RPC collector, distributed collector and the process group of its learners.

Each part runs in processes of its own, started as TorchRL's tests start them.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from client_results import numbers_of, report, run_workers
from tensordict import TensorDict
from torch.distributed import rpc
from torchrl.collectors.distributed import DistributedCollector, RPCCollector
from torchrl.data.replay_buffers import RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import RandomSampler
from torchrl.data.replay_buffers.storages import LazyMemmapStorage
from torchrl.data.replay_buffers.writers import RoundRobinWriter
from torchrl.modules import RandomPolicy
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv
from torchrl.trainers._distributed import _DDPProcessGroup

FRAMES, FRAMES_PER_BATCH = 200, 50


class BufferNode(RemoteTensorDictReplayBuffer):  # type: ignore[misc]  # the package has no types
    def __init__(self, capacity: int, folder: str) -> None:
        super().__init__(
            storage=LazyMemmapStorage(max_size=capacity, scratch_dir=folder, device=torch.device("cpu")),
            sampler=RandomSampler(),
            writer=RoundRobinWriter(),
            collate_fn=lambda item: item,
        )


def replay_buffer(rank: int, port: int) -> dict[str, object]:
    """The trainer adds to a buffer that the other worker owns, and samples from it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    name = ("BUFFER", "TRAINER")[rank]
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    results: dict[str, object] = {}
    if name == "TRAINER":
        with tempfile.TemporaryDirectory() as folder:
            buffer = rpc.remote("BUFFER", BufferNode, args=(1000, folder))
            results["type"] = type(buffer) is torch._C._distributed_rpc.PyRRef
            added = TensorDict({"a": torch.tensor([7, 8])}, [2])
            results["index"] = rpc.rpc_sync(buffer.owner(), BufferNode.add, args=(buffer, added))
            sampled = rpc.rpc_sync(buffer.owner(), BufferNode.sample, args=(buffer, 1))
            results["sampled"] = [type(sampled).__name__, sampled["a"].tolist()]
            results["async"] = rpc.rpc_async(buffer.owner(), BufferNode.sample, args=(buffer, 3)).wait().shape[0]
            results["remote"] = rpc.remote(buffer.owner(), BufferNode.sample, args=(buffer, 2)).to_here().shape[0]
            del buffer
    rpc.shutdown()
    return results


def collector(kind: Callable[..., Any], sync: bool) -> Callable[[int, int], dict[str, object]]:
    def collect(_: int, port: int) -> dict[str, object]:
        os.environ["RCP_IDLE_TIMEOUT"] = "10"
        collected = kind(
            [ContinuousActionVecMockEnv] * 2,
            RandomPolicy(ContinuousActionVecMockEnv().action_spec),
            total_frames=FRAMES,
            frames_per_batch=FRAMES_PER_BATCH,
            sync=sync,
            launcher="mp",
            tcp_port=str(port),
        )
        sizes = [batch.numel() for batch in collected]
        if store := getattr(collected, "_store", None):
            # A worker reads an instruction and then deletes it, so that one which comes between is lost.
            while any(store.check([f"NODE_{rank}_in"]) for rank in (1, 2)):
                time.sleep(0.01)
        collected.shutdown()
        return {"batches": sizes}

    return collect


def learner(rank: int, port: int) -> dict[str, object]:
    """The default group of a learner, and DDP over it."""
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    context = _DDPProcessGroup.create(rank=rank, local_rank=rank, world_size=2, store=store, timeout=60.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    wrapped = context.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 1.0], [1.0, 3.0]]).chunk(2)[rank]
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(data).pow(2).mean().backward()
        optimizer.step()
    context.barrier()
    context.close()
    store.set(f"closed by {rank}", "")
    store.wait(["closed by 1"])  # rank 0 has the store
    return {"parameters": numbers_of(model)}


PARTS: dict[str, tuple[Callable[[int, int], dict[str, object]], int]] = {
    "remote replay buffer": (replay_buffer, 2),
    "RPC collector": (collector(RPCCollector, False), 1),
    "RPC collector, synchronous": (collector(RPCCollector, True), 1),
    "distributed collector": (collector(DistributedCollector, False), 1),
    "distributed collector, synchronous": (collector(DistributedCollector, True), 1),
    "learners": (learner, 2),
}


def work(name: str, rank: int, port: int, results: Any) -> None:
    results.put((rank, PARTS[name][0](rank, port)))


def run(name: str) -> list[object]:
    found, exits = run_workers(work, PARTS[name][1], name)
    if any(exits):
        sys.exit(f"{name}: exit codes {exits}")
    return [outcome for _, outcome in sorted(found, key=lambda each: each[0])]


if __name__ == "__main__":
    report({name: run(name) for name in PARTS})
