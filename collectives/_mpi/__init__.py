"""The parts of the `mpi` backend."""

__all__: list[str] = []
