"""How messages become bytes: envelopes, chunks of large buffers, and what waits to be written or to be complete."""
