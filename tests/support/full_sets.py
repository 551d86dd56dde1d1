"""Which tests run in every run, and which only in the full sets (`make stress`)."""

from __future__ import annotations

import os

import pytest

__all__ = ["FULL", "FULL_ONLY"]

FULL = os.environ.get("RPCDIST_TEST_FULL") == "1"
FULL_ONLY = pytest.mark.skipif(not FULL, reason="runs in `make stress`, with RPCDIST_TEST_FULL=1")
