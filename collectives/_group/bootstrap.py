"""How the ranks of a new group reach one another: each publishes its address in the store, and reads all others'."""

from __future__ import annotations

import dataclasses
import json
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from rpcdist.collectives._group.arrival import wait_for_keys
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._stores.signed_records import SignedRecords
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, DistNetworkError, RendezvousError, StoreTimeout
from rpcdist.transport.sockets import HubAddress, SocketHub

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How the ranks of a group reach one another.

    Attributes:
        uid: random name of this group, equal on all its ranks.
        addresses: addresses of the ranks' socket hubs, by rank in the group.
        boots: boot id of the kernel that each rank runs on; empty where it is unknown.
    """

    uid: str
    addresses: tuple[str, ...]
    boots: tuple[str, ...]


def exchange_values(context: GroupContext, key: str, value: str, deadline: Deadline) -> list[str]:
    """Publishes a value of this rank, signed, and returns those of all ranks, by rank.

    Raises:
        AuthenticationFailed: a value was not written by a process of this job.
        RendezvousError: some ranks did not publish theirs in time; names them.
    """
    keys = [f"{key}/{rank}" for rank in range(context.size)]
    signed = SignedRecords(context.store, context.process.records())
    signed.set(keys[context.rank], value)
    _wait_for_all(context, keys, deadline)
    return signed.get(keys)


def wait_until_made(context: GroupContext, deadline: Deadline) -> None:
    """Says that this rank needs nothing more for making the group. Rank 0 waits until all have said so.

    It mostly serves the store, and it may end at once: the others would lose the store while they still read it.

    Raises:
        RendezvousError: some ranks did not come to it in time; names them.
    """
    keys = [f"made/{rank}" for rank in range(context.size)]
    context.store.set(keys[context.rank], b"1")
    if context.rank == 0:
        _wait_for_all(context, keys, deadline)


def _wait_for_all(context: GroupContext, keys: list[str], deadline: Deadline) -> None:
    """Waits for one key of each rank; `exchange_values` says what it raises."""
    store = context.store
    try:
        wait_for_keys(store, keys, deadline.remaining_s(), context.check)
    except StoreTimeout as exc:
        missing = [context.ranks[rank] for rank, name in enumerate(keys) if not store.check([name])]
        raise RendezvousError(
            f"group {context.name!r} could not be made: these ranks did not come within {context.timeout_s:g} s: "
            f"{', '.join(map(str, missing))}. Do they run, and do all ranks call the same functions in the same order?"
        ) from exc


def exchange_addresses(
    context: GroupContext, hub: SocketHub, deadline: Deadline, unix_sockets: bool = True
) -> Bootstrap:
    """Publishes the address of this rank's hub, without its Unix socket if told so, and returns those of all ranks."""
    address = HubAddress.parse(hub.address)
    if not unix_sockets:
        address = dataclasses.replace(address, unix_name="")
    own = {"hub": str(address), "boot": _boot_id(), "uid": secrets.token_hex(8)}
    entries = [json.loads(text) for text in exchange_values(context, "bootstrap", json.dumps(own), deadline)]
    return Bootstrap(
        uid=str(entries[0]["uid"]),
        addresses=tuple(str(entry["hub"]) for entry in entries),
        boots=tuple(str(entry["boot"]) for entry in entries),
    )


def connect_watch(
    context: GroupContext, hub: SocketHub, bootstrap: Bootstrap, deadline: Deadline
) -> dict[int, socket.socket]:
    """The connections of the group's watch: at rank 0 one with every other rank, elsewhere one with rank 0.

    Raises:
        ConnectFailed: nobody listens at the address of rank 0.
        DistNetworkError: some ranks did not connect to rank 0 in time; names them.
    """
    purpose = f"{bootstrap.uid}/watch/"
    if context.rank != 0:
        try:
            return {0: hub.connect(bootstrap.addresses[0], f"{purpose}{context.rank}", deadline.remaining_s())}
        except ConnectFailed as exc:
            reason = f"{exc.reason} (rank 0 of group {context.name!r}). Did it end?"
            raise ConnectFailed(exc.address, reason, exc.waited_s) from exc
    sockets: dict[int, socket.socket] = {}
    try:
        for rank in range(1, context.size):
            sockets[rank] = hub.expect(f"{purpose}{rank}", deadline.remaining_s(), context.check)
    except BaseException as exc:
        for sock in sockets.values():
            sock.close()
        if isinstance(exc, TimeoutError):
            missing = [context.ranks[rank] for rank in range(1, context.size) if rank not in sockets]
            raise DistNetworkError(
                f"ranks {missing} of group {context.name!r} did not connect to rank 0. Did they end? Their own "
                "error says why"
            ) from exc
        raise
    return sockets


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
