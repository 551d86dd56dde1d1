"""The transport of a group that spans several hosts with several ranks each: shared memory inside, sockets between.

Every host has a leader, its lowest rank. An operation becomes several smaller ones: on the host's own transport, on the
transport of the leaders, and on the host's own transport again. ALL_TO_ALL gains nothing from leaders, so it runs on a
socket transport of all ranks. All parts carry the fingerprint of the whole operation, so that each detects a mismatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rpcdist.collectives._operations import reduce_kernels
from rpcdist.collectives._operations.operation import Kind, Operation, ReduceOp, by_kind
from rpcdist.collectives._transports.transport_base import (
    Control,
    PartControl,
    Transport,
    TransportMismatch,
    TransportPeerLost,
    TransportTimeout,
)

Hosts = tuple[tuple[int, ...], ...]
"""The ranks of each host in ascending order; hosts are ordered by their first rank, which leads."""


def hosts_of(leaders: Sequence[int]) -> Hosts:
    """Groups the ranks by their leader; a leader's entry is the leader itself."""
    members: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        members.setdefault(leader, []).append(rank)
    return tuple(tuple(members[leader]) for leader in sorted(members))


def index_of_host(hosts: Hosts, rank: int) -> int:
    return next(index for index, ranks in enumerate(hosts) if rank in ranks)


def leaders_of(hosts: Hosts) -> tuple[int, ...]:
    return tuple(ranks[0] for ranks in hosts)


class _Part:
    """A transport that connects some ranks of the group, with those ranks."""

    def __init__(self, transport: Transport, ranks: tuple[int, ...]) -> None:
        self.transport = transport
        self.ranks = ranks
        self._count = 0

    def run(self, whole: Control, operation: Operation) -> None:
        """Runs an operation; translates the ranks in the transport's errors to those of the group."""
        self._count += 1
        try:
            self.transport.run(operation, PartControl(whole, self._count, whole.fingerprint))
        except TransportMismatch as exc:
            raise TransportMismatch({self.ranks[rank]: view for rank, view in exc.views.items()}) from exc
        except TransportPeerLost as exc:
            raise TransportPeerLost(self.ranks[exc.rank], exc.reason) from exc
        except TransportTimeout as exc:
            raise TransportTimeout(frozenset(self.ranks[rank] for rank in exc.waiting_for)) from exc


