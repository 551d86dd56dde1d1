"""Names of functions that were sent before hold only as long as they lead back to the function."""

from __future__ import annotations

import sys
import types

import pytest

from rpcdist.rpc._calling import new_calls
from rpcdist.rpc._calling.new_calls import KnownNames
from rpcdist.rpc._values.function_names import function_reference

MODULE = "module_of_known_names"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType(MODULE)
    exec("def work(): pass\ndef other(): pass\nclass Box:\n    def put(self): pass", made.__dict__)
    monkeypatch.setitem(sys.modules, MODULE, made)
    return made


def noted(func: object) -> KnownNames:
    names = KnownNames()
    names.note(func, function_reference(func))  # type: ignore[arg-type]
    return names


@pytest.mark.parametrize("name", ["work", "Box"])
def test_functions_and_classes_at_the_top_level_are_kept(module: types.ModuleType, name: str) -> None:
    func = getattr(module, name)
    assert KnownNames().find(func) is None
    assert noted(func).find(func) == f"{MODULE}:{name}"


@pytest.mark.parametrize("change", ["replaced", "deleted", "module gone"])
def test_a_name_that_leads_elsewhere_now_is_dropped(
    change: str, module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, names = module.work, noted(module.work)
    if change == "replaced":
        monkeypatch.setattr(module, "work", module.other)
    elif change == "deleted":
        monkeypatch.delattr(module, "work")
    else:
        monkeypatch.delitem(sys.modules, MODULE)
    assert names.find(work) is None
    assert repr(names) == "<KnownNames [0]>"  # the function may end


def test_what_holds_something_or_lies_deeper_is_not_kept(module: types.ModuleType) -> None:
    box = module.Box()
    held: list[object] = []
    for func in (module.Box.put, box.put, held.append, len):
        names = KnownNames()
        names.note(func, f"{MODULE}:something")
        assert names.find(func) is None


def test_the_number_of_names_is_bounded(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_calls, "MAX_KNOWN", 1)
    names = noted(module.work)
    names.note(module.other, f"{MODULE}:other")
    assert repr(names) == "<KnownNames [1]>"
    assert names.find(module.other) == f"{MODULE}:other"  # the latest is among them
