"""Starts parts of this package in a process that lacks something; for a worker of a test."""

from __future__ import annotations

import operator
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from own_shortages import few_descriptors

import rpcdist
from rpcdist import checkpoint, collectives, metrics, rpc
from rpcdist.errors import RpcdistError
from rpcdist.testing import LIMIT_S
from rpcdist.transport import acquire_node

__all__ = ["STARTS", "start_with_few_descriptors", "start_without_threads"]


def _rpc(folder: str) -> Callable[[], object]:
    rpc.init_rpc("alone", rank=0, world_size=1)
    return rpc.shutdown


def _store(folder: str) -> Callable[[], object]:
    store = collectives.TCPStore("127.0.0.1", 0, 1, True, timedelta(seconds=LIMIT_S))
    store.set("key", "value")
    return store.close


def _file_store(folder: str) -> Callable[[], object]:
    store = collectives.FileStore(f"{folder}/store", 1)
    store.set("key", "value")
    return store.close


def _group(folder: str) -> Callable[[], object]:
    collectives.init_process_group(store=collectives.HashStore(), rank=0, world_size=1)
    collectives.all_reduce(torch.ones(1))
    return collectives.destroy_process_group


def _node(folder: str) -> Callable[[], object]:
    return acquire_node().release


def _save(folder: str) -> Callable[[], object]:
    checkpoint.save(f"{folder}/saved", {"weights": torch.ones(3)})
    return _nothing


def _load(folder: str) -> Callable[[], object]:
    weights = torch.zeros(3)
    checkpoint.load(f"{folder}/complete", {"weights": weights})
    assert weights.eq(1).all()
    return _nothing


def _launch(folder: str) -> Callable[[], object]:
    assert rpcdist.launch(operator.index, workers=1) == [0]  # a function of a module that does not import torch
    return _nothing


def _cluster(folder: str) -> Callable[[], object]:
    return rpcdist.LocalCluster(1).start().close


def _metrics(folder: str) -> Callable[[], object]:
    metrics.serve("21000-21999")
    return metrics._endpoint.clear


def _nothing() -> None:
    """There is nothing to close."""


STARTS: Final = {
    "init_rpc": _rpc,
    "TCPStore": _store,
    "FileStore": _file_store,
    "init_process_group": _group,
    "acquire_node": _node,
    "checkpoint.save": _save,
    "checkpoint.load": _load,
    "launch": _launch,
    "LocalCluster": _cluster,
    "metrics.serve": _metrics,
}


def start_with_few_descriptors(name: str, numbers: list[int]) -> list[str]:
    """The outcome of each start with so many free descriptors, and of the last one without a limit."""
    return _outcomes(name, [partial(few_descriptors, number) for number in numbers])


def start_without_threads(name: str) -> list[str]:
    """The outcome of a start in a process that gets no thread, and of one afterwards."""
    return _outcomes(name, [_no_thread])


def _outcomes(name: str, limits: list[Callable[[], AbstractContextManager[object]]]) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "complete", {"weights": torch.ones(3)})
        STARTS[name](folder)()  # once, so that no module is missing
        return [_outcome(name, folder, limit()) for limit in limits] + [_outcome(name, folder)]


def _outcome(name: str, folder: str, limit: AbstractContextManager[object] | None = None) -> str:
    close: Callable[[], object] = _nothing
    try:
        if limit is None:
            close = STARTS[name](folder)
        else:
            with limit:
                close = STARTS[name](folder)
    except Exception as exc:
        return f"{'' if isinstance(exc, RpcdistError) else 'bare '}{type(exc).__name__}: {exc}"
    finally:
        close()
    return "started"


class _no_thread:
    """No thread can be started meanwhile."""

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()

        def fail(*_arguments: Any, **_named: Any) -> None:
            raise RuntimeError("can't start new thread")

        # Python 3.13 has another one.
        started_by = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
        self._patch.setattr(threading, started_by, fail)

    def __exit__(self, *_error: object) -> None:
        self._patch.undo()
