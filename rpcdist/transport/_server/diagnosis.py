"""The service for `python -m rpcdist doctor`: reports this process's clock and versions, and connects to its caller."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rpcdist._proto import diagnosis_pb2 as pb
from rpcdist.errors import ConfigError, TransportError
from rpcdist.ids import Identity
from rpcdist.time_limits import ATTEMPT_LIMIT_S
from rpcdist.transport.handshake_side import package_version
from rpcdist.transport.link import Link
from rpcdist.transport.session import NullHandler

DIAGNOSIS_SERVICE: Final = pb.DESCRIPTOR.services_by_name["Diagnosis"]
DIAGNOSIS_ROLE: Final = "diagnosis"
MAX_PADDING_BYTES: Final = 64 << 10
_MAX_ATTEMPTS: Final = 8  # simultaneous attempts to reach callers


Reach = Callable[[Identity, pb.ReachRequest], Awaitable[pb.ReachReply]]


def reach_service(connect: Callable[..., Awaitable[Link]]) -> Reach:
    """The method that answers the doctor; on the I/O loop.

    It tries to open a session with the caller at its stated address, as a worker would. Cancellation ends that.

    Args:
        connect: opens a link, like `Connector.connect`.
    """
    num_attempts = 0

    async def reach(peer: Identity, request: pb.ReachRequest) -> pb.ReachReply:
        reply = pb.ReachReply(time_s=time.time(), versions=library_versions())
        reply.padding = bytes(min(request.reply_bytes, MAX_PADDING_BYTES))
        if request.address:
            reply.failure, reply.channel = await attempt(request.address, peer)
        return reply

    async def attempt(address: str, caller: Identity) -> tuple[str, str]:
        nonlocal num_attempts
        if num_attempts >= _MAX_ATTEMPTS:
            return "too many processes ask at the same time; try again", ""
        num_attempts += 1
        try:
            link = await connect(address, DIAGNOSIS_ROLE, ATTEMPT_LIMIT_S, NullHandler(), caller, retry=False)
            await link.close()
        except (TransportError, ConfigError) as exc:
            return str(exc), ""
        finally:
            num_attempts -= 1
        return "", link.session.channel_kind

    return reach


def library_versions() -> dict[str, str]:
    """Versions of the loaded libraries on which the processes of a job should agree."""
    versions = {"rpcdist": package_version(), "python": platform.python_version()}
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "version"):
        versions["torch"] = str(torch.__version__)
        if torch.version.cuda is not None:
            versions["cuda"] = str(torch.version.cuda)
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions
