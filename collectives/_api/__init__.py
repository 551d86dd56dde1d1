"""The functions that users call, one file for each family."""

__all__: list[str] = []
