"""The transport on sockets: runs plans between the ranks of a group, on the thread of the caller."""
