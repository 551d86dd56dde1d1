"""Coroutines that take their torch state along, so that many of them can share one thread."""

from __future__ import annotations

from collections.abc import Awaitable, Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar, overload

from rpcdist.rpc._executors.torch_state import StateSlot

T = TypeVar("T")


class StatefulCoroutine(Coroutine[Any, Any, T]):
    """A coroutine that takes its torch state with it: every step swaps it in and out.

    Args:
        coroutine: what to drive.
        slot: where the state is kept between steps. Give several the same to let them share one state, e.g. those that
            draw the items of one async generator.
    """

    __slots__ = ("__weakref__", "_coroutine", "slot")

    def __init__(self, coroutine: Coroutine[Any, Any, T], slot: StateSlot | None = None) -> None:
        self._coroutine = coroutine
        self.slot = slot if slot is not None else StateSlot()

    @classmethod
    def of(cls, awaitable: Awaitable[T], slot: StateSlot | None = None) -> StatefulCoroutine[T]:
        """The same for any awaitable, such as what `anext(generator)` returns."""
        return cls(awaitable if isinstance(awaitable, Coroutine) else _await(awaitable), slot)

    def send(self, value: Any, /) -> Any:
        slot = self.slot
        if slot.is_empty:  # nothing to install, which is nearly always so
            try:
                return self._coroutine.send(value)
            finally:
                slot.swap_out()
        return slot.call(self._coroutine.send, value)

    @overload
    def throw(
        self, kind: type[BaseException], error: object = None, traceback: TracebackType | None = None, /
    ) -> Any: ...
    @overload
    def throw(self, error: BaseException, none: None = None, traceback: TracebackType | None = None, /) -> Any: ...
    def throw(self, *arguments: Any) -> Any:
        return self.slot.call(self._coroutine.throw, *arguments)

    def close(self) -> None:
        self.slot.call(self._coroutine.close)  # its `with` blocks are left in the state that they know

    def __await__(self) -> Generator[Any, Any, T]:
        step, argument = self.send, None
        try:
            while True:
                awaited = step(argument)
                try:
                    step, argument = self.send, (yield awaited)
                except GeneratorExit:
                    self.close()
                    raise
                except BaseException as error:
                    step, argument = self.throw, error
        except StopIteration as stop:
            result: T = stop.value
            return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._coroutine, name)  # cr_frame, cr_await, ...: for stack dumps and for repr of tasks

    def __repr__(self) -> str:
        return repr(self._coroutine)


async def _await(awaitable: Awaitable[T]) -> T:
    return await awaitable
