"""The nodes of torch's graph that represent messages, and the calls of torch's engine that execute them.

    SendRpc     takes the tensors of a message at its sender; its output is a dummy scalar, kept by the context
    RecvRpc     makes the tensors of a message at its receiver; its backward passes their gradient to the run
    GateOrder   made at backward time: waits for the gradient of a send, then its SendRpc runs

torch names the nodes SendRpcBackward and RecvRpcBackward, like the nodes of its own distributed autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from ctypes import py_object, pythonapi
from dataclasses import dataclass
from functools import partial, wraps
from sys import getrefcount
from typing import Any, Final, cast
from weakref import ref

import torch
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from rpcdist.rpc._devices.handler_streams import into_default_streams

Gradients = Sequence[torch.Tensor | None]

Captured = dict[torch.Tensor, torch.Tensor]
"""Gradients by leaf, as `queue_callback` shows them."""

DUMMY_DEVICE: Final = torch.device("cpu")
"""The tensors of these nodes that hold no data are here, whatever default device the program has set."""

_engine = cast(Any, torch.autograd.Variable._execution_engine)

# The constructor of a named tuple is a Python function, and these are made for each leaf and tensor of each pass.
new_edge: Callable[[tuple[Any, int, None]], GradientEdge] = partial(tuple.__new__, GradientEdge)


class RecordedSend:
    """A message whose tensors require grad, at its sender.

    Attributes:
        id, to, stamp: as in `LocalSend` of `_verdicts`.
        gate: the output of `SendRpc`, and its `node`, whose next functions are the edges of the tensors.
        devices: the devices of the tensors; None if all are on the CPU.
    """

    __slots__ = ("devices", "gate", "id", "node", "stamp", "to")

    gate: torch.Tensor

    def __init__(self, id: int, to: int, stamp: int, tensors: Sequence[torch.Tensor]) -> None:
        self.id = id
        self.to = to
        self.stamp = stamp
        self.devices = None if all([one.is_cpu for one in tensors]) else [one.device for one in tensors]
        if torch.is_grad_enabled():  # as nearly always: entering the mode again takes a third of the time
            self.gate = _apply_send(id, *tensors)
        else:
            with torch.enable_grad():
                self.gate = _apply_send(id, *tensors)
        node: Any = self.gate.grad_fn  # torch's stubs say that it may be None
        self.node: Node = node


@dataclass(slots=True, eq=False)
class RecordedRecv:
    """A message whose tensors require grad, at its receiver.

    Attributes:
        id, sender, stamp: as in `LocalRecv`.
        is_hooked: whether a hook is registered with its node, which must then be executed; see `_marking`.
        is_watched: whether a hook, which only torch's engine calls, is registered with one of its tensors.
        tensors: the tensors of the message, while they live.
    """

    context_id: int
    id: int
    sender: int
    stamp: int
    count: int
    size_bytes: int
    is_hooked: bool = False
    is_watched: bool = False
    tensors: Sequence[ref[torch.Tensor]] = ()

    def needs_engine(self) -> bool:
        """Whether torch's engine must compute gradients of its tensors, because of a hook or a `retain_grad`."""
        living = [one for tensor in self.tensors if (one := tensor()) is not None]
        return self.is_hooked or self.is_watched or any([one.retains_grad for one in living])


_RUN_KEY = "rpcdist.autograd.run"
_C = cast(Any, torch._C)  # torch's stubs lack these names


def current_run() -> EngineRun | None:
    """The run whose engine call executes on this thread.

    It is kept in torch's thread-local storage, which torch copies to the threads that its engine has for accelerators.
    """
    run: EngineRun | None = _C._get_obj_in_tls(_RUN_KEY) if _C._is_key_in_tls(_RUN_KEY) else None
    return run


def _steals(stash: Callable[[str, object], None]) -> bool:
    """Whether torch drops a reference that it does not own, as 2.11 does: each call would free an object too early."""
    probe = object()
    before = getrefcount(probe)
    stash(_RUN_KEY, probe)
    steals = getrefcount(probe) == before
    for lost in (probe, None) if steals else ():
        pythonapi.Py_IncRef(py_object(lost))
    stash(_RUN_KEY, None)
    return steals


def _stash_own(run: object) -> None:
    pythonapi.Py_IncRef(py_object(run))
    _C._stash_obj_in_tls(_RUN_KEY, run)


stash_run: Final[Callable[[object], None]] = (
    _stash_own if _steals(_C._stash_obj_in_tls) else partial(_C._stash_obj_in_tls, _RUN_KEY)
)


def active_run() -> Any:
    """The `GroupRun` whose engine call executes on this thread."""
    run = current_run()
    if run is None:
        raise RuntimeError(
            "the graph of a distributed autograd context was used by an ordinary backward; call "
            "rpcdist.autograd.backward(context_id, [loss]) for tensors that depend on RPCs"
        )
    if type(run) is EngineRun:
        raise RuntimeError("a hook ran an ordinary backward through the graph of a distributed autograd context")
    return run


