"""The caller's side: makes calls, keeps those in flight, and hands their outcome to whoever waits for it."""
