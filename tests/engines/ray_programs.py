"""Programs on Ray, as users run them; `python ray_programs.py NAME` runs one, which asserts what it expects."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rpcdist
from rpcdist import Role, rpc
from rpcdist.errors import ConfigError, ProcessFailed, RpcdistError
from rpcdist.transport.token import job_token

SECRET = "a token that is nowhere else 0123456789"
FIRST = "RPCDIST_TEST_FOLDER"
LOST_NODE = "RPCDIST_TEST_LOST_NODE"


def place_of(rank: int) -> tuple[int, str, str, str]:
    """The environment of a rank, and its token: the rank has it, and other processes cannot see it there."""
    token = job_token().decode()
    environment = Path("/proc/self/environ").read_bytes()
    seen = "RPCDIST_TOKEN" in os.environ or token.encode() in environment
    return rank, os.environ["LOCAL_RANK"], os.environ.get("CUDA_VISIBLE_DEVICES", ""), "seen" if seen else token


def call_all(rank: int) -> tuple[list[tuple[int, str, str, str]], bool]:
    """The reports of all ranks about themselves, by functions of this script; and whether this is a main thread."""
    rpc.init_rpc(_name())
    size = rpcdist.placement_from_environment().world_size  # type: ignore[union-attr]
    names = [info.name for info in sorted(rpc.workers(), key=lambda info: info.id)]
    assert len(names) == size
    answers = rpc.wait_all([rpc.rpc_async(name, place_of, (number,)) for number, name in enumerate(names)])
    rpc.shutdown()
    return answers, threading.current_thread() is threading.main_thread()


def fail_at_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("no data")
    threading.Event().wait()


def wait_for_ever(rank: int) -> None:
    print("waits", rank, flush=True)
    threading.Event().wait()


def die_once(rank: int) -> str:
    """The first process of each rank is killed, when all have joined."""
    rpc.init_rpc(_name())
    first = Path(os.environ[FIRST], f"was{rank}")
    if not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.shutdown()
    return "came back"


def _name() -> str:
    place = rpcdist.placement_from_environment()
    assert place is not None
    return place.name


def on_one_node() -> None:
    """Places, devices, the token, and errors."""
    import ray

    import rpcdist.ray

    os.environ["RPCDIST_TOKEN"] = SECRET  # after Ray's processes were started, which would inherit it
    results = rpcdist.ray.launch(call_all, workers=2, resources={"CPU": 1, "GPU": 1})
    told, on_main_thread = results[0]
    assert results == [(told, True)] * 2 and on_main_thread
    assert [(rank, local, token) for rank, local, _, token in told] == [(0, "0", SECRET), (1, "1", SECRET)], told
    # Each sees the GPUs of both, and LOCAL_RANK is the number of its own.
    assert [sorted(devices.split(",")) for _, _, devices, _ in told] == [["0", "1"]] * 2, told
    logs = [path for path in Path("/tmp/ray/session_latest/logs").rglob("*") if path.is_file()]
    leaks = [str(path) for path in logs if SECRET.encode() in path.read_bytes()]
    assert logs and not leaks, leaks

    _fails(ProcessFailed, "rank 1 raised ValueError", fail_at_rank_1, workers=2)
    _fails(ConfigError, "worker0 asks for 5 GPU, and no node of this cluster has more than 2", print, 1, GPU=5)
    _fails(ConfigError, "3 ranks ask for 3 GPU, and this cluster has 2", print, 3, GPU=1)
    _fails(ConfigError, "3 ranks ask for 3 GPU", print, 3, join_timeout_s=1, GPU=1)
    assert ray.available_resources()["GPU"] == 2
    by_role = rpcdist.ray.launch(roles=[Role("server", call_all, 1), Role("trainer", call_all, 1)])
    assert [len(by_role[role]) for role in ("server", "trainer")] == [1, 1]


def _fails(
    kind: type[Exception],
    text: str,
    function: object,
    workers: int,
    join_timeout_s: float | None = None,
    **wanted: float,
) -> None:
    import rpcdist.ray

    launch: Any = rpcdist.ray.launch
    try:
        launch(function, workers=workers, resources=wanted or None, join_timeout_s=join_timeout_s)
    except kind as error:
        assert text in str(error), error
        return
    raise AssertionError(f"no error with {text!r}")


def lost_ranks() -> None:
    """Rank 0 and rank 1 are killed, and come back."""
    import rpcdist.ray

    env = {FIRST: os.environ[FIRST]}
    assert rpcdist.ray.launch(die_once, workers=2, max_restarts=1, env=env) == ["came back"] * 2


def node_of(rank: int) -> tuple[str, str]:
    """The nodes of the first and the last process of a rank. The one on the node that is lost waits for its end."""
    import ray

    rpc.init_rpc(_name())
    here = ray.get_runtime_context().get_node_id()
    first = Path(os.environ[FIRST], f"node{rank}")
    if not first.exists():
        first.write_text(here)
        if here == os.environ[LOST_NODE]:
            threading.Event().wait()
        other = f"worker{1 - rank}"
        pid = rpc.rpc_sync(other, os.getpid)
        Path(os.environ[FIRST], "joined").touch()
        _wait_for_another_process(other, pid)
    rpc.shutdown()
    return first.read_text(), here


def _wait_for_another_process(name: str, pid: int) -> None:
    while True:
        try:
            if rpc.rpc_sync(name, os.getpid) != pid:
                return
        except RpcdistError:
            time.sleep(0.1)  # until the new one has joined


def lost_node() -> None:
    """One of two nodes is lost with its rank, which comes back on the other one."""
    import ray
    from ray.cluster_utils import Cluster

    import rpcdist.ray

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        second = nodes.add_node(num_cpus=2)
        ray.init(address=nodes.address)

        def kill_node() -> None:
            while not Path(os.environ[FIRST], "joined").exists():
                time.sleep(0.1)
            nodes.remove_node(second, allow_graceful=False)

        threading.Thread(target=kill_node, daemon=True).start()
        env = {FIRST: os.environ[FIRST], LOST_NODE: second.node_id}
        results = rpcdist.ray.launch(node_of, workers=2, max_restarts=1, env=env, strategy="SPREAD")
        assert len({first for first, _ in results}) == 2, results
        assert len({last for _, last in results}) == 1, results
    finally:
        ray.shutdown()
        nodes.shutdown()


def cluster() -> None:
    """Workers are called, added, removed, and one is killed."""
    import rpcdist.ray

    with rpcdist.ray.Cluster(3, max_restarts=1) as made:
        assert rpc.rpc_sync("worker2", place_of, (2,))[0] == 2
        assert made.add("extra") == "extra"
        made.remove("worker2")
        assert sorted(info.name for info in rpc.workers()) == ["extra", "worker0", "worker1"]
        pid = rpc.rpc_sync("worker1", os.getpid)
        os.kill(pid, signal.SIGKILL)
        _wait_for_another_process("worker1", pid)
        try:
            made.remove("worker2")
        except ConfigError as error:
            assert "'worker2' is no worker that can be removed" in str(error)
    assert "closed" in repr(made)


def interrupted() -> None:
    """Ctrl-C ends this program, and with it Ray's processes."""
    import rpcdist.ray

    rpcdist.ray.launch(wait_for_ever, workers=2)


