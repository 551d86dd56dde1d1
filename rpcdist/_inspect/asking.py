"""Asks the workers of a job what they do, from outside of the job or from a process in it.

Every process that has the job token may ask, and nothing changes by it. A worker that does not answer is looked at from
outside: by this process if it runs on this host, else by a worker that has answered and listens at the same host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self, TypeVar

from rpcdist._proto import inspection_pb2
from rpcdist.errors import ConfigError, ConnectFailed, RpcdistError, TransportError, WorkerLost
from rpcdist.frozen_process import FrozenProcess, look_at_process
from rpcdist.inspection import MemberFacts, SilentWorker, WorkerFacts, facts_from_json
from rpcdist.off_loop import run_in_thread
from rpcdist.time_limits import FROZEN_STACKS_LIMIT_S, LINK_CLOSE_LIMIT_S, LOOK_LIMIT_S
from rpcdist.transport import NodeOptions, acquire_node
from rpcdist.transport.addresses import split_address
from rpcdist.transport.link import Link
from rpcdist.transport.unix_sockets import INSPECTION_ROLE, local_addresses, process_at

S = TypeVar("S")
T = TypeVar("T")

MAX_WORKERS: Final = 1000
MAX_AT_ONCE: Final = 32
MAX_STACKS_CHARS: Final = 256 << 10


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The workers of one job: the facts of those that have answered, by rank, and those that have not."""

    job: str
    workers: tuple[WorkerFacts, ...]
    silent: tuple[SilentWorker, ...]


