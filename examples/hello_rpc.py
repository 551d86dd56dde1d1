"""$ python examples/hello_rpc.py
[1, 2, 4, 8, 16]
[[2.0, 1.0], [1.0, 2.0]]
"""

import asyncio

import torch

from rpcdist import launch, rpc


async def ask() -> None:
    print(await asyncio.gather(*[rpc.rpc_async("worker1", pow, args=(2, n)) for n in range(5)]))
    matrix = rpc.remote("worker1", torch.eye, args=(2,))  # a reference: the matrix stays on worker1
    print((await matrix.rpc_async().add(1)).tolist())


def run(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        asyncio.run(ask())
    rpc.shutdown()  # waits until everybody is done


if __name__ == "__main__":
    launch(run, workers=2)
