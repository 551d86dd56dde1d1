"""The private parts of `rpcdist.parallel.distributed`: buckets, the reducer, hooks, checks."""
