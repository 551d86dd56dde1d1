"""Transports: what moves the bytes of a group's operations and messages."""

__all__: list[str] = []
