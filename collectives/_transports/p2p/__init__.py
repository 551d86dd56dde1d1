"""Messages between two ranks of a group: `send`, `recv` and their asynchronous forms, over one socket per direction."""
