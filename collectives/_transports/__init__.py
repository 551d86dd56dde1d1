"""Transports: what moves the bytes of a group's operations and messages."""
