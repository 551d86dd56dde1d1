"""A function and its arguments on the way to other processes, and the results on the way back.

They go as pickles. Where the main module has no file that another process could import, as in a notebook or under
`python -c` and `python -`, functions and classes of it travel by value, as cloudpickle writes them.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from dataclasses import dataclass
from typing import Any

from rpcdist.errors import SerializationError


@dataclass(frozen=True, slots=True)
class RankCall:
    """A function and its arguments after the rank.

    Attributes:
        pickled: both as a pickle.
        by_value: whether the pickle contains the definitions of the main module.
        imports: further modules that the other process imports before it reports that it is ready.
    """

    pickled: bytes
    by_value: bool
    imports: tuple[str, ...] = ()

    def load(self) -> tuple[Any, tuple[Any, ...]]:
        """The function and its arguments; imports their modules."""
        for module in self.imports:
            importlib.import_module(module)
        function, args = pickle.loads(self.pickled)
        return function, args

    def dump_result(self, result: object) -> bytes:
        """A result for the process that made the call."""
        return _dump(result, self.by_value)


def pickle_call(function: object, args: tuple[object, ...], imports: tuple[str, ...] = ()) -> RankCall:
    """A call for other processes; `imports` as in `RankCall`. Raises `SerializationError`."""
    by_value = not main_has_a_file()
    name = getattr(function, "__qualname__", "")
    if not by_value and ("<lambda>" in name or "<locals>" in name):
        raise SerializationError(
            f"{name} has no name by which a new process finds it. Define the function at the top of a module, and pass "
            "what it needs as arguments."
        )
    try:
        return RankCall(_dump((function, args), by_value), by_value, imports)
    except Exception as exc:  # pickle raises many types, and objects may raise any
        raise SerializationError(
            f"{function!r} with {len(args)} arguments cannot be sent to a new process: {exc}. Define the function at "
            "the top of a module, and pass arguments that can be pickled."
        ) from exc


def load_result(rank: int, result: bytes) -> Any:
    """The result that `RankCall.dump_result` of a rank wrote. Raises `SerializationError`."""
    try:
        return pickle.loads(result)
    except Exception as exc:
        raise SerializationError(f"the result of rank {rank} cannot be rebuilt here: {exc}") from exc


def main_has_a_file() -> bool:
    """Whether another process can import the main module of this one."""
    main = sys.modules.get("__main__")
    if getattr(main, "__spec__", None) is not None:  # python -m
        return True
    path = getattr(main, "__file__", None)
    return path is not None and os.path.isfile(path)  # under `python -` it is "<stdin>"


def _dump(value: object, by_value: bool) -> bytes:
    if not by_value:
        return pickle.dumps(value)
    import cloudpickle  # type: ignore[import-untyped]  # needed here only, and slow to import

    pickled: bytes = cloudpickle.dumps(value)
    return pickled
