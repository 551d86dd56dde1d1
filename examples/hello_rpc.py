"""$ python examples/hello_rpc.py
[1, 2, 4, 8, 16]
[[2.0, 1.0], [1.0, 2.0]]
"""

import asyncio

import torch
import torch.multiprocessing as mp

from rpcdist import rpc


async def ask() -> None:
    print(await asyncio.gather(*[rpc.rpc_async("worker1", pow, args=(2, n)) for n in range(5)]))
    matrix = rpc.remote("worker1", torch.eye, args=(2,))  # a reference: the matrix stays on worker1
    print((await matrix.rpc_async().add(1)).tolist())


def run(rank: int) -> None:
    options = rpc.RpcOptions(init_method="tcp://127.0.0.1:29500")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        asyncio.run(ask())
    rpc.shutdown()  # waits until everybody is done


if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
