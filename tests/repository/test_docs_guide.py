"""The program in docs/guide.md does what the page says, and what docs/clusters.md says works beside us does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from docs_programs import blocks, environment, free_port, page, program_of, run

GUIDE = """
{definitions}


def check(value: object, expected: str, line: int) -> None:
    assert repr(value) == expected, f"docs/guide.md:{{line}} says {{expected}}, but it is {{value!r}}"


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{{rank}}")
    if rank == 0:
        exec(compile({statements!r}, "the statements of docs/guide.md", "exec"), globals())
        print("all of it was run")
    rpc.shutdown()
"""


@pytest.mark.multiproc
def test_the_guide_for_newcomers_runs(tmp_path: Path) -> None:
    definitions, statements = program_of(page("docs/guide.md"))
    assert statements.count("check(") >= 15
    (tmp_path / "guide.py").write_text(GUIDE.format(definitions=definitions, statements=statements))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    printed = run([([sys.executable, "guide.py"], environment(**address, RANK=rank)) for rank in "012"], tmp_path)
    assert printed == ["all of it was run\n", "", ""]


@pytest.mark.multiproc
def test_torchs_fsdp_works_beside(tmp_path: Path) -> None:
    [source] = [code for _, code in blocks(page("docs/clusters.md"), "python") if code.startswith("# beside.py\n")]
    (tmp_path / "beside.py").write_text(source)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    [printed] = run([([*torchrun, str(free_port()), "beside.py"], environment(OMP_NUM_THREADS="1"))], tmp_path)
    assert printed == "learned True\n"
