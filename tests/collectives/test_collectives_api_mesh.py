"""`DeviceMesh`: groups along the dimensions of an array of ranks. Ranks are threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from collectives_ranks import run_ranks
from inside_groups import World, use_world

import rpcdist.collectives as c
from rpcdist.collectives import DeviceMesh, ProcessGroup, init_device_mesh
from rpcdist.errors import ConfigError


def total(group: ProcessGroup) -> float:
    tensor = torch.tensor([float(c.get_rank())])
    c.all_reduce(tensor, group=group)
    return tensor.item()


def test_two_dimensions() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("replicas", "shards"))
        row, column = divmod(rank, 3)
        assert (mesh.shape, mesh.ndim, mesh.size(), mesh.size(0), mesh.size(1)) == ((2, 3), 2, 6, 2, 3)
        assert mesh.get_rank() == rank and mesh.get_coordinate() == (row, column)
        assert mesh.get_local_rank("replicas") == mesh.get_local_rank(0) == row
        assert mesh.get_local_rank("shards") == mesh.get_local_rank(-1) == column
        assert mesh.get_group("replicas").ranks == (column, column + 3)
        assert total(mesh.get_group(0)) == 2 * column + 3 and total(mesh.get_group("shards")) == [3, 12][row]
        assert mesh.get_group("shards").group_desc == "mesh_shards"
        assert repr(mesh) == "<DeviceMesh of 'cpu': replicas=2, shards=3; ranks [[0, 1, 2], [3, 4, 5]]>"
        assert mesh["shards"].mesh.tolist() == [3 * row + other for other in range(3)]
        assert mesh["shards"].get_group() is mesh.get_group("shards") and mesh["shards"].get_local_rank() == column
        assert mesh["replicas", "shards"] is mesh and mesh["replicas"].mesh_dim_names == ("replicas",)
        assert mesh["replicas"].get_coordinate() == (row,) and c.get_pg_count() == 1 + 3 + 2
        with pytest.raises(RuntimeError, match="`mesh_dim` needs to be specified"):
            mesh.get_group()
        with pytest.raises(RuntimeError, match="no dimension 2"):
            mesh.get_group(2)
        for wrong in ("rows", ("shards", "replicas"), ("shards", "shards"), ()):
            with pytest.raises(KeyError, match="Invalid mesh_dim_name"):
                mesh[wrong]

    run_ranks(6, on_rank)


def test_three_dimensions_and_a_part_of_two() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        part = mesh["a", "c"]
        assert part.shape == (2, 2) and part.get_coordinate() == (rank // 4, rank % 2)
        assert part.mesh.flatten().tolist() == [each for each in range(8) if (each // 2) % 2 == (rank // 2) % 2]
        assert part["c"] == mesh["c"] and hash(part["c"]) == hash(mesh["c"]) and part["a"] != mesh["c"]
        assert part.get_all_groups() == [mesh.get_group("a"), mesh.get_group("c")]

    run_ranks(8, on_rank)


def test_flattened_unflattened_and_concatenated() -> None:
    """The ranks of each part as torch's classes have them."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "context", "tensor"))
        flat = mesh["data", "context"]._flatten()
        assert flat.mesh.tolist() == [each for each in range(8) if each % 2 == rank % 2]
        assert flat.mesh_dim_names == ("data_context",) and mesh["data_context"] is flat
        assert total(flat.get_group()) == sum(flat.mesh.tolist())
        assert mesh["data", "context"]._flatten() is flat and flat._flatten() is flat
        both = DeviceMesh._concatenate([mesh["tensor"], flat])
        assert both.shape == (2, 4) and both.mesh.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
        assert both.get_all_groups() == [mesh.get_group("tensor"), flat.get_group()]
        pairs = DeviceMesh._concatenate([mesh["data"], mesh["tensor"]])
        assert pairs == mesh["data", "tensor"]
        again = flat._unflatten(0, (2, 2), ("outer", "inner"))
        assert again.mesh.tolist() == [[each, each + 2] for each in (rank % 2, 4 + rank % 2)]
        assert again.get_group("inner").ranks == (rank - rank // 2 % 2 * 2, rank - rank // 2 % 2 * 2 + 2)
        assert total(again.get_group("outer")) == 2 * (rank % 4) + 4
        one = mesh._flatten("all")
        assert one.mesh.tolist() == list(range(8)) and one.get_group() is c.group.WORLD
        mistakes: tuple[Callable[[], object], ...] = (
            lambda: DeviceMesh._concatenate([mesh["data"], flat]),
            lambda: DeviceMesh._concatenate([mesh["data"], DeviceMesh.from_group(one.get_group(), "cpu")]),
            lambda: mesh["data", "tensor"]._flatten("data_context"),
            lambda: mesh["data", "tensor"]._flatten("data"),
            lambda: flat._unflatten(0, (2, 3), ("outer", "inner")),
            lambda: flat._unflatten(0, (2, 2), ("outer",)),
            lambda: DeviceMesh.from_group(one.get_group(), "cpu")._flatten(),
            lambda: DeviceMesh.from_group(one.get_group(), "cpu")._unflatten(0, (2, 4), ("a", "b")),
        )
        for wrong in mistakes:
            with pytest.raises(ConfigError):
                wrong()

    run_ranks(8, on_rank)


def test_one_dimension_of_all_ranks_is_the_default_group() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        assert mesh.get_group() is c.group.WORLD and mesh.get_local_rank() == rank and c.get_pg_count() == 1
        with pytest.raises(KeyError, match="name the dimensions"):
            mesh["a"]
        assert init_device_mesh("cpu", (2,), backend_override={0: "local"}).get_group() is not c.group.WORLD

    run_ranks(2, on_rank)


def test_a_mesh_in_another_order_and_without_some_ranks() -> None:
    def on_rank(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[3, 1], [2, 0]], mesh_dim_names=("a", "b"))
        if rank == 4:
            assert mesh.get_coordinate() is None and mesh["a"].mesh.tolist() == [3, 2]
            with pytest.raises(ConfigError, match="rank 4 is not in the mesh"):
                mesh.get_local_rank("a")
            return
        assert mesh.get_coordinate() == {3: (0, 0), 1: (0, 1), 2: (1, 0), 0: (1, 1)}[rank]
        assert mesh.get_group("b").ranks == ((3, 1) if rank in (3, 1) else (2, 0))
        assert mesh.get_local_rank("b") == (rank in (1, 0))

    run_ranks(5, on_rank)


