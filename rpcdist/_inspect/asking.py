"""Queries the state of a job's workers, from outside the job or from a process in it.

Every process that has the job token may query; queries change nothing. If a worker does not answer, its process is
inspected from outside: by this process on the same host, otherwise by an answering worker on the worker's host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Self, TypeVar

from rpcdist._proto import inspection_pb2
from rpcdist.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectFailed,
    ProtocolViolation,
    RpcdistError,
    TransportError,
)
from rpcdist.frozen_process import FrozenProcess, inspect_process
from rpcdist.inspection import MemberFacts, SilentWorker, WorkerFacts, facts_from_json, notes_from_json
from rpcdist.inspection.facts import JobFacts
from rpcdist.time_limits import (
    CONNECTION_CLOSE_LIMIT_S,
    LOOK_LATE_S,
    LOOK_LIMIT_S,
    LOOK_PATIENCE_S,
    QUICK_ANSWER_LIMIT_S,
)
from rpcdist.transport import acquire_node
from rpcdist.transport.addresses import split_address
from rpcdist.transport.link import Link
from rpcdist.transport.unix_sockets import INSPECTION_ROLE, local_addresses, process_at
from rpcdist.waiters import run_in_thread

S = TypeVar("S")
T = TypeVar("T")

MAX_WORKERS: Final = 1000
MAX_AT_ONCE: Final = 32
MAX_NEIGHBOURS: Final = 2
MAX_STACKS_CHARS: Final = 256 << 10
MAX_NOTE_NUMBER: Final = (1 << 63) - 1


class Asker:
    """Queries workers; use it as a context manager. Its methods block for a limited time, and may be called repeatedly.

    Args:
        is_live: queries log lines and spans, too, which workers then record; each answer has those since the last one.
            It gets stacks only from workers where an operation takes long, and members only from the first worker;
            `facts_at` gets all.

    Raises:
        ConfigError: there is no usable token.
    """

    def __init__(self, is_live: bool = False) -> None:
        self._node = acquire_node()
        self._is_live = is_live
        # By address: links to workers that answered last time, and the numbers of the last notes received.
        self._links: dict[str, tuple[Link, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._node.run(self._close_links(), CONNECTION_CLOSE_LIMIT_S)
        finally:
            self._node.release()

    def job_at(self, address: str) -> JobFacts:
        """The job of the worker that serves at an address, or of the store there if a worker's process serves it.

        Raises:
            ConnectFailed: no worker answers there, and no process there can be inspected.
            AuthenticationFailed: the worker has another token, or belongs to another job.
        """
        return self._node.run(self._job_at(address), None)

    def facts_at(self, address: str) -> WorkerFacts:
        """All facts of the worker that serves at an address. Raises as `job_at` does."""
        return self._node.run(self._query(address, inspection_pb2.LookRequest()), None)

    def jobs_here(self) -> tuple[list[JobFacts], dict[str, RpcdistError]]:
        """The jobs that have a worker on this host and, by address, the errors of other workers on this host.

        Those workers mostly belong to another user or job, so they have another token.
        """
        return self._node.run(self._jobs_here(), None)

    async def _jobs_here(self) -> tuple[list[JobFacts], dict[str, RpcdistError]]:
        found: list[JobFacts] = []
        errors: dict[str, RpcdistError] = {}
        left = local_addresses()
        first = await self._all(left, lambda address: self._ask(address, (), has_members=True))
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
            if isinstance(answer, FrozenProcess):
                found.append(_unknown_job(address, answer))
            elif not isinstance(answer, ConnectFailed):  # on ConnectFailed the worker has ended
                errors[address] = answer
        return found, errors

    async def _job_at(self, address: str) -> JobFacts:
        first = await self._ask(address, (), has_members=True)
        if isinstance(first, FrozenProcess):
            return _unknown_job(address, first)
        if isinstance(first, RpcdistError):
            raise first
        return await self._with_others(first)

    async def _with_others(self, first: WorkerFacts) -> JobFacts:
        others = [member for member in first.members if member.id != first.id][:MAX_WORKERS]
        workers = [first]
        silent = await self._all(others, lambda member: self._ask_member(member, workers))
        seen = tuple(one for one in silent if one is not None)
        return JobFacts(first.job, tuple(sorted(workers, key=lambda facts: facts.id)), seen)

    async def _all(self, items: Iterable[S], ask: Callable[[S], Awaitable[T]]) -> list[T]:
        places = asyncio.Semaphore(MAX_AT_ONCE)

        async def one(item: S) -> T:
            async with places:
                return await ask(item)

        return list(await asyncio.gather(*(one(item) for item in items)))

    # ------------------------------------------------------------ one worker

    async def _ask_member(self, member: MemberFacts, answered: list[WorkerFacts]) -> SilentWorker | None:
        """Queries a worker, and adds its answer to `answered`; without an answer, returns what its process shows."""
        answer: WorkerFacts | FrozenProcess | RpcdistError
        if member.is_lost:  # no query, so that many lost workers cost no time
            lost = FrozenProcess("lost", "the first worker that answered has declared it lost")
            answer = await self._inspect_from_outside(member.address, answered) or lost
        else:
            answer = await self._ask(member.address, answered)
        if isinstance(answer, WorkerFacts) and answer.worker != member.name:
            answer = ProtocolViolation(f"it answers as {answer.worker!r}, and no worker speaks for another")
        if isinstance(answer, WorkerFacts):
            answered.append(answer)
            return None
        if isinstance(answer, RpcdistError):
            unseen = " (and no worker on its host can inspect the process)" if _is_silence(answer) else ""
            answer = FrozenProcess("unknown", f"{answer}{unseen}")
        return _silent(member.name, member.address, answer)

    async def _ask(
        self, address: str, answered: Sequence[WorkerFacts], has_members: bool = False
    ) -> WorkerFacts | FrozenProcess | RpcdistError:
        """The answer of a worker. If it takes long, the worker's process is inspected at the same time."""
        asking = asyncio.ensure_future(self._query_or_error(address, has_members))
        try:
            await asyncio.wait({asking}, timeout=LOOK_PATIENCE_S)
            answer = asking.result() if asking.done() else None
            if isinstance(answer, WorkerFacts) or (isinstance(answer, RpcdistError) and not _is_silence(answer)):
                return answer
            seen = await self._inspect_from_outside(address, answered)
            if seen is not None and not asking.done():
                if seen.runs:  # many threads that compute in Python slow down the answering thread
                    await asyncio.wait({asking}, timeout=None if _is_busy() else LOOK_LATE_S)
                if not asking.done():
                    return seen
            answer = await asking
            return answer if isinstance(answer, WorkerFacts) or seen is None else seen
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _query_or_error(self, address: str, has_members: bool) -> WorkerFacts | RpcdistError:
        live = self._is_live
        try:
            request = inspection_pb2.LookRequest(is_live=live, is_brief=live, has_members=has_members)
            return await self._query(address, request)
        except RpcdistError as exc:
            return exc
        except (ValueError, OSError) as exc:  # the address that another worker reported is invalid
            return TransportError(str(exc))

    async def _query(self, address: str, request: inspection_pb2.LookRequest) -> WorkerFacts:
        link, seen = self._links.pop(address, (None, 0))
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                if link is None or link.session.closed_reason is not None:
                    link, seen = await self._node.connect(address, INSPECTION_ROLE, LOOK_LIMIT_S, retry=False), 0
                request.after = seen
                reply = await link.unary("Inspection", "Look", request, inspection_pb2.LookReply, LOOK_LIMIT_S)
        except BaseException as exc:
            if link is not None:
                await link.close()
            if isinstance(exc, TimeoutError):
                raise ConnectFailed(address, "it does not answer", LOOK_LIMIT_S) from exc
            raise
        kept, _ = self._links.setdefault(address, (link, seen))
        if kept is not link:  # two queries opened a link at once
            await link.close()
        facts = facts_from_json(reply.facts)
        if reply.notes:
            facts = replace(facts, notes=notes_from_json(reply.notes))
            self._links[address] = kept, min(max(seen, facts.notes.last_number), MAX_NOTE_NUMBER)
        return facts

    async def _close_links(self) -> None:
        links, self._links = list(self._links.values()), {}
        for link, _ in links:
            await link.close()

    async def _inspect_from_outside(self, address: str, answered: Sequence[WorkerFacts]) -> FrozenProcess | None:
        """Inspects the process at an address if it is on this host; otherwise asks a worker on its host to do that."""
        pid = process_at(address)
        if pid is not None:
            return await run_in_thread(lambda: inspect_process(pid), lambda: None, "rpcdist-inspect")
        host = _host_of(address)
        neighbours = [facts for facts in answered if host is not None and _host_of(facts.address) == host]
        for facts in neighbours[:MAX_NEIGHBOURS]:
            with suppress(RpcdistError, TimeoutError):
                async with asyncio.timeout(LOOK_LIMIT_S + QUICK_ANSWER_LIMIT_S):
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
    """The host of an address; None if a worker reported an invalid address."""
    try:
        return split_address(address)[0]
    except ConfigError:
        return None


def _is_silence(error: RpcdistError) -> bool:
    """Whether the worker sent no answer at all, not even an invalid one."""
    return isinstance(error, TransportError) and not isinstance(error, AuthenticationFailed | ProtocolViolation)


def _is_busy() -> bool:
    """Whether processes of this host wait for processors, so that a healthy one may answer late."""
    return os.getloadavg()[0] > 2 * (os.cpu_count() or 1)


def _unknown_job(address: str, seen: FrozenProcess) -> JobFacts:
    return JobFacts("unknown", (), (_silent(f"the process at {address}", address, seen),))


def _silent(worker: str, address: str, seen: FrozenProcess) -> SilentWorker:
    return SilentWorker(worker, address, seen.state, seen.detail, seen.stacks)
