"""How functions are named, found again, and what the caller gets where there is no name."""

from __future__ import annotations

import functools
import math
import operator
import sys
import threading
import types
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torchscript_functions import scripted

from rpcdist.errors import RpcdistError
from rpcdist.rpc._values.function_names import FunctionLookupError, decode_function, function_reference, unwrap

HERE = __name__


def plain(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def decorate(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return ("wrapped", function(*args))

    return wrapper


@decorate
def wrapped(number: int) -> int:
    return number


def _hidden(number: int) -> int:
    return number


shadowed = functools.wraps(_hidden)(lambda number: -number)
module_lambda = lambda number: number  # noqa: E731


class Base:
    def __init__(self, offset: int = 0) -> None:
        self.offset = offset

    def method(self, number: int) -> int:
        return self.offset + number

    @classmethod
    def make(cls, offset: int) -> Base:
        return cls(offset)

    @staticmethod
    def double(number: int) -> int:
        return 2 * number

    def __call__(self, number: int) -> int:
        return self.offset - number

    class Inner:
        def method(self) -> str:
            return "inner"


class Derived(Base):
    def __init__(self, offset: int = 0, extra: object = None) -> None:
        super().__init__(offset)
        self.extra = extra


NAMED = [
    (plain, f"{HERE}:plain"),
    (wrapped, f"{HERE}:wrapped"),
    (Base, f"{HERE}:Base"),
    (Base.method, f"{HERE}:Base.method"),
    (Derived.method, f"{HERE}:Base.method"),
    (Base.double, f"{HERE}:Base.double"),
    (Base.make, f"{HERE}:Base.make"),
    (Derived.make, f"{HERE}:Derived.make"),
    (Base.Inner.method, f"{HERE}:Base.Inner.method"),
    (len, "builtins:len"),
    (dict, "builtins:dict"),
    (dict.fromkeys, "builtins:dict.fromkeys"),
    (str.upper, "builtins:str.upper"),
    (object.__init__, "builtins:object.__init__"),
    (math.sin, "math:sin"),
    (operator.add, "_operator:add"),
    (torch.add, "torch:add"),
    (torch.conv2d, "torch:conv2d"),
    (torch.ones, "torch:ones"),
    (torch.Tensor.add_, "torch._C:TensorBase.add_"),
    (torch.nn.functional.relu, "torch.nn.functional:relu"),
    (torch.nn.functional.gelu, "torch._C._nn:gelu"),
    (torch.nn.functional.max_pool2d, "torch.nn.functional:max_pool2d"),
    (torch.nn.functional.adaptive_max_pool2d, "torch.nn.functional:adaptive_max_pool2d"),
    (torch.nn.functional.fractional_max_pool3d, "torch.nn.functional:fractional_max_pool3d"),
    (torch.unique, "torch.functional:unique"),
    (torch.unique_consecutive, "torch.functional:unique_consecutive"),
    (torch.linalg.norm, "torch._C._linalg:linalg_norm"),
    (torch.fft.fft, "torch._C._fft:fft_fft"),
    (torch.ops.aten.add, "torch:ops.aten.add"),
    (scripted, "torchscript_functions:scripted"),
    (torch.ops.aten.add.Tensor, "torch:ops.aten.add.Tensor"),
    (nn.Linear, "torch.nn.modules.linear:Linear"),
]


@pytest.mark.parametrize(("function", "name"), NAMED, ids=[name for _, name in NAMED])
def test_names_lead_back(function: Any, name: str) -> None:
    assert unwrap(function, (1,), {}) == (function, (1,), {})
    assert function_reference(function) == name
    found = decode_function(name)
    assert found is function or found == function


@pytest.mark.parametrize(
    "module", [torch, torch.nn.functional, torch.linalg, torch.fft, torch.special, nn.init, nn.utils, torch.func]
)
def test_every_public_function_of_torch_has_a_name(module: types.ModuleType) -> None:
    names = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    found = [getattr(module, name, None) for name in names]
    kinds = (types.FunctionType, types.BuiltinFunctionType)
    nameless = [function for function in found if isinstance(function, kinds) and function_reference(function) is None]
    assert nameless == []


class Countdown:
    def __init__(self) -> None:
        self.left = 3

    def __call__(self) -> int:
        self.left -= 1
        return self.left


def test_what_a_callable_holds_becomes_an_argument() -> None:
    derived = Derived(10)
    countdown = Countdown()
    tensor = torch.ones(2)
    words: list[str] = []
    module = nn.Linear(2, 1)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], str, tuple[Any, ...], dict[str, Any]]] = [
        (derived.method, (5,), {}, f"{HERE}:Base.method", (derived, 5), {}),
        (derived, (5,), {}, f"{HERE}:Base.__call__", (derived, 5), {}),
        (countdown, (), {}, f"{HERE}:Countdown.__call__", (countdown,), {}),
        (functools.partial(plain, 1, a=2, b=3), (4,), {"b": 5}, f"{HERE}:plain", (1, 4), {"a": 2, "b": 5}),
        (functools.partial(derived.method, 5), (), {}, f"{HERE}:Base.method", (derived, 5), {}),
        (functools.partial(functools.partial(plain, 1), 2), (3,), {}, f"{HERE}:plain", (1, 2, 3), {}),
        (words.append, ("a",), {}, "builtins:list.append", (words, "a"), {}),
        (tensor.add_, (1,), {}, "torch._C:TensorBase.add_", (tensor, 1), {}),
        (module, (tensor,), {}, "torch.nn.modules.module:Module._wrapped_call_impl", (module, tensor), {}),
    ]
    for function, args, kwargs, name, moved, keywords in cases:
        target, left, rest = unwrap(function, args, kwargs)
        assert function_reference(target) == name
        assert len(left) == len(moved) and all(a is b or a == b for a, b in zip(left, moved, strict=True))
        assert rest == keywords
        decode_function(name)(*left, **rest)


