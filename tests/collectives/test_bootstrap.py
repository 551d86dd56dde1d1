"""How the ranks of a group reach one another: what they say of addresses that the job's previous start left behind."""

from __future__ import annotations

import pytest
from socket_hubs import open_hub

from rpcdist.collectives import HashStore
from rpcdist.collectives._group.backend_contract import GroupContext
from rpcdist.collectives._group.bootstrap import Bootstrap, connect_watch, wait_until_made
from rpcdist.deadline import Deadline
from rpcdist.errors import ConnectFailed, DistNetworkError, RendezvousError

SHORT_S = 0.2
NAME_THE_START = r"RPCDIST_ATTEMPT, docs/clusters\.md"


def context(rank: int, store: HashStore) -> GroupContext:
    return GroupContext("world", rank, (0, 1), store, timeout_s=SHORT_S)


def test_a_rank_that_reads_an_address_of_the_previous_start_says_how_to_name_starts() -> None:
    with open_hub() as gone:
        address = gone.address
    old = Bootstrap("group", (address, address), ("", ""))
    with open_hub() as hub, pytest.raises(ConnectFailed, match=NAME_THE_START) as caught:
        connect_watch(context(1, HashStore()), hub, old, Deadline.after(SHORT_S))
    assert caught.value.address == address
    assert "rank 0 of group 'world'" in str(caught.value)


def test_rank_0_says_how_to_name_starts_when_others_do_not_come() -> None:
    with open_hub() as hub, pytest.raises(DistNetworkError, match=rf"ranks \[1\] of group 'world'.*{NAME_THE_START}"):
        connect_watch(context(0, HashStore()), hub, Bootstrap("group", ("", ""), ("", "")), Deadline.after(SHORT_S))


def test_rank_0_is_not_done_before_the_others_are() -> None:
    """It may end at once, and take the store with it."""
    store = HashStore()
    with pytest.raises(RendezvousError, match=r"these ranks did not come within .*: 1"):
        wait_until_made(context(0, store), Deadline.after(SHORT_S))
    wait_until_made(context(1, store), Deadline.after(0.0))
    wait_until_made(context(0, store), Deadline.after(SHORT_S))
