"""The parts of `rpcdist.parallel.Published`: how tensors lie in a segment, who holds versions, who reads them."""
