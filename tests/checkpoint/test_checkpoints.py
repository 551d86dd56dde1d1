"""Checkpoints: whole ones only, of ranks and of owners, read by other numbers of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_ranks
import pytest
import torch
from docs_programs import run_page
from full_sets import FULL_ONLY
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from rpcdist import autograd, checkpoint, rpc
from rpcdist.checkpoint import _folders, _saving_and_loading, _storage
from rpcdist.checkpoint._saving_and_loading import new_part
from rpcdist.errors import CheckpointError, ConfigError, WorkerLost
from rpcdist.optim import DistributedOptimizer
from rpcdist.parallel import ParameterServer, Pipeline, ShardedEmbedding
from rpcdist.testing import InProcessCluster, RankPool

LIMIT_S = 30.0
NAMES = ("trainer", "owner0", "owner1")


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(*NAMES) as cluster:
        yield cluster


def assert_alone(path: Path) -> None:
    """Nothing is beside the checkpoint but its folder."""
    folder = os.readlink(path)
    assert sorted(os.listdir(path.parent)) == sorted([path.name, folder])


class Scale(nn.Module):
    """A state with something that is no tensor."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(2) * factor)

    def get_extra_state(self) -> int:
        return self.factor

    def set_extra_state(self, state: int) -> None:
        self.factor = state


# ---- one process


def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    module = Scale(3)
    optimizer = torch.optim.Adam([module.weight], lr=0.1)
    module.weight.grad = torch.ones(2)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    nested = {"list": [torch.arange(3), (1, 2.5)], 5: torch.tensor(2.5, dtype=torch.float64), "empty": {}}
    state = {"module": module, "optimizer": optimizer, "scheduler": scheduler, "nested": nested, "step": 7}
    checkpoint.save(path, state)
    assert_alone(path)
    other = Scale(9)
    other_optimizer = torch.optim.Adam([other.weight], lr=0.5)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 1)
    found: dict[str, Any] = {
        "module": other, "optimizer": other_optimizer, "scheduler": other_scheduler, "nested": None, "step": 0
    }  # fmt: skip
    checkpoint.load(path, found)
    assert other.factor == 3 and torch.equal(other.weight, module.weight)
    torch.testing.assert_close(other_optimizer.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert other_scheduler.state_dict() == scheduler.state_dict()
    assert found["step"] == 7 and found["nested"].keys() == {"list", 5, "empty"}
    torch.testing.assert_close(found["nested"], nested, rtol=0, atol=0)


class Subclass(Tensor):
    """Is a tensor, but of a class that the reader of a checkpoint does not know."""


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(2)


UNSUPPORTED: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "sparse": ("a tensor of layout torch.sparse_coo", lambda: torch.eye(2).to_sparse()),
    "rows": ("a tensor of layout torch.sparse_csr", lambda: torch.eye(2).to_sparse_csr()),
    "mkldnn": ("a tensor of layout torch._mkldnn", lambda: torch.ones(2, 2).to_mkldnn()),
    "quantized": (
        r"a quantized tensor \(torch.qint8\)",
        lambda: torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    ),
    "nested": ("a nested tensor", lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": (
        "a NestedTensor, a subclass",
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ),
    "meta": ("a tensor on the meta device", lambda: torch.ones(2, device="meta")),
    "fake": ("a FakeTensor, a subclass", _fake),
    "subclass": ("a Subclass, a subclass", lambda: torch.ones(2).as_subclass(Subclass)),
    "bits": ("a tensor of torch.bits8", lambda: torch.ones(2, dtype=torch.uint8).view(torch.bits8)),
    "small": ("a tensor of torch.uint4", lambda: torch.empty(2, dtype=torch.uint4)),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("kind", list(UNSUPPORTED))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning", "ignore:.*Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_a_tensor_of_a_kind_that_cannot_be_saved_is_named(tmp_path: Path, kind: str) -> None:
    """Not as a full disk, and not only when it is loaded: alone, in a structure, and in a module."""
    text, make = UNSUPPORTED[kind]
    tensor = make()
    module = nn.Module()
    module.register_buffer("buffer", tensor)
    states: tuple[dict[str, object], ...] = {"here": tensor}, {"here": [{"deep": tensor}]}, {"here": module}
    for state, key in zip(states, ("here", "here.0.deep", "here.buffer"), strict=True):
        with pytest.raises(ConfigError, match=rf"'{key}' is {text}.* checkpoint.save\(\) does not support that"):
            checkpoint.save(tmp_path / "checkpoint", state)
    assert not list(tmp_path.iterdir())


def test_a_lazy_module_that_has_not_run_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'here\.weight' is a lazy parameter or buffer"):
        checkpoint.save(tmp_path / "checkpoint", {"here": nn.LazyLinear(2)})


def test_an_error_of_serialisation_is_not_one_of_the_disk(tmp_path: Path) -> None:
    with (
        pytest.raises(
            CheckpointError, match=r"cannot be turned into bytes \(NotImplementedError: no bytes\)"
        ) as caught,
        _folders.writing(tmp_path),
    ):
        raise NotImplementedError("no bytes")
    assert "MiB free" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint16, torch.bool])
