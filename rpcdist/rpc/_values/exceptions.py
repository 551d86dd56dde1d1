"""Reads, copies, describes and dissects users' exceptions without running user code.

[Note: hostile exceptions] An exception is the user's object: its `str`, its attributes, its pickling and its
constructor may raise anything, `SystemExit` included; a frozen dataclass refuses to set any attribute, and `isinstance`
reads its `__class__`. Between the failure of a call and its answer, none of that may run unguarded, or the call would
never end. So this module reads and writes the fields of `BaseException` with the descriptors of `BaseException`,
compares types with `issubclass(type(exc), ...)`, and gets texts from `text_of` and `traceback_of`, which never raise.

By default an exception is pickled as its type, called with `args`. A class that defines `__init__(self, status, body)`
usually gives its base one text, so that call fails at the other end, or makes another exception. So here the builtin
base class makes the object, and its `args` and attributes are set. Classes that define how they are pickled are left
alone when they are sent; a copy within this process never runs code of the class.
"""

from __future__ import annotations

import copyreg
import inspect
import traceback
from types import BuiltinFunctionType, MemberDescriptorType, TracebackType, WrapperDescriptorType
from typing import Any, Final, TypeVar, cast

from rpcdist.errors import MAX_TEXT, SerializationError, described, text_of

E = TypeVar("E", bound=BaseException)
State = tuple[dict[str, Any], dict[str, Any]]
"""The attributes in `__slots__` of the classes, and those in the `__dict__`."""

MAX_CAUSES: Final = 64  # limit on the causes, and the members of groups, that are copied with an exception

_PICKLING: Final = frozenset(
    ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
)
_NOT_SENT: Final = frozenset(("__suppress_context__", "obj"))  # `obj` of an AttributeError may be any object
_HEAP_TYPE: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that is not one of the interpreter's own

# ---------------------------------------------------------------- fields, without running code of the class

_args, _dict, _cause, _traceback = (
    cast(Any, vars(BaseException)[name]) for name in ("args", "__dict__", "__cause__", "__traceback__")
)


def args_of(exc: BaseException) -> tuple[Any, ...]:
    return cast("tuple[Any, ...]", _args.__get__(exc))


def get_traceback(exc: BaseException) -> TracebackType | None:
    return cast("TracebackType | None", _traceback.__get__(exc))


def set_traceback(exc: BaseException, frames: TracebackType | None) -> None:
    _traceback.__set__(exc, frames)


def drop_first_frame(exc: BaseException) -> None:
    """Removes the frame that has caught an error from its traceback: its variables hold the error, which is a cycle."""
    if (frames := get_traceback(exc)) is not None:
        set_traceback(exc, frames.tb_next)


def get_cause(exc: BaseException) -> BaseException | None:
    return cast("BaseException | None", _cause.__get__(exc))


def set_cause(exc: BaseException, cause: BaseException | None) -> None:
    _cause.__set__(exc, cause)


def add_note(exc: BaseException, note: str) -> None:
    """`exc.add_note(note)`; does nothing if the exception uses `__notes__` in another way."""
    notes = _dict.__get__(exc).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def state_of(exc: BaseException) -> State:
    """The attributes of an exception, without those that are None or were never set."""
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
    return slots, dict(_dict.__get__(exc))


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
    _dict.__get__(exc).update(attributes)


# ---------------------------------------------------------------- texts


def traceback_of(exc: BaseException) -> str:
    """The traceback with the text, cut in the middle; raises nothing."""
    text = described("", lambda: _cut_in_the_middle("".join(traceback.format_exception(exc))))
    if text.startswith("< failed: "):  # str(), notes or attributes of an exception; the frames run no user code
        frames = described("formatting the traceback", lambda: "".join(traceback.format_tb(get_traceback(exc))))
        name = described("the name of the type", lambda: type(exc).__qualname__)
        text = f"Traceback (most recent call last):\n{frames}{name}: {text_of(exc)}\n"
    return text


def _cut_in_the_middle(text: str) -> str:
    """Cuts the middle: the frames are at the beginning, and a long message is at the end."""
    half = MAX_TEXT // 2
    return (
        text if len(text) <= MAX_TEXT else f"{text[:half]}... [{len(text) - 2 * half} characters cut] ...{text[-half:]}"
    )


# ---------------------------------------------------------------- taking apart, and copying