class HierarchicalTransport(Transport):
    """Runs each operation in parts: inside the hosts, between their leaders, inside the hosts.

    Args:
        between: the transport of the leaders; None on a rank that does not lead.
        everyone: a socket transport of all ranks.
    """

    def __init__(
        self, rank: int, hosts: Hosts, local: Transport, between: Transport | None, everyone: Transport
    ) -> None:
        self.rank = rank
        self._hosts = hosts
        self._order = [rank for ranks in hosts for rank in ranks]
        self.size = len(self._order)
        self._host = index_of_host(hosts, rank)
        self._mine = hosts[self._host]
        self._local = _Part(local, self._mine)
        self._between = None if between is None else _Part(between, leaders_of(hosts))
        self._everyone = _Part(everyone, tuple(range(self.size)))
        self._runners: dict[Kind, Callable[[Operation, Control], None]] = by_kind(self)

    def run(self, operation: Operation, control: Control) -> None:
        self._runners[operation.kind](operation, control)

    def close(self) -> None:
        for part in (self._local, self._between, self._everyone):
            if part is not None:
                part.transport.close()

    # ------------------------------------------------------------ parts

    def _reduce_to_leader(self, control: Control, buffer: torch.Tensor, reduce_op: ReduceOp) -> None:
        self._local.run(control, Operation(Kind.REDUCE, (buffer,), (buffer,), reduce_op, root=0))

    def _broadcast_on_host(self, control: Control, buffer: torch.Tensor, root: int = 0) -> None:
        self._local.run(control, Operation(Kind.BROADCAST, (buffer,), (buffer,), root=root))

    def _leaders(self, control: Control, operation: Operation) -> None:
        if self._between is not None:
            self._between.run(control, operation)

    def _reduced(self, operation: Operation, buffer: torch.Tensor) -> ReduceOp:
        """Multiplies `buffer` if needed; returns the reduction for the parts. `_finish` divides later."""
        assert operation.reduce_op is not None
        reduce_kernels.premultiply_to(operation, buffer, buffer)
        return ReduceOp.SUM if operation.reduce_op in (ReduceOp.AVG, ReduceOp.PREMUL_SUM) else operation.reduce_op

    def _finish(self, operation: Operation, buffer: torch.Tensor) -> None:
        assert operation.reduce_op is not None
        reduce_kernels.finish(operation.reduce_op, buffer, self.size)

    # ------------------------------------------------------------ the operations

    def _all_reduce(self, operation: Operation, control: Control) -> None:
        buffer = operation.outputs[0]
        part = self._reduced(operation, buffer)
        self._reduce_to_leader(control, buffer, part)
        self._leaders(control, Operation(Kind.ALL_REDUCE, (buffer,), (buffer,), part))
        self._broadcast_on_host(control, buffer)
        self._finish(operation, buffer)

    def _reduce(self, operation: Operation, control: Control) -> None:
        root_host = index_of_host(self._hosts, operation.root)
        buffer = operation.outputs[0].clone()  # only the root's tensor may change
        part = self._reduced(operation, buffer)
        self._reduce_to_leader(control, buffer, part)
        self._leaders(control, Operation(Kind.REDUCE, (buffer,), (buffer,), part, root=root_host))
        if self._host == root_host:
            self._broadcast_on_host(control, buffer)
        self._barrier(operation, control)
        if self.rank == operation.root:
            self._finish(operation, buffer)
            operation.outputs[0].copy_(buffer)

    def _broadcast(self, operation: Operation, control: Control) -> None:
        buffer = operation.outputs[0]
        root_host = index_of_host(self._hosts, operation.root)
        if self._host == root_host:
            self._broadcast_on_host(control, buffer, root=self._mine.index(operation.root))
        self._leaders(control, replace(operation, root=root_host))
        if self._host != root_host:
            self._broadcast_on_host(control, buffer)
        self._barrier(operation, control)

    def _all_gather(self, operation: Operation, control: Control) -> None:
        blocks, whole = self._gather_on_leader(operation.inputs[0], control)
        for index, block in enumerate(blocks):
            self._leaders(control, Operation(Kind.BROADCAST, (block,), (block,), root=index))
        self._broadcast_on_host(control, whole)
        self._copy_chunks(whole, operation.outputs)

    def _gather(self, operation: Operation, control: Control) -> None:
        root_host = index_of_host(self._hosts, operation.root)
        blocks, whole = self._gather_on_leader(operation.inputs[0], control)
        self._move_blocks(control, blocks, root_host, to_root=True)
        if self._host == root_host:
            self._broadcast_on_host(control, whole)
        self._barrier(operation, control)
        self._copy_chunks(whole, operation.outputs)

    def _scatter(self, operation: Operation, control: Control) -> None:
        output = operation.outputs[0]
        root_host = index_of_host(self._hosts, operation.root)
        whole = output.new_empty(output.numel() * self.size)
        if self.rank == operation.root:
            torch.cat([operation.inputs[rank].view(-1) for rank in self._order], out=whole)
        blocks = self._blocks(whole)
        if self._host == root_host:
            self._broadcast_on_host(control, whole, root=self._mine.index(operation.root))
        self._move_blocks(control, blocks, root_host, to_root=False)
        self._scatter_on_host(blocks[self._host], [output.numel()] * len(self._mine), output, control)
        self._barrier(operation, control)

    def _reduce_scatter(self, operation: Operation, control: Control) -> None:
        inputs, output = operation.inputs, operation.outputs[0]
        whole = torch.cat([inputs[rank].view(-1) for rank in self._order])
        part = self._reduced(operation, whole)
        self._reduce_to_leader(control, whole, part)
        sizes = [[inputs[rank].numel() for rank in ranks] for ranks in self._hosts]
        blocks = whole.split([sum(numbers) for numbers in sizes])
        block = blocks[self._host]
        self._leaders(control, Operation(Kind.REDUCE_SCATTER, tuple(blocks), (block,), part))
        self._scatter_on_host(block, sizes[self._host], output, control)
        self._finish(operation, output)

    def _all_to_all(self, operation: Operation, control: Control) -> None:
        self._everyone.run(control, operation)

    def _barrier(self, operation: Operation, control: Control) -> None:
        barrier = Operation(Kind.BARRIER)
        self._local.run(control, barrier)
        self._leaders(control, barrier)
        self._local.run(control, barrier)

    # ------------------------------------------------------------ buffers with a chunk for each rank, ordered by host

    def _blocks(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The block of each host in a buffer with a chunk of equal size for every rank."""
        count = whole.numel() // self.size
        return tuple(whole.split([count * len(ranks) for ranks in self._hosts]))

    def _gather_on_leader(self, chunk: torch.Tensor, control: Control) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Returns a buffer for all ranks, as blocks and as a whole; on the leader, the block of its host is filled."""
        whole = chunk.new_empty(chunk.numel() * self.size)
        blocks = self._blocks(whole)
        chunks = (
            tuple(blocks[self._host].split(chunk.numel())) if chunk.numel() else (chunk.view(-1),) * len(self._mine)
        )
        outputs = chunks if self._between is not None else ()
        self._local.run(control, Operation(Kind.GATHER, (chunk,), outputs, root=0))
        return blocks, whole

    def _move_blocks(self, control: Control, blocks: Sequence[torch.Tensor], root_host: int, to_root: bool) -> None:
        """Moves the blocks of all other hosts to the leader of one, or from it."""
        nothing = [blocks[0][:0]] * len(blocks)
        at_root = self._host == root_host
        mine = list(blocks) if at_root else list(nothing)
        mine[root_host] = nothing[0] if at_root else blocks[self._host]
        sends, arrivals = (nothing, mine) if to_root == at_root else (mine, nothing)
        self._leaders(control, Operation(Kind.ALL_TO_ALL, tuple(sends), tuple(arrivals)))

    def _copy_chunks(self, whole: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
        """Copies each rank's chunk of `whole` to that rank's output, if the operation has outputs on this rank."""
        count = whole.numel() // self.size
        for position, rank in enumerate(self._order if outputs else ()):
            outputs[rank].view(-1).copy_(whole[position * count : (position + 1) * count])

    def _scatter_on_host(self, block: torch.Tensor, sizes: list[int], output: torch.Tensor, control: Control) -> None:
        """Scatters the leader's block to the ranks of its host, in chunks of these sizes."""
        nothing = block[:0]
        chunks = block.split(sizes) if self._between is not None else (nothing,) * len(sizes)
        arrivals = (output.view(-1), *(nothing,) * (len(sizes) - 1))
        self._local.run(control, Operation(Kind.ALL_TO_ALL, tuple(chunks), arrivals))