def test_numbers_of_every_kind_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.tensor([1, 0, 1]).to(dtype)
    if dtype.is_complex:
        value = (value + 2j).conj()
    checkpoint.save(tmp_path / "checkpoint", {"value": value})
    found = torch.zeros_like(value)
    checkpoint.load(tmp_path / "checkpoint", {"value": found})
    assert torch.equal(found.to(torch.complex64), value.to(torch.complex64))


def test_torch_reads_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "checkpoint", {"model": Scale(2), "step": 1})
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "file.pt")
    found = torch.load(tmp_path / "file.pt", weights_only=False)
    assert found["step"] == 1 and torch.equal(found["model.weight"], torch.full((2,), 2.0))


def test_a_save_that_fails_leaves_the_old_one_and_the_next_one_tidies_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.save(path, {"value": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"'function' cannot be pickled: .*local object"):
        checkpoint.save(path, {"value": torch.ones(2), "function": lambda: None})
    assert_alone(path)
    with monkeypatch.context() as patch:  # a process that is killed discards nothing
        patch.setattr(_storage, "end_with_index", interrupt)
        patch.setattr(_folders, "discard", lambda folder: None)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(path, {"value": torch.ones(2)})
    (tmp_path / ".checkpoint-of-a-user").mkdir()
    assert len(os.listdir(tmp_path)) == 4
    state: dict[str, Any] = {"value": torch.full((2,), 5.0)}
    checkpoint.load(path, state)
    assert state["value"].tolist() == [0.0, 0.0]
    checkpoint.save(path, {"value": torch.ones(2)})
    (tmp_path / ".checkpoint-of-a-user").rmdir()
    assert_alone(path)
    checkpoint.load(path, state)
    assert state["value"].tolist() == [1.0, 1.0]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"missing": torch.ones(1)},
            r"no entry 'missing'; it has model\._extra_state, model\.weight, optimizer, step$",
        ),
        (
            {"model.weight": torch.ones(3)},
            r"'model\.weight' of the checkpoint is a tensor \(2,\), but the object to load it into has a tensor \(3,\)",
        ),
        (
            {"step": torch.ones(1)},
            r"'step' of the checkpoint is no tensor, but the object to load it into has a tensor \(1,\)",
        ),
        ({"model.weight": 1}, r"is a tensor \(2,\), but the object to load it into has no tensor"),
        ({"model": None}, r"'model' was saved as a module: give a module with the same parameters"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(1), torch.ones(1)])},
            r"saved as 'optimizer' does not fit this SGD: ",
        ),
    ],
)
def test_what_does_not_fit_is_explained(tmp_path: Path, state: dict[str, Any], message: str) -> None:
    optimizer = torch.optim.SGD([torch.ones(1)])
    checkpoint.save(tmp_path / "checkpoint", {"model": Scale(2), "optimizer": optimizer, "step": 1})
    with pytest.raises(ConfigError, match=message):
        checkpoint.load(tmp_path / "checkpoint", state)


