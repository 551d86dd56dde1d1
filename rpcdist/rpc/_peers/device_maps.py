"""Where tensors of other devices than the CPU go: there by the caller's device map, and back by the same one.

Each worker says with the first message of a session which map it has for the worker at the other end. Its calls come by
that session, and their results go by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rpcdist._proto import rpc_pb2
from rpcdist.errors import ProtocolViolation, RpcdistError
from rpcdist.ids import Identity
from rpcdist.rpc._peers.demultiplexer import PoolJob
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc._values import MapDevice, ReceiveBuffer

logger = logging.getLogger(__name__)

DeviceMap = Mapping[torch.device, torch.device]


@dataclass(slots=True, eq=False)
class DeviceMaps:
    """One per agent.

    Args:
        me: this worker's name.
        maps: by worker name, where tensors of this worker's devices go there.
        name_of: the name of a worker.
    """

    _me: str
    _maps: Mapping[str, DeviceMap]
    _name_of: Callable[[int], str]
    _back: dict[MessageSink, DeviceMap] = field(default_factory=dict)  # inverse maps of others, by their sessions
    _told: set[MessageSink] = field(default_factory=set)  # the sessions on which a map has come

    def find(self, to: int, session: MessageSink | None) -> MapDevice | None:
        """The map for what goes to a worker; None without one.

        Args:
            to: the worker.
            session: for the result of a call, the one by which the call came.
        """
        if session is not None and (back := self._back.get(session)) is not None:
            return partial(self._look_up, back, session.peer.name, self._me)
        if not self._maps:  # asked for with every call
            return None
        name = self._name_of(to)
        there = self._maps.get(name)
        return None if there is None else partial(self._look_up, there, self._me, name)

    @staticmethod
    def _look_up(device_map: DeviceMap, whose: str, to: str, device: torch.device) -> torch.device:
        if device not in device_map:
            raise RpcdistError(
                f"a tensor on {device} cannot be sent: it is not among {list(device_map)}, the devices of this worker "
                f"in the device map of {whose!r} for {to!r}; there, options.set_device_map({to!r}, {{...}}) adds it"
            )
        return device_map[device]

    # ------------------------------------------------------------ what workers say to one another, on the I/O loop

    def introduction(self, to: Identity) -> rpc_pb2.Message | None:
        """The first message of a session with a worker; None if there is nothing to be said."""
        there = self._maps.get(to.name)
        if not there:
            return None
        pairs = there.items()
        return rpc_pb2.Message(
            device_map=rpc_pb2.DeviceMap(here=[str(here) for here, _ in pairs], there=[str(at) for _, at in pairs])
        )

    def on_message(
        self, session: MessageSink, message: rpc_pb2.Message, buffers: list[ReceiveBuffer], jobs: list[PoolJob]
    ) -> None:
        """A worker introduces itself."""
        pairs = zip(message.device_map.here, message.device_map.there, strict=False)
        if session in self._told:
            raise ProtocolViolation("a second device map arrived on one session")
        self._told.add(session)
        try:
            self._back[session] = {torch.device(at): torch.device(here) for here, at in pairs}
        except RuntimeError as exc:  # of a torch that knows other devices
            logger.warning("the device map of %s cannot be read here: %s", session.peer.name, exc)

    def forget(self, session: Any, reason: str) -> None:
        """A session has ended."""
        self._back.pop(session, None)
        self._told.discard(session)
