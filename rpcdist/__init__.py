"""rpcdist: asynchronous RPC, remote references and collectives for distributed training on PyTorch tensors."""
