"""Type checkers see what users mean, and see the package where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TYPED_USES = Path(__file__).with_name("typed_uses.py")
LIMIT_S = 100

needs_pyright = pytest.mark.skipif(
    importlib.util.find_spec("basedpyright") is None, reason="basedpyright is not installed: `make setup` installs it"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has the dependencies, and this repository as the Makefile installs it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    found = folder / "bin" / "python"
    site = run(found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip()
    dependencies = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    # `.pth` files there are not read again, and so the import hook of an editable install is not.
    Path(site, "dependencies.pth").write_text("\n".join(dependencies))
    linked = run(found, ROOT / "tools" / "link_for_type_checkers.py", cwd=folder)
    assert linked.returncode == 0, linked.stderr
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The file of typed uses, far from the repository, for pyright, whose settings lie beside it."""
    program = tmp_path / "program.py"
    program.write_text(TYPED_USES.read_text())
    settings = {
        "typeCheckingMode": "standard",
        "pythonVersion": "3.11",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    return program


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@needs_pyright
def test_pyright_infers_what_users_mean(python: Path, program: Path) -> None:
    """mypy does so with all other files (`mypy --strict`)."""
    checked = run(sys.executable, "-m", "basedpyright", "--pythonpath", python, "--outputjson", ".", cwd=program.parent)
    report = json.loads(checked.stdout)
    found = [f"{item['range']['start']['line'] + 1}: {item['message']}" for item in report["generalDiagnostics"]]
    assert not found, "\n".join(found)
    assert report["summary"]["filesAnalyzed"] == 1


def test_mypy_finds_an_editable_install(python: Path, tmp_path: Path) -> None:
    """Only found, not read: that is most of mypy's time."""
    program = tmp_path / "program.py"
    program.write_text("import rpcdist.rpc\nimport rpcdist.autograd\nimport rpcdist.collectives\nimport torch\n")
    options = ("--strict", "--follow-imports=skip", "--cache-dir", os.devnull, "--python-executable", python)
    checked = run(sys.executable, "-m", "mypy", *options, program, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout
    program.write_text("import rpcdist.no_such_module\n")
    checked = run(sys.executable, "-m", "mypy", *options, program, cwd=tmp_path)
    assert "rpcdist.no_such_module" in checked.stdout and checked.returncode == 1


def test_python_takes_the_link_too(python: Path, tmp_path: Path) -> None:
    ask = "from importlib.util import find_spec as f; print(f('rpcdist.autograd').origin, f('rpcdist.rpc').origin)"
    ran = run(python, "-c", ask, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    files = [Path(file).resolve() for file in ran.stdout.split()]
    assert files == [ROOT / "autograd" / "__init__.py", ROOT / "rpcdist" / "rpc" / "__init__.py"]
