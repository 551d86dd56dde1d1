"""The functions that users call, one file for each family."""
