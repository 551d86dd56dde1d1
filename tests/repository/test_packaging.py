"""The installed files: every module, under `rpcdist` and nowhere else, and cheap to import."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("autograd", "collectives")  # top-level folders that are installed as subpackages
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(*arguments: str | Path, cwd: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def modules_on_disk() -> set[str]:
    """The path of every module inside an installed package, such as `rpcdist/collectives/store.py`."""
    own = [file.relative_to(ROOT) for file in (ROOT / "rpcdist").rglob("*.py")]
    mapped = [Path("rpcdist") / file.relative_to(ROOT) for folder in MAPPED for file in (ROOT / folder).rglob("*.py")]
    return {file.as_posix() for file in own + mapped}


def test_every_package_is_listed() -> None:
    on_disk = {str(Path(file).parent).replace("/", ".") for file in modules_on_disk() if file.endswith("/__init__.py")}
    folders_with_modules = {str(Path(file).parent).replace("/", ".") for file in modules_on_disk()}
    assert folders_with_modules == on_disk, "a folder with modules has no __init__.py"
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk


def test_the_classifiers_name_the_pythons_that_were_run() -> None:
    """Those of README's table of platforms."""
    platforms = (ROOT / "README.md").read_text().partition("\n## Platforms\n")[2].partition("\n## ")[0]
    were_run = set(re.findall(r"^\| (3\.\d+)(?:\.\d+)? \|", platforms, re.MULTILINE))
    prefix = "Programming Language :: Python :: 3."
    named = {line.rpartition(" ")[2] for line in PROJECT["project"]["classifiers"] if line.startswith(prefix)}
    assert named == were_run
    assert min(named, key=lambda each: int(each.partition(".")[2])) in PROJECT["project"]["requires-python"]


@pytest.mark.parametrize("name", MAPPED)
def test_mapped_folder_has_its_link(name: str) -> None:
    """Type checkers look for `rpcdist.autograd` inside `rpcdist/`."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: an unpacked source distribution has no links")
    link = ROOT / "rpcdist" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert PROJECT["tool"]["setuptools"]["package-dir"][f"rpcdist.{name}"] == name
    listing = subprocess.run(
        ["git", "ls-files", "--stage", f"rpcdist/{name}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert listing.stdout.startswith("120000 "), "commit the link itself, not a copy of the folder"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A wheel, built from a source distribution, built from a copy of the files: building litters its folder."""
    folder = tmp_path_factory.mktemp("packaging")
    ignored = shutil.ignore_patterns(".*", "build", "dist", "out", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, folder / "source", ignore=ignored, symlinks=True)
    build = run_python(
        "-m", "build", "--no-isolation", "--outdir", folder, folder / "source", cwd=folder, timeout_s=100
    )
    assert build.returncode == 0, build.stdout + build.stderr
    [wheel] = folder.glob("*.whl")
    [source] = folder.glob("*.tar.gz")
    return wheel, source


def test_wheel_has_every_module_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[0]) as wheel:
        names = set(wheel.namelist())
    installed = {name for name in names if ".dist-info/" not in name}
    assert {name for name in installed if name.endswith(".py")} == modules_on_disk()
    pages = {f"rpcdist/_dashboard/page/page.{kind}" for kind in ("css", "html", "js")}
    assert {name for name in installed if not name.endswith((".py", ".pyi"))} == {"rpcdist/py.typed", *pages}
    assert {name.split("/")[0] for name in installed} == {"rpcdist"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_wheel_works_without_the_repository(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(distributions[0]) as wheel:
        wheel.extractall(target)
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import rpcdist.autograd, rpcdist.collectives\n"
        "for package in (rpcdist, rpcdist.autograd, rpcdist.collectives):\n"
        "    print(package.__file__)\n"
    )
    run = run_python("-I", "-c", program, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert [Path(line).relative_to(target).parts[:-1] for line in run.stdout.splitlines()] == [
        ("rpcdist",),
        ("rpcdist", "autograd"),
        ("rpcdist", "collectives"),
    ]


def test_source_distribution_can_be_tested(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "Makefile",
        "autograd/__init__.py",
        "collectives/__init__.py",
        "constraints.txt",
        "proto/rpc.proto",
        "tests/conftest.py",
        "tests/repository/test_packaging.py",
        "tools/generate_proto.py",
    } <= names
    assert not {name for name in names if name.startswith((".venv", ".git/", "build/"))}


def test_import_is_lazy(tmp_path: Path) -> None:
    program = (
        "import sys, rpcdist\n"
        "print(sorted({'grpc', 'torch', 'google.protobuf', 'asyncio'} & sys.modules.keys()))\n"
        "rpcdist.deadline.Deadline\n"
        "print(rpcdist.__version__)\n"
    )
    run = run_python("-c", program, cwd=tmp_path)
    assert run.stdout.splitlines() == ["[]", PROJECT["project"]["version"]], run.stderr


def test_submodules_are_attributes(tmp_path: Path) -> None:
    program = "import rpcdist\nfor name in rpcdist.__all__: assert name in dir(rpcdist) and getattr(rpcdist, name)\n"
    run = run_python("-c", program, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_unknown_attribute_is_an_attribute_error(tmp_path: Path) -> None:
    run = run_python("-c", "import rpcdist; rpcdist.nothing_of_this_name", cwd=tmp_path)
    assert run.stderr.splitlines()[-1] == "AttributeError: module 'rpcdist' has no attribute 'nothing_of_this_name'"


@pytest.mark.parametrize("name", MAPPED)
def test_repository_root_on_the_path_gets_advice(name: str) -> None:
    """A script in the repository's root, or `python -m` run there, finds our folder where it wants another package."""
    run = run_python("-c", f"import {name}", cwd=ROOT)
    assert run.returncode == 1
    message = run.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: this folder is installed as rpcdist.{name}; write `import rpcdist.{name}`")
