"""The parts of the `nccl` backend."""

__all__: list[str] = []
