"""`DeviceMesh`: the ranks of the world as an array, with a group along each of its dimensions.

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards"))
    all_reduce(gradient, group=mesh["replicas"].get_group())

All ranks of the world make the same meshes in the same order, as with groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from rpcdist._launch.placement import launcher_variable
from rpcdist.collectives._api.default_group import init_process_group
from rpcdist.collectives._api.group_queries import get_rank, get_world_size, is_initialized
from rpcdist.collectives._api.new_groups import new_group
from rpcdist.collectives._group.world import current_world, default_group
from rpcdist.collectives._operations.operation import whole_number
from rpcdist.collectives.process_group import ProcessGroup
from rpcdist.errors import ConfigError

__all__ = ["DeviceMesh", "init_device_mesh"]

Dimension = int | str
Names = tuple[str, ...] | None
Groups = tuple[ProcessGroup, ...]


class DeviceMesh:
    """See the module's docstring. Programs usually call `init_device_mesh`.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh: ranks in the world, each once, as a tensor or nested sequences.
        mesh_dim_names: one for each dimension.
        backend_override: the backend of a dimension's groups, by number or name of the dimension; by default that of
            the default group.

    Attributes:
        device_type: as given.
        mesh: int64, on the CPU.
        mesh_dim_names: as given.

    Raises (constructor):
        ConfigError: ranks do not exist, or the number of names is wrong.
    """

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence[object],
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Mapping[Dimension, str] | None = None,
    ) -> None:
        ranks = torch.as_tensor(mesh, dtype=torch.int64, device="cpu").clone()
        check_device_type(device_type)
        names = checked_names(mesh_dim_names, ranks.dim())
        set_up_world(device_type)
        self._set(device_type, ranks[None], names, (), {})
        check_ranks(ranks)
        backends = {self._dimension(key): name for key, name in (backend_override or {}).items()}
        self._groups = tuple(self._make_groups(dim, backends.get(dim)) for dim in range(ranks.dim()))

    def _set(
        self, device_type: str, slices: torch.Tensor, names: Names, groups: Groups, flattened: dict[str, DeviceMesh]
    ) -> None:
        """Sets all attributes; the mesh is the slice that contains this rank, otherwise the first slice.

        Args:
            slices: all parts of the whole mesh that have these dimensions, concatenated; every rank makes the groups of
                all of them.
            flattened: the meshes that `_flatten` made from the whole mesh and its parts, by name.
        """
        own = (slices == get_rank()).reshape(len(slices), -1).any(1).nonzero().flatten().tolist()
        self.device_type = device_type
        self.mesh = slices[own[0] if own else 0].clone()
        self.mesh_dim_names = names
        self._groups = groups
        self._slices = slices
        self._flattened = flattened
        self._rank = -1
        self._coordinate: tuple[int, ...] | None = None

    def _make_groups(self, dim: int, backend: str | None) -> ProcessGroup:
        """Makes the groups along one dimension, on all ranks; returns this rank's group."""
        name = f"mesh_{dim}" if self.mesh_dim_names is None else f"mesh_{self.mesh_dim_names[dim]}"
        everybody = list(range(get_world_size()))
        own_group: ProcessGroup | None = None
        for ranks in self._slices.movedim(dim + 1, -1).reshape(-1, self.mesh.shape[dim]).tolist():
            reuses = ranks == everybody and backend is None
            made = default_group() if reuses else new_group(ranks, backend=backend, group_desc=name, sort_ranks=False)
            if isinstance(made, ProcessGroup):
                own_group = made
        return cast(ProcessGroup, own_group)

    @classmethod
    def _part(
        cls, device_type: str, slices: torch.Tensor, names: Names, groups: Groups, flattened: dict[str, DeviceMesh]
    ) -> DeviceMesh:
        made = cls.__new__(cls)
        made._set(device_type, slices, names, groups, flattened)
        return made

    @staticmethod
    def from_group(
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence[object] | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Makes a mesh from existing groups: from one group, or from one for each dimension of `mesh`.

        Raises:
            ConfigError: the groups do not fit the mesh.
        """
        check_device_type(device_type)
        groups = (group,) if isinstance(group, ProcessGroup) else tuple(group)
        if mesh is None and len(groups) != 1:
            raise ConfigError("Must pass mesh if passing several ProcessGroups, or none")
        found = groups[0].ranks if mesh is None else mesh
        ranks = torch.as_tensor(found, dtype=torch.int64, device="cpu").clone()
        if ranks.dim() != len(groups):
            raise ConfigError(f"the mesh has {ranks.dim()} dimensions, but {len(groups)} groups; pass one for each")
        made = DeviceMesh._part(device_type, ranks[None], checked_names(mesh_dim_names, ranks.dim()), groups, {})
        for dim, each in enumerate(groups):
            if (line := made._line(dim)) != list(each.ranks):
                raise ConfigError(f"dimension {dim} of the mesh has ranks {line} here, but its group {each.ranks}")
        return made

    def _line(self, dim: int) -> list[int]:
        coordinate = self.get_coordinate()
        if coordinate is None:
            raise ConfigError(f"rank {get_rank()} is not in the mesh")
        index = tuple(slice(None) if other == dim else at for other, at in enumerate(coordinate))
        return cast("list[int]", self.mesh[index].tolist())

    def __repr__(self) -> str:
        names = self.mesh_dim_names or range(self.ndim)
        sizes = ", ".join(f"{name}={size}" for name, size in zip(names, self.shape, strict=True))
        return f"<DeviceMesh of {self.device_type!r}: {sizes}; ranks {self.mesh.tolist()}>"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the groups, which belong to this process; a copy uses those with the same names in its process."""
        return {**self.__dict__, "_groups": [None if each is None else each.group_name for each in self._groups]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        groups = current_world().groups
        self.__dict__.update(state, _groups=tuple(groups.get(name) for name in state["_groups"]))

    def __enter__(self) -> DeviceMesh:
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing: torch's DTensor uses an entered mesh as the current one, but rpcdist does not."""

    def _key(self) -> tuple[object, ...]:
        return self.device_type, self.shape, tuple(self.mesh.flatten().tolist()), self.mesh_dim_names

    # ------------------------------------------------------------ its shape, and this rank in it

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.mesh.dim()

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of ranks in each dimension."""
        return tuple(self.mesh.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Returns the number of ranks in the mesh, or along one dimension."""
        return self.mesh.numel() if mesh_dim is None else self.mesh.shape[mesh_dim]

    def get_rank(self) -> int:
        """Returns this process's rank in the world."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Returns the coordinates of this rank in the mesh; None if it is not in the mesh."""
        if self._rank != get_rank():
            self._rank = get_rank()
            coordinates = (self.mesh == self._rank).nonzero().tolist()
            self._coordinate = tuple(coordinates[0]) if coordinates else None
        return self._coordinate

    def get_local_rank(self, mesh_dim: Dimension | None = None) -> int:
        """Returns this rank's index along a dimension, which is optional if the mesh has only one.

        Raises:
            ConfigError: the mesh has several dimensions and `mesh_dim` is missing, or this rank is not in the mesh.
        """
        return self.get_group(mesh_dim).rank()

    # ------------------------------------------------------------ groups and parts

    def get_group(self, mesh_dim: Dimension | None = None) -> ProcessGroup:
        """Returns the group of this rank along a dimension, which is optional if the mesh has only one.

        Raises:
            ConfigError: the mesh has several dimensions and `mesh_dim` is missing, or this rank is not in the mesh.
            KeyError: the mesh has no dimension with this name.
        """
        if mesh_dim is None and self.ndim != 1:
            raise ConfigError(
                f"Found the DeviceMesh have {self.ndim} dimensions. Optional kwarg `mesh_dim` needs to be specified "
                "when device_mesh.ndim > 1; or take one dimension first, e.g. mesh['name'].get_group()"
            )
        return self.get_all_groups()[0 if mesh_dim is None else self._dimension(mesh_dim)]

    def get_all_groups(self) -> list[ProcessGroup]:
        """Returns the groups of this rank, by dimension. Raises ConfigError if the rank is not in the mesh."""
        if self.get_coordinate() is None:
            raise ConfigError(f"rank {get_rank()} is not in the mesh {self!r}, so it has no group there")
        if None in self._groups:
            raise ConfigError(f"{self!r} was pickled on a rank that has other groups; make it on all ranks instead")
        return list(self._groups)

    def _dimension(self, key: Dimension) -> int:
        if not isinstance(key, str):
            if not -self.ndim <= (number := whole_number(key, "mesh_dim")) < self.ndim:
                raise ConfigError(f"the mesh has {self.ndim} dimensions, but no dimension {number}")
            return number % self.ndim
        if self.mesh_dim_names is None:
            raise KeyError("No `mesh_dim_names` found: name the dimensions when you make the mesh")
        if key not in self.mesh_dim_names:
            raise KeyError(f"Invalid mesh_dim_name {key!r}; valid names are {', '.join(self.mesh_dim_names)}")
        return self.mesh_dim_names.index(key)

    def __getitem__(self, mesh_dim_names: str | Sequence[str]) -> DeviceMesh:
        """Returns the part of the mesh that contains this rank, with some of the dimensions, in order; sends nothing.

        On a rank outside the mesh it is the first such part.

        Raises:
            KeyError: names do not exist or are in another order.
        """
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if len(names) == 1 and names[0] in self._flattened:
            return self._flattened[names[0]]
        dims = [self._dimension(name) for name in names]
        if not dims or dims != sorted(set(dims)):
            text = f"Invalid mesh_dim_names {names}: pass some of {self.mesh_dim_names}, each once, in this order"
            raise KeyError(text)
        if len(dims) == self.ndim:
            return self
        slices = self._slices.movedim([dim + 1 for dim in dims], list(range(-len(dims), 0)))
        slices = slices.reshape(-1, *(self.shape[dim] for dim in dims))
        groups = tuple(self._groups[dim] for dim in dims)
        return self._part(self.device_type, slices, names, groups, self._flattened)

    def _flatten(self, mesh_dim_name: str | None = None, backend_override: str | None = None) -> DeviceMesh:
        """Returns a mesh of one dimension with all ranks of this mesh and a new group; all ranks of the world call it.

        Args:
            mesh_dim_name: its name for `mesh[name]`; by default the names of the dimensions, joined by "_".
            backend_override: the group's backend.

        Raises:
            ConfigError: the dimensions have no names, or the name is that of another dimension.
        """
        if self.mesh_dim_names is None:
            raise ConfigError("Cannot flatten a DeviceMesh without mesh_dim_names!")
        name = mesh_dim_name or "_".join(self.mesh_dim_names)
        if self.mesh_dim_names == (name,):
            return self
        if name in self.mesh_dim_names:
            raise ConfigError(f"{name!r} is a dimension of the mesh; pass another name for the flattened mesh")
        made = self._part(self.device_type, self._slices.flatten(1), (name,), (), self._flattened)
        if (known := self._flattened.get(name)) is not None:
            if known._slices.tolist() != made._slices.tolist():
                raise ConfigError(f"{name!r} is the name of other flattened dimensions; pass another name")
            return known
        made._groups = (made._make_groups(0, backend_override),)
        self._flattened[name] = made
        return made

    def _unflatten(
        self,
        dim: Dimension,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Mapping[Dimension, str] | None = None,
    ) -> DeviceMesh:
        """Returns the mesh with one dimension split into several, the last one fastest; all ranks of the world call it.

        Args:
            dim: the dimension to split, by number or name.
            mesh_sizes: the sizes of the new dimensions.
            mesh_dim_names: one for each new dimension.
            backend_override: the backend of a new dimension's groups, by number or name of the dimension.

        Raises:
            ConfigError: sizes or names do not fit.
        """
        at, sizes, new_names = self._dimension(dim), tuple(mesh_sizes), tuple(mesh_dim_names)
        if self.mesh_dim_names is None:
            raise ConfigError("Cannot unflatten a DeviceMesh without mesh_dim_names!")
        if len(sizes) != len(new_names) or torch.Size(sizes).numel() != self.shape[at]:
            raise ConfigError(f"sizes {sizes} named {new_names} do not make a dimension of {self.shape[at]} ranks")
        all_names = (*self.mesh_dim_names[:at], *new_names, *self.mesh_dim_names[at + 1 :])
        slices = self._slices.unflatten(at + 1, sizes)
        made = self._part(self.device_type, slices, checked_names(all_names, slices.dim() - 1), (), self._flattened)
        backends = {made._dimension(key) - at if isinstance(key, str) else key: name
                    for key, name in (backend_override or {}).items()}  # fmt: skip
        new_groups = (made._make_groups(at + number, backends.get(number)) for number in range(len(sizes)))
        made._groups = (*self._groups[:at], *new_groups, *self._groups[at + 1 :])
        return made

    @staticmethod
    def _concatenate(device_mesh_list: Sequence[DeviceMesh]) -> DeviceMesh:
        """Returns a mesh with the dimensions of several parts of one mesh, in this order; sends nothing.

        Raises:
            ConfigError: the parts belong to different meshes, have no names, or share a dimension.
        """
        first, *others = device_mesh_list
        slices = first._slices
        for other in others:
            slice_of = {rank: part.tolist() for part in other._slices for rank in part.flatten().tolist()}
            ranks = slices.flatten().tolist()
            if other._flattened is not first._flattened or not all(rank in slice_of for rank in ranks):
                raise ConfigError("Cannot concatenate DeviceMeshes derived from different device meshs")
            parts = torch.tensor([slice_of[rank] for rank in ranks], device="cpu")
            slices = parts.reshape(*slices.shape, *other.shape)
        if any(len(set(part)) != len(part) for part in slices.flatten(1).tolist()):
            raise ConfigError(f"Cannot concatenate overlapping meshes: {device_mesh_list}")
        unique = {tuple(sorted(part.flatten().tolist())): part for part in reversed(slices)}
        groups = tuple(group for mesh in device_mesh_list for group in mesh._groups)
        slices = torch.stack(list(unique.values()))
        all_names = [name for mesh in device_mesh_list for name in mesh.mesh_dim_names or ()]
        names = checked_names(all_names, slices.dim() - 1)
        return DeviceMesh._part(first.device_type, slices, names, groups, first._flattened)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[Dimension, str] | None = None,
) -> DeviceMesh:
    """Makes a mesh of ranks 0, 1, 2, ..., the last dimension fastest; calls `init_process_group()` if necessary.

    Args:
        device_type: "cpu" or "cuda", without an index.
        mesh_shape: the number of ranks along each dimension.
        mesh_dim_names: one for each dimension.
        backend_override: the backend of a dimension's groups, by number or name of the dimension.

    Raises:
        ConfigError: the names do not fit the shape, or the mesh has more ranks than the world.
    """
    shape = tuple(mesh_shape)
    if not shape or any(length < 1 for length in shape):
        raise ConfigError(f"mesh_shape must have at least one dimension, none of size 0, but is {shape}")
    if mesh_dim_names is not None and len(mesh_dim_names) != len(shape):
        raise ConfigError(
            "mesh_shape and mesh_dim_names should have same length! Found "
            f"len(mesh_dim_names): {len(mesh_dim_names)} and len(mesh_shape): {len(shape)}."
        )
    ranks = torch.arange(torch.Size(shape).numel(), device="cpu").view(shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backend_override)


def check_device_type(device_type: str) -> None:
    if not device_type.isalpha():
        raise ConfigError(
            f"Device type with index is not supported but got {device_type}: pass 'cpu' or 'cuda', and set the current "
            "device with torch.cuda.set_device()"
        )


def checked_names(names: Sequence[str] | None, ndim: int) -> Names:
    if names is None:
        return None
    unique = tuple(names)
    if len(unique) != ndim:
        raise ConfigError(f"the mesh has {ndim} dimensions, but {len(unique)} names: {unique}")
    if len(set(unique)) != len(unique):
        raise ConfigError(f"Each mesh_dim_name must be unique; found {unique}")
    return unique


def check_ranks(ranks: torch.Tensor) -> None:
    flat, size = ranks.flatten().tolist(), get_world_size()
    if len(set(flat)) != len(flat):
        raise ConfigError(f"a mesh must contain each rank once, but has {flat}")
    if flat and not (0 <= min(flat) and max(flat) < size):
        text = f"Mesh should not be bigger than default world size {size}, but found ranks up to {max(flat)}"
        raise ConfigError(text)


def set_up_world(device_type: str) -> None:
    """Makes the default group if necessary, as torch does before it makes the first mesh."""
    if not is_initialized():
        init_process_group()
    if device_type == "cuda" and torch.cuda.is_available() and not torch.cuda.is_initialized():
        local_rank = launcher_variable("LOCAL_RANK")
        number = int(local_rank) if local_rank.isdigit() else get_rank()
        torch.cuda.set_device(number % torch.cuda.device_count())
