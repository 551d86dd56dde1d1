"""`python -m rpcdist profile-call`: where the time of one kind of call goes, stage by stage, in both processes.

Nothing here is part of a call: the marks are wrapped around functions of the call path in the two processes that the
command starts, and nowhere else.
"""

from __future__ import annotations

from rpcdist.profiling._command import add_profile_call

__all__ = ["add_profile_call"]
