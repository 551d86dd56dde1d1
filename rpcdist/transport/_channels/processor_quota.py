"""Whether the system limits this process's processor time, as it does in a container with a CPU limit.

See the kernel's documentation of control groups, `cpu.max` in version 2 and `cpu.cfs_quota_us` in version 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_GROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")


def has_processor_quota(groups: Path = _GROUPS, mount: Path = _MOUNT) -> bool:
    """Whether this process, or a group that it is in, gets a part of each period only; False where nobody says so.

    Args:
        groups: lists this process's control groups.
        mount: where the control groups are.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return False
    return any(_has_quota(line, mount) for line in lines)


def _has_quota(line: str, mount: Path) -> bool:
    number, _, rest = line.partition(":")
    controllers, _, group = rest.partition(":")
    if number == "0":
        folder, name = mount, "cpu.max"
    elif "cpu" in controllers.split(","):
        folder, name = mount / "cpu", "cpu.cfs_quota_us"
    else:
        return False
    inner = Path(group.strip("/"))
    return any(_is_limited(folder / part / name) for part in (inner, *inner.parents))


def _is_limited(limit: Path) -> bool:
    try:
        first = limit.read_text().split()[0]
    except (OSError, IndexError):  # there is no limit of this kind
        return False
    return first.isdigit()  # else "max", or -1
