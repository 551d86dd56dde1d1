"""Examines a worker from the view of another worker; see `WorkerFact`. Every probe has a limit of seconds.

It tries a session first, and plain connections only if that fails, because a probe of a port without a session leaves a
warning in the worker's log.
"""

from __future__ import annotations

import errno
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError

from rpcdist._doctor.doctor_facts import PortAnswer, PortFact, SessionFact, Shown, WorkerFact
from rpcdist._proto import diagnosis_pb2, membership_pb2
from rpcdist.errors import AuthenticationFailed, ConfigError, RpcdistError, TransportError
from rpcdist.time_limits import ATTEMPT_LIMIT_S, MIN_ATTEMPT_S, SIDE_ATTEMPT_LIMIT_S
from rpcdist.transport import Link, Node
from rpcdist.transport._framing.message_parts import parsed
from rpcdist.transport._server.diagnosis import DIAGNOSIS_ROLE
from rpcdist.transport._tls.certificate_proof import MALFORMED
from rpcdist.transport._tls.job_authority import CLOCK_TOLERANCE, LIFETIME, JobAuthority
from rpcdist.transport.addresses import host_from_environment, is_loopback, join_address, pick_bind_host, split_address
from rpcdist.transport.identities import printable
from rpcdist.transport.session import NullHandler

LARGE_BYTES: Final = 20_000
"""More than one packet of any network, but less than slow links need a second for."""

