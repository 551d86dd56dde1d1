"""The runners of an agent, by which arriving tensors find theirs.

[Note: receivers]
    Neighbours address a runner by the pipeline's key and the worker's index, not by a remote reference: references from
    worker to worker and back would keep each other alive. The runner lives as long as the driver's reference to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

from rpcdist.errors import RpcdistError
from rpcdist.parallel.pipeline._schedules import Action, Kind
from rpcdist.rpc._agent_local import AgentLocal
from rpcdist.rpc._peers.calling_worker import calling_session
from rpcdist.rpc._peers.network import MessageSink
from rpcdist.rpc.functions import runs_on_reader


class Receiver(Protocol):
    """Takes the tensors that a neighbour pushes: a `StageRunner`."""

    def arrived(self, step: int, action: Action, values: Sequence[object], source: MessageSink | None) -> None:
        """Takes the tensors for an action of this or a later step, and where they came from; on any thread."""


receivers: AgentLocal[WeakValueDictionary[tuple[str, int], Receiver]] = AgentLocal(WeakValueDictionary)
"""By the key of the pipeline and the index of the worker."""


@runs_on_reader
def push(key: str, worker: int, step: int, stage: int, kind: Kind, microbatch: int, values: list[object]) -> None:
    """Delivers tensors for an action. A neighbour calls it by RPC."""
    receiver = receivers.get().get((key, worker))
    if receiver is None:
        raise RpcdistError(f"the pipeline {key} has ended on this worker")
    receiver.arrived(step, Action(stage, kind, microbatch), values, calling_session.get())
