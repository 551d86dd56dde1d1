"""The process of one rank, as an actor of Ray. Each of its methods runs on the main thread, one after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import spawn
from typing import Any

import ray

from rpcdist._launch.rank_call import RankCall
from rpcdist._launch.reports import Report, Returned, report_of_exception
from rpcdist.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Where:
    """Where an actor runs: the address and name of its node, its process, and the GPUs that Ray gave it."""

    address: str
    node: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MainModule:
    """How the workers import the script of the driver, so that its functions have one name everywhere.

    Attributes:
        path: absolute; of the driver.
        below: relative to the driver's working directory, which Ray may ship (`working_dir`); None if it is not below.
        argv: of the driver.
    """

    path: str
    below: str | None
    argv: list[str]


class RankActor:
    """See the module. Ray shows `repr` in front of each line that the process writes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name

    def where(self) -> Where:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return Where(ray.util.get_node_ip_address(), os.uname().nodename, os.getpid(), tuple(map(str, gpus)))

    def prepare(self, variables: Mapping[str, str], token: str, main: MainModule | None, call: RankCall) -> None:
        """Sets the environment and the token, and imports what the function needs."""
        os.environ.update(variables)
        os.environ.setdefault("RPCDIST_HOST", ray.util.get_node_ip_address())
        from rpcdist.transport.token import bring_job_token  # after the environment is set

        bring_job_token(token)
        if main is not None:
            _import_main(main)
        else:
            from rpcdist.rpc import options

            options.by_value_by_default = True
        self._function, self._args = call.load()
        self._call = call

    def run(self, rank: int) -> Report:
        """Calls the function."""
        try:
            return Returned(self._call.dump_result(self._function(rank, *self._args)))
        except BaseException as error:  # SystemExit, too, for which Ray would end the actor
            return report_of_exception(error)
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()


def _import_main(main: MainModule) -> None:
    found = next((path for path in (main.below, main.path) if path is not None and os.path.isfile(path)), None)
    if found is None:
        raise ConfigError(
            f"the script {main.path} is not on the node {os.uname().nodename}, whose processes import it: have Ray "
            "ship its folder, rpcdist.ray.launch(..., runtime_env={'working_dir': '.'}), or put it on a shared disk"
        )
    path = os.path.abspath(found)
    if os.path.dirname(path) not in sys.path:
        sys.path.insert(0, os.path.dirname(path))
    preparation: dict[str, Any] = {"init_main_from_path": path, "sys_argv": main.argv}
    spawn.prepare(preparation)