def test_wrong_paths_and_keys_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint at .*nowhere: checkpoint\.save\(\) writes one"):
        checkpoint.load(tmp_path / "nowhere", {"step": 0})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="use an unused path"):
        checkpoint.save(tmp_path / "file", {"step": 0})
    with pytest.raises(ConfigError, match=r"no checkpoint at .*file"):
        checkpoint.load(tmp_path / "file", {"step": 0})
    with pytest.raises(ConfigError, match="is a dict: the path comes first"):
        checkpoint.save({"step": 0}, str(tmp_path / "checkpoint"))  # type: ignore[arg-type]
    for save_or_load in (checkpoint.save, checkpoint.load):
        with pytest.raises(ConfigError, match="the state is a Scale: give a dictionary of values by name"):
            save_or_load(tmp_path / "checkpoint", Scale(1))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"the state is of keys \[1\]: give a dictionary"):
            save_or_load(tmp_path / "checkpoint", {1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"'table' is a tensor on the meta device"):
        checkpoint.save(tmp_path / "checkpoint", {"table": torch.ones(2, device="meta")})
    with pytest.raises(ConfigError, match=r"two values of the state have the entry 'a\.weight'"):
        checkpoint.save(tmp_path / "checkpoint", {"a": Scale(1), "a.weight": 1})
    with pytest.raises(ConfigError, match=r"two tensors of the state would have the key 'a\.0'"):
        checkpoint.save(tmp_path / "checkpoint", {"a": {0: torch.ones(1), "0": torch.ones(1)}})
    with pytest.raises(ConfigError, match="give a group of rpcdist"):
        checkpoint.save(tmp_path / "checkpoint", {"a": 1}, group="world")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["file"]


def test_what_was_published_stays_whatever_comes_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last message among ranks may fail when the new checkpoint has taken the place of the old one."""
    path = tmp_path / "checkpoint"
    checkpoint.save(path, {"step": 0})
    publish = _folders.publish

    def publish_and_fail(*args: Path) -> None:
        publish(*args)
        interrupt()

    monkeypatch.setattr(_folders, "publish", publish_and_fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"step": 1})
    found: dict[str, Any] = {"step": -1}
    checkpoint.load(path, found)
    assert found["step"] == 1
    assert_alone(path)


def test_a_second_save_at_once_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.save(path, {"step": 0})

    class Slow:
        """Its state is asked for while the first save has its folder."""

        def state_dict(self) -> dict[str, Any]:
            with pytest.raises(ConfigError, match=r"another checkpoint\.save\(\) to .* is running"):
                checkpoint.save(path, {"step": 2})
            return {"step": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert state == {"step": 1}

    checkpoint.save(path, {"slow": Slow()})
    checkpoint.load(path, {"slow": Slow()})
    assert_alone(path)


@pytest.mark.parametrize("target", ["elsewhere", "folder/elsewhere"])
def test_links_of_others_stay(tmp_path: Path, target: str) -> None:
    (tmp_path / "checkpoint").symlink_to(target)
    with pytest.raises(ConfigError, match="use an unused path"):
        checkpoint.save(tmp_path / "checkpoint", {"step": 0})
    assert os.readlink(tmp_path / "checkpoint") == target


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_files_are_explained(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / "checkpoint"
    checkpoint.save(path, {"value": torch.ones(1000), "step": 0})
    whole = (path / name).read_bytes()
    (path / name).write_bytes(whole[: len(whole) - 60] if content is None else content)
    with pytest.raises(CheckpointError, match=rf"^the checkpoint at {tmp_path}\S* (is damaged|cannot be read)"):
        checkpoint.load(path, {"value": torch.zeros(1000), "step": 0})


# ---- owners of references


def new_scale(factor: int) -> Scale:
    return Scale(factor)


def new_parameter(value: float) -> Tensor:
    return torch.full((3,), value, requires_grad=True)


def files_of_owners(path: Path) -> int:
    return len([name for name in os.listdir(path) if name.endswith(".distcp")])


def test_owners_write_and_read_what_is_theirs(cluster: InProcessCluster, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with cluster.use("trainer"):
        state: dict[str, Any] = {
            "model": rpc.remote("owner0", new_scale, (3,)),
            "table": rpc.remote("owner1", new_parameter, (5.0,)),
            "own": rpc.RRef(Scale(4)),
            "step": 8,
        }
        checkpoint.save(path, state)
        assert files_of_owners(path) == 4  # the owners and this one; its references and its own values apart
        assert_alone(path)
        moved: dict[str, Any] = {
            "model": rpc.remote("owner1", new_scale, (0,)),
            "table": rpc.remote("owner1", new_parameter, (0.0,)),
            "own": rpc.remote("owner1", new_scale, (0,)),
            "step": 0,
        }
        checkpoint.load(path, moved)
        assert moved["model"].to_here().factor == 3 and moved["own"].to_here().weight.tolist() == [4.0, 4.0]
        assert moved["table"].to_here().tolist() == [5.0] * 3 and moved["step"] == 8
        with pytest.raises(ConfigError, match="'step' refers to a int on 'owner0', which cannot be changed in place"):
            checkpoint.load(path, {"step": rpc.remote("owner0", int, (1,))})
        del state, moved


def test_a_dead_owner_leaves_the_old_one(cluster: InProcessCluster, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with cluster.use("trainer"):
        state = {"table": rpc.remote("owner1", new_parameter, (5.0,)), "step": 1}
        checkpoint.save(path, state)
        cluster.kill("owner1")
        with pytest.raises(WorkerLost, match="owner1"):
            checkpoint.save(path, {**state, "step": 2})
        assert_alone(path)
        found: dict[str, Any] = {"step": 0}
        checkpoint.load(path, found)
        assert found["step"] == 1
        del state


def test_workers_that_do_not_share_a_folder_are_told(
    cluster: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_saving_and_loading, "new_part", part_elsewhere)
    with cluster.use("trainer"):
        reference = rpc.remote("owner1", new_parameter, (5.0,))
        with pytest.raises(CheckpointError, match=r"other workers wrote __1_0\.distcp, which this one does not see"):
            checkpoint.save(tmp_path / "checkpoint", {"table": reference})
        assert [name for name in os.listdir(tmp_path) if name != "elsewhere"] == []
        del reference


def part_elsewhere(folder: str, references: dict[str, rpc.RRef[Any]], algorithm: str) -> object:
    return new_part(str(Path(folder).parent / "elsewhere"), references, algorithm)


def test_optimizers_pipelines_and_parameter_servers(cluster: InProcessCluster, tmp_path: Path) -> None:
    """Each rank that has an object with a `state_dict` saves it."""
    path = tmp_path / "checkpoint"
    with cluster.use("trainer"):
        parameter = rpc.remote("owner0", new_parameter, (1.0,))
        optimizer = DistributedOptimizer(torch.optim.Adam, [parameter], lr=0.1)
        with autograd.context() as context_id:
            autograd.backward(context_id, [parameter.to_here().sum()])
            optimizer.step(context_id)
        server = ParameterServer(Scale(3), NAMES[1:], torch.optim.Adam, lr=0.1)
        server.push({"weight": torch.ones(2)})
        words = ShardedEmbedding(7, 2, NAMES[1:], torch.optim.SGD, lr=0.1, seed=1)
        pipe = Pipeline([nn.Linear(2, 2), nn.Linear(2, 1)], NAMES[1:], loss_fn=nn.functional.mse_loss)
        state: dict[str, Any] = {
            "parameter": parameter, "optimizer": optimizer, "server": server, "words": words, "pipe": pipe
        }  # fmt: skip
        checkpoint.save(path, state)
        other: dict[str, Any] = {
            "parameter": (moved := rpc.remote("owner1", new_parameter, (0.0,))),
            "optimizer": DistributedOptimizer(torch.optim.Adam, [moved], lr=0.7),
            "server": ParameterServer(Scale(0), NAMES[1:2], torch.optim.Adam, lr=0.7),
            "words": ShardedEmbedding(7, 2, NAMES[1:2], torch.optim.SGD, lr=0.7, seed=2),
            "pipe": Pipeline(
                [nn.Linear(2, 2), nn.Linear(2, 1)], NAMES[1:2], schedule="interleaved", loss_fn=nn.functional.mse_loss
            ),
        }
        checkpoint.load(path, other)
        assert torch.equal(moved.to_here(), parameter.to_here())
        for name in ("optimizer", "server", "words", "pipe"):
            torch.testing.assert_close(other[name].state_dict(), state[name].state_dict(), rtol=0, atol=0)
        del state, other, parameter, moved, optimizer, server, words, pipe


def test_the_page_runs(cluster: InProcessCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with cluster.use("trainer"):
        run_page("docs/checkpoints.md")


# ---- ranks


@pytest.mark.multiproc
def test_another_number_of_ranks_goes_on(rank_pool: RankPool, tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    for files in rank_pool.run(2, checkpoint_ranks.train_and_save, rank_pool.new_file(), str(target)):
        assert files == [".digests", ".metadata", "__0_0.distcp", "__1_0.distcp"]  # each rank has written a share
    assert_alone(target)
    alone = checkpoint_ranks.state_of(0, 1)
    checkpoint_ranks.train(alone["model"], alone["optimizer"], range(5))
    for step, parameters in rank_pool.run(3, checkpoint_ranks.go_on, rank_pool.new_file(), str(target)):
        assert step == 3
        torch.testing.assert_close(parameters, alone["model"].state_dict())
    own: dict[str, Any] = {"rank1 of 2": torch.zeros(3)}
    checkpoint.load(target, own)
    assert own["rank1 of 2"].tolist() == [1.0] * 3


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        (1, "write"),
        pytest.param(1, "written", marks=FULL_ONLY),
        pytest.param(0, "written", marks=FULL_ONLY),
        (0, "publish"),
    ],
)
def test_a_killed_rank_leaves_the_old_one(rank_pool: RankPool, tmp_path: Path, victim: int, moment: str) -> None:
    target = tmp_path / "checkpoint"
    pending = rank_pool.begin(2, checkpoint_ranks.save_and_die, rank_pool.new_file(), str(target), victim, moment)
    outcomes = rank_pool.outcomes(pending)
    assert outcomes[1 - victim] == "RankLost", outcomes
    assert isinstance(outcomes[victim], Exception)
    assert checkpoint_ranks.value_of(target) == (0.0, 0)
    checkpoint.save(target, {"value": torch.ones(1000), "step": 1})
    assert_alone(target)
    assert checkpoint_ranks.value_of(target) == (1.0, 1)
