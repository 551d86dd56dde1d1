"""Runs user code: a thread pool, and an event loop."""
