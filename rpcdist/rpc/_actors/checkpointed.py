"""An actor that is made again, at its owner: each call may bring the state after it along with its result.

Both are made in one turn and leave in one reply, so the creator has the result of a call if and only if it has the
state that the call left behind.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any

from rpcdist.errors import CallRefused, RRefError
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._values.exceptions import described_error
from rpcdist.rpc.future import Future

ActorState = tuple[Any]
"""The result of `checkpoint()`, which may be None."""


class Checkpointed:
    """The value of the reference: an object of a user's class, and calls of its methods that ask for its state.

    Args:
        kind, args, kwargs: how to make the object.
        state: for its `restore`; None at the first creation.
        num_restarts: how often it was made again, this time included.

    Attributes:
        object: of the user's class.
    """

    def __init__(
        self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], state: ActorState | None, num_restarts: int = 0
    ) -> None:
        # A peer that may call this class must not reach other classes through it.
        agent, module, name = current_agent(), kind.__module__, kind.__qualname__
        if not agent.options.allows(module, name):
            raise CallRefused(
                f"worker {agent.worker_name!r} does not allow calls of {module}:{name}; add it to "
                "RpcOptions(allow_functions=...) of that worker"
            )
        self.num_restarts = int(num_restarts)
        self.object = kind(*args, **kwargs)
        if state is not None:
            self.object.restore(state[0])

    def invoke_checkpointed(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], wants_state: bool) -> Any:
        """Calls a method of the object, or reads an attribute.

        Returns:
            Its result and the `ActorState` after it, which is None unless it was asked for; a coroutine of these where
            the result of the method has to be awaited.
        """
        found = getattr(self.object, method)
        result = found(*args, **kwargs) if callable(found) or args or kwargs else found
        if isinstance(result, Generator | AsyncGenerator):
            raise TypeError(
                f"{method}() of the actor {type(self.object).__name__} is a generator function: its items would be "
                "produced while other calls run. Return a list"
            )
        if inspect.iscoroutine(result) or isinstance(result, Future):  # and no reference, which can be awaited, too
            return self._finish(method, result, wants_state)
        return result, self._state(method) if wants_state else None

    async def _finish(self, method: str, result: Awaitable[Any], wants_state: bool) -> tuple[Any, ActorState | None]:
        return await result, self._state(method) if wants_state else None

    def _state(self, method: str) -> ActorState:
        ran = f"{method}() of the actor {type(self.object).__name__} ran, but "
        try:
            state = self.object.checkpoint()
        except Exception as exc:
            raise RRefError(f"{ran}the checkpoint() after it failed: {described_error(exc)}") from exc
        unsendable = current_agent().marshal.why_unpicklable(state, "checkpoint()")
        if unsendable is not None:
            raise RRefError(f"{ran}{unsendable}. Leave it out of the state, and create it in restore()")
        try:
            return (copy.deepcopy(state),)  # tensors are sent as they are, perhaps while the next call runs
        except Exception as exc:
            raise RRefError(f"{ran}its state cannot be copied: {described_error(exc)}") from exc
