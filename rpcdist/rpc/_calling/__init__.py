"""The caller's side: calls in flight, and whoever waits for their outcome."""

__all__: list[str] = []
