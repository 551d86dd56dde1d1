"""How the ranks of a group reach one another, and what they say of ranks that do not answer."""

from __future__ import annotations

import pytest
from socket_hubs import open_hub

from rpcdist.collectives import HashStore
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import Bootstrap, connect_watch, wait_until_made
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, DistNetworkError, RendezvousError

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
