"""What the documentation says is so: its programs run, its links lead somewhere, the files that it names exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import socket

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 100.0  # of a program; most of it is importing torch in several processes

FENCE = re.compile(
    r"^(?P<mark><!-- not run: .+ -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
FILE = re.compile(
    r"`(?P<path>(?:rpcdist|collectives|autograd|proto|tests|examples|benchmarks|docs|tools)/[\w/]*(?:/|\.\w+))`"
)

# Rank 0 runs the statements of the guide, rank 1 serves. The definitions are at the top level: both need them.
GUIDE = """
{definitions}
import torch.multiprocessing


def check(value: object, expected: str, line: int) -> None:
    assert repr(value) == expected, f"docs/rpc.md:{{line}} says {{expected}}, but it is {{value!r}}"


def work(rank: int) -> None:
    options = rpc.RpcOptions(init_method="tcp://127.0.0.1:{port}", shutdown_timeout=60)
    rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        exec(compile({statements!r}, "the statements of docs/rpc.md", "exec"), globals())
    rpc.shutdown()


def serve(index: int) -> None:
    work(1)


if __name__ == "__main__":
    server = torch.multiprocessing.spawn(serve, nprocs=1, join=False)
    work(0)
    assert server.join(60)
    print("all of it was run")
"""


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """The first line, and the code, of every block that may be run."""
    for found in FENCE.finditer(text):
        if found["language"] == language and not found["mark"]:
            yield text.count("\n", 0, found.start("code")) + 1, found["code"]


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(**variables: str) -> dict[str, str]:
    """Ours, without what a launcher may have left there."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launcher} | variables


def run(commands: list[tuple[list[str | Path], dict[str, str]]], folder: Path) -> list[str]:
    """Runs programs at the same time; returns what each printed. None of them outlives this."""
    with ExitStack() as stack:
        processes = []
        for command, variables in commands:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            stack.callback(process.communicate)
            stack.callback(process.kill)
        printed = []
        for process in processes:
            output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, output + errors
            printed.append(output)
        return printed


class Checks(ast.NodeTransformer):
    """Turns each `value  # -> text` at the top level of a block into a check."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        _, arrow, expected = self.lines[(node.end_lineno or node.lineno) - 1].partition("# -> ")
        if not arrow:
            return node
        arguments = [node.value, ast.Constant(expected), ast.Constant(node.lineno)]
        check = ast.Expr(ast.Call(ast.Name("check", ast.Load()), arguments, []))
        return ast.fix_missing_locations(ast.copy_location(check, node))


def program_of(text: str) -> tuple[str, str]:
    """The definitions (and imports) of a page, and its statements, as two sources."""
    definitions: list[ast.stmt] = []
    statements: list[ast.stmt] = []
    lines = text.splitlines()
    for first, code in blocks(text, "python"):
        tree = ast.parse("\n" * (first - 1) + code)
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)):
                definitions.append(node)
            else:
                statements.append(Checks(lines).visit(node))
    return ast.unparse(ast.Module(definitions, [])), ast.unparse(ast.Module(statements, []))


def run_page(name: str) -> None:
    """Runs the code of a page in this process, for tests that have the workers which it names."""
    definitions, statements = program_of(page(name))
    lines = []

    def check(value: object, expected: str, line: int) -> None:
        assert repr(value) == expected, f"{name}:{line} says {expected}, but it is {value!r}"
        lines.append(line)

    names: dict[str, object] = {"__name__": name, "check": check}
    exec(compile(f"{definitions}\n{statements}", name, "exec"), names)
    assert lines, f"{name} says of nothing what it is"


@pytest.mark.multiproc
def test_the_guide_runs(tmp_path: Path) -> None:
    definitions, statements = program_of(page("docs/rpc.md"))
    assert statements.count("check(") > 20
    script = tmp_path / "guide.py"
    script.write_text(GUIDE.format(definitions=definitions, statements=statements, port=free_port()))
    [printed] = run([([sys.executable, script], environment())], tmp_path)
    assert printed == "all of it was run\n"


def test_the_first_program_of_the_readme_is_the_example() -> None:
    """`test_examples.py` runs it, and compares what it prints with its docstring."""
    _, docstring, code = (ROOT / "examples" / "hello_rpc.py").read_text().split('"""', 2)
    text = page("README.md")
    assert next(blocks(text, "python"))[1] == code.lstrip()
    assert next(blocks(text, "text"))[1] == docstring


@pytest.mark.multiproc
def test_the_job_of_the_readme_runs_by_hand_and_under_torchrun(tmp_path: Path) -> None:
    [source] = [code for _, code in blocks(page("README.md"), "python") if code.startswith("# job.py\n")]
    (tmp_path / "job.py").write_text(source)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    by_hand = run([([sys.executable, "job.py"], environment(**address, RANK=rank)) for rank in "01"], tmp_path)
    assert sorted(by_hand) == ["", "6\n"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    [printed] = run([([*torchrun, "job.py"], environment())], tmp_path)
    assert printed == "6\n"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text()
    local = [found["target"] for found in LINK.finditer(text) if "://" not in found["target"]]
    for target in local:
        file, _, anchor = target.partition("#")
        linked = (path.parent / file) if file else path
        assert linked.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(linked.read_text()), f"{path.name} links to {target}"
    missing = [found["path"] for found in FILE.finditer(text) if not (ROOT / found["path"]).exists()]
    assert not missing, f"{path.name} names files that do not exist"


def anchors(text: str) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_lists_every_page() -> None:
    listed = {found["target"] for found in LINK.finditer(page("docs/index.md"))}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= listed
