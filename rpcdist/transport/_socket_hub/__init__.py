"""The parts of the socket hub: what is said on a raw socket, and the connections that wait to be expected."""
