"""The methods of `ProcessGroup` with torch's lower-case names: they take ranks in the group and return Work.

Options may be those of this package or of torch. Like torch's methods, some accept a reduce operation or a root instead
of options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar

import torch

from rpcdist.collectives._group.backend_binding import BackendBinding
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.operation import ReduceOp, check_tensor, check_timeout, whole_number
from rpcdist.collectives.options import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    OperationOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError

P = ParamSpec("P")
Given = TypeVar("Given", bound=OperationOptions)

Tensors = torch.Tensor | Sequence[torch.Tensor]
TensorLists = Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]]


class LowerCaseOperations:
    """The operations as methods, for a class that knows the backend of each device type.

    Not an ABC: that would slow down the `isinstance` test for groups, which every call makes.
    """

    def binding(self, device_type: str) -> BackendBinding:
        """Returns the backend binding for tensors of a device type."""
        raise NotImplementedError

    @property
    def object_device(self) -> str:
        """The device type for operations without a tensor."""
        raise NotImplementedError

    def _binding_of(self, tensor: torch.Tensor) -> BackendBinding:
        return self.binding(tensor.device.type)

    def _run(
        self,
        tensor: torch.Tensor,
        given: OperationOptions,
        lower: Callable[Concatenate[Place, P], Lowered],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Work:
        """Runs an operation on the backend for a tensor; `lower` makes it from the further arguments."""
        binding = self._binding_of(tensor)
        return binding.submit(lower(binding.place, *args, **kwargs), given.asyncOp, given.timeout_s)

    # ------------------------------------------------------------ one tensor

    def allreduce(
        self, tensors: Tensors, opts: object = None, timeout: timedelta | None = None, *, op: object = None
    ) -> Work:
        """`opts`: AllreduceOptions, or a ReduceOp, which may be given as `op`."""
        tensor = _one(tensors)
        given = _options(AllreduceOptions, _either(opts, op), "reduceOp", timeout)
        return self._binding_of(tensor).all_reduce(tensor, given.reduceOp, given.asyncOp, given.timeout_s)

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: object = None) -> Work:
        """Reduces tensors of one dtype in one operation."""
        given = _options(AllreduceCoalescedOptions, opts, "reduceOp")
        return self._run(tensors[0], given, lowering.all_reduce_coalesced, list(tensors), given.reduceOp)

    def reduce(
        self,
        tensors: Tensors,
        opts: object = None,
        op: object = ReduceOp.SUM,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """`opts`: ReduceOptions, or the root's rank, which may be given as `root`."""
        tensor = _one(tensors)
        given = _options(ReduceOptions, _either(opts, root), "rootRank", timeout, reduceOp=op)
        return self._run(tensor, given, lowering.reduce, tensor, given.rootRank, given.reduceOp)

    def broadcast(
        self, tensors: Tensors, opts: object = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> Work:
        """`opts`: BroadcastOptions, or the root's rank, which may be given as `root`."""
        tensor = _one(tensors)
        given = _options(BroadcastOptions, _either(opts, root), "rootRank", timeout)
        return self._run(tensor, given, lowering.broadcast, tensor, given.rootRank)

    # ------------------------------------------------------------ gathering

    def allgather(self, output_tensors: TensorLists, input_tensors: Tensors, opts: object = None) -> Work:
        """Takes one list of outputs and one input, each of which may be in a further list."""
        tensor, outputs = _one(input_tensors), _list(output_tensors)
        given = _options(AllgatherOptions, opts)
        return self._run(tensor, given, lowering.all_gather, outputs, tensor)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> Work:
        """Gathers the inputs of all ranks in one tensor."""
        given = _options(AllgatherOptions, opts)
        return self._run(input, given, lowering.all_gather_single, output, input)

    _allgather_base = all_gather_single

    def gather(
        self,
        output_tensors: TensorLists,
        input_tensors: Tensors,
        opts: object = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """`opts`: GatherOptions, or the root's rank, also as `root`; `output_tensors` is empty on other ranks."""
        tensor, outputs = _one(input_tensors), _list(output_tensors)
        given = _options(GatherOptions, _either(opts, root), "rootRank", timeout)
        return self._run(tensor, given, lowering.gather, outputs, tensor, given.rootRank)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> Work:
        """Gathers the inputs of all ranks in one tensor of the root; other ranks do not use `output`."""
        given = _options(GatherOptions, opts, "rootRank")
        return self._run(input, given, lowering.gather_single, output, input, given.rootRank)

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: TensorLists,
        opts: object = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """`opts`: ScatterOptions, or the root's rank, also as `root`; `input_tensors` is empty on other ranks."""
        tensor, inputs = _one(output_tensors), _list(input_tensors)
        given = _options(ScatterOptions, _either(opts, root), "rootRank", timeout)
        return self._run(tensor, given, lowering.scatter, tensor, inputs, given.rootRank)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: TensorLists, opts: object = None, *, op: object = None
    ) -> Work:
        """`opts`: ReduceScatterOptions, or a ReduceOp, which may be given as `op`."""
        tensor, inputs = _one(output_tensors), _list(input_tensors)
        given = _options(ReduceScatterOptions, _either(opts, op), "reduceOp")
        return self._run(tensor, given, lowering.reduce_scatter, tensor, inputs, given.reduceOp)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: object = None) -> Work:
        """The input has one chunk for each rank."""
        given = _options(ReduceScatterOptions, opts, "reduceOp")
        return self._run(output, given, lowering.reduce_scatter_single, output, input, given.reduceOp)

    _reduce_scatter_base = reduce_scatter_single

    # ------------------------------------------------------------ several at once

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], input_list: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """`output_lists[i]` are rank i's inputs."""
        by_tensor = [list(outputs) for outputs in zip(*output_lists, strict=True)]
        return _last(self.allgather(*each, opts) for each in zip(by_tensor, input_list, strict=True))

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Runs `all_gather_single` for each pair."""
        return _last(self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Runs `reduce_scatter_single` for each pair."""
        return _last(self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------ all to all

    def alltoall(
        self, output_tensors: Sequence[torch.Tensor], input_tensors: Sequence[torch.Tensor], opts: object = None
    ) -> Work:
        """Takes one output from and one input for each rank."""
        given = _options(AllToAllOptions, opts)
        return self._run(input_tensors[0], given, lowering.all_to_all, list(output_tensors), list(input_tensors))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: object = None,
    ) -> Work:
        """Exchanges parts of one tensor, cut along its first dimension."""
        given = _options(AllToAllOptions, opts)
        splits = output_split_sizes, input_split_sizes
        return self._run(input, given, lowering.all_to_all_single, output, input, *splits)

    alltoall_base = all_to_all_single

    # ------------------------------------------------------------ point to point, barriers

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        """Sends to a rank of the group; done when the tensor may be changed again."""
        return self._binding_of(_one(tensors)).send(_one(tensors), whole_number(dstRank, "dstRank"), tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        """Receives from a rank of the group."""
        return self._binding_of(_one(tensors)).recv(_one(tensors), whole_number(srcRank, "srcRank"), tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Receives from the first rank that sends."""
        return self._binding_of(_one(tensors)).recv(_one(tensors), None, tag)

    def barrier(self, opts: object = None, timeout: timedelta | None = None) -> Work:
        """Done when all ranks have called it."""
        given = _options(BarrierOptions, opts, timeout=timeout)
        device = getattr(given, "device", None)
        binding = self.binding(self.object_device if device is None else device.type)
        return binding.submit(lowering.barrier(), given.asyncOp, given.timeout_s)


def _either(opts: object, named: object) -> object:
    """Returns the options, or the value of a keyword of torch that replaces them."""
    if opts is not None and named is not None:
        raise TypeError(f"got both {opts!r} and the keyword argument {named!r}; pass one of them")
    return named if opts is None else opts


def _last(works: Iterable[Work]) -> Work:
    """Returns the last work in the order of the calls: it is done when all are, and fails if one has failed."""
    started = list(works)
    return started[-1] if started else Work.finished("nothing")


def _options(
    kind: type[Given], opts: object, direct: str = "", timeout: timedelta | None = None, **rest: object
) -> Given:
    """Makes options from our options or torch's, from the value of the field `direct`, or from nothing."""
    made = kind()
    for name, value in rest.items():
        setattr(made, name, value)
    if isinstance(opts, kind):
        made = opts
    elif hasattr(opts, "timeout"):
        for name in vars(made):
            if hasattr(opts, name):
                setattr(made, name, getattr(opts, name))
    elif opts is not None:
        if not direct:
            raise TypeError(f"expected {kind.__name__}, not {opts!r}")
        setattr(made, direct, opts)
    if timeout is not None:
        made = replace(made, timeout=check_timeout(timeout))
    return made


def _one(tensors: Tensors) -> torch.Tensor:
    """Returns the tensor, which may be in a list of one; torch once took a tensor for each GPU."""
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise ConfigError(f"expected one tensor in the list, not {len(tensors)}")
    check_tensor(tensors[0], "tensors[0]")
    return tensors[0]


def _list(tensors: TensorLists) -> list[torch.Tensor]:
    """Returns the list of tensors, which may be in another list."""
    if len(tensors) == 1 and not isinstance(tensors[0], torch.Tensor):
        return list(tensors[0])
    checked = [each for each in tensors if isinstance(each, torch.Tensor)]
    if len(checked) != len(tensors):
        raise ConfigError("expected one list of tensors")
    return checked
