"""Channels: what carries the frames of a session, over gRPC or over a Unix socket of the same host."""
