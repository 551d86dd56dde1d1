"""PyTorch Geometric's RPC, feature and graph stores, and distributed neighbour samplers, on two workers.

Each worker has half of a ring with chords, looks up features of nodes that the other has, samples the neighbourhoods of
nodes whose neighbours the other has, and leaves in an atexit callback that it registered before `init_rpc`, as in
PyG's own tests.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

import pyg_operators
import torch
from client_results import report, run_workers
from torch_geometric.distributed import DistNeighborSampler, LocalFeatureStore, LocalGraphStore, dist_neighbor_sampler
from torch_geometric.distributed.dist_context import DistContext
from torch_geometric.distributed.event_loop import ConcurrentEventLoop
from torch_geometric.distributed.rpc import (
    RPCCallBase,
    RPCRouter,
    global_all_gather,
    global_barrier,
    init_rpc,
    rpc_async,
    rpc_is_initialized,
    rpc_partition_to_workers,
    rpc_register,
    rpc_sync,
    shutdown_rpc,
)
from torch_geometric.sampler import NodeSamplerInput

NUM_NODES, NUM_WORKERS = 24, 2
NEIGHBOURS = [sorted({(node + step) % NUM_NODES for step in (1, 5, 17)}) for node in range(NUM_NODES)]
assert pyg_operators.LIBRARY

# The sampler of PyG 2.8.1 cannot be made on torch either: it gives `warnings.warn` a `stack_level`, not `stacklevel`.
dist_neighbor_sampler.warn = lambda *_, **__: None


class Doubling(RPCCallBase):  # type: ignore[misc]  # the package has no types
    def rpc_sync(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    def rpc_async(self, value: torch.Tensor) -> torch.Tensor:
        return value * 2


def partition_of(nodes: torch.Tensor) -> torch.Tensor:
    return (nodes * NUM_WORKERS) // NUM_NODES


def stores(rank: int) -> tuple[LocalFeatureStore, LocalGraphStore]:
    """Of the worker's half of the nodes: the features, and the edges that lead to them."""
    book = partition_of(torch.arange(NUM_NODES))
    own = (book == rank).nonzero().flatten()
    features = LocalFeatureStore()
    features.put_global_id(own, group_name=None)
    features.put_tensor(own[:, None] * torch.ones(1, 4), group_name=None, attr_name="x")
    features.num_partitions, features.partition_idx = NUM_WORKERS, rank
    features.node_feat_pb, features.local_only = book, False
    features.meta = {"edge_types": None, "is_hetero": False, "node_types": None, "num_parts": NUM_WORKERS}
    edges = torch.tensor([(source, node) for node in own.tolist() for source in NEIGHBOURS[node]]).t().contiguous()
    graph = LocalGraphStore.from_data(edge_id=None, edge_index=edges, num_nodes=NUM_NODES, is_sorted=True)
    graph.node_pb, graph.partition_idx, graph.num_partitions = book, rank, NUM_WORKERS
    graph.meta.update(num_parts=NUM_WORKERS)
    return features, graph


def expected_sample(seeds: list[int], num_hops: int) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Nodes, edges and the numbers of new nodes in each hop, found here."""
    nodes, edges, counts, frontier = list(dict.fromkeys(seeds)), [], [len(seeds)], list(seeds)
    for _ in range(num_hops):
        found = [(source, node) for node in frontier for source in NEIGHBOURS[node]]
        edges += found
        frontier = [node for node in dict.fromkeys(source for source, _ in found) if node not in nodes]
        nodes += frontier
        counts.append(len(frontier))
    return nodes, edges, counts


def checks(rank: int, context: DistContext, doubling: int) -> dict[str, Callable[[], bool]]:
    features, graph = stores(rank)
    router = RPCRouter(rpc_partition_to_workers(context, NUM_WORKERS, rank))
    features.set_rpc_router(router)
    other = f"clients-{1 - rank}"

    def gather() -> bool:
        return bool(global_all_gather(rank * 10) == {f"clients-{each}": each * 10 for each in range(NUM_WORKERS)})

    def look_up() -> bool:
        wanted = torch.tensor([NUM_NODES - 1, 0, 7, 13, 7])
        return torch.equal(features.lookup_features(wanted).wait(), wanted[:, None] * torch.ones(1, 4))

    def sample(seeds: list[int], num_hops: int) -> bool:
        sampler = DistNeighborSampler(
            data=(features, graph), current_ctx=context, num_neighbors=[-1] * num_hops, shuffle=False
        )
        sampler.init_sampler_instance()
        sampler.register_sampler_rpc()
        sampler.event_loop = ConcurrentEventLoop(2)
        sampler.event_loop.start_loop()
        global_barrier()  # the other's calls name the sampler by a number that both count
        out = sampler.event_loop.run_task(
            coro=sampler.node_sample(NodeSamplerInput(input_id=None, node=torch.tensor(seeds)))
        )
        global_barrier()
        nodes, edges, counts = expected_sample(seeds, num_hops)
        found = [(int(out.node[source]), int(out.node[node])) for source, node in zip(out.row, out.col, strict=True)]
        return (out.node.tolist(), found, list(out.num_sampled_nodes)) == (nodes, edges, counts)

    return {
        "is initialised": rpc_is_initialized,
        "all_gather": gather,
        "partitions to workers": lambda: router.get_to_worker(1 - rank) == other,
        "rpc_sync": lambda: torch.equal(rpc_sync(other, doubling, args=(torch.arange(3),)), torch.tensor([0, 2, 4])),
        "rpc_async": lambda: rpc_async(other, doubling, args=(torch.ones(1),)).wait().item() == 2.0,
        "feature store": look_up,
        "sampler, one hop": lambda: sample([rank, NUM_NODES - 1], 1),
        "sampler, two hops": lambda: sample([11, 12 + rank], 2),
        "sampler, three hops": lambda: sample([3 + 13 * rank], 3),
    }


def work(rank: int, port: int, results: Any) -> None:
    atexit.register(end, results)
    context = DistContext(rank, rank, NUM_WORKERS, NUM_WORKERS, "clients")
    init_rpc(context, "127.0.0.1", port)
    doubling = rpc_register(Doubling())
    global_barrier()
    for name, check in checks(rank, context, doubling).items():
        try:
            results.put((name, "right" if check() else "wrong"))
        except Exception as error:
            results.put((name, f"{type(error).__name__}: {error}"))


def end(results: Any) -> None:
    try:
        shutdown_rpc()
        results.put(("shutdown at exit", "wrong" if rpc_is_initialized() else "right"))
    except Exception as error:
        results.put(("shutdown at exit", f"{type(error).__name__}: {error}"))


def main() -> None:
    found, exits = run_workers(work, NUM_WORKERS)
    outcomes: dict[str, list[str]] = {}
    for name, outcome in found:
        outcomes.setdefault(name, []).append(outcome)
    report({name: sorted(each) for name, each in sorted(outcomes.items())} | {"exits": exits})
    sys.exit(exits != [0] * NUM_WORKERS or any(set(each) != {"right"} for each in outcomes.values()))


if __name__ == "__main__":
    main()
