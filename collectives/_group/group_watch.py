"""The watch of a group whose data others carry (MPI, NCCL): how its ranks learn what befell one another."""

from __future__ import annotations

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import connect_watch, exchange_addresses
from rpcdist.collectives._group.local_process import LocalProcess, acquire_local_process, bind_host
from rpcdist.collectives._group.watch import Watch, WatchListener
from rpcdist.deadline import Deadline
from rpcdist.time_limits import THREAD_GRACE_S

__all__ = ["GroupWatch"]


class GroupWatch:
    """Holds a watch and what it stands on.

    Args:
        context: of the group; more than one rank.
        listener: who acts on what the watch learns.
        deadline: for the other ranks to come.

    Attributes:
        watch: reports failures.

    Raises (constructor):
        RendezvousError: some ranks did not come; names them.
        TransportError: a rank cannot be reached, or did not prove the job token.
    """

    def __init__(self, context: GroupContext, listener: WatchListener, deadline: Deadline) -> None:
        self._process: LocalProcess = acquire_local_process(bind_host(context.store))
        try:
            bootstrap = exchange_addresses(context, self._process.hub, deadline)
            sockets = connect_watch(context, self._process.hub, bootstrap, deadline)
            self.watch = Watch(self._process.node, context.rank, context.ranks, context.name, listener)
            self.watch.start(sockets, deadline.remaining_s() + THREAD_GRACE_S)
        except BaseException:
            self._process.release()
            raise

    def close(self, sequence: int) -> None:
        """Says that this rank leaves after that many operations; bounded. Call it once."""
        self.watch.close(sequence)
        self._process.release()
