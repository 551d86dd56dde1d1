"""Names of actors: the coordinator knows which worker has which, and that worker holds a reference under it.

So a name is unique in the job, an actor that has one lives as long as its worker, and a name is free again when the
worker of its actor has ended. While the actor is created, the name is reserved, until its creator ends.

A coordinator that took the place of another one knows of no names. It asks each worker once which it keeps, when it is
asked for a name that it does not know.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeGuard

from rpcdist.errors import ActorNameTaken, CallRefused, Overloaded, RpcdistError, UnknownActor
from rpcdist.ids import Identity
from rpcdist.rpc._calling.caller import Caller
from rpcdist.rpc._peers.directory import Directory
from rpcdist.rpc._peers.network import calling_worker, check_speaks_for
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.time_limits import ATTEMPT_LIMIT_S

logger = logging.getLogger(__name__)

RESERVE: Final = "rpcdist.rpc._actors.actor_names:reserve"
CONFIRM: Final = "rpcdist.rpc._actors.actor_names:confirm"
ADMIT: Final = "rpcdist.rpc._actors.actor_names:admit"
RELEASE: Final = "rpcdist.rpc._actors.actor_names:release"
FIND: Final = "rpcdist.rpc._actors.actor_names:find"
GIVE: Final = "rpcdist.rpc._actors.actor_names:give"
KEPT: Final = "rpcdist.rpc._actors.actor_names:kept"

MAX_NAME_CHARS: Final = 1000
MAX_NAMES: Final = 1 << 14
"""So many names the coordinator keeps at once; a peer may ask for any number."""

MAX_NAMES_TOLD: Final = 256  # to a worker that asks for another name, for the text of its error


@dataclass(slots=True, eq=False)
class _Claim:
    """The owner of a name, at the coordinator."""

    owner: Identity
    creator: Identity
    is_confirmed: bool = False


class ActorNames:
    """One per agent. Functions for other workers run on the user loop; the other methods block, on any thread.

    Args:
        has_predecessor: whether this worker is a coordinator that took the place of another one.
    """

    def __init__(self, me: Identity, directory: Directory, caller: Caller, has_predecessor: Callable[[], bool]) -> None:
        self._me = me
        self._directory = directory
        self._caller = caller
        self._claims: dict[str, _Claim] = {}  # at the coordinator
        self._has_predecessor = has_predecessor
        self._asked: set[Identity] = set()  # which names they keep
        self._asking = asyncio.Lock()
        self._kept: dict[str, Awaitable[Any]] = {}  # at owners

    # ------------------------------------------------------------ what this worker asks

    def reserve(self, name: str, owner: int, timeout_s: float) -> None:
        """Takes a name for an actor that is about to be created. Raises `ActorNameTaken`."""
        self._ask(RESERVE, (name, owner, self._me.id), timeout_s)

    def confirm(self, name: str, timeout_s: float) -> None:
        """The actor exists under the name."""
        self._ask(CONFIRM, (name, self._me.id), timeout_s)

    def release(self, name: str, timeout_s: float) -> None:
        """The actor was not created."""
        self._ask(RELEASE, (name, self._me.id), timeout_s)

    def find(self, name: str, timeout_s: float) -> Any:
        """A reference to the actor. Raises `UnknownActor`."""
        return self._caller.gather(self._ask(FIND, (name,), timeout_s), GIVE, (name,), timeout_s)

    def _ask(self, what: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        return self._caller.gather(self._directory.coordinator, what, arguments, timeout_s)

    # ------------------------------------------------------------ what others ask (user loop)

    @property
    def callables(self) -> dict[str, Callable[..., Coroutine[Any, Any, object]]]:
        """The functions that every peer may call, by the name on the wire."""
        return {
            RESERVE: self._on_reserve,
            ADMIT: self._on_admit,
            CONFIRM: self._on_confirm,
            RELEASE: self._on_release,
            FIND: self._on_find,
            GIVE: self._on_give,
            KEPT: self._on_kept,
        }

    async def _on_reserve(self, name: str, owner: int, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        if not _is_name(name):
            raise CallRefused(f"the name of an actor is a text of 1 to {MAX_NAME_CHARS} characters")
        if len(self._claims) >= MAX_NAMES:
            self._drop_ended()
        claim = await self._known_claim(name)
        if claim is not None:
            raise ActorNameTaken(
                f"the name {name!r} is that of an actor on worker {claim.owner.name!r}; rpc.get_actor({name!r}) gives "
                "a reference to it, and another name makes another actor"
            )
        if len(self._claims) >= MAX_NAMES:
            raise Overloaded(f"{MAX_NAMES} actors of the job have names already; make others without name=")
        member = self._directory.member
        self._claims[name] = _Claim(member(owner).identity, member(creator).identity)

    async def _on_admit(self, name: str, owner: int, creator: int) -> None:
        """An owner asks whether a worker has reserved a name for an actor there."""
        check_speaks_for(self._directory.name_of(owner))
        claim = self._claim(name)
        if claim is None or claim.is_confirmed or (claim.owner.id, claim.creator.id) != (owner, creator):
            raise CallRefused(
                f"{self._directory.name_of(creator)!r} has not reserved the name {name!r} for an actor there"
            )

    async def _on_confirm(self, name: str, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        claim = self._claim(name)
        if claim is None or claim.creator.id != creator:
            raise UnknownActor(name)
        claim.is_confirmed = True

    async def _on_release(self, name: str, creator: int) -> None:
        check_speaks_for(self._directory.name_of(creator))
        claim = self._claims.get(name)
        if claim is not None and not claim.is_confirmed and claim.creator.id == creator:
            del self._claims[name]

    async def _on_find(self, name: str) -> int:
        claim = await self._known_claim(name)
        if claim is None or not claim.is_confirmed:
            self._drop_ended()
            raise UnknownActor(name, list(islice(self._claims, MAX_NAMES_TOLD)))
        return claim.owner.id

    def _claim(self, name: str) -> _Claim | None:
        """The owner of a name; a worker that is gone loses it."""
        claim = self._claims.get(name)
        if claim is not None and self._has_ended(claim):
            del self._claims[name]
            return None
        return claim

    async def _known_claim(self, name: str) -> _Claim | None:
        """As `_claim`; asks the workers first that were there before this coordinator, if it does not know the name."""
        if self._claim(name) is None and self._has_predecessor():
            async with self._asking:
                await self._ask_workers()
        return self._claim(name)

    async def _ask_workers(self) -> None:
        """Asks all workers for their names. One that cannot answer now is asked again at the next unknown name."""
        workers = [member.identity for member in self._directory.living() if member.identity != self._me]
        asked = [
            (worker, self._caller.start_gathering(worker.id, KEPT, (), ATTEMPT_LIMIT_S))
            for worker in workers
            if worker not in self._asked
        ]
        for worker, future in asked:
            try:
                names = await future
            except RpcdistError as exc:
                logger.warning("worker %r did not say which actors it has: %s", worker.name, exc)
                continue
            self._asked.add(worker)
            self._take_names(worker, names)

    def _take_names(self, worker: Identity, names: object) -> None:
        """Takes the names that a worker answered, except those that another worker has got meanwhile."""
        if not isinstance(names, list):
            logger.warning("worker %r did not say which actors it has, but %.200r", worker.name, names)
            return
        for name in names:
            if _is_name(name) and self._claim(name) is None and len(self._claims) < MAX_NAMES:
                claim = self._claims[name] = _Claim(worker, worker)
                claim.is_confirmed = True

    def _has_ended(self, claim: _Claim) -> bool:
        return not self._lives(claim.owner) or not (claim.is_confirmed or self._lives(claim.creator))

    def _lives(self, worker: Identity) -> bool:
        directory = self._directory
        return directory.is_living(worker.id) and directory.member(worker.id).identity == worker

    def _drop_ended(self) -> None:
        self._claims = {name: claim for name, claim in self._claims.items() if not self._has_ended(claim)}

    async def keep(self, name: str, rref: Awaitable[Any]) -> None:
        """At the owner: holds the actor under its name, as soon as it exists. Raises what its creation raised, and
        `CallRefused` unless the worker that asks for it has reserved the name.
        """
        await rref
        caller = calling_worker.get()
        if caller is None:
            raise CallRefused("an actor is kept under a name for the worker that calls for it")
        asked = (name, self._me.id, caller.id)
        await self._caller.start_gathering(self._directory.coordinator, ADMIT, asked, UNSET_RPC_TIMEOUT)
        if len(self._kept) >= MAX_NAMES and name not in self._kept:
            raise Overloaded(f"{MAX_NAMES} actors of this worker have names already; make others without name=")
        self._kept[name] = rref  # one that is here already was never confirmed, or its claim ended with its coordinator

    async def _on_give(self, name: str) -> Awaitable[Any]:
        if name not in self._kept:
            raise UnknownActor(name, list(islice(self._kept, MAX_NAMES_TOLD)))
        return self._kept[name]

    async def _on_kept(self) -> list[str]:
        """The names of the actors here, for a coordinator that has just begun."""
        check_speaks_for(self._directory.name_of(self._directory.coordinator))
        return list(self._kept)


def _is_name(name: object) -> TypeGuard[str]:
    return isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS
