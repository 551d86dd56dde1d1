"""The programs in the pages of the documentation: finding them, and running them."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from socket import socket

import psutil

from rpcdist.testing import UNIT_S, free_port

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
LIMIT_S = 1000 * UNIT_S  # of a program; most of it is importing torch in several processes

FENCE = re.compile(
    r"^(?P<mark><!-- not run: [^\n]+ -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


def page(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """The first line, and the code, of every block that may be run."""
    for found in FENCE.finditer(text):
        if found["language"] == language and not found["mark"]:
            yield text.count("\n", 0, found.start("code")) + 1, found["code"]


def blocks_with(text: str, words: str) -> list[str]:
    """The blocks of Python that contain the words, those that are marked as not run included."""
    return [found["code"] for found in FENCE.finditer(text) if found["language"] == "python" and words in found["code"]]


def two_free_ports() -> int:
    """The first of two neighbours: one program meets at one address for its process group, and at the next for RPC."""
    while True:
        port = free_port()
        with socket() as second, suppress(OSError):
            second.bind(("127.0.0.1", port + 1))
            return port


def environment(**variables: str) -> dict[str, str]:
    """Ours, without what a launcher may have left there."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in launcher} | variables


def run(commands: list[tuple[list[str | Path], dict[str, str]]], folder: Path) -> list[str]:
    """Runs programs at the same time; returns what each printed. None of them outlives this.

    One that takes longer than `LIMIT_S` is an error with the stacks of its threads, and of those of its children.
    """
    with ExitStack() as stack:
        processes = []
        for command, variables in commands:
            process = subprocess.Popen(
                list(map(str, command)),
                cwd=folder,
                env={"PYTHONFAULTHANDLER": "1", **variables},
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
            try:
                output, errors = process.communicate(timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                abort(process.pid)
                output, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, f"{output}{errors}exit status {process.returncode}"
            printed.append(output)
        return printed


def abort(pid: int) -> None:
    """Ends a process and its children, which write the stacks of their threads."""
    found = psutil.Process(pid)
    for process in (*found.children(recursive=True), found):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)


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


def script_of(text: str) -> tuple[str, list[str]]:
    """A page whose lines print what they compute, as a script for three workers, and the lines that it prints."""
    definitions: list[ast.stmt] = []
    statements: list[ast.stmt] = []
    for _, code in blocks(text, "python"):
        for node in ast.parse(code).body:
            defines = isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
            )
            (definitions if defines else statements).append(node)
    frame = "def main() -> None: ...\nif __name__ == '__main__':\n    with rpcdist.LocalCluster(3):\n        main()"
    main, start = ast.parse(frame).body
    assert isinstance(main, ast.FunctionDef)
    main.body = statements
    script = ast.unparse(ast.fix_missing_locations(ast.Module([*definitions, main, start], [])))
    return script, re.findall(r"^print\(.*\)  # -> (.*)$", text, re.MULTILINE)


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
