"""How a function travels: as "module:qualified.name" where that names it, else as a value beside its arguments.

A name is looked up at every call, so the callee runs what its module holds now. `unwrap` first turns what a callable
holds (the instance of a bound method, the arguments of a `functools.partial`) into arguments, and only a plain function
is left to be named.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]
import torch

from rpcdist.errors import RpcdistError
from rpcdist.rpc._values.pickled import NOT_ON_CALLEE

_MRO: Final[Any] = type.__dict__["__mro__"]
_CLASS_DICT: Final[Any] = type.__dict__["__dict__"]
_CALLABLES: Final = frozenset(
    (
        types.FunctionType,
        types.BuiltinFunctionType,
        types.MethodDescriptorType,
        types.WrapperDescriptorType,
        types.ClassMethodDescriptorType,
        staticmethod,
        classmethod,
    )
)
"""The members of a class whose binding runs only code of the interpreter."""


def look_up_quietly(module_name: str, path: str) -> Any:
    """The object that "module:path" names, found without import, and without code of a module.

    `getattr` would run code: a module may have a `__getattr__` (PEP 562), or be of a class that imports on demand (lazy
    packages, `importlib.util.LazyLoader`), and a class may have a metaclass and descriptors. Only the dictionaries of
    modules and classes are searched.

    Raises:
        AttributeError: the module is not loaded, or its dictionaries lack the name.
    """
    found: Any = sys.modules.get("__main__" if module_name == "__mp_main__" else module_name)
    if found is None:
        raise AttributeError(f"module {module_name!r} is not loaded here, and nothing is imported for a peer")
    for part in path.split("."):
        found = _member(found, part)
    return found


def _member(owner: Any, name: str) -> Any:
    kind = type(owner)  # `isinstance` would ask the object for its `__class__`
    if issubclass(kind, types.ModuleType):
        members = object.__getattribute__(owner, "__dict__")
        if name in members:
            return members[name]
    elif issubclass(kind, type):
        for base in _MRO.__get__(owner):
            members = _CLASS_DICT.__get__(base)
            if name in members:
                found = members[name]
                return found.__get__(None, owner) if type(found) in _CALLABLES else found
    raise AttributeError(f"it has no {name!r} of its own")


_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)


class FunctionLookupError(RpcdistError, AttributeError):
    """This process has no function of that name."""


def unwrap(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """The same call, with what `func` holds moved into the arguments.

    A bound method becomes its function, called with the instance; a `functools.partial` its function, with its
    arguments; an instance with `__call__` that method, called with the instance. Class methods and everything that
    holds nothing stay as they are.
    """
    while True:
        kind = type(func)
        if kind is types.FunctionType:
            return func, args, kwargs
        if kind is types.BuiltinFunctionType:
            method = _unbound_builtin(func)
            return (func, args, kwargs) if method is None else (method, (func.__self__, *args), kwargs)  # type: ignore[attr-defined]
        if kind is functools.partial:
            partial: functools.partial[Any] = func  # type: ignore[assignment]
            func, args, kwargs = partial.func, partial.args + args, {**partial.keywords, **kwargs}
        elif kind is types.MethodType and not isinstance(func.__self__, type):  # type: ignore[attr-defined]
            bound: types.MethodType = func  # type: ignore[assignment]
            if not _resolves_to(_plain_name(bound.__func__), bound.__func__):
                return func, args, kwargs
            func, args = bound.__func__, (bound.__self__, *args)
        elif isinstance(func, type) or function_name(func) is not None:
            return func, args, kwargs
        else:
            call = getattr(kind, "__call__", None)  # noqa: B004
            if not isinstance(call, types.FunctionType) or not _resolves_to(_plain_name(call), call):
                return func, args, kwargs
            func, args = call, (func, *args)


def function_reference(func: Callable[..., Any], *, by_value: bool = False) -> str | None:
    """The name under which `func` is called at another worker; None where it has to go as a value.

    Args:
        func: best the result of `unwrap`.
        by_value: whether lambdas, local functions, those of `__main__`, and those of modules given to
            `cloudpickle.register_pickle_by_value` go as values; the others keep going by name.
    """
    name = function_name(func)
    return None if name is not None and by_value and _goes_by_value(name) else name


def function_name(func: Callable[..., Any], is_quiet: bool = False) -> str | None:
    """The "module:qualified.name" under which this process finds `func` itself, or None.

    Args:
        is_quiet: only where it is found without code of a module, as by `loaded_function`.
    """
    special = None if type(func) is types.FunctionType else _special_name(func)
    if special is not None and _resolves_to(special, func, is_quiet):
        return special
    for name in (_plain_name(func), *_other_names(func)):
        if _resolves_to(name, func, is_quiet):
            return "__main__:" + name.partition(":")[2] if name.startswith("__mp_main__:") else name
    return None


def loaded_function(reference: str, may_import: bool = False) -> Callable[..., Any]:
    """The function of a name, for a peer that may not have code of its choice run: by `look_up_quietly`.

    Args:
        reference: the name.
        may_import: whether its module may be imported, if it is not loaded; else there is no import.

    Raises:
        FunctionLookupError: there is none, or it is not callable. Errors of the import pass through.
    """
    module_name, _, path = reference.partition(":")
    if may_import:
        _import(reference, module_name)  # or waits for another thread that is about it
    try:
        func = look_up_quietly(module_name, path)
    except AttributeError as exc:
        advice = "Import its module there, or add its whole name to allow_functions."
        raise FunctionLookupError(f"function {reference!r} was not found on the callee: {exc}. {advice}") from exc
    return _checked(reference, func)


def decode_function(reference: str) -> Callable[..., Any]:
    """The function that `function_reference` named. Imports the module where necessary, which may block.

    Raises:
        FunctionLookupError: module or name do not exist here, or it is not callable. Errors of the import pass
            through.
    """
    module_name, _, path = reference.partition(":")
    try:
        func = _walk(sys.modules[module_name], path)
    except (KeyError, AttributeError):
        # Not imported yet, or another thread is in the middle of importing it; `import_module` waits for that one.
        module = _import(reference, module_name)
        try:
            func = _walk(module, path)
        except AttributeError as exc:
            raise FunctionLookupError(_advice(reference, f"{exc}")) from exc
    return _checked(reference, func)


def _checked(reference: str, func: Any) -> Callable[..., Any]:
    if not callable(func):
        raise FunctionLookupError(_advice(reference, f"it is a {type(func).__name__}, which cannot be called"))
    return func  # type: ignore[no-any-return]


def _import(reference: str, module_name: str) -> types.ModuleType:
    if module_name == "__mp_main__":
        module_name = "__main__"
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and module_name != exc.name and not module_name.startswith(exc.name + "."):
            raise  # the module is there, but something that it imports is not
        raise FunctionLookupError(_advice(reference, f"{exc}")) from exc
    except ValueError as exc:  # an empty name
        raise FunctionLookupError(_advice(reference, f"{exc}")) from exc


def _advice(reference: str, reason: str) -> str:
    module_name = reference.partition(":")[0]
    advice = "Define it in a module that caller and callee can both import."
    if module_name in ("__main__", "__mp_main__"):
        advice = (
            "It belongs to the caller's script; start the callee from the same script, define it in a module that both "
            "can import, or send it by value: RpcOptions(by_value=True)."
        )
    return f"function {reference!r} was not found on the callee: {reason}. {advice} {NOT_ON_CALLEE}"


def _walk(module: types.ModuleType, path: str) -> Any:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    return found


def names_itself(func: Any) -> bool:
    """Whether its attributes can be read without code of its class, as those of a lazy object cannot."""
    return not any(
        "__getattr__" in vars(base) or type(vars(base).get("__getattribute__")) is types.FunctionType
        for base in type(func).__mro__
    )


def _plain_name(func: Any) -> str:
    """The name that `func` gives itself; for class methods, by the class that they are bound to."""
    if type(func) is types.MethodType:
        owner = func.__self__
        return f"{getattr(owner, '__module__', None)}:{getattr(owner, '__qualname__', None)}.{func.__name__}"
    return f"{getattr(func, '__module__', None)}:{getattr(func, '__qualname__', None)}"


def _unbound_builtin(func: Any) -> Any:
    """For a method of a C type that is bound to an object (`[].append`): the method of the type; None for others."""
    owner = func.__self__
    if owner is None or isinstance(owner, type | types.ModuleType):
        return None
    method: Any = getattr(type(owner), func.__name__, None)
    return method if type(method) in _DESCRIPTORS and function_name(method) is not None else None


def _special_name(func: Any) -> str | None:
    """Names of callables that do not tell their own: torch's builtins, methods of C types, operators, TorchScript."""
    kind = type(func)
    if kind is types.BuiltinFunctionType:
        owner = func.__self__
        if isinstance(owner, type):
            return f"{owner.__module__}:{owner.__qualname__}.{func.__name__}"
        if owner is None:
            return f"{func.__module__}:{func.__name__}"  # torch.add
        return None
    if kind in _DESCRIPTORS:
        return f"{func.__objclass__.__module__}:{func.__objclass__.__qualname__}.{func.__name__}"
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch:ops.{func}"
    if kind is torch.jit.ScriptFunction:
        module, _, name = func.qualified_name.removeprefix("__torch__").rpartition(".")
        return f"{module.removeprefix('.') or '__main__'}:{name}"
    return None


