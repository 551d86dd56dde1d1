"""Where torch keeps `RemoteModule`: `rpcdist.nn.api.remote_module`."""

from __future__ import annotations

__all__: list[str] = []
