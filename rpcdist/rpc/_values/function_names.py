"""How a function travels: as "module:qualified.name" if it has such a name, else as a value beside its arguments.

A name is looked up at every call, so the callee runs the object that its module holds now. `unwrap` first turns the
values that a callable holds (the instance of a bound method, the arguments of a `functools.partial`) into arguments, so
that only a plain function must be named.
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
_DESCRIPTORS: Final = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_CALLABLES: Final = {types.FunctionType, types.BuiltinFunctionType, *_DESCRIPTORS, staticmethod, classmethod}
"""The members of a class whose binding runs only code of the interpreter."""


def look_up_quietly(module_name: str, path: str) -> Any:
    """The object that "module:path" names, found without import, and without running code of a module.

    `getattr` would run code: a module may have a `__getattr__` (PEP 562), or be of a class that imports on demand (lazy
    packages, `importlib.util.LazyLoader`), and a class may have a metaclass and descriptors. Only the dictionaries of
    modules and classes are searched.

    Raises:
        AttributeError: the module is not loaded, or its dictionaries lack the name.
    """
    found: Any = sys.modules.get("__main__" if module_name == "__mp_main__" else module_name)
    if found is None:
        raise AttributeError(f"module {module_name!r} is not loaded here, and calls from peers import nothing")
    for part in path.split("."):
        found = _member(found, part)
    return found


def _member(owner: Any, name: str) -> Any:
    kind = type(owner)  # `isinstance` would read the object's `__class__`
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


class FunctionLookupError(RpcdistError, AttributeError):
    """This process has no function with the given name."""


def unwrap(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """Returns an equivalent call, with the values that `func` holds moved into the arguments.

    A bound method becomes its function, called with the instance; a `functools.partial` becomes its function, with its
    arguments; an instance with `__call__` becomes that method, called with the instance. Class methods, and callables
    that hold nothing, stay unchanged.
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
    """The name under which `func` is called at another worker; None if it must travel as a value.

    Args:
        func: preferably the result of `unwrap`.
        by_value: whether lambdas, local functions, functions of `__main__`, and functions of modules given to
            `cloudpickle.register_pickle_by_value` travel as values; the others still travel by name.
    """
    name = function_name(func)
    return None if name is not None and by_value and _goes_by_value(name) else name


def function_name(func: Callable[..., Any], is_quiet: bool = False) -> str | None:
    """The "module:qualified.name" under which this process finds `func` itself, or None.

    Args:
        is_quiet: accept only a name that is found without running code of a module, as in `loaded_function`.
    """
    special = None if type(func) is types.FunctionType else _special_name(func)
    if special is not None and _resolves_to(special, func, is_quiet):
        return special
    for name in (_plain_name(func), *_other_names(func)):
        if _resolves_to(name, func, is_quiet):
            return "__main__:" + name.partition(":")[2] if name.startswith("__mp_main__:") else name
    return None


def loaded_function(reference: str, may_import: bool = False) -> Callable[..., Any]:
    """The function with a name, found by `look_up_quietly`, for peers that may not run code of their choice.

    Args:
        reference: the name.
        may_import: whether its module may be imported if it is not loaded.

    Raises:
        FunctionLookupError: there is no such function, or it is not callable. Errors of the import pass through.
    """
    module_name, _, path = reference.partition(":")
    if may_import:
        _import(reference, module_name)  # also waits for another thread that is importing it
    try:
        func = look_up_quietly(module_name, path)
    except AttributeError as exc:
        advice = "Import its module in that worker, or add its full name to allow_functions."
        raise FunctionLookupError(f"function {reference!r} was not found on the callee: {exc}. {advice}") from exc
    return _checked(reference, func)


def decode_function(reference: str) -> Callable[..., Any]:
    """The function that `function_reference` named. Imports the module where necessary, which may block.

    Raises:
        FunctionLookupError: the module or the name does not exist here, or it is not callable. Errors of the import
            pass through.
    """
    module_name, _, path = reference.partition(":")
    try:
        func = _walk(sys.modules[module_name], path)
    except (KeyError, AttributeError):
        # Not imported yet, or another thread is just importing it; `import_module` waits for that thread.
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
            raise  # the module exists, but a module that it imports does not
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
    """Whether its attributes can be read without running code of its class, unlike those of a lazy object."""
    return not any(
        "__getattr__" in vars(base) or type(vars(base).get("__getattribute__")) is types.FunctionType
        for base in type(func).__mro__
    )


def _plain_name(func: Any) -> str:
    """The name in the attributes of `func`; for class methods, with the class to which they are bound."""
    if type(func) is types.MethodType:
        owner = func.__self__
        return f"{getattr(owner, '__module__', None)}:{getattr(owner, '__qualname__', None)}.{func.__name__}"
    return f"{getattr(func, '__module__', None)}:{getattr(func, '__qualname__', None)}"


def _unbound_builtin(func: Any) -> Any:
    """The method of a C type that `func` binds to an object, as `[].append` does; None for other callables."""
    owner = func.__self__
    if owner is None or isinstance(owner, type | types.ModuleType):
        return None
    method: Any = getattr(type(owner), func.__name__, None)
    return method if type(method) in _DESCRIPTORS and function_name(method) is not None else None


def _special_name(func: Any) -> str | None:
    """Names of callables that lack usable attributes: torch's builtins, methods of C types, operators, TorchScript."""
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
    """Other names under which a function may be found, if its qualified name does not lead to it, as with some of
    torch.

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
