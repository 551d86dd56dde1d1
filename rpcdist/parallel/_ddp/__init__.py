"""Data parallel training: what `rpcdist.parallel.distributed` is made of."""

__all__: list[str] = []