def reduce_exception(exc: BaseException) -> Any:
    """The result that `__reduce__` should have returned; NotImplemented if pickle handles the class itself."""
    cls = type(exc)
    if _pickles_itself(cls) or not _has_own_constructor(cls):
        return NotImplemented
    return reduction_of(exc, args_of(exc), state_of(exc))


def _pickles_itself(cls: type) -> bool:
    return cls in copyreg.dispatch_table or any(
        base.__flags__ & _HEAP_TYPE and not _PICKLING.isdisjoint(vars(base)) for base in cls.__mro__
    )


def _has_own_constructor(cls: type) -> bool:
    """Whether calling the class runs code of its author, however that was written."""
    return any(
        "__call__" in vars(meta) for meta in inspect.getmro(type(cls)) if meta is not type and meta is not object
    ) or any(
        not isinstance(vars(base).get("__init__"), WrapperDescriptorType | None)
        or not isinstance(vars(base).get("__new__"), BuiltinFunctionType | None)
        for base in cls.__mro__
    )


def reduction_of(exc: BaseException, args: tuple[Any, ...], state: State) -> tuple[Any, ...]:
    """The pickle of an exception with other arguments and attributes than its own.

    The attributes come after the object, since one of them may refer to it.
    """
    parts = _made_from(exc, args)
    made = (type(exc), args) if parts is args else (type(exc), args, parts)
    return rebuild_exception, made, state, None, None, restore_state


def _made_from(exc: BaseException, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments from which the builtin base makes the object. A group stores its members apart from its `args`."""
    if not issubclass(type(exc), BaseExceptionGroup):
        return args
    message = vars(BaseExceptionGroup)["message"].__get__(exc)
    if len(args) == 2 and type(args[1]) in (list, tuple) and len(args[1]) == len(_members_of(exc)):
        return (message, args[1])
    return (message, _members_of(exc))


def _members_of(group: BaseException) -> tuple[BaseException, ...]:
    members: tuple[BaseException, ...] = vars(BaseExceptionGroup)["exceptions"].__get__(group)
    return members


def rebuild_exception(cls: type, args: tuple[Any, ...], made_from: tuple[Any, ...] | None = None) -> BaseException:
    """An exception with these arguments, made without calling its constructor; see `_made_from`."""
    if not (isinstance(cls, type) and issubclass(cls, BaseException)):
        raise SerializationError(f"{cls!r} arrived as the class of an exception")
    builtin: Any = cls
    while builtin.__flags__ & _HEAP_TYPE:
        builtin = builtin.__base__  # the base that determines the memory layout, if there are several
    try:
        exc: BaseException = builtin.__new__(cls, *(args if made_from is None else made_from))
    except TypeError:
        exc = builtin.__new__(cls)
    _args.__set__(exc, args)
    return exc


def copied(error: E) -> E:
    """A copy of the error to raise again, without a traceback; its constructor is not called.

    [Note: kept errors] When an exception is raised, it stores the frames that it passes, and with them the reference
    whose use failed. If the tables keep that exception, the reference would never be freed, and its value would leak.
    So the causes of the error, and the members of a group, which also have such frames, are copied, too. An error that
    cannot be copied is returned itself.
    """
    try:
        return cast(E, _copy(error, {}))
    except Exception:
        return error


def _copy(error: BaseException, done: dict[int, BaseException]) -> BaseException:
    if id(error) in done:
        return done[id(error)]
    if len(done) >= MAX_CAUSES:
        return error
    args, made_from = args_of(error), None
    if issubclass(type(error), BaseExceptionGroup):
        done[id(error)] = error  # a member may refer to the group
        members = [_copy(member, done) for member in _members_of(error)]
        made_from = (_made_from(error, args)[0], members)
        if len(args) == 2:
            args = (args[0], tuple(members) if type(args[1]) is tuple else members)
    twin = done[id(error)] = rebuild_exception(type(error), args, made_from)
    slots, attributes = state_of(error)
    slots.pop("exceptions", None)
    notes = attributes.get("__notes__")
    if type(notes) is list:
        attributes["__notes__"] = list(notes)  # a note on one of them must not appear on the other
    restore_state(twin, (slots, attributes))
    cause = get_cause(error)
    if cause is not None:
        set_cause(twin, cause if get_traceback(cause) is None else _copy(cause, done))
    return twin
