"""The job of `torchrun_job.py`: torchrun's agents, whose ranks run the programs in turn, each as `__main__`.

    python torchrun_driver.py FOLDER

FOLDER has the programs in `job.json`, and gets what each of them printed, by program, rank and descriptor. The command
`torchrun` starts an interpreter for each rank; here the agent forks the ranks, and has imported before what they need.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path
from uuid import uuid4

from parent_death import end_with_parent
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run(script: str) -> int:
    """The status with which the program would have ended."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_programs(folder: Path, programs: list[tuple[str, list[str], int]]) -> None:
    """The function of each rank."""
    for inherited in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(inherited, signal.SIG_DFL)  # the agent's handlers were forked as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = int(os.environ["RANK"])
    path = sys.path[1:]  # without the folder of this file
    for number, (script, arguments, world_size) in enumerate(programs):
        if rank >= world_size:
            continue
        here = folder / str(number)
        here.mkdir(exist_ok=True)
        os.chdir(here)
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
        sys.argv = [script, *arguments]
        sys.path[:] = [str(Path(script).parent), *path]
        for descriptor in (1, 2):
            with open(f"{rank}.{descriptor}", "w") as file:
                os.dup2(file.fileno(), descriptor)
        status = run(script)
        sys.stdout.flush()
        sys.stderr.flush()
        Path(f"{rank}.status").write_text(str(status))


def main() -> None:
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    for module in job["imports"]:
        importlib.import_module(module)
    num_ranks = max(world_size for _, _, world_size in job["programs"])
    num_agents = job["num_agents"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = 0 if num_agents == 1 else free.getsockname()[1]
    config = LaunchConfig(  # as `torchrun --standalone` has it, except for the number of agents
        min_nodes=num_agents,
        max_nodes=num_agents,
        nproc_per_node=num_ranks // num_agents,
        run_id=str(uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        local_addr="127.0.0.1",
        max_restarts=job["max_restarts"],
        start_method="fork",
    )
    others = [forked_agent(config, folder, job["programs"]) for _ in range(num_agents - 1)]
    elastic_launch(config, run_programs)(folder, job["programs"])
    for other in others:
        status = os.waitpid(other, 0)[1]
        assert status == 0, f"an agent ended with status {status}"


def forked_agent(config: LaunchConfig, folder: Path, programs: list[tuple[str, list[str], int]]) -> int:
    """The process of an agent of another node."""
    child = os.fork()
    if child:
        return child
    end_with_parent(signal.SIGTERM)
    status = 1
    try:
        config.rdzv_configs["is_host"] = False
        elastic_launch(config, run_programs)(folder, programs)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
