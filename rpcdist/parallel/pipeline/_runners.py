"""The driver's connection to the runners of its pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import rpcdist.rpc as rpc
from rpcdist.parallel.pipeline._stage_runner import StageRunner


class Runners:
    """One remote `StageRunner` per worker. The stages live as long as this object.

    Args:
        rrefs: the runners, in the order of the pipeline's workers.
        timeout_s: limit of each call; 0 for none.
    """

    def __init__(self, rrefs: Sequence[rpc.RRef[StageRunner]], timeout_s: float) -> None:
        self._rrefs = list(rrefs)
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self._rrefs)

    def __iter__(self) -> Iterator[rpc.RRef[StageRunner]]:
        return iter(self._rrefs)

    def ask(self, method: str, *args: object) -> list[Any]:
        """Calls a method of all runners at the same time, with the same arguments; waits for the results."""
        return self.ask_each(method, [args] * len(self._rrefs))

    def ask_each(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Calls a method of all runners at the same time, with other arguments for each; waits for the results."""
        calls = [
            getattr(rref.rpc_async(self._timeout_s), method)(*each)
            for rref, each in zip(self._rrefs, args, strict=True)
        ]
        return rpc.wait_all(calls)
