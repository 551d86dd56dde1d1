"""`python -m rpcdist doctor`: why the workers of a job cannot reach each other, and what to do about it."""

__all__: list[str] = []
