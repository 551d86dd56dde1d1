"""Stores: a table of keys through which the processes of a job find each other. Import them from `rpcdist.collectives`."""

__all__: list[str] = []