def _other_names(func: Any) -> Iterator[str]:
    """Where a function is found whose qualified name does not lead back, as some of torch's do not.

    By its qualified name, `F.max_pool2d` is a local function of `boolean_dispatch`; once torch has compiled something,
    `torch.manual_seed` is a wrapper of the function in `torch.random`.
    """
    module, name = getattr(func, "__module__", None), getattr(func, "__name__", None)
    if isinstance(module, str) and isinstance(name, str):
        yield f"{module}:{name}"
        yield f"{module.partition('.')[0]}:{name}"


def _resolves_to(name: str, func: object, is_quiet: bool = False) -> bool:
    """Whether `name` leads back to `func` in this process. Imports nothing."""
    module_name, _, path = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        return False
    try:
        found = look_up_quietly(module_name, path) if is_quiet else _walk(module, path)
    except AttributeError:
        return False
    # A class method or a builtin method of a type is a new, equal object at each look-up.
    return found is func or (type(func) in (types.MethodType, types.BuiltinFunctionType) and bool(found == func))


def _goes_by_value(name: str) -> bool:
    module_name = name.partition(":")[0]
    registered = cloudpickle.list_registry_pickle_by_value()
    return module_name == "__main__" or any(f"{module_name}.".startswith(f"{parent}.") for parent in registered)
