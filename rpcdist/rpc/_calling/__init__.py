"""The caller's side: makes calls, keeps those in flight, and hands their outcomes to waiting threads and futures."""
