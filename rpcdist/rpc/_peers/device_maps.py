"""Device maps: where tensors go by the caller's map, and where they come back by the same map.

Each worker sends its map for the peer in the first message of a session that it opens. Its calls use that session, and
their results return on it. A call may bring a map of its own, which replaces that map.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from rpcdist._proto import rpc_pb2
from rpcdist.errors import CallRefused, ProtocolViolation, RpcdistError, raised_as
from rpcdist.ids import Identity
from rpcdist.rpc._peers.network import AnySession
from rpcdist.rpc._values.buffers import ReceiveBuffer
from rpcdist.rpc._values.tensors import MapDevice

logger = logging.getLogger(__name__)

DeviceMap = Mapping[torch.device, torch.device]

MAX_ENTRIES: Final = 1024
"""Limit on the entries of a map that a peer sends: no host has that many devices."""

_CPU: Final = torch.device("cpu")


@dataclass(slots=True, eq=False)
class DeviceMaps:
    """The device maps of one agent.

    Args:
        maps: by worker name, the device there for tensors on each device of this worker.
    """

    _me: str
    _maps: Mapping[str, DeviceMap]
    _name_of: Callable[[int], str]
    _back: dict[AnySession, DeviceMap] = field(default_factory=dict)  # inverse maps of peers, by session
    _arrived: set[AnySession] = field(default_factory=set)  # the sessions on which a map has arrived

    def find(self, to: int, session: AnySession | None, of_call: DeviceMap | None = None) -> MapDevice | None:
        """Returns the device map for values sent to a worker, or None.

        Args:
            session: for the result of a call, the session of the call.
            of_call: the map of the call alone, or its inverse for the result.
        """
        if of_call is not None:
            caller = self._me if session is None else session.peer.name
            return partial(_look_up, of_call, f"the call of {caller!r}", "its argument device_map= can name it")
        if session is not None and (back := self._back.get(session)) is not None:
            return partial(_look_up, back, *_explanation(session.peer.name, self._me))
        if not self._maps:  # asked for with every call
            return None
        name = self._name_of(to)
        there = self._maps.get(name)
        if there is None:
            return None
        if session is not None:  # a result: tensors on the CPU stay there, unless the caller's map has the CPU
            there = {here: at for here, at in there.items() if here != _CPU}
        return partial(_look_up, there, *_explanation(self._me, name))

    # ------------------------------------------------------------ messages between workers, on the I/O loop

    def introduction(self, to: Identity) -> rpc_pb2.Message | None:
        """The first message of a session with a worker; None if there is no map for it."""
        there = self._maps.get(to.name)
        if not there:
            return None
        return rpc_pb2.Message(device_map=device_map_to_pb(there))

    def on_message(self, session: AnySession, message: rpc_pb2.Message, buffers: list[ReceiveBuffer]) -> None:
        if session in self._arrived:
            raise ProtocolViolation("a second device map arrived on one session")
        self._arrived.add(session)
        try:
            self._back[session] = inverse_of(message.device_map)
        except CallRefused as exc:  # its torch knows other devices
            logger.warning("the device map of %s cannot be read here: %s", session.peer.name, exc)

    def forget(self, session: Any, reason: str) -> None:
        self._back.pop(session, None)
        self._arrived.discard(session)


def check_own_devices(me: str, target: str, device_map: DeviceMap) -> None:
    """Raises `ValueError` if a map names a device that this worker does not have."""
    for device in device_map:
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"Node {me} has source devices with invalid indices in its device map for {target}: {device}, but "
                f"{me} has {torch.cuda.device_count()} CUDA devices"
            )


def device_map_to_pb(device_map: DeviceMap) -> rpc_pb2.DeviceMap:
    return rpc_pb2.DeviceMap(here=map(str, device_map), there=map(str, device_map.values()))


def inverse_of(message: rpc_pb2.DeviceMap) -> DeviceMap:
    """The inverse of a peer's map, for values sent back. Raises `CallRefused` if it cannot be read here."""
    if not len(message.here) == len(message.there) <= MAX_ENTRIES:
        raise CallRefused(
            f"a device map of {len(message.here)} devices for {len(message.there)} arrived; the limit is {MAX_ENTRIES}"
        )
    with raised_as(CallRefused, "a device map arrived that cannot be read", RuntimeError):
        return {torch.device(at): torch.device(here) for here, at in zip(message.here, message.there, strict=True)}


def _explanation(whose: str, to: str) -> tuple[str, str]:
    return f"{whose!r} for {to!r}", f"add it in that worker with options.set_device_map({to!r}, {{...}})"


def _look_up(device_map: DeviceMap, whose: str, advice: str, device: torch.device) -> torch.device:
    found = device_map.get(device)
    if found is not None:
        return found
    if device.type == "cpu":
        return device
    raise RpcdistError(
        f"a tensor on {device} cannot be sent: it is not among {list(map(str, device_map))}, the devices of this "
        f"worker in the device map of {whose}; {advice}"
    )
