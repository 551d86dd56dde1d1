"""Messages between two ranks of a group: `send`, `recv` and their asynchronous forms, over one socket per direction."""

from rpcdist.collectives._transports.p2p.mailboxes import Mailboxes

__all__ = ["Mailboxes"]
