"""The commands that inspect a running job (`stacks`), or the files of a failed one (`report`)."""
