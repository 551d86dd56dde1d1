"""`ProcessGroup`: some ranks of the world, and the backends that carry their operations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import torch

from rpcdist.collectives._api.group_methods import LowerCaseOperations
from rpcdist.collectives._group import backend_contract
from rpcdist.collectives._operations import lowering
from rpcdist.collectives._operations.lowering import Lowered, Place
from rpcdist.collectives._operations.sparse_all_reduce import all_reduce_sparse
from rpcdist.collectives.work import Work
from rpcdist.errors import ConfigError, RpcdistError

if TYPE_CHECKING:
    from rpcdist.collectives._stores.base import Store

__all__ = ["BackendBinding", "ProcessGroup"]

CPU_BACKENDS: Final = frozenset({"tcp", "gloo", "mpi"})
"""Those that reach the CPU's memory only: tensors of other devices go through it."""


class BackendBinding:
    """What carries the operations of one group on the tensors of one device type.

    Attributes:
        group: the group.
        backend: does it.
        place: for lowering.
    """

    __slots__ = ("backend", "group", "place")

    def __init__(self, group: ProcessGroup, backend: backend_contract.Backend, place: Place) -> None:
        self.group = group
        self.backend = backend
        self.place = place

    def run(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work | None:
        """Carries out an operation; returns Work if it is asynchronous, as the functions of torch do."""
        work = self.submit(lowered, async_op, timeout_s)
        return work if async_op else None

    def submit(self, lowered: Lowered, async_op: bool, timeout_s: float | None = None) -> Work:
        """The same, and always returns the Work."""
        operation, finish, result = lowered
        return self.backend.submit(
            operation,
            asynchronous=async_op,
            timeout_s=self.group.changed_timeout_s if timeout_s is None else timeout_s,
            finish=finish,
            result=result,
        )

    def all_reduce(self, tensor: torch.Tensor, op: object, async_op: bool, timeout_s: float | None = None) -> Work:
        """The one operation that sparse tensors have as well."""
        if tensor.is_sparse:
            return all_reduce_sparse(self, tensor, op, async_op, timeout_s)
        return self.submit(lowering.all_reduce(self.place, tensor, op), async_op, timeout_s)


class ProcessGroup(LowerCaseOperations):
    """Some ranks of the world that run operations together. Made by `init_process_group`, `new_group` and the like.

    Its own methods with torch's lower-case names (`allreduce`, `_allgather_base`, ...) take ranks in the group and
    return Work; the functions of `rpcdist.collectives` are the usual way.

    Args:
        name: the same on all its ranks.
        rank: of this process in the group.
        ranks: the members' ranks in the world, by their rank in the group.
        store: a key space that only this group uses.
        backends: device type to backend; one backend may carry several device types.
        backend_name: as the caller of `init_process_group` or `new_group` gave it.
        names: device type to the name that the caller knows the backend by ("gloo" for `tcp`).
        timeout_s: limit of each operation that brings no other.
        description: for people.
        options: `pg_options`.
        device: the device that the group is bound to.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        ranks: tuple[int, ...],
        store: Store,
        backends: Mapping[str, backend_contract.Backend],
        *,
        backend_name: str = "tcp",
        names: Mapping[str, str] | None = None,
        timeout_s: float = 1800.0,
        description: str = "undefined",
        options: object | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._places = {world_rank: rank for rank, world_rank in enumerate(ranks)}
        self._store = store
        self._backends = dict(backends)
        self._bindings = {
            device_type: BackendBinding(
                self, backend, Place(rank, len(ranks), device_type != "cpu" and backend.name in CPU_BACKENDS)
            )
            for device_type, backend in backends.items()
        }
        self._backend_name = backend_name
        self._names = dict(names or {device: backend.name for device, backend in backends.items()})
        self._timeout_s = timeout_s
        self._description = description
        self._closed = False
        self.changed_timeout_s: float | None = None
        self.options = options
        self.bound_device_id = device

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else self.backend_config or "no backend"
        ranks = ", ".join(map(str, self._ranks[:8])) + (", ..." if len(self._ranks) > 8 else "")
        return f"<ProcessGroup {self._name!r}: rank {self._rank} of {len(self._ranks)} (world ranks {ranks}), {state}>"

    # ------------------------------------------------------------ who it is

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """How many ranks it has."""
        return len(self._ranks)

    def name(self) -> str:
        """The name of its backend, as in torch; the group's own is `group_name`."""
        return self._backend_name

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks in the world, by their rank in the group."""
        return self._ranks

    @property
    def group_name(self) -> str:
        """Equal on all its ranks, and different from those of all other groups."""
        return self._name

    @property
    def group_desc(self) -> str:
        """For people: what the creator said it is for."""
        return self._description

    @property
    def backend_config(self) -> str:
        """Which backend carries which device type, e.g. "cpu:tcp,cuda:nccl"."""
        return ",".join(f"{device}:{name}" for device, name in self._names.items())

    @property
    def device_types(self) -> tuple[str, ...]:
        """The types of devices whose tensors it carries."""
        return tuple(self._backends)

    @property
    def timeout(self) -> timedelta:
        """Limit of each operation that brings no other."""
        return timedelta(seconds=self.timeout_s)

    @property
    def timeout_s(self) -> float:
        """The same in seconds."""
        return self._timeout_s if self.changed_timeout_s is None else self.changed_timeout_s

    def get_group_store(self) -> Store:
        """A key space that only this group uses."""
        return self._store

    def group_rank(self, world_rank: int) -> int:
        """The rank in this group of a rank in the world. Raises ConfigError for one that is not a member."""
        try:
            return self._places[world_rank]
        except (KeyError, TypeError):
            raise ConfigError(f"Global rank {world_rank} is not part of group {self}") from None

    def world_rank(self, group_rank: int) -> int:
        """The rank in the world of a rank in this group. Raises ConfigError for one that it does not have."""
        if not 0 <= group_rank < len(self._ranks):
            raise ConfigError(f"Group rank {group_rank} is not part of group {self}")
        return self._ranks[group_rank]

    # ------------------------------------------------------------ what carries it

    def binding(self, device_type: str) -> BackendBinding:
        """What carries the operations on tensors of a device type.

        Raises:
            ConfigError: the group has no backend for it, or was destroyed.
        """
        try:
            return self._bindings[device_type]
        except KeyError:
            raise self._no_backend(device_type) from None

    def _no_backend(self, device_type: str) -> RpcdistError:
        if self._closed:
            return ConfigError(f"Invalid process group specified: {self} was destroyed; make a new one")
        return ConfigError(
            f"No backend type associated with device type {device_type}: the group carries {self.backend_config}; name "
            f"one when you make it, e.g. backend='cpu:tcp,{device_type}:...'"
        )

    @property
    def object_device(self) -> str:
        """The type of device on which pickled objects travel: the CPU where there is a backend for it."""
        if "cpu" in self._backends or not self._backends:
            return "cpu"
        return next(iter(self._backends))

    def backend(self, device: torch.device | str) -> backend_contract.Backend:
        """The backend for a device."""
        return self.binding(torch.device(device).type).backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of the operations that start from now on."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout}")
        self.changed_timeout_s = timeout.total_seconds()

    def lost_ranks(self) -> dict[int, str]:
        """The ranks in the world of members that are known to be gone, and why."""
        found = [backend.lost_ranks() for backend in self._distinct_backends()]
        return {self._ranks[rank]: reason for lost in found for rank, reason in lost.items()}

    # ------------------------------------------------------------ the end

    def _distinct_backends(self) -> list[backend_contract.Backend]:
        return list({id(backend): backend for backend in self._backends.values()}.values())

    def abort(self) -> None:
        """Ends all operations at once, here and on the other ranks, with `GroupAborted`; never waits; idempotent.

        The group is of no more use; `destroy_process_group` frees it, and a new one can be made.
        """
        for backend in self._distinct_backends():
            backend.abort("abort() was called")

    def shutdown(self) -> None:
        """Waits for what was submitted, up to the group's timeout, and frees everything; idempotent."""
        if self._closed:
            return
        self._closed = True
        backends = self._distinct_backends()
        self._bindings.clear()
        self._backends.clear()
        for backend in backends:
            backend.close(self.timeout_s)

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: object | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup | None:
        """A group of some ranks of this one; only they call it.

        Args:
            ranks: in this group.
            timeout: this group's by default.
            opts: `pg_options`; this group's by default.
            group_name: one is made up by default; give one that is equal on all the ranks.
            group_desc: for people.

        Returns:
            None on a rank that is not among them.
        """
        from rpcdist.collectives._api.split_groups import split_off

        return split_off(self, ranks, timeout=timeout, options=opts, name=group_name, description=group_desc)
