"""The web service of docs/recipes.md, under uvicorn: a request is answered; a client that hangs up cancels its call."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from docs_programs import LIMIT_S, blocks_with, environment, page

from rpcdist.testing import eventually, free_port

MODEL = """
import asyncio, os, pathlib, sys
from rpcdist import rpc

async def run_model(number):
    if number == 0:
        pathlib.Path("running").touch()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pathlib.Path("cancelled").touch()
            raise
    return 2 * number

if __name__ == "__main__":
    import model  # what the service names
    rpc.init_rpc("model", rank=0, rpc_backend_options=rpc.RpcOptions(init_method=sys.argv[1]))
    rpc.serve()
    rpc.shutdown(graceful=False)
"""


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of the running service."""
    url, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    [code] = blocks_with(page("docs/recipes.md"), "FastAPI(")
    (tmp_path / "web.py").write_text(re.sub(r"tcp://[\d.:]+", url, code))
    (tmp_path / "model.py").write_text(MODEL)
    commands = [
        ["model.py", url],
        ["-m", "uvicorn", "web:app", "--port", str(port), "--timeout-graceful-shutdown", "1"],
    ]
    with ExitStack() as running:
        for command in commands:
            process = subprocess.Popen([sys.executable, *command], cwd=tmp_path, env=environment())
            running.callback(end, process)
        eventually(lambda: listens(port), "uvicorn listens", LIMIT_S)
        yield port


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def request(port: int, number: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    client.sendall(f"GET /predict/{number} HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n".encode())
    return client


@pytest.mark.multiproc
def test_a_client_that_hangs_up_cancels_the_call(port: int, tmp_path: Path) -> None:
    with request(port, 21) as client, client.makefile() as answer:
        assert answer.read().endswith('{"result":42}')
    with request(port, 0):
        eventually((tmp_path / "running").exists, "the model runs", LIMIT_S)
    eventually((tmp_path / "cancelled").exists, "the call is cancelled", LIMIT_S)
