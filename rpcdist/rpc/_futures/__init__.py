"""Parts of `rpcdist.rpc.Future`: failures, and waiting for several."""
