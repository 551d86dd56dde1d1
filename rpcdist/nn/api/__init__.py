"""The package in which torch has `RemoteModule`: `rpcdist.nn.api.remote_module`."""

from __future__ import annotations

__all__: list[str] = []
