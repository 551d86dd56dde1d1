"""`GroupWatch`: a group's watch and the sockets that it stands on, from the first moment of the group to its last."""

from __future__ import annotations

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import connect_watch, exchange_addresses
from rpcdist.collectives._group.setup_watch import OpenGroup, SetupWatch
from rpcdist.collectives._group.shared_sockets import bind_host
from rpcdist.collectives._group.state import GroupState
from rpcdist.collectives._group.watch import Watch
from rpcdist.deadline import Deadline
from rpcdist.time_limits import THREAD_GRACE_S


class GroupWatch:
    """Connects the watch of a group before anything else of it, so that a rank that dies meanwhile is noticed.

    Args:
        context: describes the group, which has more than one rank.
        state: the state of the group; it keeps what the watch hears until `hand_over`.
        deadline: for the other ranks to come.
        unix_sockets: whether other ranks may reach this one through Unix sockets.

    Attributes:
        bootstrap: how the ranks reach one another.
        check: raises when the group cannot be made any more.
        hub: connects to the other ranks.
        reporter: tells the other ranks what this one found.

    Raises (constructor):
        RendezvousError: some ranks did not come; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    def __init__(self, context: GroupContext, state: GroupState, deadline: Deadline, unix_sockets: bool = True) -> None:
        self._setup = SetupWatch(state, context.check)
        self._sockets = context.process.acquire_sockets(bind_host(context.store))
        self.check = self._setup.check
        self.hub = self._sockets.hub
        try:
            self.bootstrap = exchange_addresses(context, self.hub, deadline, unix_sockets)
            sockets = connect_watch(context, self.hub, self.bootstrap, deadline)
            self.reporter = Watch(self._sockets.node, context.rank, context.ranks, context.name, self._setup)
            self.reporter.start(sockets, deadline.remaining_s() + THREAD_GRACE_S)
        except BaseException:
            self.release()
            raise

    def hand_over(self, group: OpenGroup) -> None:
        """The group is made, and acts on what the watch heard and hears."""
        self._setup.end(group)

    def leave(self, sequence: int) -> None:
        """Tells the other ranks that this one leaves after that many operations; bounded; idempotent."""
        self.reporter.close(sequence)

    def release(self) -> None:
        """Gives the sockets back, once nothing of the group uses them; call it once. Blocks, bounded."""
        self._sockets.release()

    def give_up(self) -> None:
        """The group cannot be made: tells the other ranks, and gives the sockets back."""
        self.leave(0)
        self.release()
