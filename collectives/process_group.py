"""`ProcessGroup`: ranks of the world that run operations together, and the backends that run the operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch

from rpcdist.collectives._api.group_methods import LowerCaseOperations
from rpcdist.collectives._group.backend_binding import BackendBinding
from rpcdist.collectives._group.backend_contract import GroupBackend
from rpcdist.collectives._group.operation_hooks import OperationHooks, PostHookArgs, PreHookArgs
from rpcdist.collectives._group.state import monitored_text
from rpcdist.collectives._operations.lowering import Place, barrier
from rpcdist.collectives.options import GlooOptions
from rpcdist.collectives.work import Work
from rpcdist.errors import CollectiveTimeout, ConfigError, RankLost, RpcdistError, refuse_pickling
from rpcdist.time_limits import GROUP_TIMEOUT_S

if TYPE_CHECKING:
    from rpcdist.collectives._stores.store_base import Store

__all__ = ["ProcessGroup"]

CPU_BACKENDS: Final = frozenset({"tcp", "gloo", "mpi"})
"""Backends that use only CPU memory, in which tensors of other devices are staged."""


_INSTEAD: Final = "call grow_group, shrink_group or new_group, or use ElasticDataParallel (docs/collectives.md)"


class ProcessGroup(LowerCaseOperations):
    """Ranks of the world that run operations together, made by `init_process_group`, `new_group` and similar functions.

    Its methods with torch's lower-case names (`allreduce`, `_allgather_base`, ...) take ranks in the group and return
    Work; programs usually call the functions of `rpcdist.collectives`. Inference engines make groups in addition to the
    default group by `ProcessGroup(store, rank, size)`, which have no backend before `_register_backend`.

    Args:
        store: the part of the store that only this group uses.
        rank: rank of this process in the group.
        ranks: ranks of the members in the world, by rank in the group; or the size of a group outside a world.
            Classes of programs call the constructor with a rank and a size alone, as in torch.
        name: equal on all its ranks, and unique among groups.
        backends: the backend of each device type; one backend may carry several device types.
        split: makes groups of some of its ranks.
        backend_name: the name that the caller of `init_process_group` or `new_group` passed.
        names: the caller's name of the backend ("gloo" for `tcp`) for each device type.
        timeout_s: default limit of each operation, in seconds.
        description: the purpose of the group, for people.
        options: `pg_options` of the caller.
        device: the device that the group is bound to.
    """

    class BackendType(Enum):
        """Kinds of backends, with torch's names and numbers."""

        UNDEFINED = 0
        GLOO = 1
        NCCL = 2
        UCC = 3
        MPI = 4
        XCCL = 5
        CUSTOM = 6

    __reduce_ex__ = refuse_pickling

    def __init__(
        self,
        store: Store | int,
        rank: int,
        ranks: tuple[int, ...] | int | None = None,
        *,
        name: str = "",
        backends: Mapping[str, GroupBackend] = MappingProxyType({}),
        split: Callable[..., ProcessGroup | None] | None = None,
        backend_name: str = "undefined",
        names: Mapping[str, str] | None = None,
        timeout_s: float = GROUP_TIMEOUT_S,
        description: str = "undefined",
        options: object | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._store = None if isinstance(store, int) else store
        if isinstance(store, int):  # a rank and a size
            rank, ranks = store, rank
        if ranks is None:
            raise TypeError("ProcessGroup takes a store, a rank and ranks, or a rank and a size")
        self._name = name
        self._rank = rank
        ranks = tuple(range(ranks)) if isinstance(ranks, int) else ranks
        self._ranks = ranks
        self._group_ranks = {world_rank: rank for rank, world_rank in enumerate(ranks)}
        self._backends = dict(backends)
        self._bindings = {
            device_type: BackendBinding(
                backend, Place(rank, len(ranks), device_type != "cpu" and backend.name in CPU_BACKENDS)
            )
            for device_type, backend in backends.items()
        }
        self._backend_name = backend_name
        self._names = dict(names or {device: backend.name for device, backend in backends.items()})
        self._timeout_s = timeout_s
        self._description = description
        self._split = split
        self._closed = False
        self._numbers: Counter[str] = Counter()
        self._hooks = OperationHooks()
        self._options = options
        self.bound_device_id = device

    def __repr__(self) -> str:
        state = "destroyed" if self._closed else self.backend_config or "no backend"
        ranks = ", ".join(map(str, self._ranks[:8])) + (", ..." if len(self._ranks) > 8 else "")
        return f"<ProcessGroup {self._name!r}: rank {self._rank} of {len(self._ranks)} (world ranks {ranks}), {state}>"

    # ------------------------------------------------------------ identity

    def rank(self) -> int:
        """Returns this process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Returns the number of ranks in the group."""
        return len(self._ranks)

    def name(self) -> str:
        """Returns the name of its backend, as in torch; the group's name is `group_name`."""
        return self._backend_name

    _get_backend_name = name

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the members in the world, by rank in the group."""
        return self._ranks

    @property
    def group_name(self) -> str:
        """The group's name, equal on all its ranks and unique among groups."""
        return self._name

    @property
    def group_desc(self) -> str:
        """The purpose of the group, as its creator described it."""
        return self._description

    @property
    def backend_config(self) -> str:
        """The backend of each device type, e.g. "cpu:tcp,cuda:nccl"."""
        return ",".join(f"{device}:{name}" for device, name in self._names.items())

    @property
    def device_types(self) -> tuple[str, ...]:
        """The device types whose tensors it carries."""
        return tuple(self._backends)

    @property
    def _device_types(self) -> list[torch.device]:
        """The device types as devices, for torch's checkpoints."""
        return [torch.device(device_type) for device_type in self._backends]

    @property
    def timeout(self) -> timedelta:
        """Default limit of each operation."""
        return timedelta(seconds=self.timeout_s)

    @property
    def timeout_s(self) -> float:
        """Default limit of each operation, in seconds."""
        return self._timeout_s

    @property
    def options(self) -> object:
        """The caller's `pg_options`; without them, options as torch's Gloo has, with the group's timeout."""
        return GlooOptions(self.timeout) if self._options is None else self._options

    def get_group_store(self) -> Store:
        """Returns the part of the store that only this group uses. Raises ConfigError if it was made without one."""
        if self._store is None:
            raise ConfigError(f"{self!r} was made without a store")
        return self._store

    def next_number(self, purpose: str) -> int:
        """Counts from 1 for each purpose. Ranks get equal numbers if they all call it in the same order."""
        self._numbers[purpose] += 1
        return self._numbers[purpose]

    def group_rank(self, world_rank: int) -> int:
        """Returns the rank in this group of a rank in the world. Raises ConfigError if that is not a member."""
        try:
            return self._group_ranks[world_rank]
        except (KeyError, TypeError):
            raise ConfigError(f"Global rank {world_rank} is not part of group {self}") from None

    def world_rank(self, group_rank: int) -> int:
        """Returns the rank in the world of a rank in this group. Raises ConfigError if the group has no such rank."""
        if not 0 <= group_rank < len(self._ranks):
            raise ConfigError(f"Group rank {group_rank} is not part of group {self}")
        return self._ranks[group_rank]

    # ------------------------------------------------------------ backends

    def binding(self, device_type: str) -> BackendBinding:
        """Returns the backend binding for tensors of a device type.

        Raises:
            ConfigError: the group has no backend for the device type, or was destroyed.
        """
        try:
            return self._bindings[device_type]
        except KeyError:
            raise self._no_backend(device_type) from None

    def _no_backend(self, device_type: str) -> RpcdistError:
        if self._closed:
            return ConfigError(f"Invalid process group specified: {self} was destroyed; make a new one")
        if device_type == "meta":
            return ConfigError("groups carry values, but a tensor on the device meta has none; call to_empty() first")
        if type(self) is not ProcessGroup:
            return ConfigError(
                f"{type(self).__name__} is a class of the program: call its methods, such as allreduce, instead of "
                "functions of torch.distributed, or run the program without compat"
            )
        return ConfigError(
            f"No backend type associated with device type {device_type}: the group carries {self.backend_config}; name "
            f"one when you make it, e.g. backend='cpu:tcp,{device_type}:...'"
        )

    @property
    def object_device(self) -> str:
        """The device type for pickled objects: the CPU if the group has a backend for it."""
        if "cpu" in self._backends or not self._backends:
            return "cpu"
        return next(iter(self._backends))

    def backend(self, device: torch.device | str) -> GroupBackend:
        """Returns the backend for a device."""
        return self.binding(torch.device(device).type).backend

    get_backend = backend

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:
        """Returns the group, which has the methods of torch's backends that programs call."""
        self.binding(torch.device(device).type)
        return self

    def _set_default_backend(self, kind: BackendType) -> None:
        """Sets the name of the backend, for programs that construct groups, as in torch."""
        self._backend_name = kind.name.lower()

    def _register_backend(self, device: torch.device, kind: BackendType, backend: ProcessGroup | None = None) -> None:
        """Uses the backend of another group, such as `ProcessGroupGloo(store, rank, size)`, for a device type.

        Raises:
            ConfigError: the backend is not a group of rpcdist, or has other ranks.
        """
        if not isinstance(backend, ProcessGroup) or (backend.rank(), backend.size()) != (self.rank(), self.size()):
            raise ConfigError(
                f"the backend of {self} must be a group of as many ranks, such as ProcessGroupGloo(store, "
                f"{self.rank()}, {self.size()}), but is {backend!r}"
            )
        binding = backend.binding(device.type)
        self._backends[device.type], self._bindings[device.type] = binding.backend, binding
        self._names[device.type] = backend.name()

    def _set_group_name(self, name: str) -> None:
        """Names a group made by hand, which has no name yet. Raises ConfigError for a group that has another name."""
        if self._name not in ("", name):
            raise ConfigError(f"{self!r} keeps its name, which its ranks share; _register_process_group adds {name!r}")
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, as groups always number their operations."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the limit of later operations."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"Expected timeout argument to be of type datetime.timedelta, got {timeout}")
        self._timeout_s = timeout.total_seconds()
        for binding in self._bindings.values():
            binding.timeout_s = self._timeout_s

    _set_default_timeout = set_timeout

    def lost_ranks(self) -> dict[int, str]:
        """Returns the world ranks of members that are known to be gone, with the reason."""
        lost_ranks = [backend.lost_ranks() for backend in self._distinct_backends()]
        return {self._ranks[rank]: reason for lost in lost_ranks for rank, reason in lost.items()}

    # ------------------------------------------------------------ hooks

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], object]) -> None:
        """Calls `hook` before each operation of this rank, on the caller's thread; it must not change the tensors.

        If it raises, the caller gets the error, and the operation does not start. It replaces a hook of the same id.
        """
        self._hooks.pre[hook_id] = hook
        self._use_hooks()

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Forgets the hook with this id, if it exists."""
        self._hooks.pre.pop(hook_id, None)
        self._use_hooks()

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], object]) -> None:
        """Calls `hook` when an asynchronous operation has started, or a blocking one is done, on the caller's thread.

        If it raises, the caller gets the error, and the operation continues.
        """
        self._hooks.post[hook_id] = hook
        self._use_hooks()

    def unregister_post_hook(self, hook_id: int) -> None:
        """Forgets the hook with this id, if it exists."""
        self._hooks.post.pop(hook_id, None)
        self._use_hooks()

    def _use_hooks(self) -> None:
        for binding in self._bindings.values():
            binding.hooks = self._hooks if self._hooks.pre or self._hooks.post else None

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Calls `hook` once when the group fails or is aborted, before its operations fail, such as to record its
        state.

        It runs on the thread that finds the failure, which may be one that watches the ranks, so it must be short. Its
        errors are logged.

        Raises:
            ConfigError: a backend of the group calls no hooks.
        """
        for hooks in self._abort_hooks("register_abort_hook"):
            hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        """Forgets the hook with this id, if it exists. Raises ConfigError like `register_abort_hook`."""
        for hooks in self._abort_hooks("unregister_abort_hook"):
            hooks.pop(hook_id, None)

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether all backends of the group call abort hooks."""
        return all(backend.abort_hooks is not None for backend in self._distinct_backends())

    def _abort_hooks(self, what: str) -> list[dict[int, Callable[[], object]]]:
        backends = self._distinct_backends()
        unable = [backend.name for backend in backends if backend.abort_hooks is None]
        if unable:
            raise ConfigError(f"Backend {unable[0]} does not support {what}")
        return [backend.abort_hooks for backend in backends if backend.abort_hooks is not None]

    # ------------------------------------------------------------ what torch's groups can and these cannot

    supports_completion_hooks: Final = False
    supports_reconfigure: Final = False
    supports_window: Final = False

    def get_reconfigure_handle(self) -> str:
        """Not supported, see `reconfigure`."""
        raise ConfigError(f"Backend {self._backend_name} does not support get_reconfigure_handle: {_INSTEAD}")

    def reconfigure(self, opts: object) -> Work:
        """Not supported, as a group keeps its ranks. Raises ConfigError, which names functions to call instead."""
        raise ConfigError(f"Backend {self._backend_name} does not support reconfigure: {_INSTEAD}")

    def new_window(self, tensor: torch.Tensor | None = None) -> object:
        """Not supported, as by torch's Gloo: no memory is shared for writing. Raises ConfigError."""
        raise ConfigError(f"Backend {self._backend_name} does not support new_window; use send and recv")

    # ------------------------------------------------------------ beside the operations of one backend

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Waits for all ranks; `ranks` of its error has all that did not call it.

        The text is torch's, which programs parse: on rank 0 it names the first missing rank, or all with
        `wait_all_ranks`. In a group of several ranks, a timeout of 0 fails at once.
        """
        limit_s = self.timeout_s if timeout is None or timeout < timedelta(0) else timeout.total_seconds()
        binding = self.binding(self.object_device)
        if limit_s == 0:
            if self.size() > 1:
                text = monitored_text(self.rank(), (), 0.0, wait_all_ranks)
                raise CollectiveTimeout(f"monitored_barrier of group {self.group_name!r}", text)
            return
        try:
            binding.carry_out(barrier(), False, limit_s)
        except (CollectiveTimeout, RankLost) as exc:
            text = monitored_text(self.rank(), exc.ranks, limit_s, wait_all_ranks)
            raise type(exc)(exc.operation, f"{text} {exc.reason}", exc.ranks) from None

    # ------------------------------------------------------------ the end

    def _distinct_backends(self) -> list[GroupBackend]:
        return list({id(backend): backend for backend in self._backends.values()}.values())

    def abort(self, reason: str = "abort() was called") -> None:
        """Ends all operations at once, on all ranks, with `GroupAborted`. Never waits; idempotent.

        The group cannot be used afterwards; `destroy_process_group` frees it. The error contains `reason`.
        """
        for backend in self._distinct_backends():
            backend.abort(reason)

    def shutdown(self) -> None:
        """Waits for submitted operations, up to the group's timeout, and frees all resources. Idempotent."""
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
        """Makes a group of some ranks of this one; only they call it.

        Args:
            ranks: ranks in this group.
            timeout: limit of each operation of the new group; the backend's default if missing.
            opts: `pg_options`; those of this group by default.
            group_name: equal on all the ranks; derived from the ranks by default.
            group_desc: the purpose of the group, for people.

        Returns:
            The new group; None on a rank that is not in `ranks`.
        """
        if self._split is None:
            raise ConfigError(f"{self} was made by its class, so it cannot be split; make a group of these ranks")
        return self._split(self, ranks, timeout=timeout, options=opts, name=group_name, description=group_desc)