def test_a_mesh_of_groups_that_there_are() -> None:
    def on_rank(rank: int) -> None:
        rows, _ = c.new_subgroups(2)
        columns, _ = c.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        mesh = DeviceMesh.from_group([columns, rows], "cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        assert mesh.get_group("b") is rows and mesh["a"].get_group() is columns
        assert DeviceMesh.from_group(rows, "cpu").get_local_rank() == rank % 2
        with pytest.raises(ConfigError, match="dimension 0 of the mesh has ranks"):
            DeviceMesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]])
        with pytest.raises(ConfigError, match="2 dimensions, but 1 groups"):
            DeviceMesh.from_group(rows, "cpu", [[0, 1], [2, 3]])
        with pytest.raises(ConfigError, match="Must pass mesh"):
            DeviceMesh.from_group([rows, columns], "cpu")

    run_ranks(4, on_rank)


def test_a_copy_has_the_groups_of_the_process_that_makes_it() -> None:
    """Programs keep a mesh in their configuration, which is copied, or sent to another process."""

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        flat = mesh._flatten("all")
        for made in (copy.copy(mesh), copy.deepcopy({"mesh": mesh})["mesh"], pickle.loads(pickle.dumps(mesh))):
            assert made == mesh and made.mesh.tolist() == mesh.mesh.tolist()
            assert made.get_coordinate() == divmod(rank, 2) and made.get_group(
                cast(int, np.int64(1))
            ) is mesh.get_group(1)
            assert made.get_all_groups() == mesh.get_all_groups() and made["b"].get_group() is mesh.get_group("b")
            assert made["all"].get_group() is flat.get_group()
        given: list[object] = [mesh]
        c.broadcast_object_list(given, 0)
        came = given[0]
        assert isinstance(came, DeviceMesh) and came.shape == (2, 2)
        if rank == 0:
            assert came.get_all_groups() == mesh.get_all_groups()
        else:
            with pytest.raises(ConfigError, match="pickled on a rank that has other groups"):
                came.get_all_groups()
        with mesh as entered:
            assert entered is mesh

    run_ranks(4, on_rank)


def test_what_belongs_to_a_process_is_not_copied() -> None:
    """The error names it, and not a lock somewhere inside."""

    def on_rank(rank: int) -> None:
        group = c.group.WORLD
        work = c.barrier(async_op=True)
        assert work is not None
        message, store = c.P2POp(c.isend, torch.ones(1), 1 - rank), c.HashStore()
        assert store.add("counter", cast(int, np.int64(2))) == 2
        held = [group, work, message, store, c.PrefixStore("a", store)]
        named = ["ProcessGroup", "Work", "ProcessGroup", "HashStore", "HashStore"]
        for each, name in zip(held, named, strict=True):
            for copied in (pickle.dumps, copy.deepcopy):
                with pytest.raises(TypeError, match=f"cannot pickle '{name}' object: it belongs to the process"):
                    copied(each)
        work.wait()

    run_ranks(2, on_rank)


def test_it_makes_the_default_group_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with use_world(World()):
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        assert total(mesh.get_group("b")) == 0 and mesh.get_coordinate() == (0, 0)
        c.destroy_process_group()
        c.close_stores()


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: init_device_mesh("cpu:0", (2,)), "Device type with index"),
        (lambda: init_device_mesh("cpu", (2,), mesh_dim_names=("a", "b")), "should have same length"),
        (lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "a")), "must be unique"),
        (lambda: init_device_mesh("cpu", (3,)), "should not be bigger"),
        (lambda: init_device_mesh("cpu", ()), "at least one dimension"),
        (lambda: DeviceMesh("cpu", [0, 0]), "once"),
        (lambda: DeviceMesh("cpu", [0, 1], mesh_dim_names=()), "0 names"),
        (lambda: init_device_mesh("cpu", (2,), backend_override={"a": "tcp"}), "name the dimensions"),
    ],
)
def test_wrong_arguments(call: Callable[[], object], expected: str) -> None:
    def on_rank(rank: int) -> None:
        with pytest.raises((ConfigError, KeyError), match=expected):
            call()

    run_ranks(2, on_rank)
