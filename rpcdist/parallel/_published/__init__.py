"""The parts of `rpcdist.parallel.Published`: the layout of tensors in a segment, sources of versions, and readers."""
