"""Carries large payloads of a session on several TCP connections, next to the one that carries its messages."""
