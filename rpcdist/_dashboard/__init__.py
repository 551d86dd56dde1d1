"""A live view of a job: `python -m rpcdist dashboard` (a web page) and `python -m rpcdist top` (a terminal)."""
