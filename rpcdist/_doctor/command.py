"""The command: collects the facts, and prints the findings."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from rpcdist.errors import ConfigError

if TYPE_CHECKING:
    from rpcdist._doctor.doctor_facts import HostFacts, WorkerFact


MAX_MEMBERS: Final = 64
_AT_A_TIME: Final = 8

_DESCRIPTION: Final = """Says why workers cannot reach each other, or why slowly: names, interfaces, ports, firewalls,
address translation, tokens, clocks, versions, channels, packet sizes, limits, GPUs. Without an address it looks at this
machine. An address is that of a worker (host:port, such as MASTER_ADDR:MASTER_PORT for rank 0, which names all others).
The exit status is 1 if something was found."""


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("doctor", help="says why workers cannot reach each other", description=_DESCRIPTION)
    parser.add_argument("addresses", nargs="*", type=_address, metavar="ADDRESS", help="host:port of a worker")
    parser.set_defaults(run=_run)


def _address(text: str) -> str:
    from rpcdist.transport.addresses import split_address  # imports gRPC, which others do not need

    try:
        split_address(text)
    except ConfigError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def _run(arguments: argparse.Namespace) -> int:
    from rpcdist._doctor.findings import host_findings, summary, worker_findings
    from rpcdist._doctor.host_probes import host_facts

    # The findings contain what the transport would log about failed attempts.
    logging.getLogger("rpcdist").setLevel(logging.CRITICAL)
    addresses: Sequence[str] = list(dict.fromkeys(arguments.addresses))
    host = host_facts()
    print(_machine(host))
    found = host_findings(host, is_asked_about_workers=bool(addresses))
    if addresses and (host.setting_error or host.token_error or host.is_token_missing):
        print("the addresses were not tried, because a worker could not start here either")
    elif addresses:
        for facts in _examined(addresses):
            print(summary(facts))
            found += worker_findings(facts, host)
    found = list(dict.fromkeys(found))
    if not found:
        print("no problems found")
        return 0
    print(f"{len(found)} finding{'s' if len(found) > 1 else ''}:")
    for number, finding in enumerate(found, start=1):
        print(f"{number}. {finding}")
    return 1


def _machine(host: HostFacts) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in host.versions.items())
    memory = f", {host.free_memory_bytes / (1 << 30):.1f} GiB of memory free" if host.free_memory_bytes else ""
    gpu = f", GPUs with CUDA {host.torch_cuda}" if host.can_use_gpu else ", no GPU in use"
    return f"this machine: {versions}{memory}, {host.descriptors or 'unlimited'} files a process{gpu}"


def _examined(addresses: Sequence[str]) -> list[WorkerFact]:
    """Examines the workers at the addresses, and those that a coordinator among them names."""
    from rpcdist._doctor.worker_probes import WorkerProbes
    from rpcdist.transport import Node, NodeOptions

    probes = WorkerProbes(Node(NodeOptions()).start_loop())
    try:
        with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="doctor") as threads:
            asked = list(threads.map(probes.examine, addresses))
            names = {facts.session.name for facts in asked if facts.session is not None}
            named = dict.fromkeys((address, name) for facts in asked for name, address in facts.members)
            others = [(address, name) for address, name in named if address not in addresses and name not in names]
            if len(others) > MAX_MEMBERS:
                print(f"the job has {len(others)} more workers; only the first {MAX_MEMBERS} are examined")
            return asked + list(threads.map(lambda each: probes.examine(*each), others[:MAX_MEMBERS]))
    finally:
        probes.close()
