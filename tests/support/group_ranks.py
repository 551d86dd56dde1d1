"""What runs in the processes of `group_pool`."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import signal
from multiprocessing.connection import Connection
from typing import Any

state: dict[object, Any] = {}
"""What functions keep from one call to the next."""


def serve(connection: Connection, log: str, flight_folder: str) -> None:
    """Carries out requests until the other end closes."""
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is for the test's process
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    os.environ["RPCDIST_FLIGHT_RECORDER_DIR"] = flight_folder
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        number, *what = pickle.loads(request)
        connection.send_bytes(pickle.dumps((number, _carry_out(*what))))


def _carry_out(module: str, name: str, rank: int, size: int, arguments: tuple[object, ...]) -> object:
    try:
        function = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        answer: object = function(rank, size, *arguments)  # type: ignore[operator]
        return answer
    except Exception as exc:
        logging.debug("the function failed", exc_info=True)
        return exc
