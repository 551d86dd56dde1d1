"""Parts of `rpcdist.rpc.Future`: failures, waiting for several, and waits that Ctrl-C ends."""
