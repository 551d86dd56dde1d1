"""Names that a peer writes, of functions and of classes of exceptions, lead to no import and no code of a module."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peer_timeouts import CALM_S

from rpcdist._proto import rpc_pb2
from rpcdist.errors import CallRefused, FunctionNotFound, RemoteError
from rpcdist.rpc._values.failures import exception_of
from rpcdist.rpc._values.function_names import look_up_quietly
from rpcdist.testing import InProcessCluster

TRAPS = """
import trapped_log as log

def __getattr__(name):
    log.ran.append(f"__getattr__({name})")
    return getattr(__import__("trapped_victim"), "Error" if name.startswith("Late") else "run")

def greet():
    return "hello"

class Error(Exception):
    class Inner(Exception):
        pass

class Meta(type):
    def __getattribute__(cls, name):
        log.ran.append(f"metaclass {name}")
        return super().__getattribute__(name)
    def __subclasscheck__(cls, other):
        log.ran.append("__subclasscheck__")
        return False
    def __new__(mcs, name, bases, members):
        log.ran.append(f"new class {name}")
        return super().__new__(mcs, name, bases, members)

class Odd(Exception, metaclass=Meta):
    pass

class Watching(Exception):
    def __init_subclass__(cls, **kwargs):
        log.ran.append("__init_subclass__")

class Descriptor:
    def __get__(self, instance, owner):
        log.ran.append("__get__")
        return Error

class Holder:
    late = Descriptor()
    @staticmethod
    def static():
        return "static"
    @classmethod
    def bound(cls):
        return cls.__name__

class Lazy:
    def __getattr__(self, name):
        log.ran.append(f"instance {name}")
        raise AttributeError(name)
    def __call__(self):
        return "called"

lazy = Lazy()
"""
LAZY_PACKAGE = """
import importlib, sys, types

class LazyPackage(types.ModuleType):
    def __getattr__(self, name):
        return importlib.import_module("trapped_victim")
    def __getattribute__(self, name):
        import trapped_log
        trapped_log.ran.append(f"package {name}")
        return super().__getattribute__(name)

module = LazyPackage(__name__)
module.__dict__.update(__spec__=__spec__, __path__=__path__, __file__=__file__)
sys.modules[__name__] = module
"""
VICTIM = """
import trapped_log
trapped_log.ran.append("import")
class Error(Exception):
    pass
def run():
    trapped_log.ran.append("run")
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The code of modules on the path, some of them loaded, that has run."""
    package = tmp_path / "trapped_package"
    package.mkdir()
    for name, text in (("log", "ran = []"), ("tools", TRAPS), ("victim", VICTIM), ("lazily", VICTIM)):
        (tmp_path / f"trapped_{name}.py").write_text(text)
    (package / "__init__.py").write_text(LAZY_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        log: list[str] = importlib.import_module("trapped_log").ran
        importlib.import_module("trapped_tools")
        importlib.import_module("trapped_package")
        sys.modules["trapped_lazily"] = load_lazily("trapped_lazily")
        log.clear()
        yield log
    finally:
        for name in [name for name in sys.modules if name.startswith("trapped_")]:
            del sys.modules[name]


def load_lazily(name: str) -> ModuleType:
    """A module whose code runs when the first attribute of it is asked for."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TRAPPED_NAMES = [
    ("trapped_victim", "Error"),
    ("trapped_lazily", "Error"),
    ("trapped_package", "Error"),
    ("trapped_package", "victim.Error"),
    ("trapped_package.victim", "Error"),
    ("trapped_tools", "LateError"),
    ("trapped_tools", "LateError.Inner"),
    ("trapped_tools", "Holder.late"),
    ("trapped_tools", "Odd"),
    ("trapped_tools", "Odd.Inner"),
    ("trapped_tools", "Watching"),
    ("trapped_tools", "lazy.Error"),
    ("trapped_tools", "log.Error"),
    ("trapped_tools", "greet"),
    ("trapped_tools", "greet.__class__"),
    ("trapped_tools", ""),
    ("", "Error"),
    ("trapped_tools", "__builtins__.ValueError"),
]


