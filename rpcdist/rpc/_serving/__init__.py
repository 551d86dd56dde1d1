"""The callee's side: runs the calls that arrive, and sends what they return."""
