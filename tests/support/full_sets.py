"""Which tests run in every run, and which only in the full sets (`make stress`)."""

from __future__ import annotations

import os

import pytest

__all__ = ["FULL", "FULL_ONLY", "num_examples"]

FULL = os.environ.get("RPCDIST_TEST_FULL") == "1"
FULL_ONLY = pytest.mark.skipif(not FULL, reason="runs in `make stress`, with RPCDIST_TEST_FULL=1")


def num_examples(always: int, full: int) -> int:
    """How many random examples a property is tried with: in every run, and in the full set."""
    return full if FULL else always
