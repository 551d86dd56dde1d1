"""What runs in the processes of `group_pool`."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import pickle
import signal
import struct
import sys
from typing import Any

state: dict[object, Any] = {}
"""What functions keep from one call to the next."""


def main(result_descriptor: int) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.WARNING)
    import torch

    torch.set_num_threads(1)
    requests = sys.stdin.buffer
    with os.fdopen(result_descriptor, "wb") as results:
        while len(header := requests.read(8)) == 8:
            module, name, rank, size, arguments = pickle.loads(requests.read(struct.unpack("<Q", header)[0]))
            try:
                function = importlib.import_module(module)
                for part in name.split("."):
                    function = getattr(function, part)
                answer: object = function(rank, size, *arguments)  # type: ignore[operator]
            except Exception as exc:
                logging.debug("the function failed", exc_info=True)
                answer = exc
            data = pickle.dumps(answer)
            results.write(struct.pack("<Q", len(data)) + data)
            results.flush()


if __name__ == "__main__":
    sys.modules["group_ranks"] = sys.modules["__main__"]  # functions that import it share `state`
    main(int(sys.argv[1]))
