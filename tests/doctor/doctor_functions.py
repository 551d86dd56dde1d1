"""The functions that worker processes run in the tests of the doctor: they run the command, in namespaces of their
own.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout

from inside_agents import own_node
from transport_nodes import tcp_port

from rpcdist.__main__ import main

__all__ = ["diagnose", "ports_of_this_worker"]


def diagnose(*addresses: str, token: str | None = None, **variables: str) -> tuple[int, list[str]]:
    """The exit status of the command and the lines that it prints, with other variables in the environment."""
    before = dict(os.environ)
    os.environ.update(variables)
    if token is not None:
        os.environ["RPCDIST_TOKEN"] = token
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            status = main(["doctor", *addresses])
    finally:
        os.environ.clear()
        os.environ.update(before)
    return status, printed.getvalue().splitlines()


def ports_of_this_worker() -> tuple[int, int]:
    """The port of gRPC and that of raw connections."""
    node = own_node()
    assert node.address is not None
    return int(node.address.rpartition(":")[2]), tcp_port(node)
