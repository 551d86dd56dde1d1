"""Exceptions taken apart, and put together again without their constructor.

By default an exception pickles as its type called with `args`. A class with an `__init__(self, status, body)` of its
own usually gives its base one text, so that call fails at the other end, or makes something else. Here the object is
made by the builtin class below it, and its `args` and attributes are set. Classes that say how they are pickled are
left alone.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from types import FunctionType, MemberDescriptorType
from typing import Any, Final

from rpcdist.errors import SerializationError

__all__ = ["WithoutConstructor", "copied", "pickles_itself", "rebuild_exception", "reduce_exception", "restore_state"]

_PICKLING: Final = frozenset(
    ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
)
_NOT_SENT: Final = frozenset(("__suppress_context__", "obj"))  # `obj` of an AttributeError is whatever was asked
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not one of the interpreter's own

State = tuple[dict[str, Any], dict[str, Any]]
"""What lies in slots of the classes, and in the `__dict__`."""


def pickles_itself(cls: type) -> bool:
    """Whether a class of exceptions says how its objects are pickled."""
    return cls in copyreg.dispatch_table or any(
        base.__flags__ & _HEAP_TYPE and not _PICKLING.isdisjoint(vars(base)) for base in cls.__mro__
    )


def _has_own_constructor(cls: type) -> bool:
    return any(isinstance(vars(base).get("__init__"), FunctionType) or _new_in_python(base) for base in cls.__mro__)


def _new_in_python(base: type) -> bool:
    return isinstance(vars(base).get("__new__"), FunctionType | staticmethod)


def reduce_exception(exc: BaseException) -> Any:
    """What `__reduce__` should have returned; NotImplemented where the class may be left to pickle."""
    cls = type(exc)
    if pickles_itself(cls) or not _has_own_constructor(cls):
        return NotImplemented
    return _reduction(cls, _args_of(exc), _state_of(exc))


def _reduction(cls: type, args: tuple[Any, ...], state: State) -> tuple[Any, ...]:
    # The attributes come after the object: one of them may lead back to it.
    return rebuild_exception, (cls, args), state, None, None, restore_state


# Past `__getattribute__` of the class, which belongs to the user and may raise.


def _args_of(exc: BaseException) -> tuple[Any, ...]:
    args: tuple[Any, ...] = vars(BaseException)["args"].__get__(exc)
    return args


def _state_of(exc: BaseException) -> State:
    slots: dict[str, Any] = {}
    for base in type(exc).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, MemberDescriptorType) and name not in _NOT_SENT and name not in slots:
                try:
                    value = member.__get__(exc)
                except AttributeError:  # never set
                    continue
                if value is not None:
                    slots[name] = value
    return slots, dict(object.__getattribute__(exc, "__dict__"))


def rebuild_exception(cls: type, args: tuple[Any, ...]) -> BaseException:
    """An exception with these arguments, whose constructor was not called."""
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise SerializationError(f"{cls!r} arrived as the class of an exception")
    builtin: Any = cls
    while builtin.__flags__ & _HEAP_TYPE:
        builtin = builtin.__base__  # the base that decides about the memory, where there are several
    try:
        exc: BaseException = builtin.__new__(cls, *args)
    except TypeError:
        exc = builtin.__new__(cls)
    vars(BaseException)["args"].__set__(exc, args)
    return exc


def restore_state(exc: BaseException, state: State) -> None:
    """Sets the attributes of an exception from `rebuild_exception`."""
    slots, attributes = state
    for base in type(exc).__mro__:
        for name in slots.keys() & vars(base).keys():
            member = vars(base)[name]
            if isinstance(member, MemberDescriptorType):
                try:
                    member.__set__(exc, slots[name])
                except (AttributeError, TypeError):  # read-only: `__new__` has set it
                    continue
    object.__getattribute__(exc, "__dict__").update(attributes)


def copied(exc: BaseException) -> BaseException:
    """A copy without traceback and cause, whose constructor was not called."""
    twin = rebuild_exception(type(exc), _args_of(exc))
    restore_state(twin, _state_of(exc))
    return twin


class WithoutConstructor:
    """Pickles as an exception of which some parts are left out.

    Args:
        exc: the exception.
        can_be_sent: says of one argument or attribute whether it stays.

    Attributes:
        left_out: names of what does not.
    """

    def __init__(self, exc: BaseException, can_be_sent: Callable[[object], bool]) -> None:
        self.left_out: list[str] = []
        args = _args_of(exc)
        if not can_be_sent(args):
            self.left_out.append("args")
            args = tuple(part if can_be_sent(part) else f"<{type.__repr__(type(part))}>" for part in args)
        slots, attributes = (self._sendable(part, can_be_sent) for part in _state_of(exc))
        self._reduction = _reduction(type(exc), args, (slots, attributes))

    def _sendable(self, attributes: dict[str, Any], can_be_sent: Callable[[object], bool]) -> dict[str, Any]:
        kept = {name: value for name, value in attributes.items() if can_be_sent(value)}
        self.left_out += sorted(attributes.keys() - kept.keys())
        return kept

    def __reduce__(self) -> Any:
        return self._reduction
