"""How the ranks of a group reach one another, and what they say of ranks that do not answer."""

from __future__ import annotations

import pytest
from socket_hubs import open_hub

from rpcdist.collectives import HashStore, PrefixStore
from rpcdist.collectives._group import bootstrap
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import Bootstrap, agree, connect_watch, wait_until_made
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, DistNetworkError, RendezvousError, StoreTimeout

SHORT_S = 0.2


def context(rank: int, store: HashStore) -> GroupContext:
    return GroupContext("world", rank, (0, 1), store, timeout_s=SHORT_S)


def test_who_cannot_reach_rank_0_names_it() -> None:
    with open_hub() as gone:
        address = gone.address
    old = Bootstrap("group", (address, address), ("", ""))
    with open_hub() as hub, pytest.raises(ConnectFailed) as caught:
        connect_watch(context(1, HashStore()), hub, old, Deadline.after(SHORT_S))
    assert caught.value.address == address
    assert "rank 0 of group 'world'" in str(caught.value)


def test_rank_0_names_those_that_do_not_connect() -> None:
    with open_hub() as hub, pytest.raises(DistNetworkError, match=r"ranks \[1\] of group 'world'"):
        connect_watch(context(0, HashStore()), hub, Bootstrap("group", ("", ""), ("", "")), Deadline.after(SHORT_S))


def test_rank_0_is_not_done_before_the_others_are() -> None:
    """It may end at once, and take the store with it."""
    store = HashStore()
    with pytest.raises(RendezvousError, match=r"these ranks did not come within .*: 1"):
        wait_until_made(context(0, store), Deadline.after(SHORT_S))
    wait_until_made(context(1, store), Deadline.after(0.0))
    wait_until_made(context(0, store), Deadline.after(SHORT_S))


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
