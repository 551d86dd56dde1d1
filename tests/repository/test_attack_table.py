"""The table of attacks names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
TABLE = REPOSITORY / "tests" / "attacks" / "README.md"


def test_each_attack_has_a_test_that_exists() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| **")]
    missing = []
    for line in lines[1:]:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line)
        if not named:
            missing.append(line)
        for path, name in named:
            file = REPOSITORY / path
            if not file.exists() or f"def {name}(" not in file.read_text():
                missing.append(f"{path}::{name}")
    assert not missing
    assert len(lines) > 30