class Asker:
    """Asks; use it as a context manager. Its methods block, bounded, and may be called again and again.

    Args:
        options: the token and the like; by default those of the environment.

    Raises:
        ConfigError: there is no usable token.
    """

    def __init__(self, options: NodeOptions | None = None) -> None:
        self._node = acquire_node(options)
        self._links: dict[str, Link] = {}  # by address: those that answered last time, for the next look

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what the asking needed."""
        try:
            self._node.run(self._close_links(), LINK_CLOSE_LIMIT_S)
        finally:
            self._node.release()

    def job_at(self, address: str) -> JobFacts:
        """The job of the worker that serves at an address, or of the store there, if a worker's process has it.

        Raises:
            ConnectFailed: no worker answers there, nor is there a process that can be looked at.
            AuthenticationFailed: that worker has another token, or belongs to another job.
        """
        return self._node.run(self._job_at(address), None)

    def jobs_here(self) -> tuple[list[JobFacts], dict[str, RpcdistError]]:
        """The jobs that have a worker on this host, and, by address, why others on this host were not asked.

        Those are mostly of another user or job: they hold another token.
        """
        return self._node.run(self._jobs_here(), None)

    async def _jobs_here(self) -> tuple[list[JobFacts], dict[str, RpcdistError]]:
        found: list[JobFacts] = []
        errors: dict[str, RpcdistError] = {}
        left = local_addresses()
        first = await self._all(left, lambda address: self._look_or_error(address))
        answers = {address: answer for address, answer in zip(left, first, strict=True)}
        known: set[str] = set()
        for address, answer in answers.items():
            if isinstance(answer, WorkerFacts) and address not in known:
                job = await self._with_others(answer)
                found.append(job)
                known |= {worker.address for worker in job.workers} | {one.address for one in job.silent}
        for address, answer in answers.items():
            if address in known or isinstance(answer, WorkerFacts):
                continue
            seen = await self._look_from_here(address) if isinstance(answer, ConnectFailed) else None
            if seen is not None:
                found.append(JobFacts("unknown", (), (_silent(f"the process at {address}", address, seen),)))
            elif not isinstance(answer, ConnectFailed):  # it has ended
                errors[address] = answer
        return found, errors

    async def _job_at(self, address: str) -> JobFacts:
        try:
            first = await self._look(address)
        except ConnectFailed:
            seen = await self._look_from_here(address)
            if seen is None:
                raise
            return JobFacts("unknown", (), (_silent(f"the process at {address}", address, seen),))
        return await self._with_others(first)

    async def _with_others(self, first: WorkerFacts) -> JobFacts:
        others = [member for member in first.members if member.id != first.id][:MAX_WORKERS]
        answers = await self._all(others, self._ask_member)
        workers, silent = [first], []
        for member, answer in zip(others, answers, strict=True):
            if isinstance(answer, WorkerFacts):
                workers.append(answer)
            else:
                silent.append((member, answer))
        seen = await self._all(silent, lambda one: self._look_at_silent(one[0], one[1], workers))
        return JobFacts(first.job, tuple(sorted(workers, key=lambda facts: facts.id)), tuple(seen))

    async def _all(self, items: Iterable[S], ask: Callable[[S], Awaitable[T]]) -> list[T]:
        """Asks about several, some at a time."""
        places = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(item: S) -> T:
            async with places:
                return await ask(item)

        return list(await asyncio.gather(*(one(item) for item in items)))

    # ------------------------------------------------------------ one worker

    async def _ask_member(self, member: MemberFacts) -> WorkerFacts | RpcdistError:
        if member.is_lost:  # which costs a job with many losses no time
            return WorkerLost(member.name, "this look", 0.0, "the worker that was asked first has declared it lost")
        return await self._look_or_error(member.address)

    async def _look_or_error(self, address: str) -> WorkerFacts | RpcdistError:
        try:
            return await self._look(address)
        except RpcdistError as exc:
            return exc
        except (ValueError, OSError) as exc:  # an address that a worker made up
            return TransportError(str(exc))

    async def _look(self, address: str) -> WorkerFacts:
        link = self._links.pop(address, None)
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                if link is None or link.session.closed_reason is not None:
                    link = await self._node.connect(address, INSPECTION_ROLE, LOOK_LIMIT_S, retry=False)
                reply = await link.unary(
                    "Inspection", "Look", inspection_pb2.LookRequest(), inspection_pb2.LookReply, LOOK_LIMIT_S
                )
        except BaseException as exc:
            if link is not None:
                await link.close()
            if isinstance(exc, TimeoutError):
                raise ConnectFailed(address, "it does not answer", LOOK_LIMIT_S) from exc
            raise
        kept = self._links.setdefault(address, link)
        if kept is not link:  # two asked at once
            await link.close()
        return facts_from_json(reply.facts)

    async def _close_links(self) -> None:
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()

    async def _look_at_silent(
        self, member: MemberFacts, error: RpcdistError, answered: list[WorkerFacts]
    ) -> SilentWorker:
        seen = await self._look_from_here(member.address)
        if seen is None:
            seen = await self._look_from_there(member.address, answered)
        if seen is None:
            if member.is_lost:
                seen = FrozenProcess("lost", "the worker that was asked first has declared it lost")
            else:
                seen = FrozenProcess("unknown", f"{error} (and nobody on its host sees the process)")
        return _silent(member.name, member.address, seen)

    async def _look_from_here(self, address: str) -> FrozenProcess | None:
        pid = process_at(address)
        if pid is None:
            return None
        return await run_in_thread(lambda: look_at_process(pid), lambda: None, "rpcdist-looks-in")

    async def _look_from_there(self, address: str, answered: list[WorkerFacts]) -> FrozenProcess | None:
        """Asks a worker on the same host to look."""
        host = _host_of(address)
        for facts in answered:
            if host is None or _host_of(facts.address) != host:
                continue
            with suppress(RpcdistError, TimeoutError):
                async with asyncio.timeout(LOOK_LIMIT_S + FROZEN_STACKS_LIMIT_S):
                    link = await self._node.connect(facts.address, INSPECTION_ROLE, LOOK_LIMIT_S, retry=False)
                    try:
                        request = inspection_pb2.NeighbourRequest(address=address)
                        reply = await link.unary(
                            "Inspection", "LookAtNeighbour", request, inspection_pb2.NeighbourReply, LOOK_LIMIT_S
                        )
                    finally:
                        await link.close()
                if reply.state != "unknown":
                    return FrozenProcess(reply.state[:100], reply.detail[:1000], reply.stacks[:MAX_STACKS_CHARS])
        return None


def _host_of(address: str) -> str | None:
    """None for an address that a worker made up."""
    try:
        return split_address(address)[0]
    except ConfigError:
        return None


def _silent(worker: str, address: str, seen: FrozenProcess) -> SilentWorker:
    return SilentWorker(worker, address, seen.state, seen.detail, seen.stacks)