@pytest.mark.parametrize(("module", "name"), TRAPPED_NAMES)
def test_the_class_of_an_exception_is_found_without_code_of_its_module(ran: list[str], module: str, name: str) -> None:
    """A module of whatever name was asked for an attribute of whatever name, and lazy packages import then."""
    failure = rpc_pb2.Failure(type_module=module, type_name=name, text="no", worker="b")
    assert type(exception_of(failure)) is RemoteError and ran == []


def test_classes_that_are_there_are_found(ran: list[str]) -> None:
    tools: Any = sys.modules["trapped_tools"]
    for name, cls in (("Error", tools.Error), ("Error.Inner", tools.Error.Inner)):
        failure = rpc_pb2.Failure(type_module="trapped_tools", type_name=name, text="no", worker="b")
        assert isinstance(exception_of(failure), cls)
    failure = rpc_pb2.Failure(type_module="builtins", type_name="LookupError", text="no", worker="b")
    assert isinstance(exception_of(failure), LookupError)
    assert look_up_quietly("trapped_tools", "Holder.static")() == "static"
    assert look_up_quietly("trapped_tools", "Holder.bound")() == "Holder"
    assert look_up_quietly("builtins", "dict.fromkeys")("a") == {"a": None} and ran == []


REFUSED_CALLS = [
    "trapped_victim:run",
    "trapped_lazily:run",
    "trapped_package:run",
    "trapped_package:victim.run",
    "trapped_package.victim:run",
    "trapped_tools:late",
    "trapped_tools:late.run",
    "trapped_tools:Holder.late",
    "trapped_tools:lazy.run",
    "trapped_tools:Odd.mro",
]
RESTRICTED: list[dict[str, Any]] = [
    {"allow_functions": ["trapped_tools:*", "trapped_package*:*", "trapped_v*:*", "trapped_l?zily:*"]},
    {"allow_pickle": False},
    {"allow_functions": ["trapped_*:*"], "allow_pickle": False},
]


@pytest.mark.parametrize("options", RESTRICTED, ids=["a list", "no pickle", "both"])
def test_a_call_leads_to_no_import_and_no_code_of_a_module(ran: list[str], options: dict[str, Any]) -> None:
    """`tools:*` had any attribute of the module asked for, and any module that a pattern meant imported."""
    with InProcessCluster("a", "b", peer_timeout=CALM_S, **options) as cluster, cluster.use("a") as agent:
        for name in REFUSED_CALLS:
            with pytest.raises((CallRefused, FunctionNotFound)):
                agent.caller.gather(1, name, (), CALM_S)
            assert ran == [], name
        assert agent.caller.gather(1, "trapped_tools:greet", (), CALM_S) == "hello"
        assert agent.caller.gather(1, "trapped_tools:Holder.static", (), CALM_S) == "static"
        if "allow_functions" in options:
            with pytest.raises(CallRefused, match="a callable without a name of its own"):
                agent.caller.gather(1, "trapped_tools:lazy", (), CALM_S)
        assert ran == []


def test_what_the_list_names_is_imported_and_asked_for(ran: list[str]) -> None:
    allowed = ["trapped_victim:*", "trapped_tools:late"]
    with InProcessCluster("a", "b", peer_timeout=CALM_S, allow_functions=allowed) as cluster, cluster.use("a") as agent:
        with pytest.raises(CallRefused, match="does not allow calls of trapped_tools:later"):
            agent.caller.gather(1, "trapped_tools:later", (), CALM_S)
        assert ran == []
        agent.caller.gather(1, "trapped_victim:run", (), CALM_S)
        assert ran == ["import", "run"]
        agent.caller.gather(1, "trapped_tools:late", (), CALM_S)
        assert ran == ["import", "run", "__getattr__(late)", "run"]


def test_where_peers_run_any_code_functions_are_imported_as_ever(ran: list[str]) -> None:
    with InProcessCluster("a", "b", peer_timeout=CALM_S) as cluster, cluster.use("a") as agent:
        agent.caller.gather(1, "trapped_victim:run", (), CALM_S)
        agent.caller.gather(1, "trapped_tools:late", (), CALM_S)
    assert ran == ["import", "run", "__getattr__(late)", "run"]
