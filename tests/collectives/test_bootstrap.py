"""How the ranks of a group reach one another, and what they say of ranks that do not answer."""

from __future__ import annotations

import errno
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from inside_groups import GroupContext
from socket_hubs import open_hub

from rpcdist.collectives import HashStore, PrefixStore, tcp
from rpcdist.collectives._api.default_group import _until_all_have_it
from rpcdist.collectives._group import bootstrap, group_watch
from rpcdist.collectives._group.bootstrap import agree
from rpcdist.collectives._group.group_watch import GroupWatch, connect_watch
from rpcdist.collectives._group.state import LEFT
from rpcdist.collectives.tcp import TcpBackend, _read_leader
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, DistNetworkError, ProtocolViolation, RankLost, RendezvousError, StoreTimeout
from rpcdist.testing import eventually
from rpcdist.time_limits import STORE_CHECK_INTERVAL_S
from rpcdist.transport import sockets
from rpcdist.transport.hub_connector import HubAddress
from rpcdist.transport.shared_memory import Segment, SegmentError

SHORT_S, LIMIT_S = 0.2, 20.0


def context(rank: int, store: HashStore, size: int = 2) -> GroupContext:
    return GroupContext("world", rank, tuple(range(size)), store, timeout_s=SHORT_S)


def watch(context: GroupContext, limit_s: float = LIMIT_S) -> GroupWatch:
    return GroupWatch(context, Deadline.after(limit_s))


def test_who_cannot_reach_rank_0_names_it() -> None:
    with open_hub() as gone:
        address = gone.address
    with open_hub() as hub, pytest.raises(ConnectFailed) as caught:
        connect_watch(context(1, HashStore()), hub, address, "group", Deadline.after(SHORT_S))
    assert caught.value.address == address
    assert "rank 0 of group 'world'" in str(caught.value)


def test_a_rank_0_that_ends_while_a_rank_connects_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, open_hub() as hub, ThreadPoolExecutor(1) as thread:
        address = str(HubAddress("127.0.0.1", listener.getsockname()[1], taker="0" * 16))
        connecting = thread.submit(
            connect_watch, context(1, HashStore()), hub, address, "group", Deadline.after(LIMIT_S)
        )
        listener.accept()[0].close()
        with pytest.raises(ConnectFailed, match=r"rank 0 of group 'world'\)\. Did it end\?"):
            connecting.result(LIMIT_S)


def test_rank_0_names_those_that_do_not_connect() -> None:
    with open_hub() as hub, pytest.raises(DistNetworkError, match=r"ranks \[1\] of group 'world'"):
        connect_watch(context(0, HashStore()), hub, "", "group", Deadline.after(SHORT_S))


def test_a_rank_without_rank_0_says_so() -> None:
    with pytest.raises(RendezvousError, match=r"these ranks did not join within 0\.2 s: 0\. Do they run"):
        watch(context(1, HashStore()), SHORT_S)


@pytest.mark.parametrize("text", ["a b", "\N{LATIN SMALL LETTER E WITH ACUTE}" * 2000])
def test_what_a_rank_says_of_itself_and_no_rank_can_read_is_its_fault(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_watch, "_boot_id", lambda: text)
    store = HashStore()
    with ThreadPoolExecutor() as ranks:
        both = [ranks.submit(watch, context(rank, store)) for rank in (0, 1)]
        for made in both:
            with pytest.raises(ProtocolViolation, match="rank 0 of group 'world' sent '"):
                made.result(LIMIT_S)


@pytest.mark.parametrize("text", ["{", "7", "[0]", "[2, true]", "[-1, true]", "[true, true]", "[0, 1]", "[" * 9000])
def test_a_rank_names_itself_or_a_lower_one_as_the_leader_of_its_host(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        _read_leader(1, text)


@pytest.mark.parametrize("late", [1, 2])
def test_rank_0_tells_the_others_which_rank_did_not_connect(late: int) -> None:
    """They see the end of their own connections only, and rank 0 waits for all in any order."""
    store = HashStore()
    with ThreadPoolExecutor() as ranks:
        first = ranks.submit(watch, context(0, store, 3), 3.0)  # in which the other one comes, also on a busy machine
        second = ranks.submit(watch, context(3 - late, store, 3))
        with pytest.raises(DistNetworkError, match=rf"ranks \[{late}\] of group 'world' did not connect"):
            first.result(LIMIT_S)
        with pytest.raises(RendezvousError, match=rf"ranks \[{late}\] of group 'world' did not connect"):
            second.result(LIMIT_S)


def test_a_rank_may_come_long_before_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "ROLE_LIMIT_S", 0.05)  # how long a connection waits that nobody expects
    store = HashStore()
    with ThreadPoolExecutor() as ranks, open_hub() as hub:
        first = ranks.submit(connect_watch, context(0, store, 3), hub, "", "group", Deadline.after(LIMIT_S))
        eventually(lambda: "group/watch/" in hub._announced, "rank 0 waits for the others")
        second = hub.connect(hub.address, "group/watch/2", LIMIT_S)
        with pytest.raises(TimeoutError):
            first.result(0.5)
        ends = [second, hub.connect(hub.address, "group/watch/1", LIMIT_S), *first.result(LIMIT_S).values()]
        for end in ends:
            end.close()


