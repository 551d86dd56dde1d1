"""The web page of a job, served by a process of its own that ends with this one."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping

from rpcdist.errors import DeadlineExceeded, RpcdistError
from rpcdist.time_limits import CLOSE_LIMIT_S, CLUSTER_START_LIMIT_S

MAX_URL_CHARS = 1000


class PageProcess:
    """Starts the process, and waits until the page is served.

    Args:
        address: of a worker of the job.
        variables: environment variables that say how to reach the job, such as its token.

    Attributes:
        url: of the page, with its token.

    Raises:
        RpcdistError: the process has ended; its lines on the standard error stream say why.
        DeadlineExceeded: the page is not served in time.
    """

    def __init__(self, address: str, variables: Mapping[str, str]) -> None:
        # The address is no secret; the token goes by the environment, which other users cannot read.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rpcdist", "dashboard", address, "--until-stdin-ends"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **variables},
            start_new_session=True,  # Ctrl-C at the terminal is for the job
        )  # fmt: skip
        try:
            self.url = self._first_line()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process; it keeps nothing."""
        self._process.kill()
        self._process.wait(CLOSE_LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _first_line(self) -> str:
        stream = self._process.stdout
        assert stream is not None
        end = time.monotonic() + CLUSTER_START_LIMIT_S
        line = b""
        with selectors.DefaultSelector() as ready:
            ready.register(stream, selectors.EVENT_READ)
            while not line.endswith(b"\n") and len(line) < MAX_URL_CHARS:
                if not ready.select(max(0.0, end - time.monotonic())):
                    raise DeadlineExceeded(f"the dashboard was not served within {CLUSTER_START_LIMIT_S:g} s")
                more = os.read(stream.fileno(), 4096)
                if not more:
                    raise RpcdistError("the dashboard was not served; the lines of its process above say why")
                line += more
        return line.decode().strip()
