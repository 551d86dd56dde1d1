"""The parts of the `mpi` backend."""
