"""The other workers: connections to them, reliable control messages, leases."""
