"""Barrier and all_gather among workers, by calls to one of them: the first by name, as in torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rpcdist.errors import ConfigError, DeadlineExceeded, RpcdistError
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._membership.leader import CONTRIBUTE, MISSING, names_for
from rpcdist.rpc._peers.directory import Directory
from rpcdist.time_limits import MISSING_NAMES_LIMIT_S


class Gatherings:
    """The participating side; one per agent.

    Args:
        caller: makes the calls to the leader.
        directory: who is in the job.
        is_static: whether the members are the same from beginning to end.
    """

    def __init__(self, caller: Caller, directory: Directory, is_static: bool) -> None:
        self._caller = caller
        self._directory = directory
        self._is_static = is_static

    def __repr__(self) -> str:
        return f"<Gatherings of {self._directory.me.name}>"

    def all_gather(self, obj: Any, names: Iterable[str] | None, timeout_s: float) -> dict[str, Any]:
        """Exchanges one object per worker; blocks.

        Args:
            obj: what the others get from here.
            names: who takes part; None for everybody, where workers come and go: for those who are there now. Every
                participant must pass the same set, this worker included, and call in the same order.
            timeout_s: limit in seconds; infinity waits as long as the missing workers live.

        Returns:
            The objects by worker name.

        Raises:
            RuntimeError: the time is over; the text names who is missing.
            WorkerLost: a participant died.
        """
        chosen, result = self._gather(obj, names, timeout_s, True)
        return {name: result[name] for name in chosen}

    def barrier(self, names: Iterable[str] | None, timeout_s: float) -> None:
        """Waits until all have come; as `all_gather`, without objects."""
        self._gather(None, names, timeout_s, False)

    def _gather(
        self, obj: Any, names: Iterable[str] | None, timeout_s: float, wants_objects: bool
    ) -> tuple[list[str], Any]:
        me = self._directory.me.name
        chosen = sorted(self._everybody() if names is None else set(names))
        if me not in chosen:
            raise ConfigError(f"worker {me!r} is not expected in a gathering of {chosen}; add it to the names")
        leader = self._directory.resolve(chosen[0])
        limit = 0 if timeout_s == float("inf") else timeout_s
        group = chosen if me == chosen[0] else names_for(chosen)
        try:
            return chosen, self._caller.gather(leader, CONTRIBUTE, (group, me, obj, wants_objects), limit)
        except DeadlineExceeded as exc:
            raise self._late(exc, chosen, timeout_s) from exc

    def _everybody(self) -> set[str]:
        if not self._is_static:
            self._directory.refresh()
        return {info.name for info in self._directory.infos(present=not self._is_static)}

    def _late(self, exc: DeadlineExceeded, names: list[str], timeout_s: float) -> DeadlineExceeded:
        who = self._who_is_missing(names)
        if names[0] != self._directory.me.name:
            return DeadlineExceeded(f"{exc}. {who}")
        return DeadlineExceeded(f"{names[0]} timed out in _all_gather after {timeout_s:.2f} seconds. {who}")

    def _who_is_missing(self, names: list[str]) -> str:
        leader = names[0]
        try:
            missing = self._caller.gather(self._directory.resolve(leader), MISSING, (names,), MISSING_NAMES_LIMIT_S)
        except RpcdistError as exc:
            return f"The leader {leader!r} did not say who is missing: {exc}"
        return f"These workers did not arrive at {leader!r} in time: {missing}"
