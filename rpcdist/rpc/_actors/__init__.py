"""Actors: values whose methods run one call at a time, in the order of each caller; see `docs/actors.md`."""
