"""The functions of `rpcdist.autograd`, with torch's names and signatures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from rpcdist.autograd._autograd_worker import AutogradWorker
from rpcdist.autograd._context import MAX_NUMBER, Context, make_id
from rpcdist.deadline import Deadline, current_deadline, limit_of
from rpcdist.errors import AutogradError, BlockingInLoop, ConfigError
from rpcdist.rpc._autograd_hooks import current_autograd
from rpcdist.rpc._current import agent_or_none, current_agent
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.future import Future, _get_running_loop

Mode = Literal["smart", "fast"]
"""How a backward pass treats unused results: "smart" leaves them out, "fast" expects that there are none."""


def is_available() -> bool:
    """Always true; torch's function says whether torch was built with distributed autograd."""
    return True


def _worker() -> AutogradWorker:
    hooks = current_agent().autograd
    assert isinstance(hooks, AutogradWorker)
    return hooks


class context:
    """Records the RPCs of this thread, or of this task, for a distributed backward pass.

        with autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", forward, (x,)).sum()
            autograd.backward(context_id, [loss])
            gradients = autograd.get_gradients(context_id)

    `async with` works as well. The end of the block releases the context on all participating workers without waiting.

    Raises:
        AutogradError: on entering, inside another context.
    """

    def __enter__(self) -> int:
        self._context = _new_context()
        return self._context.id

    def __exit__(self, *error: object) -> None:
        _release_context(self._context.id, quietly=True)

    async def __aenter__(self) -> int:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)


def backward(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Mode | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> None:
    """Computes the gradients of all leaves that the roots depend on, on all workers of a context; blocks.

    Gradients accumulate in the context (`get_gradients`); `.grad` does not change.

    Args:
        context_id: from `context()`.
        roots: scalars, computed in the context on this worker.
        retain_graph: keep the graph for a second backward pass.
        mode: "smart" allows unused results of RPCs; "fast" exchanges no verdicts, and waits for the gradients of all
            results until the timeout. By default `RpcOptions(autograd_mode=)`.
        timeout: limit in seconds; 0 means no limit; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        ContextNotFound: the context has ended, or is unknown on this worker.
        AutogradError: a root cannot be used.
        BackwardError: the pass failed on a worker; the text has the worker's id and the error. The gradients are
            incomplete.
        DeadlineExceeded: the timeout expired; the text names the workers that the pass waits for.
        BlockingInLoop: called on an event loop; write `await backward_async(...)` there.
    """
    if _get_running_loop() is not None:
        raise BlockingInLoop("backward", "await autograd.backward_async(...)")
    worker = _worker()
    worker.backward(*_checked(context_id, roots), retain_graph, _mode(worker, mode), _deadline(worker, timeout))


def backward_async(
    context_id: int,
    roots: Sequence[torch.Tensor],
    retain_graph: bool = False,
    mode: Mode | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[None]:
    """`backward` as a future: await it, or wait for it. Cancelling it ends the pass on all workers."""
    worker = _worker()
    chosen = _mode(worker, mode)
    return worker.backward_async(*_checked(context_id, roots), retain_graph, chosen, _deadline(worker, timeout))


def get_gradients(context_id: int) -> dict[torch.Tensor, torch.Tensor]:
    """The gradients that the passes of a context have computed on this worker, by leaf.

    Raises:
        ContextNotFound: the context has ended, or is unknown on this worker.
    """
    return _worker().contexts.find(context_id).gradients.snapshot()


def _checked(context_id: Any, roots: Any) -> tuple[int, Sequence[torch.Tensor]]:
    if not isinstance(context_id, int) or not isinstance(roots, list | tuple):
        raise TypeError(
            "backward(): incompatible function arguments. It takes a context's id (int) and a list of tensors, but got "
            f"{type(context_id).__name__} and {type(roots).__name__}"
        )
    for root in roots:
        if not isinstance(root, torch.Tensor):
            raise TypeError(f"backward(): incompatible function arguments. A root is a {type(root).__name__}")
    return context_id, roots


def _mode(worker: AutogradWorker, mode: str | None) -> str:
    chosen = mode or worker.agent.options.autograd_mode
    if chosen not in ("smart", "fast"):
        raise ConfigError(f"mode must be 'smart' or 'fast', but got {chosen!r}")
    return chosen


def _deadline(worker: AutogradWorker, timeout_s: float) -> Deadline:
    limit_s = limit_of(timeout_s, worker.agent.caller.new_calls.rpc_timeout_s)
    return Deadline.after(limit_s).earlier(current_deadline.get())


# ---------------------------------------------------------------- torch's private names


def _new_context() -> Context:
    current = current_autograd.get()
    if not isinstance(current, Context):
        current = None
    if current is not None and not current.is_released:  # a context that ended with its agent may be left behind
        raise AutogradError("Already have an autograd context id for this thread.")
    made = _worker().contexts.new()
    current_autograd.set(made)
    return made


def _release_context(context_id: int, quietly: bool = False) -> None:
    current = current_autograd.get()
    if isinstance(current, Context) and current.id == context_id:
        current_autograd.set(None)
    if quietly and agent_or_none() is None:
        return  # RPC was shut down inside the `with` block, and the contexts with it
    worker = _worker()
    if not quietly:
        worker.contexts.find(context_id)
    released = worker.release(context_id)
    if released is not None:
        released.drop()


def _current_context() -> Context:
    current = current_autograd.get()
    if not isinstance(current, Context) or current.is_released:
        raise AutogradError(
            "Current thread doesn't have a valid autograd context. Please wrap your code using: "
            "`with rpcdist.autograd.context() as context_id` to generate a valid context"
        )
    return current


def _retrieve_context(context_id: int) -> Context:
    return _worker().contexts.find(context_id)


def _is_valid_context(context_id: int) -> bool:
    """True if the context is alive on this worker; otherwise raises `ContextNotFound`."""
    _worker().contexts.find(context_id)
    return True


def _get_max_id() -> int:
    return make_id(_worker().id, MAX_NUMBER)


def _init(worker_id: int) -> None:
    """Nothing to do: `init_rpc` does it."""


def _get_debug_info() -> dict[str, str]:
    return _worker().counts()
