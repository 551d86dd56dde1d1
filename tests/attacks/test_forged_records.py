"""Records that a stranger writes into the store of a job: nobody believes them, or calls the address in them.

torchrun's own store takes writes from everybody who reaches its port.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as torch_distributed
from inside_groups import GroupContext

from rpcdist import rpc
from rpcdist.collectives import HashStore, PrefixStore, TorchStoreAdapter
from rpcdist.collectives._group.bootstrap import exchange_values
from rpcdist.collectives._group.group_watch import GroupWatch
from rpcdist.collectives._stores.store_base import SignedRecords
from rpcdist.deadline import Deadline
from rpcdist.errors import AuthenticationFailed
from rpcdist.ids import Identity
from rpcdist.rpc._start import COORDINATOR_KEY, node_options, start_agent
from rpcdist.testing import LIMIT_S
from rpcdist.transport import Node
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.token import job_token as token_in_use

JOB = "default"
KEY = f"job/{COORDINATOR_KEY}"


def records(token: bytes, job: str = JOB) -> Credentials:
    return Credentials(token, job, Identity("somebody", -1, 1))


MARK = b"rpcdist-record-1:"

FORGERIES: dict[str, tuple[Callable[[bytes, bytes], bytes], str]] = {
    "unsigned": (lambda address, token: address, "is not signed"),
    "nonsense": (lambda address, token: MARK + b"0" * 63 + b":" + address, "is not signed"),
    "a guessed proof": (lambda address, token: MARK + b"0" * 64 + b":" + address, "the same token"),
    "another token": (lambda address, token: records(b"another token of 16").sign(KEY, address), "RPCDIST_TOKEN"),
    "another job": (lambda address, token: records(token, "other").sign(KEY, address), f"of job '{JOB}'"),
    "another key": (lambda address, token: records(token).sign("job/other", address), "was not signed"),
    "a true proof, another address": (
        lambda address, token: records(token).sign(KEY, b"127.0.0.1:1")[:-11] + address,
        "Allow only machines of the job to reach the store",
    ),
}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where the forger would have the workers connect."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


def was_called(listener: socket.socket) -> bool:
    listener.setblocking(False)
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def test_a_record_is_replaced_once_and_only_if_it_is_of_the_job() -> None:
    """Of several that come after the last coordinator has left, one replaces its record."""
    store = HashStore()
    signed = [SignedRecords(store, records(b"the token of the job")) for _ in range(2)]
    signed[0].set("key", "left")
    assert signed[0].replace("key", "left", "left 1") and not signed[1].replace("key", "left", "left 2")
    assert signed[1].get(["key"]) == ["left 1"]
    store.set("key", "left")
    with pytest.raises(AuthenticationFailed, match="is not signed"):
        signed[0].replace("key", "left", "left 1")
    assert store.get("key") == b"left"


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_address_of_the_coordinator_is_refused(
    job_token: str, listener: socket.socket, forgery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RPCDIST_JOB", raising=False)
    make, expected = FORGERIES[forgery]
    served = torch_distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stranger = torch_distributed.TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=LIMIT_S))
    stranger.set(KEY, make(f"127.0.0.1:{listener.getsockname()[1]}".encode(), token_in_use()).decode())
    store = PrefixStore("job", TorchStoreAdapter(served))
    options = rpc.RpcOptions(rpc_timeout=LIMIT_S)
    # A node of its own: that of the process may be a worker of other tests, and would call itself "b" from now on.
    network = Node(node_options(options)).start_loop()
    with pytest.raises(AuthenticationFailed) as refused:
        start_agent(store=store, name="b", rank=1, world_size=2, options=options, network=network)
    assert f"'{KEY}'" in str(refused.value) and expected in str(refused.value)
    assert not was_called(listener)


def test_a_forged_address_of_a_rank_is_refused() -> None:
    store = HashStore()
    context = GroupContext("group", 0, (0, 1), PrefixStore("of this group", store), LIMIT_S)
    store.set("of this group/bootstrap/1", '{"hub": "10.0.0.9:1"}')
    with pytest.raises(AuthenticationFailed, match=r"'of this group/bootstrap/1'.*is not signed"):
        exchange_values(context, "bootstrap", "mine", Deadline.after(LIMIT_S))


def test_a_forged_address_of_rank_0_is_refused() -> None:
    """It is all that the other ranks of a group take from the store."""
    store = HashStore()
    context = GroupContext("group", 1, (0, 1), PrefixStore("of this group", store), LIMIT_S)
    store.set("of this group/rank 0", '["10.0.0.9:1/0", "uid"]')
    with pytest.raises(AuthenticationFailed, match=r"'of this group/rank 0'.*is not signed"):
        GroupWatch(context, Deadline.after(LIMIT_S))


def test_a_record_of_one_group_counts_in_no_other() -> None:
    store = HashStore()
    one, other = (GroupContext("group", 0, (0,), PrefixStore(name, store), LIMIT_S) for name in ("one", "other"))
    assert exchange_values(one, "bootstrap", "mine", Deadline.after(LIMIT_S)) == ["mine"]
    two = GroupContext("group", 1, (0, 1), PrefixStore("other", store), LIMIT_S)
    store.set("other/bootstrap/0", store.get("one/bootstrap/0"))
    with pytest.raises(AuthenticationFailed, match=r"'other/bootstrap/0'.*was not signed"):
        exchange_values(two, "bootstrap", "mine", Deadline.after(LIMIT_S))
    assert exchange_values(other, "bootstrap", "mine", Deadline.after(LIMIT_S)) == ["mine"]
