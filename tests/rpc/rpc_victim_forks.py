"""The functions with which victims fork. All processes import this module by the same name."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from rpc_victim_functions import held, make
from torch.utils.data import DataLoader, TensorDataset

from rpcdist import rpc
from rpcdist.errors import RpcdistError


def fork_data_loader_workers() -> list[int]:
    """Starts `DataLoader` workers by fork, which live as long as this process; their process ids."""
    loader = DataLoader(
        TensorDataset(torch.arange(1000.0)), batch_size=1, num_workers=2, multiprocessing_context="fork"
    )
    batches: Any = iter(loader)
    next(batches)
    held.append(batches)
    return [worker.pid for worker in batches._workers]


def in_forked_child(what: str, to: str) -> tuple[str, int]:
    """Forks, uses RPC in the child, and tells what that raised and how the child ended."""
    rref = rpc.remote(to, make)
    rref.to_here()
    future = rpc.rpc_async(to, make)
    future.wait()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _use_in_child(what, to, rref)
            os.write(writing, b"nothing")
        except RpcdistError as exc:
            os.write(writing, f"{type(exc).__name__}: {exc}".encode())
        except BaseException as exc:
            os.write(writing, f"unexpected {exc!r}".encode())
        finally:
            os._exit(5)
    os.close(writing)
    with open(reading) as report:
        text = report.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert rref.to_here() == 7  # the parent goes on
    return text, status


def _use_in_child(what: str, to: str, rref: Any) -> Any:
    signal.alarm(20)  # a child that hangs is killed
    match what:
        case "rpc_sync":
            return rpc.rpc_sync(to, make)
        case "rpc_async":
            return rpc.rpc_async(to, make)
        case "remote":
            return rpc.remote(to, make)
        case "RRef":
            return rpc.RRef(1)
        case "to_here":
            return rref.to_here()
        case "shutdown":
            return rpc.shutdown()
        case "init_rpc":
            return rpc.init_rpc("child", rank=0, world_size=1)
        case "drop":  # allowed: a fork drops what the parent holds
            del rref
            raise RpcdistError("dropped")
    raise ValueError(what)
