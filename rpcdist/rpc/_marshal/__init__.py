"""Values with what belongs to them beyond data: shares of remote references, and history for autograd."""
