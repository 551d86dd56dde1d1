"""Slurm with a controller and two nodes in three network namespaces of this machine. It takes root, Slurm and munge."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["SlurmCluster", "slurm_cluster"]

NODES = ("n1", "n2")
CONTROLLER = "n3"
ADDRESSES = {"n1": "10.79.0.1", "n2": "10.79.0.2", "n3": "10.79.0.3"}
START_LIMIT_S = 60.0
STOP_LIMIT_S = 20.0

CONFIGURATION = """\
ClusterName=engines
SlurmctldHost=n3(10.79.0.3)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
KillWait=3
SlurmdParameters=config_overrides
NodeName=n1 NodeAddr=10.79.0.1 CPUs=4 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeAddr=10.79.0.2 CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """The running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._namespaces = {node: f"sl{os.getpid()}{node}" for node in ADDRESSES}
        self._bridge = f"sl{os.getpid()}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def inside(self, node: str, script: str) -> list[str]:
        """The command that runs a shell script on a node: with its network, its name, and the names of the others."""
        # `ip netns exec` would hide the control groups.
        where = ["nsenter", f"--net=/run/netns/{self._namespaces[node]}", "unshare", "-u", "-m"]
        prepare = f"hostname {node}; mount --bind {self.folder}/hosts /etc/hosts; "
        return [*where, "sh", "-c", f"{prepare}export SLURM_CONF={self.folder}/slurm.conf; {script}"]

    def run(self, script: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Runs a script where users log in."""
        return subprocess.run(
            self.inside(CONTROLLER, script),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def start(self) -> None:
        self._make_network()
        for name in ("state", "munge"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(folder=self.folder))
        hosts = "".join(f"{address} {node}\n" for node, address in ADDRESSES.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for path in (key, self.folder, self.folder / "munge"):
            shutil.chown(path, "munge")
        paths = {"key-file": key, "socket": self.folder / "munge.sock"}
        paths |= {f"{kind}-file": self.folder / "munge" / kind for kind in ("pid", "log", "seed")}
        user = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
        self._daemon(
            [*user, "munged", "--force", "--foreground", *(f"--{name}={path}" for name, path in paths.items())]
        )
        self._until(lambda: (self.folder / "munge.sock").exists(), "munged listens")
        self._daemon(self.inside(CONTROLLER, "exec slurmctld -D -c"))
        for node in NODES:
            self._daemon(self.inside(node, f"exec slurmd -D -N {node}"))
        self._until(lambda: self.run("sinfo -h -t idle -o %D", 20).stdout.strip() == "2", "both nodes are idle")

    def stop(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(STOP_LIMIT_S)
        for namespace in self._namespaces.values():
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True, timeout=10)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True, timeout=10)

    def _daemon(self, command: list[str]) -> None:
        log = (self.folder / f"daemon{len(self._daemons)}.log").open("wb")
        with log:
            self._daemons.append(subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=subprocess.STDOUT))

    def _until(self, condition: object, what: str) -> None:
        assert callable(condition)
        end = time.monotonic() + START_LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"within {START_LIMIT_S:g} s not: {what}"
            time.sleep(0.2)  # Slurm tells nobody

    def _make_network(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for number, (node, address) in enumerate(ADDRESSES.items()):
            namespace, end = self._namespaces[node], f"{self._bridge}v{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", end, "master", self._bridge, "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Starts the cluster, and stops it; skips the test where that is not possible."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "srun", "ip") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"no Slurm can be started here: it takes root, and {', '.join(missing) or 'nothing else'}")
    folder.chmod(0o755)
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
