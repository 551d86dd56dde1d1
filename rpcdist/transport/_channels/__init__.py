"""Channels carry the frames of a session: over gRPC, TCP, or a Unix socket of the same host."""
