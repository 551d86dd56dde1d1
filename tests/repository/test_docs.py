"""The documentation is true: its programs run, its links lead somewhere, the files that it names exist."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from docs_programs import PAGES, ROOT, blocks, environment, page, program_of, run
from full_sets import FULL_ONLY

from rpcdist.testing import free_port

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


@FULL_ONLY  # `test_torchrun.py` always runs it under torchrun, and `test_collectives_api_processes.py` one by hand
@pytest.mark.multiproc
def test_the_job_of_the_readme_runs_by_hand(tmp_path: Path) -> None:
    [source] = [code for _, code in blocks(page("README.md"), "python") if code.startswith("# job.py\n")]
    (tmp_path / "job.py").write_text(source)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    by_hand = run([([sys.executable, "job.py"], environment(**address, RANK=rank)) for rank in "01"], tmp_path)
    assert sorted(by_hand) == ["", "6\n"]


@pytest.mark.multiproc
def test_the_tests_of_the_page_on_testing_pass(tmp_path: Path) -> None:
    for _, code in blocks(page("docs/testing.md"), "python"):
        name = code.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).write_text(code)
    [printed] = run([([sys.executable, "-m", "pytest", "-q", tmp_path], environment())], tmp_path)
    assert re.search(r"^9 passed", printed, re.MULTILINE), printed


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


def test_the_page_of_examples_has_each_with_its_command_and_output() -> None:
    shown = re.findall(r"^```text\n(.*?)\n```$", page("docs/examples.md"), re.MULTILINE | re.DOTALL)
    programs = sorted((ROOT / "examples").glob("[a-z]*.py"))
    said = [(ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0] for path in programs]
    assert sorted(shown) == sorted(said)


def test_the_index_lists_every_page() -> None:
    listed = {found["target"] for found in LINK.finditer(page("docs/index.md"))}
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"} <= listed
