"""Programs that were written for torch run after `python -m rpcdist port` has changed their import lines.

The programs are those in `tests/ported/`, which also run on torch itself, as they are, and the two examples of torch's
own that its wheel contains.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_programs import environment, run, two_free_ports
from full_sets import FULL

from rpcdist.compat._porting import port

PORTED = Path(__file__).parents[1] / "ported"
PROGRAMS = sorted(path.stem for path in PORTED.glob("ported_*.py"))
STARTED_BY_ITSELF = "ported_recurrent_net"  # as users do it, in the full set; others share processes: torch is slow
TORCH_EXAMPLES = ("parameter_server_test", "reinforcement_learning_rpc_test")

# Every program finds the others' remains: an agent that was shut down in the same process.
DRIVER = """
import importlib
import os

import torch
import torch._dynamo  # as the first optimizer does
import torch.multiprocessing as mp
from rpcdist import rpc


def run_torch_examples(rank, world_size):
    import parameter_server_test
    import reinforcement_learning_rpc_test as reinforcement_learning

    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
    if rank == 0:
        parameter_server_test.run_ps([f"worker{trainer}" for trainer in range(1, world_size)])
        reinforcement_learning.run_agent(reinforcement_learning.Agent(world_size), n_steps=100)
    rpc.shutdown()


def work(rank):
    torch.set_num_threads(1)
    for name, port in PROGRAMS.items():
        os.environ["MASTER_PORT"] = str(port)
        if name == "torch_examples":
            run_torch_examples(rank, 4)
            continue
        program = importlib.import_module(name)
        if rank < program.WORLD_SIZE:
            program.run_worker(rank, program.WORLD_SIZE)


if __name__ == "__main__":
    mp.start_processes(work, nprocs=4, start_method="fork")  # torch is imported once; no thread has been started
"""


def without_imports(text: str) -> str:
    tree = ast.parse(text)
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    return ast.dump(tree)


def torch_examples() -> Iterator[Path]:
    spec = importlib.util.find_spec("torch.testing._internal.distributed.rpc")
    assert spec is not None and spec.submodule_search_locations is not None
    for name in TORCH_EXAMPLES:
        yield Path(spec.submodule_search_locations[0], "examples", f"{name}.py")


def is_learned(line: str) -> bool:
    """Every program prints `who: loss 1.234 -> 0.123`, and should come down to two thirds."""
    found = re.fullmatch(r".*: loss (\d+\.\d+) -> (\d+\.\d+)", line)
    assert found, line
    return float(found[2]) < float(found[1]) * 2 / 3


@pytest.mark.multiproc
@pytest.mark.timeout(240)  # twice the limit of `run`, for eight programs in six processes
def test_programs_for_torch_run(tmp_path: Path) -> None:
    for path in [*(PORTED / f"{name}.py" for name in PROGRAMS), *torch_examples()]:
        text = path.read_text()
        result = port(text)
        changed = result.text
        assert not result.left, result.left
        assert without_imports(changed) == without_imports(text)
        assert "import torch.distributed" not in changed
        (tmp_path / path.name).write_text(changed)
    ports = {name: two_free_ports() for name in [*PROGRAMS, "torch_examples"]}
    local = {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    commands: list[tuple[list[str | Path], dict[str, str]]] = [([sys.executable, "driver.py"], environment(**local))]
    if FULL:
        alone = environment(**local, MASTER_PORT=str(ports.pop(STARTED_BY_ITSELF)))
        commands.append(([sys.executable, "-W", "error", f"{STARTED_BY_ITSELF}.py"], alone))
    (tmp_path / "driver.py").write_text(f"PROGRAMS = {ports}\n{DRIVER}")
    printed = run(commands, tmp_path)
    learned = {line: is_learned(line) for text in printed for line in text.splitlines() if ": loss " in line}
    assert len(learned) == 7, printed  # the pipeline trains twice
    assert all(learned.values()), learned
    assert printed[0].count("PS updated model") == 4
    assert "Solved! Running reward is now " in printed[0]