def test_a_callable_without_a_name_stays_what_it_is() -> None:
    class Local:
        def method(self) -> None: ...

        def __call__(self) -> None: ...

    for function in (Local().method, Local(), lambda: None, module_lambda):
        assert unwrap(function, (1,), {}) == (function, (1,), {})


@pytest.mark.parametrize(
    "function", [module_lambda, shadowed, (lambda: lambda: None)()], ids=["lambda", "shadowed", "local"]
)
def test_what_no_name_leads_back_to_has_none(function: Any) -> None:
    assert function_reference(function) is None


def test_by_value() -> None:
    assert function_reference(lambda number: number, by_value=True) is None
    assert function_reference(torch.add, by_value=True) == "torch:add"  # both sides have it
    assert function_reference(plain, by_value=True) == f"{HERE}:plain"
    cloudpickle.register_pickle_by_value(sys.modules[HERE])
    try:
        assert function_reference(plain, by_value=True) is None
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[HERE])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        ("os.no_such_part:f", "No module named"),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        (f"{HERE}:Base.nothing", "has no attribute 'nothing'"),
        ("math:pi", "it is a float, which cannot be called"),
        ("__main__:nothing_there", "caller's script"),
        ("__mp_main__:nothing_there", "caller's script"),
        ("math", "no attribute ''"),
        (":", "not found"),
        ("", "not found"),
        ("math:", "no attribute ''"),
    ],
    ids=repr,
)
def test_what_is_missing_is_named(name: str, text: str) -> None:
    with pytest.raises(FunctionLookupError, match=text) as error:
        decode_function(name)
    assert repr(name) in str(error.value)
    assert "RPC pickler does not serialize" in str(error.value)
    assert isinstance(error.value, RpcdistError) and isinstance(error.value, AttributeError)


def test_what_a_module_raises_at_import_passes_through(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "breaks_at_import.py").write_text("raise ZeroDivisionError('at import')")
    (tmp_path / "lacks_a_module.py").write_text("import no_such_module_at_all")
    (tmp_path / "fine_module.py").write_text("def f(): return 7")
    with pytest.raises(ZeroDivisionError, match="at import"):
        decode_function("breaks_at_import:f")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all") as error:
        decode_function("lacks_a_module:f")
    assert not isinstance(error.value, FunctionLookupError)
    assert decode_function("fine_module:f")() == 7
    monkeypatch.delitem(sys.modules, "fine_module")


def test_a_name_is_looked_up_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decode_function(f"{HERE}:plain") is plain
    monkeypatch.setattr(sys.modules[HERE], "plain", _hidden)
    assert decode_function(f"{HERE}:plain") is _hidden


def test_a_module_that_another_thread_is_importing_is_waited_for(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slow_module.py").write_text(
        "import slow_module_gates as gates\ngates.started.set()\nassert gates.go_on.wait(30)\ndef f(): return 5"
    )
    gates: Any = types.ModuleType("slow_module_gates")
    gates.started, gates.go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "slow_module_gates", gates)
    importer = threading.Thread(target=lambda: __import__("slow_module"))
    importer.start()
    assert gates.started.wait(30)
    found: list[Any] = []
    caller = threading.Thread(target=lambda: found.append(decode_function("slow_module:f")()))
    caller.start()
    gates.go_on.set()
    importer.join(30)
    caller.join(30)
    assert found == [5]
    monkeypatch.delitem(sys.modules, "slow_module")