MAX_ADDRESSES: Final = 4  # per name
_OTHER_PORT: Final = 9  # "discard": closed on every machine, so a running machine refuses the connection
_IP_MTU: Final = 14
_IPV6_MTU: Final = 24
_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE")
_NO_WAY: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class WorkerProbes:
    """Examines workers from its own node. Any thread may use it; `close` ends it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._own: dict[str, str] = {}  # the address of this process for each host
        self._own_lock = threading.Lock()

    def close(self) -> None:
        self._node.release()

    def examine(self, address: str, member: str = "") -> WorkerFact:
        """Examines one worker; takes up to 30 seconds without an answer.

        Args:
            address: host:port.
            member: the name of the worker, if the coordinator named the address.
        """
        host, _ = split_address(address)
        try:
            hosts = _resolved(host)
        except OSError as exc:
            return WorkerFact(address, member, name_error=exc.strerror or str(exc))
        ways = tuple(map(_way_to, hosts))
        is_here = any(way.host == way.own_host or is_loopback(way.host) for way in ways)
        facts = WorkerFact(address, member, ports=ways, is_this_machine=is_here, now_s=time.time())
        try:
            connecting = self._node.connect(address, DIAGNOSIS_ROLE, ATTEMPT_LIMIT_S, NullHandler(), retry=False)
            link = self._node.run(connecting, 2 * ATTEMPT_LIMIT_S)
        except (TransportError, ConfigError, TimeoutError) as exc:
            return self._without_session(replace(facts, session_error=str(exc) or "no answer in time"), exc)
        try:
            return self._with_session(facts, link)
        finally:
            self._node.run(link.close(), ATTEMPT_LIMIT_S)

    # ------------------------------------------------------------ no session

    def _without_session(self, facts: WorkerFact, error: Exception) -> WorkerFact:
        number = split_address(facts.address)[1]
        ports = tuple(_tried(way, number) for way in facts.ports)
        is_refused = isinstance(error, AuthenticationFailed | ConfigError)
        facts = replace(facts, ports=ports, is_refused=is_refused, now_s=time.time())
        open_port = next((port for port in ports if port.answer == "open"), None)
        if open_port is None or not self._node.credentials.tls_policy.encrypts_grpc:
            return facts
        return replace(facts, shown=_shown(open_port.host, number, self._node.credentials.token))

    # ------------------------------------------------------------ with a session

    def _with_session(self, facts: WorkerFact, link: Link) -> WorkerFact:
        session = SessionFact(printable(link.peer.name), link.session.channel_kind, link.passed_over)
        try:
            self._ask(link)  # the first question opens gRPC's connection
            started, sent_s = time.monotonic(), time.time()
            reply = self._ask(link)
            trip_s = time.monotonic() - started
        except (RpcdistError, TimeoutError) as exc:
            session = replace(session, failure_of_question=str(exc) or "no answer in time")
            return replace(facts, session=session)
        session = replace(
            session,
            round_trip_s=trip_s,
            clock_offset_s=reply.time_s - (sent_s + trip_s / 2),
            clock_error_s=trip_s / 2,
            versions={name: printable(version[:100]) for name, version in reply.versions.items()},
        )
        members = self._members(link)
        try:
            own = self._own_address(split_address(facts.address)[0])
        except (TransportError, ConfigError) as exc:
            facts = replace(facts, listen_error=str(exc))
        else:
            session = replace(session, own_address=own, failure=self._failure_to_reach(link, own))
        session = replace(session, large_failure=self._large_failure(link))  # last: it may leave the connection stuck
        return replace(facts, session=session, members=members)

    def _ask(
        self, link: Link, address: str = "", size_bytes: int = 0, limit_s: float = ATTEMPT_LIMIT_S
    ) -> diagnosis_pb2.ReachReply:
        request = diagnosis_pb2.ReachRequest(address=address, reply_bytes=size_bytes, padding=bytes(size_bytes))
        asking = link.unary("Diagnosis", "Reach", request, diagnosis_pb2.ReachReply, limit_s)
        return self._node.run(asking, limit_s + ATTEMPT_LIMIT_S)

    def _large_failure(self, link: Link) -> str:
        try:
            self._ask(link, size_bytes=LARGE_BYTES)
        except (RpcdistError, TimeoutError) as exc:
            return str(exc) or "no answer in time"
        return ""

    def _failure_to_reach(self, link: Link, own: str) -> str:
        try:
            return printable(self._ask(link, own, limit_s=2 * ATTEMPT_LIMIT_S).failure[:1000])
        except (RpcdistError, TimeoutError) as exc:
            return f"the attempt did not end in time, {exc}"

    def _own_address(self, host: str) -> str:
        """Returns the address at which a worker here would listen for workers that are reached at `host`."""
        bind = pick_bind_host(host, host_from_environment("TP_SOCKET_IFNAME"))
        with self._own_lock:
            if bind not in self._own:
                self._own[bind] = self._node.serve(bind, 0, is_apart=True)
            return self._own[bind]

    def _members(self, link: Link) -> tuple[tuple[str, str], ...]:
        """Returns the workers of the job, if the worker is the coordinator."""
        if link.peer.id != 0:
            return ()
        request = membership_pb2.MembersRequest()
        asking = link.unary("Membership", "Members", request, membership_pb2.JoinReply, ATTEMPT_LIMIT_S)
        with suppress(RpcdistError, DecodeError, TimeoutError):  # the rank 0 of a job without RPC has no such list
            reply = self._node.run(asking, 2 * ATTEMPT_LIMIT_S)
            members = parsed(membership_pb2.MemberList, reply.members).members
            return tuple((printable(each.identity.name), printable(each.address)) for each in members)
        return ()


def _resolved(host: str) -> list[str]:
    """Returns the addresses of a name. Raises `OSError`, also if no name server answers in time."""
    found: list[str] = []
    failed: list[OSError] = []

    def look_up() -> None:
        try:
            entries = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
            found.extend(dict.fromkeys(str(entry[4][0]) for entry in entries))
        except UnicodeError as exc:
            failed.append(OSError(0, f"it is not the name of a machine: {exc}"))
        except OSError as exc:
            failed.append(exc)

    thread = threading.Thread(target=look_up, name="doctor looks up a name", daemon=True)  # it may take a minute
    thread.start()
    thread.join(SIDE_ATTEMPT_LIMIT_S)
    if failed:
        raise failed[0]
    if not found:
        raise OSError(0, f"no name server has answered within {SIDE_ATTEMPT_LIMIT_S:g} s")
    return found[:MAX_ADDRESSES]


def _way_to(host: str) -> PortFact:
    """Returns the source address of packets to a host, and their largest size; sends nothing."""
    way = PortFact(host, "open")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if ":" in host else (socket.IPPROTO_IP, _IP_MTU)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, _OTHER_PORT))
            return way._replace(own_host=str(probe.getsockname()[0]), mtu_bytes=probe.getsockopt(level, option))
    except OSError:  # no route exists, which the attempt to connect reports
        return way


def _tried(way: PortFact, number: int) -> PortFact:
    answer, detail = _connect(way.host, number, SIDE_ATTEMPT_LIMIT_S)
    is_up = None
    if answer == "silent":
        is_up = _connect(way.host, _OTHER_PORT, 10 * MIN_ATTEMPT_S)[0] in ("open", "refused")
    return way._replace(answer=answer, detail=detail, is_host_up=is_up)


def _connect(host: str, number: int, limit_s: float) -> tuple[PortAnswer, str]:
    try:
        socket.create_connection((host, number), limit_s).close()
    except TimeoutError:
        return "silent", ""
    except ConnectionRefusedError as exc:
        return "refused", exc.strerror or ""
    except OSError as exc:
        return "unreachable" if exc.errno in _NO_WAY else "failed", exc.strerror or str(exc)
    return "open", ""


def _shown(host: str, number: int, token: bytes) -> Shown | None:
    """Returns the certificate of the server at an address; None if it shows none in time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the certificate is only examined, and no data is sent
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, number), SIDE_ATTEMPT_LIMIT_S) as plain,
            context.wrap_socket(plain, server_hostname=join_address(host, number)) as connection,
        ):
            shown = connection.getpeercert(binary_form=True)
    except ssl.SSLError as exc:
        return Shown(speaks_tls=False) if exc.reason in _NOT_TLS else None
    except OSError:
        return None
    try:
        return None if shown is None else _judged(x509.load_der_x509_certificate(shown), token)
    except MALFORMED:  # of any program, perhaps a stranger's
        return Shown(speaks_tls=True)


def _judged(certificate: x509.Certificate, token: bytes) -> Shown:
    authority = x509.load_pem_x509_certificate(JobAuthority(token).certificate)
    names = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    own_names = authority.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [name.value for name in names] != [name.value for name in own_names]:
        return Shown(speaks_tls=True)
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        return Shown(speaks_tls=True, is_of_job=True)
    issued_s = (certificate.not_valid_before_utc + CLOCK_TOLERANCE).timestamp()
    return Shown(True, True, True, issued_s, issued_s + LIFETIME.total_seconds() / 2)