def ray_train() -> None:
    """DDP and calls in Ray Train's workers."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from rpcdist.ray import RpcdistConfig

    TorchTrainer(
        train_with_ray,
        train_loop_config={"folder": os.environ[FIRST]},
        torch_config=RpcdistConfig(rpc=True),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=os.environ[FIRST]),
    ).fit()
    said = sorted(path.read_text() for path in Path(os.environ[FIRST]).glob("said*"))
    assert said == ["rpcdist 0 [0, 1] True", "rpcdist 1 [0, 1] True"], said


def train_with_ray(config: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = prepare_model(torch.nn.Linear(4, 1), move_to_device=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    weights = [torch.empty(1, 4) for _ in range(2)]
    dist.all_gather(weights, next(model.parameters()).detach())
    ranks = rpc.wait_all([rpc.rpc_async(f"worker{other}", abs, (other,)) for other in range(2)])
    dist.barrier()
    said = f"{dist.get_backend()} {rank} {ranks} {torch.equal(*weights)}"
    Path(config["folder"], f"said{rank}").write_text(said)


if __name__ == "__main__":
    import ray

    if sys.argv[1] != "lost_node":  # which makes a cluster of its own
        shows_output = sys.argv[1] == "interrupted"
        ray.init("local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=shows_output)
    globals()[sys.argv[1]]()
    print("done")
