"""Parses the place of a remote module: `"name"`, `"name/cuda:0"`, `"rank:0/cpu"`, or `"cuda:0"` for this worker."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rpcdist.errors import ConfigError


class RemoteDevice(NamedTuple):
    """A worker and one of its devices.

    Attributes:
        on: name or rank of the worker; None for this worker.
        device: the device on that worker.
    """

    on: str | int | None
    device: torch.device


def parse_remote_device(text: str) -> RemoteDevice:
    """Parses a text such as `"trainer0/cuda:0"`. The default device is the CPU.

    Raises:
        ConfigError: (a ValueError) it has another form.
        RuntimeError: torch knows no such device.
    """
    if not isinstance(text, str):
        raise TypeError(f"Invalid type for remote_device: {type(text).__name__}; write '<worker>/<device>'")
    worker, slash, device = text.partition("/")
    if "/" in device or not worker or (slash and not device):
        raise _unreadable(text)
    if not slash and _is_device(worker):
        return RemoteDevice(None, torch.device(worker))
    return RemoteDevice(_worker_of(worker, text), torch.device(device or "cpu"))


def _worker_of(worker: str, text: str) -> str | int:
    word, colon, rank = worker.partition(":")
    if not colon or word != "rank":
        return worker
    if not rank.isdecimal():
        raise _unreadable(text)
    return int(rank)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
        "'rank:<rank>/<device>' or '<device>'"
    )
