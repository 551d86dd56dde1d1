"""A worker of `run_workers` for its test; it imports nothing, so that it starts at once."""

from __future__ import annotations

from typing import Any

__all__ = ["NUM_BYTES", "put_much"]

NUM_BYTES = 1_000_000


def put_much(rank: int, _port: int, results: Any) -> None:
    """Puts more than a pipe holds."""
    results.put(bytes([rank]) * NUM_BYTES)
