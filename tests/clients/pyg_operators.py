"""The operators of pyg-lib that PyG's distributed neighbour sampler calls, in Python; the import registers them.

pyg-lib itself has no release that pip finds. All neighbours of each node are taken, so that nothing is random.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

LIBRARY = torch.library.Library("pyg", "FRAGMENT")


def dist_neighbor_sample(
    colptr: Tensor,
    row: Tensor,
    seed: Tensor,
    num_neighbors: int,
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
) -> tuple[Tensor, Tensor, list[int]]:
    """The seeds and their neighbours, the edges to these, and where the neighbours of each seed begin and end."""
    assert num_neighbors == -1 and csc and not disjoint
    edges = [torch.arange(int(colptr[node]), int(colptr[node + 1])) for node in seed.tolist()]
    edge = torch.cat(edges)
    return torch.cat([seed, row[edge]]), edge, list(accumulate(map(len, edges), initial=len(seed)))


def merge_sampler_outputs(
    node_ids: list[Tensor],
    edge_ids: list[Tensor],
    cumsum_neighbors_per_node: list[list[int]],
    partition_ids: list[int],
    partition_orders: list[int],
    num_partitions: int,
    num_neighbors: int,
    batch: Tensor | None,
    disjoint: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[int]]:
    """The results of the partitions for their seeds, in the order of the seeds."""
    assert not disjoint
    nodes, edges, counts = [], [], []
    for partition, order in zip(partition_ids, partition_orders, strict=True):
        first, begin, end = (cumsum_neighbors_per_node[partition][index] for index in (0, order, order + 1))
        nodes.append(node_ids[partition][begin:end])
        edges.append(edge_ids[partition][begin - first : end - first])
        counts.append(end - begin)
    return torch.cat(nodes), torch.cat(edges), None, counts


def relabel_neighborhood(
    seed: Tensor,
    sampled_nodes_with_duplicates: Tensor,
    num_sampled_neighbors_per_node: list[int],
    num_nodes: int,
    batch: Tensor | None = None,
    csc: bool = False,
    disjoint: bool = False,
) -> tuple[Tensor, Tensor]:
    """The edges between positions in the list of nodes, whose first ones are the seeds."""
    assert csc and not disjoint
    positions: dict[int, int] = {}
    for node in seed.tolist():
        positions.setdefault(node, len(positions))
    neighbours = [positions.setdefault(node, len(positions)) for node in sampled_nodes_with_duplicates.tolist()]
    centres = [index for index, count in enumerate(num_sampled_neighbors_per_node) for _ in range(count)]
    return torch.tensor(neighbours), torch.tensor(centres)


for operator, arguments in (
    (
        dist_neighbor_sample,
        "(Tensor rowptr, Tensor col, Tensor seed, int num_neighbors, Tensor? node_time = None, "
        "Tensor? edge_time = None, Tensor? seed_time = None, Tensor? edge_weight = None, bool csc = False, "
        "bool replace = False, bool directed = True, bool disjoint = False, str temporal_strategy = 'uniform') "
        "-> (Tensor, Tensor, int[])",
    ),
    (
        merge_sampler_outputs,
        "(Tensor[] node_ids, Tensor[] edge_ids, int[][] cumsum_neighbors_per_node, int[] partition_ids, "
        "int[] partition_orders, int num_partitions, int num_neighbors, Tensor? batch, bool disjoint) "
        "-> (Tensor, Tensor, Tensor?, int[])",
    ),
    (
        relabel_neighborhood,
        "(Tensor seed, Tensor sampled_nodes_with_duplicates, int[] num_sampled_neighbors_per_node, int num_nodes, "
        "Tensor? batch = None, bool csc = False, bool disjoint = False) -> (Tensor, Tensor)",
    ),
):
    LIBRARY.define(operator.__name__ + arguments)
    LIBRARY.impl(operator.__name__, operator, "CPU")
