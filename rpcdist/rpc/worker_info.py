"""The identity of a worker: its name and its rank."""

from __future__ import annotations

from operator import index
from typing import Any, NoReturn

from rpcdist.ids import check_worker_name

__all__ = ["WorkerInfo"]

# torch stores worker ids in 16 bits; RRef and context ids of both sides rely on that.
_ID_RANGE = range(-(2**15), 2**15)


class WorkerInfo:
    """The name and the id (rank) of one worker; immutable, hashable, and cheap to send.

    Functions that take a destination accept it in place of a name or a rank.

    Args:
        name: letters, digits, `_`, `:` and `-`; not empty and shorter than 128 characters.
        id: the rank. `worker_id` is another spelling of it.

    Raises:
        ConfigError: the name is not allowed.
        TypeError: the id is missing, not an integer, or does not fit 16 bits.
    """

    __slots__ = ("_id", "_name")
    _id: int
    _name: str

    def __init__(self, name: str, id: int | None = None, *, worker_id: int | None = None) -> None:
        given: Any = id if id is not None else worker_id
        if not isinstance(name, str) or not hasattr(given, "__index__") or index(given) not in _ID_RANGE:
            raise TypeError(
                "__init__(): incompatible constructor arguments: WorkerInfo takes a name (str) and an id "
                f"({_ID_RANGE.start} to {_ID_RANGE.stop - 1}), but got {name!r} and {given!r}"
            )
        object.__setattr__(self, "_name", check_worker_name(name))
        object.__setattr__(self, "_id", index(given))

    @property
    def name(self) -> str:
        """The worker's unique name."""
        return self._name

    @property
    def id(self) -> int:
        """The worker's rank."""
        return self._id

    def __setattr__(self, attribute: str, value: object) -> NoReturn:
        raise AttributeError(f"property {attribute!r} of 'WorkerInfo' object has no setter")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WorkerInfo):
            return NotImplemented
        return self._id == other._id and self._name == other._name

    def __hash__(self) -> int:
        return hash((self._name, self._id))

    def __reduce__(self) -> tuple[type[WorkerInfo], tuple[str, int]]:
        return WorkerInfo, (self._name, self._id)

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self._id}, name={self._name})"
