"""The words of 8 bytes by which a source and its readers tell each other what they do, without a message.

The source has a page with words that its readers may only read; each reader shares one page with the source, with
three words of its own. A version and its segment are one word, so both change at once.

[Note: hazards] The source has one word for each segment: the version in it, or 0 while it is written. A reader writes
the version and the segment that it wants into its own page, and then looks whether the segment still has that version.
A source that wants to overwrite a segment sets the segment's word to 0, and then looks at the words of its readers:
provided that no load moves before the store, one of the two sees the other. A source that finds a reader puts the word
back and takes another segment; a reader that finds another version starts over. Only a locked instruction keeps a
processor from moving the load, and taking a lock has one. The same holds for the words by which one side asks the other
to be woken.

All of this relies on the store order of x86-64 ([Note: store order] in `collectives/_transports/shm/signals.py`); on
other processors each process keeps versions of its own, and words are only shared by threads.
"""

from __future__ import annotations

from typing import Final

PAGE_BYTES: Final = 4096

NEWEST: Final = 0
"""Of the source: the newest version and its segment; 0 for none."""
ASKED: Final = 1
"""Of the source: not 0 while it wants readers that finish to send it a byte."""
VERSION_IN: Final = 8
"""Of the source: from here on, the version that each segment holds; 0 while it is written."""

READING: Final = 0
"""Of a reader: the version that it reads now, and its segment; 0 for none."""
HAVE: Final = 1
"""Of a reader: the number of the version that it has read last."""
WAITING: Final = 2
"""Of a reader: not 0 while it wants the source to send it a byte for a new version."""

MAX_SEGMENTS: Final = 8


def packed(version: int, segment: int) -> int:
    """One word for both."""
    return version * MAX_SEGMENTS + segment


def unpacked(word: int) -> tuple[int, int]:
    """Version and segment of a word that is not 0."""
    return divmod(word, MAX_SEGMENTS)
