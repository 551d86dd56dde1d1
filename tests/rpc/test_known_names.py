"""Names of functions that were sent before hold only as long as they lead back to the function."""

from __future__ import annotations

import sys
import types
from contextlib import suppress
from typing import Any

import pytest

from rpcdist.rpc._calling import new_calls
from rpcdist.rpc._calling.new_calls import NewCalls
from rpcdist.rpc._values.function_names import function_reference

MODULE = "module_of_known_names"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    exec("def work(): pass\ndef other(): pass\nclass Box:\n    def put(self): pass", made.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


class Names:
    """The names of a caller, and how often one had to be looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table: Any = types.SimpleNamespace(next_id=None)
        marshal: Any = types.SimpleNamespace(by_value=False)
        self.calls = NewCalls(table, marshal, 60.0)
        self.looked_up: list[object] = []
        monkeypatch.setattr(new_calls, "function_reference", self._look_up)

    def _look_up(self, func: Any, by_value: bool) -> str | None:
        self.looked_up.append(func)
        return function_reference(func, by_value=by_value)

    @property
    def kept(self) -> list[Any]:
        """The functions whose names it will not look up again."""
        return list(self.calls._known)

    def __getitem__(self, func: Any) -> str | None:
        return self.calls._name_of(func)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@pytest.mark.parametrize("name", ["work", "Box"])
def test_functions_and_classes_at_the_top_level_are_kept(module: types.ModuleType, names: Names, name: str) -> None:
    func = getattr(module, name)
    assert names[func] == names[func] == f"{MODULE}:{name}"
    assert names.looked_up == [func]


@pytest.mark.parametrize("change", ["replaced", "deleted", "module gone"])
def test_a_name_that_leads_elsewhere_now_is_dropped(
    change: str, module: types.ModuleType, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = module.work
    assert names[work] == f"{MODULE}:work"
    if change == "replaced":
        monkeypatch.setattr(module, "work", module.other)
    elif change == "deleted":
        monkeypatch.delattr(module, "work")
    else:
        monkeypatch.delitem(sys.modules, MODULE)
    assert names[work] is None
    assert not names.kept  # the function may end


def test_what_holds_something_or_lies_deeper_is_not_kept(module: types.ModuleType, names: Names) -> None:
    for func in (module.Box.put, len):
        assert names[func] == names[func]
        assert names.looked_up[-2:] == [func, func]
    bound: Any
    for bound in (module.Box().put, [].append):  # a call sends them by value, or refuses them
        with suppress(Exception):
            names[bound]
    assert not names.kept


def test_the_number_of_names_is_bounded(
    module: types.ModuleType, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_calls, "MAX_KNOWN", 1)
    for func in (module.work, module.other, module.other):
        assert names[func] == f"{MODULE}:{func.__name__}"
    assert names.looked_up == [module.work, module.other]  # the latest is among them
    assert names.kept == [module.other]
