"""The object that a name on the wire refers to: the one that its module holds at that moment."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from rpcdist.rpc._serving import active_calls
from rpcdist.rpc._serving.active_calls import Callables
from rpcdist.rpc._values.function_names import FunctionLookupError
from rpcdist.rpc.options import RpcOptions


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("a_module_of_callables")
    sys.modules[made.__name__] = made
    yield made
    sys.modules.pop(made.__name__, None)


def found(callables: Callables, name: str) -> object:
    return callables.find(f"a_module_of_callables:{name}")()


def test_each_call_finds_what_the_module_holds_then(module: types.ModuleType) -> None:
    callables = Callables(RpcOptions(), {}, "w")
    for number in range(3):  # redefined, as by an edited notebook cell
        module.f = lambda number=number: number  # type: ignore[attr-defined]
        assert found(callables, "f") == number
    other = types.ModuleType(module.__name__)  # reloaded
    other.f = lambda: "reloaded"  # type: ignore[attr-defined]
    sys.modules[module.__name__] = other
    assert found(callables, "f") == "reloaded"


@pytest.mark.parametrize("name", ["f", "__class__"])
def test_what_is_gone_is_not_found_again(module: types.ModuleType, name: str) -> None:
    callables = Callables(RpcOptions(), {}, "w")
    setattr(module, name, types.ModuleType if name == "__class__" else dict)
    callables.find(f"{module.__name__}:{name}")
    del sys.modules[module.__name__]
    with pytest.raises(FunctionLookupError):
        callables.find(f"{module.__name__}:{name}")


def test_what_cannot_be_called_any_more_is_refused(module: types.ModuleType) -> None:
    callables = Callables(RpcOptions(), {}, "w")
    module.f = dict  # type: ignore[attr-defined]
    assert found(callables, "f") == {}
    module.f = 5  # type: ignore[attr-defined]
    with pytest.raises(FunctionLookupError, match="cannot be called"):
        found(callables, "f")


def test_the_names_that_are_kept_are_bounded(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active_calls, "MAX_KNOWN", 3)
    callables = Callables(RpcOptions(), {}, "w")
    for number in range(10):
        setattr(module, f"f{number}", dict)
        assert found(callables, f"f{number}") == {}
    assert len(callables._known) == 3
