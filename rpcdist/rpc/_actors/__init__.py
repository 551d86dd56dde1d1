"""Actors: objects that run one method call at a time, in each caller's order; see `docs/actors.md`."""
