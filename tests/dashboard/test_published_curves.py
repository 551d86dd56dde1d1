"""`rpcdist.publish`: curves of the program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpcdist
from rpcdist import _counters
from rpcdist.errors import ConfigError


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_counters, "_curves", {})
    yield


def values(name: str) -> list[float]:
    return [value for curve in _counters.published_curves() if curve.name == name for _, value in curve.points]


def test_numbers_become_a_curve() -> None:
    for value in (3, 2.5, torch.tensor(1.5), True):
        rpcdist.publish("loss", value)  # type: ignore[arg-type]
    assert values("loss") == [3.0, 2.5, 1.5, 1.0]


def test_the_latest_points_are_kept() -> None:
    for number in range(_counters.KEPT_POINTS + 50):
        rpcdist.publish("loss", number)
    assert values("loss") == [float(number) for number in range(50, _counters.KEPT_POINTS + 50)]


def test_what_is_not_finite_is_no_point() -> None:
    for value in (float("nan"), float("inf"), 1.0):
        rpcdist.publish("loss", value)
    assert values("loss") == [1.0]


@pytest.mark.parametrize("name", ["", "x" * 101, 7, None, ("loss",)])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="1 to 100 characters"):
        rpcdist.publish(name, 1.0)


def test_so_many_curves_and_no_more() -> None:
    for number in range(_counters.MAX_CURVES):
        rpcdist.publish(f"curve{number}", 1.0)
    with pytest.raises(ConfigError, match="64 curves already"):
        rpcdist.publish("another", 1.0)
    rpcdist.publish("curve0", 2.0)
    assert values("curve0") == [1.0, 2.0]


@pytest.mark.parametrize("value", ["loss", None, torch.ones(2)])
def test_a_value_that_is_no_number_is_an_error(value: Any) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        rpcdist.publish("loss", value)
