"""A worker's whole part in a backward pass, where the first message has brought all that it needs. Pure.

A worker that one other worker called, and that called nobody, usually gets the verdicts and the gradients of all that
it has sent in one message. What the state machine (`_verdicts`) finds out event by event then follows in one step, in
less time. `tests/autograd/test_autograd_verdicts.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rpcdist.autograd._pass_events import GradientArrived, PassEvent, PeerBegan, Run, SendBegin, Started, Verdicts

__all__ = ["OneMessagePart", "find_part"]


class OneMessagePart(NamedTuple):
    """What a worker does at once.

    Attributes:
        begin: what it tells its parent.
        run: all groups that are used; None if none is.
        verdicts: by recv, the mask of the tensors that are used.
    """

    begin: SendBegin
    run: Run | None
    verdicts: dict[int, int]


def find_part(started: Started, early: Sequence[PassEvent]) -> OneMessagePart | None:
    """The part of a worker in a pass whose mode is not fast.

    Args:
        started: how the pass starts on this worker.
        early: what has arrived before.

    Returns:
        The part; None if something is missing or is not as usual, so that the state machine has to handle the events.
    """
    graph, parent = started.graph, started.parent
    if parent is None or graph.num_roots or started.neighbours != {parent}:
        return None
    known = _first_message(early, parent)
    if known is None:
        return None
    received, arrived = known
    used = 0
    for send in graph.sends:
        verdict = received.get(send.id, 0)
        if send.to != parent or verdict or (verdict is None) is not (send.id in arrived):
            return None
        used |= (arrived.get(send.id, 0) << send.first) & send.mask
    verdicts: dict[int, int] = {}
    for recv in graph.recvs:
        if recv.sender != parent:
            return None
        verdicts[recv.id] = sum([1 << index for index, feeders in enumerate(recv.feeders) if feeders & used])
    # The gradients of used recvs follow at once, and stand for their verdicts.
    begin = SendBegin(parent, True, {id: None if verdict else 0 for id, verdict in verdicts.items()})
    if not used:
        return OneMessagePart(begin, None, verdicts)
    groups = tuple([number for number, sources in enumerate(graph.groups) if sources & used])
    sends = tuple([send.id for send in graph.sends if send.mask & used])
    recvs = tuple([id for id, verdict in verdicts.items() if verdict])
    return OneMessagePart(begin, Run(groups, used, sends, (), recvs), verdicts)


def _first_message(early: Sequence[PassEvent], parent: int) -> tuple[Verdicts, dict[int, int]] | None:
    """The verdicts of the parent, and the masks of the gradients that came; None if anything else came."""
    received: Verdicts | None = None
    arrived: dict[int, int] = {}
    for event in early:
        if type(event) is GradientArrived:
            arrived[event.id] = event.used
        elif type(event) is PeerBegan and event.peer == parent and not event.child and received is None:
            received = event.received
        else:
            return None
    return None if received is None else (received, arrived)
