"""Public functions of `rpcdist.rpc`; `rpcdist.rpc.api` has them, too, as torch does."""
