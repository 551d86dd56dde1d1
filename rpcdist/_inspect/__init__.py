"""The commands that look into a running job, or into what a failed one has left: `stacks` and `report`."""

__all__: list[str] = []
