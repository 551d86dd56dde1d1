"""Actors with a name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rpcdist.errors import ConfigError, RpcdistError
from rpcdist.rpc._actors.actor_names import MAX_NAME_CHARS
from rpcdist.rpc._calling.caller import Destination
from rpcdist.rpc._current import current_agent
from rpcdist.rpc._executors.async_forms import async_form, off_loop
from rpcdist.rpc.constants import UNSET_RPC_TIMEOUT
from rpcdist.rpc.rref import RRef
from rpcdist.time_limits import RREF_DELETION_LIMIT_S

logger = logging.getLogger(__name__)


@off_loop("await rpc.get_actor_async(...)")
def get_actor(name: str, timeout: float = UNSET_RPC_TIMEOUT) -> RRef[Any]:
    """A reference to the actor that `rpc.remote(..., name=...)` made under this name, on whichever worker.

    Args:
        name: of the actor.
        timeout: limit in seconds; 0 for none; by default the `rpc_timeout` of `init_rpc`.

    Raises:
        UnknownActor: there is none, or none any more: the name ends with the worker of the actor.
        BlockingInLoop: called on an event loop.
    """
    found: RRef[Any] = current_agent().actor_names.find(name, timeout)
    return found


get_actor_async = async_form(get_actor)
"""`get_actor` as a coroutine function."""


@off_loop("await rpc.remote_async(..., name=...)", "rpc.remote(..., name=...)")
def named_remote(
    to: Destination, func: Callable[..., Any], args: Any, kwargs: Any, timeout: float, is_serial: bool, name: str
) -> RRef[Any]:
    """`rpc.remote` with a name: waits until the actor exists, and raises what its creation raised."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise ConfigError(f"the name of an actor is a text of 1 to {MAX_NAME_CHARS} characters, not {name!r:.100}")
    agent = current_agent()
    owner, names = agent.directory.resolve(to), agent.actor_names
    names.reserve(name, owner, timeout)
    try:
        rref: RRef[Any] = agent.rref_home.remote(owner, func, args, timeout, kwargs, is_serial=is_serial)
        agent.caller.sync(owner, keep_actor, (name, rref), None, timeout)
        names.confirm(name, timeout)
    except BaseException:
        try:
            names.release(name, RREF_DELETION_LIMIT_S)
        except RpcdistError as exc:  # the first error says what went wrong
            logger.warning("the name %r of an actor that was not created stays reserved: %s", name, exc)
        raise
    return rref


async def keep_actor(name: str, rref: RRef[Any]) -> None:
    """At the owner of an actor: keeps it under its name."""
    await current_agent().actor_names.keep(name, rref)
