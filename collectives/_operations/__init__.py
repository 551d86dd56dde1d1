"""What an operation of a group is, and how a call's tensors become one."""

__all__: list[str] = []
