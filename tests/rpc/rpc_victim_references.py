"""The functions of victims with remote references; they hold them in `rpc_victim_functions.held`."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
from inside_agents import current_agent, handle_of, peers_of
from rpc_victim_functions import LIMIT_S, held, hold, make

from rpcdist import rpc
from rpcdist.errors import RpcdistError
from rpcdist.testing import eventually


def hold_remote(owner: str, count: int = 1) -> None:
    """Makes references to values at `owner`, and holds them."""
    made = [rpc.remote(owner, make, (number,)) for number in range(count)]
    for rref in made:
        rref._get_future().wait()
        eventually(rref.confirmed_by_owner, "the owner has confirmed")  # set by a callback of that future
    held.extend(made)


def leave_while_the_last_release_is_late() -> None:
    """Messages of others about this worker's values are read only after it has begun to look for leaks."""
    shell = current_agent().rrefs
    on_message, check_leaks = shell.on_message, shell.check_leaks
    unread: list[tuple[Any, ...]] = []

    def read() -> None:
        for message in unread:
            on_message(*message)

    def check_leaks_first() -> None:
        assert unread, "the release has not come"
        threading.Timer(0.1, read).start()
        check_leaks()

    with (
        mock.patch.object(shell, "on_message", lambda *message: unread.append(message)),
        mock.patch.object(shell, "check_leaks", check_leaks_first),
        mock.patch.object(rpc.api, "_delete_all_user_and_unforked_owner_rrefs", lambda: None),
        mock.patch.object(rpc.api, "_ignore_rref_leak", False),
    ):
        rpc.shutdown()


def leave_without_waiting_for_owners() -> None:
    shell = current_agent().rrefs
    give_back = partial(shell.delete_all_user_and_unforked_owner_rrefs, 0.0)
    with mock.patch.object(rpc.api, "_delete_all_user_and_unforked_owner_rrefs", give_back):
        rpc.shutdown()


def use_held(index: int = 0) -> Any:
    return held[index].to_here()


def fork_held_to(worker: str) -> None:
    """Gives another worker a share of everything that is held here."""
    rpc.rpc_sync(worker, hold, tuple(held))


def hold_own(count: int) -> None:
    held.extend(rpc.RRef(number) for number in range(count))


def use_held_by_proxy() -> Any:
    return held[0].rpc_sync().bit_length()


def use_held_while_the_connection_breaks() -> None:
    future = current_agent().rref_calls.start_fetch(handle_of(held[0]), LIMIT_S)
    for peer in list(peers_of(current_agent()).values()):
        if peer.session is not None:
            peer.session.close("broken by the test")
    assert future.wait() == held[0].to_here() == 0


def share_held() -> Any:
    """Shares with a worker that lives: with oneself."""
    return rpc.rpc_sync(rpc.get_worker_info(), id, (held[0],))


def fork_held_to_without_waiting(worker: str, times: int) -> None:
    for _ in range(times):
        rpc.rpc_async(worker, hold, tuple(held))


def use_until(error: type[BaseException], limit_s: float = 20.0) -> None:
    """Uses what is held until that fails as it should: first a call may fail because its connection has broken."""

    def failure() -> BaseException | None:
        for rref in held:
            try:
                rref.to_here(timeout=5.0)
            except RpcdistError as exc:
                if isinstance(exc, error):
                    return exc
        return None

    found = eventually(failure, f"a {error.__name__}", limit_s)
    assert found is not None
    raise found


# ---------------------------------------------------------------- references that wander

_bag: list[Any] = []
_bag_lock = threading.Lock()
BAG_SIZE = 30


def put_into_bag(*values: Any) -> None:
    with _bag_lock:
        _bag.extend(values)
        while len(_bag) > BAG_SIZE:
            _bag.pop(random.randrange(len(_bag)))


def take_from_bag(count: int) -> Any:
    """Some references of this worker, in a container; they stay here, too."""
    with _bag_lock:
        return {"some": tuple(random.sample(_bag, min(count, len(_bag))))}


def make_reference(value: Any) -> Any:
    return rpc.RRef(value)


def make_value(*inside: Any) -> Any:
    """A value that holds references itself."""
    return list(inside)


def _some(count: int) -> list[Any]:
    return list(take_from_bag(random.randint(0, count))["some"])


def _move(to: str) -> Any:
    """One move; the future of a call that nobody waited for."""
    match random.randrange(8):
        case 0:
            put_into_bag(rpc.remote(to, make_value, tuple(_some(3))))
        case 1:
            rpc.rpc_sync(to, put_into_bag, tuple(_some(4)))
        case 2:
            put_into_bag(*rpc.rpc_sync(to, take_from_bag, (3,))["some"])
        case 3:
            put_into_bag(rpc.rpc_sync(to, make_reference, (_some(2),)))  # an owner is a user of others
        case 4:
            put_into_bag(rpc.remote(to, make_reference, (torch.ones(2),)))  # a reference to a reference
        case 5:
            with _bag_lock:
                _bag[random.randrange(len(_bag)) :] = []
        case 6:
            for rref in _some(1):
                rref.to_here()
        case 7:
            return rpc.rpc_async(to, put_into_bag, tuple(_some(4)))
    return None


def wander(names: tuple[str, ...], limit_s: float, seed: int) -> int:
    """Makes, shares and drops references at random; at the end it drops all. The number of moves."""
    random.seed(seed)
    limit = time.monotonic() + limit_s
    put_into_bag(rpc.RRef(0))
    moves = 0
    sent = []
    while time.monotonic() < limit:
        with _bag_lock:
            if not _bag:
                _bag.append(rpc.RRef(moves))
        sent.append(_move(random.choice(names)))
        moves += 1
    for future in sent:
        if future is not None:
            future.wait(timeout=20.0)  # a function that runs late would fill a bag again
    rpc.api._barrier(set(names))
    with _bag_lock:
        _bag.clear()
    return moves
