"""The owner's side of a restartable actor: a call can return the actor's state together with its result.

The turn produces both and one reply carries them, so the creator has a call's result if and only if it has the state
after the call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any

from rpcdist.errors import CallRefused, RRefError, described_error
from rpcdist.rpc._current import current_agent
from rpcdist.rpc.future import Future

ActorState = tuple[Any]
"""Wraps the result of `checkpoint()`, which may be None."""


class Checkpointed:
    """The reference's value: wraps an object of a user's class, and adds its state to results on request.

    Args:
        kind, args, kwargs: the user's class and its constructor's arguments.
        state: passed to `restore` of the object; None at the first creation.
        num_restarts: restarts so far, including this one.

    Attributes:
        object: the instance of the user's class.
    """

    def __init__(
        self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any], state: ActorState | None, num_restarts: int = 0
    ) -> None:
        # A peer that may call this class must not use it to reach other classes.
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
            The result and the `ActorState` after the call (None unless `wants_state`), or a coroutine that returns
            these if the method's result must be awaited.
        """
        found = getattr(self.object, method)
        result = found(*args, **kwargs) if callable(found) or args or kwargs else found
        if isinstance(result, Generator | AsyncGenerator):
            raise TypeError(
                f"{method}() of the actor {type(self.object).__name__} is a generator function: its items would be "
                "produced while other calls run. Return a list"
            )
        if inspect.iscoroutine(result) or isinstance(result, Future):  # not a reference, although that is awaitable
            return self._finish(method, result, wants_state)
        return result, self._state(method) if wants_state else None

    async def _finish(self, method: str, result: Awaitable[Any], wants_state: bool) -> tuple[Any, ActorState | None]:
        return await result, self._state(method) if wants_state else None

    def _state(self, method: str) -> ActorState:
        ran = f"{method}() of the actor {type(self.object).__name__} ran, but "
        try:
            state = self.object.checkpoint()
        except Exception as exc:
            raise RRefError(f"{ran}its checkpoint() failed: {described_error(exc)}") from exc
        unsendable = current_agent().marshal.why_unpicklable(state, "checkpoint()")
        if unsendable is not None:
            raise RRefError(f"{ran}{unsendable}. Leave it out of the state, and create it in restore()")
        try:
            return (copy.deepcopy(state),)  # sending does not copy tensors, and the next call may run meanwhile
        except Exception as exc:
            raise RRefError(f"{ran}its state cannot be copied: {described_error(exc)}") from exc
