"""All limits are in `rpcdist/time_limits.py` and in its page, and those that depend on each other fit together."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from time_limits_tables import DEPENDENCIES, check

from rpcdist import time_limits

ROOT = Path(__file__).resolve().parents[1]
MODULE = ROOT / "rpcdist" / "time_limits.py"
TEST_KIT = ROOT / "rpcdist" / "testing"  # its times are multiples of a unit that its users scale
SOURCES = sorted(
    {file.resolve() for folder in ("rpcdist", "autograd", "collectives") for file in (ROOT / folder).rglob("*.py")}
    - {MODULE, *TEST_KIT.rglob("*.py")}
)
WAITS = {"timeout", "timeout_s", "limit_s", "grace_s", "pause_s", "interval_s", "idle_s", "wait_s", "peer_timeout_s"}
LIMITS = {name: value for name, value in vars(time_limits).items() if name.isupper()}


def constants(file: Path) -> list[str]:
    """Names of constants of a module and its classes that say that they are times."""
    targets: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in names if name.isupper() and name.endswith(("_S", "_MS", "_US"))]


def test_no_other_module_defines_a_time() -> None:
    assert len(SOURCES) > 200
    found = {str(file.relative_to(ROOT)): names for file in SOURCES if (names := constants(file))}
    assert not found, f"these belong into rpcdist/time_limits.py: {found}"


def literal_times(file: Path) -> list[str]:
    """Waits and their defaults that bring a number of their own."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            found += [keyword.value for keyword in node.keywords if keyword.arg in WAITS]
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("sleep", "settimeout", "call_later"):
                found += node.args[:1]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            positional = node.args.posonlyargs + node.args.args
            defaults = [*zip(reversed(positional), reversed(node.args.defaults), strict=False)]
            defaults += [
                (arg, value) for arg, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value
            ]
            found += [value for arg, value in defaults if arg.arg in WAITS]
    return [ast.unparse(value) for value in found if any(is_positive(part) for part in parts(value))]


def parts(value: ast.expr) -> list[ast.expr]:
    """The length of a wait: the value, or the arguments of `min` and `max`."""
    return [part for argument in value.args for part in parts(argument)] if isinstance(value, ast.Call) else [value]


def is_positive(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, int | float) and value.value > 0


def test_no_wait_brings_a_time_of_its_own() -> None:
    found = {str(file.relative_to(ROOT)): times for file in SOURCES if (times := literal_times(file))}
    assert not found, f"these belong into rpcdist/time_limits.py: {found}"


def test_every_limit_is_used_or_compared() -> None:
    text = "".join(file.read_text() for file in SOURCES)
    assert [name for name in LIMITS if name not in text] == []


def test_limits_exceed_those_that_they_must_exceed() -> None:
    check(LIMITS)


@pytest.mark.parametrize(("longer", "shorter", "why"), DEPENDENCIES, ids=lambda value: str(value)[:40])
def test_a_violated_dependency_is_named(longer: str, shorter: tuple[str, ...], why: str) -> None:
    changed = {**LIMITS, longer: sum(LIMITS[name] for name in shorter)}
    with pytest.raises(ValueError, match=f"{longer} must exceed "):
        check(changed)
    assert why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LEASE_IN_PEER_TIMEOUTS", 2),
        ("HEARTBEATS_PER_PEER_TIMEOUT", 1),
        ("LAST_ATTEMPT_SHARE", 0.0),
        ("LAST_ATTEMPT_SHARE", 1.0),
    ],
)
def test_a_factor_out_of_bounds_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        check({**LIMITS, name: value})


def test_the_page_has_the_tables_of_the_module() -> None:
    script = ROOT / "tools" / "time_limits_tables.py"
    run = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
