"""The parts of the `nccl` backend."""
