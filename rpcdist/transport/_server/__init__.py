"""The serving side of a process: its listeners, the admission of peers, and its gRPC services."""
