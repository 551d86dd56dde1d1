"""Text that a peer sent: bounds for what may pass, and a form that is fit for logs and errors."""

from __future__ import annotations

from typing import Final

MAX_NAME_LENGTH: Final = 128
MAX_REASON_LENGTH: Final = 600


def is_name(text: str) -> bool:
    """Whether it may be the name of a job or a process: not empty, printable, and short enough."""
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


def printable(text: str | bytes) -> str:
    """The text without control characters, which could forge log lines or steer a terminal."""
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in text)
