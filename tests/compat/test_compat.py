"""Programs that were written for torch run unmodified under `python -m rpcdist run --compat`."""

from __future__ import annotations

import py_compile
import signal
import subprocess
import sys
import zipapp
from pathlib import Path

import pytest
from docs_programs import environment, run, two_free_ports
from full_sets import FULL, FULL_ONLY

from rpcdist.__main__ import main
from rpcdist.testing import LIMIT_S, free_port

HERE = Path(__file__).parent
PORTED = HERE.parent / "ported"


def under_compat(script: Path, *arguments: str) -> list[str | Path]:
    return [sys.executable, "-W", "error", "-m", "rpcdist", "run", "--compat", script, *arguments]


@pytest.mark.multiproc
@pytest.mark.timeout(240)  # twice the limit of `run`: all of it is importing torch in a dozen processes
def test_unmodified_programs_run(tmp_path: Path) -> None:
    local = environment(OMP_NUM_THREADS="1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    zero: list[str | Path] = [*torchrun, "-m", "rpcdist", "run", "--compat", HERE / "unmodified_zero.py"]
    [names, *trained] = run(
        [
            (under_compat(HERE / "names_under_compat.py", "--flag", "value"), local),
            (under_compat(HERE / "unmodified_ddp.py", str(free_port()), str(tmp_path)), local),
            *([(zero, local)] if FULL else []),
        ],
        tmp_path,
    )
    assert names == "all as it should be\n"
    for rank in range(2):  # two processes write to one pipe: a line of one may be cut by the other's end of line
        assert (
            f"rank {rank}: total 3, DDP of rpcdist.parallel.distributed, not of torch.nn.parallel.data_parallel"
            in trained[0]
        )
        for text in trained:
            assert f"rank {rank}: {3 + rank} inputs, rpcdist.parallel.zero_redundancy" in text


@FULL_ONLY  # `test_ported_scripts.py` always runs them with changed imports
@pytest.mark.multiproc
@pytest.mark.parametrize("program", ["ported_recurrent_net", "ported_ddp_rpc"])
def test_an_unmodified_program_of_rpc_runs(program: str, tmp_path: Path) -> None:
    port = two_free_ports()  # the second program meets at both
    local = environment(OMP_NUM_THREADS="1", MASTER_ADDR="localhost", MASTER_PORT=str(port))
    [said] = run([(under_compat(PORTED / f"{program}.py"), local)], tmp_path)
    assert ": loss " in said


def test_a_script_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--compat", "/nowhere/train.py"]) == 2
    assert "no file /nowhere/train.py" in capsys.readouterr().err


@pytest.fixture
def another_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may take this process over: what it replaces comes back after the test."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's groups install another


@pytest.mark.usefixtures("another_main")
def test_annotations_of_a_script_are_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not texts, as in a file with `from __future__ import annotations`: dataclasses and TorchScript look at them."""
    script = tmp_path / "train.py"
    script.write_text("def f(x: int) -> str: ...\nprint(f.__annotations__)\n")
    assert main(["run", str(script)]) == 0
    assert capsys.readouterr().out == "{'x': <class 'int'>, 'return': <class 'str'>}\n"


@pytest.mark.usefixtures("another_main")
def test_a_module_runs_as_by_python_m(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_a_user"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tools.py").write_text("NAME = 'tools'\n")
    (package / "__main__.py").write_text(
        "import sys\nfrom .tools import NAME\nprint(__name__, __package__, __spec__.name, NAME, sys.argv[1:])\n"
        "assert sys.modules['__main__'].NAME == NAME and sys.argv[0] == __file__\nraise ValueError('x')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["run", "-m", package.name, "--epochs", "3"]) == 1
    told = capsys.readouterr()
    assert told.out == "__main__ package_of_a_user package_of_a_user.__main__ tools ['--epochs', '3']\n"
    assert told.err.splitlines()[1].startswith(f'  File "{package / "__main__.py"}"')
    with pytest.raises(SystemExit, match="No module named not_there"):
        main(["run", "-m", "not_there"])


@pytest.mark.parametrize("form", ["file", "byte code", "folder", "zip file"])
def test_a_program_finds_itself_as_under_python(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each form that `python` takes: its path, its place on `sys.path`, and how the interpreter made the module."""
    source = (
        "import sys, helper\n"
        "print(sys.argv[0], __name__, __file__, sys.path[:2], helper.PLACE, __package__, __spec__ and __spec__.name,\n"
        "      type(__builtins__), type(__loader__), __name__ in sys.modules, __doc__)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "others"))
    folder = tmp_path / "program"
    folder.mkdir()
    (folder / "helper.py").write_text("PLACE = __file__\n")
    script = folder / "__main__.py"
    script.write_text(source)
    program = {"folder": folder, "file": script}.get(form, tmp_path / "program.zip")
    if form == "zip file":
        zipapp.create_archive(folder, program)
    elif form == "byte code":
        program = Path(py_compile.compile(str(script), str(folder / "main.pyc")) or "")
    for options in ([], ["-P"]):  # with -P, the folder of a file is not on `sys.path`
        commands = [[sys.executable, *options, *way, str(program)] for way in ([], ["-m", "rpcdist", "run"])]
        ends = [subprocess.run(command, capture_output=True, text=True) for command in commands]
        assert ends[0].stdout == ends[1].stdout
        assert ends[0].returncode == ends[1].returncode == int("-P" in options and form in ("file", "byte code"))
        assert ends[0].stdout.startswith(str(program)) == (ends[0].returncode == 0)


@pytest.mark.usefixtures("another_main")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os\nx = = 3\n", '  File "{}", line 2\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n'),
        (
            "raise ValueError('x')\n",
            "Traceback (most recent call last):\n  File \"{}\", line 1, in <module>\n    raise ValueError('x')\n"
            "ValueError: x\n",
        ),
    ],
)
def test_errors_of_a_script_are_told_without_the_way_to_it(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert main(["run", str(script)]) == 1
    assert capsys.readouterr().err == said.format(script)


def test_ctrl_c_shows_the_frames_of_the_program_alone(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import signal\n\ndef wait():\n    signal.raise_signal(signal.SIGINT)\n\nwait()\n")
    ends = []
    for way in ([], ["-m", "rpcdist", "run"]):
        command = [sys.executable, *way, str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        ends.append((done.stdout, done.stderr, done.returncode))
    assert ends[0] == ends[1]
    assert ends[0][2] == -signal.SIGINT