def test_the_texts_of_an_exchange_arrive_in_order_and_its_missing_ranks_are_named_to_all() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as ranks:
        watches = [task.result(LIMIT_S) for task in [ranks.submit(watch, context(rank, store, 3)) for rank in range(3)]]
        try:
            assert watches[2].addresses == tuple(each.hub.address for each in watches)
            for number in range(3):
                texts = [
                    ranks.submit(w.exchange, f"{number} of {rank}", Deadline.after(LIMIT_S))
                    for rank, w in enumerate(watches)
                ]
                assert [t.result(LIMIT_S) for t in texts] == [[f"{number} of {rank}" for rank in range(3)]] * 3
            late = [ranks.submit(watches[1].exchange, "here", Deadline.after(LIMIT_S))]
            eventually(lambda: watches[0].reporter.missing() == [0, 2], "rank 1 has come")
            late.append(ranks.submit(watches[0].exchange, "here", Deadline.after(SHORT_S)))
            for task in late:
                with pytest.raises(RendezvousError, match=r"these ranks did not join within 0\.2 s: 2\. Do they run"):
                    task.result(LIMIT_S)
        finally:
            for each in reversed(watches):
                each.give_up()


@pytest.mark.parametrize("short", ["no memory at rank 0", "no descriptor at rank 1", "nothing"])
def test_a_host_without_memory_to_share_uses_sockets(short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 tells all of them; a rank that could not receive the memory says so before it is made."""

    def refuse(*_: object) -> Segment:
        raise SegmentError("no memory today")

    def refuse_second() -> None:
        if threading.current_thread().name.endswith("_1"):
            raise OSError(errno.EMFILE, "too many")

    if short == "no memory at rank 0":
        monkeypatch.setattr(Segment, "create", refuse)
    if short == "no descriptor at rank 1":
        monkeypatch.setattr(tcp, "try_for_descriptor", refuse_second)
    store, both = HashStore(), threading.Barrier(2)

    def make(rank: int) -> TcpBackend:
        both.wait(LIMIT_S)  # so that each has a thread of its own
        return TcpBackend(replace(context(rank, store), timeout_s=LIMIT_S))

    with ThreadPoolExecutor(2, "rank") as ranks:
        backends = [task.result(LIMIT_S) for task in [ranks.submit(make, rank) for rank in range(2)]]
        kind = "Shm" if short == "nothing" else "Socket"
        try:
            assert [kind in repr(backend) for backend in backends] == [True, True], backends
        finally:
            for task in [ranks.submit(backend.close, LIMIT_S) for backend in backends]:
                task.result(LIMIT_S)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_before_the_default_group_is_set_on_it_ends_the_wait_of_the_others(rank: int) -> None:
    lost = {2: "its process ended"}
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 3, lost_ranks=lambda: lost, _distinct_backends=list)
    with pytest.raises(RankLost, match="it is not set on rank 2: its process ended"):
        _until_all_have_it(HashStore(), group, LIMIT_S)


def test_a_rank_that_was_through_and_has_left_ends_no_wait() -> None:
    store = HashStore()
    group: Any = SimpleNamespace(rank=lambda: 1, size=lambda: 3, lost_ranks=lambda: {2: LEFT}, _distinct_backends=list)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(_until_all_have_it, store, group, LIMIT_S)
        store.wait(["set/1"], LIMIT_S)
        with pytest.raises(TimeoutError):
            waiting.result(2 * STORE_CHECK_INTERVAL_S)
        store.set("all set", b"1")
        waiting.result(LIMIT_S)


def test_a_rank_that_gives_up_ends_the_exchange_of_the_others() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as ranks:
        watches = [task.result(LIMIT_S) for task in [ranks.submit(watch, context(rank, store, 3)) for rank in range(3)]]
        waiting = [ranks.submit(watches[rank].exchange, "here", Deadline.after(LIMIT_S)) for rank in (0, 2)]
        watches[1].give_up()
        try:
            for task in waiting:
                with pytest.raises(RankLost, match="rank 1 gave up; see what it raised"):
                    task.result(LIMIT_S)
        finally:
            watches[2].give_up()
            watches[0].give_up()


def test_each_rank_logs_once_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A group's limit is 30 minutes by default: a rank that makes other groups than the others must not be silent."""
    monkeypatch.setattr(bootstrap, "INIT_NOTICE_S", 0.05)
    store, limit_s = HashStore(), 1.0  # in which the notice comes first, also on a busy machine
    for rank in (0, 1):
        ranks = (rank, 1 - rank, 2)  # both lead a group of their own name
        with pytest.raises(StoreTimeout):
            agree(PrefixStore(f"lead/{rank}", store), rank, ranks, f"group '{rank}'", limit_s, "one", fresh=True)
    with pytest.raises(StoreTimeout):
        agree(PrefixStore("follow", store), 2, (0, 1, 2), "group '2'", limit_s, "one", fresh=True)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 3
    assert "making group '0' (ranks 0, 1, 2): rank 0 still waits after 0.05 s for ranks 1, 2" in logged[0]
    assert "for ranks 0, 2" in logged[1]
    assert "rank 2 still waits after 0.05 s for rank 0, which waits for all of them" in logged[2]
