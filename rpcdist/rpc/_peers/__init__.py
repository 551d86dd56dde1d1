"""The other workers: connections to them, reliable control messages, leases."""

__all__: list[str] = []
