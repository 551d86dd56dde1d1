"""Turns messages into bytes: envelopes, chunks of large buffers, the queue to write, and incomplete messages."""