class SendRpc(Function):
    @staticmethod
    def forward(ctx: Any, message: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.message = message  # and not the `RecordedSend`: a cycle would keep the graph until a garbage collection
        return torch.empty((), device=DUMMY_DEVICE)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return None, *active_run().gradient_of(ctx.message)


class RecvRpc(Function):
    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, recv: RecordedRecv, tensors: list[torch.Tensor]) -> Any:
        ctx.recv = recv
        ctx.materialize_grads = False  # as its method does
        # The tensors come in a list, so that the same objects become the outputs: `apply` would copy its arguments, or
        # turn them into views, which could not be changed in place. The list is emptied, because a tensor that its
        # own node holds would never be freed.
        outputs = tuple(tensors)
        tensors.clear()
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        # Another thread may send them.
        into_default_streams({one.device for one in gradients if one is not None and one.is_cuda})
        active_run().deliver(ctx.recv, gradients)
        return None, None, None


class GateOrder(Function):
    @staticmethod
    def forward(ctx: Any, send: RecordedSend, previous: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.send = send
        return previous.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        active_run().wait_for(ctx.send)
        return None, torch.zeros((), device=DUMMY_DEVICE), torch.zeros((), device=DUMMY_DEVICE)


# `apply` without the layer in Python that looks for transforms of `torch.func`, in which there are no RPCs.
_apply_send = cast(Any, super(Function, SendRpc)).apply
_apply_recv = cast(Any, super(Function, RecvRpc)).apply

_TOKEN: Final = torch.ones((), device=DUMMY_DEVICE, requires_grad=True)
RecvNode = type(
    cast(tuple[torch.Tensor], RecvRpc.apply(_TOKEN, None, [torch.ones((), device=DUMMY_DEVICE)]))[0].grad_fn  # type: ignore[no-untyped-call]
)


def _marking(register: Callable[..., Any], mark: str) -> Callable[..., Any]:
    """A method by which hooks are registered with the node of a recv, and that sets an attribute of the recv."""

    @wraps(register)
    def register_and_mark(node: Any, hook: Any) -> Any:
        setattr(node.recv, mark, True)
        return register(node, hook)

    return register_and_mark


# `Tensor.register_hook` calls the last one, once for a tensor.
for _name, _mark in {
    "register_hook": "is_hooked", "register_prehook": "is_hooked", "_register_hook_dict": "is_watched",
}.items():  # fmt: skip
    setattr(RecvNode, _name, _marking(getattr(RecvNode, _name), _mark))

_TOKEN_EDGE: Final = get_gradient_edge(_TOKEN)
"""Every recv depends on this leaf, so asking for its gradient makes the engine execute recvs."""


def attach(recv: RecordedRecv, tensors: Sequence[torch.Tensor]) -> Node:
    """Makes `tensors`, leaves that have just arrived, the outputs of a recv."""
    for tensor in tensors:
        tensor.requires_grad_(False)
    recv.tensors = list(map(ref, tensors))
    # The usual case: switching modes takes a third of the time.
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        node: Node = _apply_recv(_TOKEN, recv, list(tensors))[0].grad_fn
    else:
        with torch.inference_mode(False), torch.enable_grad():
            node = _apply_recv(_TOKEN, recv, list(tensors))[0].grad_fn
    return node


class EngineRun:
    """A call of torch's engine, for the hooks that it calls. Only a `GroupRun` executes nodes of messages.

    Attributes:
        callbacks: see `queue_callback`.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callable[[Captured], object]] = []

    def run_apart(
        self,
        edges: Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor],
        leaves: Collection[Any],
        outputs: Collection[GradientEdge],
        received: Mapping[int, list[torch.Tensor | None]],
        retain_graph: bool,
        executes_recvs: bool = False,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Runs the graph from `edges`, with a gradient for each; returns the gradients of leaves.

        The gradients at `outputs`, the edges of received tensors, go into `received`, by message and number. The nodes
        of the messages are executed only on request.
        """
        wanted = [new_edge((node, 0, None)) for node in leaves]
        if outputs:
            wanted += outputs
        if executes_recvs:
            wanted.append(_TOKEN_EDGE)
        if not wanted or not edges:
            return []
        outer = current_run()
        stash_run(self)
        try:
            # `torch.autograd.grad` calls this after checks that the engine repeats.
            results: Sequence[torch.Tensor | None] = _engine.run_backward(
                tuple(edges), tuple(gradients), retain_graph, False, tuple(wanted), True, accumulate_grad=False
            )
        finally:
            stash_run(outer)
        # The zips are not strict: behind the leaves come the outputs, and then the token.
        captured = [(node.variable, found) for node, found in zip(leaves, results, strict=False) if found is not None]
        node: Any
        for (node, number, _), found in zip(outputs, results[len(leaves) :], strict=False):
            received[node.recv.id][number] = found
        return captured

    def called_back(self, captured: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The gradients of leaves, after the callbacks have replaced some of them."""
        by_leaf = dict(captured)
        for callback in self.callbacks:
            callback(by_leaf)
        return list(by_leaf.items())


def queue_callback(callback: Callable[[Captured], object]) -> None:
    """Calls a function when the engine call on this thread has ended, before its gradients are added to the context.

    Use it in tensor hooks that start work on a gradient and replace the gradient by the result at the end, like the
    reducer of DistributedDataParallel. Call it inside a tensor hook.

    Args:
        callback: gets the gradients that the engine call returned, by leaf; it may replace them in the dict.

    Raises:
        RuntimeError: no distributed backward runs on this thread.
    """
    run = current_run()
    if not isinstance(run, EngineRun):
        raise RuntimeError("queue_callback is for hooks that run in a distributed backward pass")
    run.callbacks.append(callback)


def is_in_backward() -> bool:
    """Whether a distributed backward pass runs on this thread, and not an ordinary one. For tensor hooks."""
    return current_run() is not None
