"""What runs at the owner when somebody calls a method through a reference. Calls find it by name."""

from __future__ import annotations

from typing import Any

from rpcdist.rpc import functions
from rpcdist.rpc.rref import PyRRef

__all__: list[str] = []


def _rref_typeof_on_owner(rref: PyRRef[Any]) -> type:
    return type(rref.local_value())


def _backward(rref: PyRRef[Any], context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _local_invoke(rref: PyRRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(rref: PyRRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


async def _local_invoke_coroutine(rref: PyRRef[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await getattr(await rref, method)(*args, **kwargs)
