"""Where user code runs: a pool of threads, and an event loop."""
