"""The life of a group: how its ranks find each other, run operations in order, watch each other, and fail."""
