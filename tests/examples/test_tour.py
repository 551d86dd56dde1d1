"""The notebook runs from its first cell to its last, and prints what its text promises."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from example_runs import EXAMPLES
from program_sessions import LIMIT_S


def printed(cell: Any) -> str:
    return "".join(output["text"] for output in cell["outputs"] if output.get("name") == "stdout")


@pytest.mark.multiproc
def test_the_tour(tmp_path: Path) -> None:
    read: Any = nbformat.read  # it has no annotations
    book = read(EXAMPLES / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "the notebook is kept without outputs"
    client = nbclient.NotebookClient(book, timeout=int(LIMIT_S), resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    started, address, calls, model, losses, trace, ended = [printed(cell) for cell in book.cells if "outputs" in cell]
    assert ast.literal_eval(started) == ["worker0", "worker1", "worker2"]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=\S+\n", address)
    assert calls == "[(4, 2), (4, 2), (4, 2)]\ninvalid literal for int() with base 10: 'seven'\n"
    assert model == "worker2 4\n"
    first, last = re.findall(r"\d\.\d+", losses)
    assert float(last) < 0.1 < 0.5 < float(first)
    assert {"backward", "made", "served"} <= set(ast.literal_eval(trace))
    assert (tmp_path / "trace.json").stat().st_size > 1000
    assert ended == ""
