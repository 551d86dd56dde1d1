"""What runs at the owner when somebody calls a method through a reference. Calls find it by name."""

from __future__ import annotations

from typing import Any, Protocol

from rpcdist.rpc import functions

__all__: list[str] = []


class OwnedRRef(Protocol):
    """A reference at its owner."""

    def local_value(self) -> Any: ...

    def backward(self, dist_autograd_ctx_id: int, retain_graph: bool) -> None: ...


def _rref_typeof_on_owner(rref: OwnedRRef) -> type:
    return type(rref.local_value())


def _backward(rref: OwnedRRef, context_id: int, retain_graph: bool) -> None:
    rref.backward(context_id, retain_graph)


def _local_invoke(rref: OwnedRRef, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


@functions.async_execution
def _local_invoke_async_execution(rref: OwnedRRef, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return getattr(rref.local_value(), method)(*args, **kwargs)


async def _local_invoke_coroutine(rref: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return await getattr(await rref, method)(*args, **kwargs)
