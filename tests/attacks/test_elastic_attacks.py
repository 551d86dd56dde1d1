"""An elastic group whose store a stranger writes to, and whose members lie, fall silent, or send no state.

Each rank is a thread with a world of its own. The text of a stranger is never believed. A member, which has the token,
can end the training of others, but only by an error that says so, within the limit, and with an unchanged model.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from inside_groups import World, use_world
from torch import nn

from rpcdist import collectives
from rpcdist.collectives import HashStore, PrefixStore, Store
from rpcdist.collectives._group.elastic_rounds import MAX_PROCESSES, Candidate, ClosedRound, ElasticRecords
from rpcdist.collectives.elastic_group import ElasticGroup
from rpcdist.errors import AuthenticationFailed, CollectiveMismatch, JobEnded, RendezvousError
from rpcdist.ids import Identity
from rpcdist.parallel import ElasticDataParallel
from rpcdist.parallel._ddp._state_transfer import send_state
from rpcdist.testing.limits import LIMIT_S, UNIT_S
from rpcdist.transport.credentials import Credentials
from rpcdist.transport.token import job_token as token_in_use

pytestmark = pytest.mark.usefixtures("job_token")

SOMEBODY = Candidate("somebody", "127.0.0.1:1/hub", 7, False, "a net")


@contextmanager
def elastic_group(store: Store, num_ranks: int = 1, **options: Any) -> Iterator[ElasticGroup]:
    with use_world(World()):
        elastic = ElasticGroup(store, num_ranks=num_ranks, **options)
        try:
            yield elastic
        finally:
            elastic.leave()


def records(token: bytes | None = None, job: str = "default") -> Credentials:
    return Credentials(token or token_in_use(), job, Identity("attacker", -1, 1))


def written_by(who: Credentials | None, store: Store, key: str, value: bytes) -> None:
    """Into the part of the store that an elastic group uses; None signs nothing."""
    part = PrefixStore("elastic", store)
    part.set(key, value if who is None else who.sign(part.full_key(key), value))


# ---------------------------------------------------------------- strangers


SIGNERS: dict[str, Callable[[], Credentials | None]] = {
    "nobody": lambda: None,
    "another token": lambda: records(b"another token of 16"),
    "another job": lambda: records(job="another"),
}
FORGERIES = {"ended": b"ended", "0/closed": ClosedRound((SOMEBODY,), {}).to_json().encode()}


@pytest.mark.parametrize("signer", SIGNERS)
@pytest.mark.parametrize("key", FORGERIES)
def test_what_a_stranger_says_of_the_job_is_not_believed(key: str, signer: str) -> None:
    """Unsigned words used to end the job for everybody, or to have a rank counted as gone that lived."""
    store = HashStore()
    with elastic_group(store, num_ranks=2) as elastic:
        written_by(SIGNERS[signer](), store, key, FORGERIES[key])
        with pytest.raises(AuthenticationFailed, match=f"'elastic/{key}'"):
            elastic.form(0, is_new=True)


@pytest.mark.parametrize("names", [b"stranger ", b"\xff\xfe" * 9, b"x " * 10**6], ids=["a name", "no text", "too long"])
@pytest.mark.parametrize("is_added", [True, False])
def test_names_that_a_stranger_puts_on_the_list_are_waited_for_by_nobody(
    names: bytes, is_added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name without a record used to be waited for, for as long as the store waits."""
    store = HashStore()
    with elastic_group(store, num_ranks=2) as elastic:
        register = ElasticRecords.register

        def register_and_be_attacked(records: ElasticRecords, number: int, own: Candidate) -> None:
            register(records, number, own)
            (store.append if is_added else store.set)("elastic/0/came", names)

        monkeypatch.setattr(ElasticRecords, "register", register_and_be_attacked)
        with pytest.raises(AuthenticationFailed, match="'elastic/0/came' of processes"):
            elastic.form(0, is_new=True)


def test_a_stranger_cannot_say_that_a_rank_is_gone() -> None:
    store = HashStore()
    with elastic_group(store) as elastic:
        elastic.form(0, is_new=True)
        assert elastic.round is not None
        me = elastic.round.members[0]
        is_gone = elastic._is_gone
        assert not is_gone(me)
        written_by(None, store, f"gone/{me.identity}", b"1")
        with pytest.raises(AuthenticationFailed, match="gone/"):
            is_gone(me)


# ---------------------------------------------------------------- members whose words make no sense


NO_CANDIDATES: dict[str, object] = {
    "no object": [1],
    "a field too few": {name: value for name, value in asdict(SOMEBODY).items() if name != "is_new"},
    "a field too many": {**asdict(SOMEBODY), "more": 1},
    "no number of steps": {**asdict(SOMEBODY), "progress": "7"},
    "too many steps": {**asdict(SOMEBODY), "progress": 2**63},
    "steps before the first": {**asdict(SOMEBODY), "progress": -1},
    "true steps": {**asdict(SOMEBODY), "progress": True},
    "neither new nor old": {**asdict(SOMEBODY), "is_new": 0},
    "no address": {**asdict(SOMEBODY), "address": "nowhere"},
    "no identity": {**asdict(SOMEBODY), "identity": ["a"]},
    "two identities": {**asdict(SOMEBODY), "identity": "a b"},
    "a long description": {**asdict(SOMEBODY), "description": "x" * 5000},
}
NO_ROUNDS: dict[str, object] = {
    "no object": 7,
    "no members": {"members": [], "refused": {}},
    "members that are none": {"members": {"a": 1}, "refused": {}},
    "a member twice": {"members": [asdict(SOMEBODY)] * 2, "refused": {}},
    "refused without a reason": {"members": [asdict(SOMEBODY)], "refused": {"a": 1}},
    "more": {"members": [asdict(SOMEBODY)], "refused": {}, "more": 1},
}
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "text",
    [*(json.dumps(each).encode() for each in NO_CANDIDATES.values()), DEEP, b"\xff{", b" " * 20_000],
    ids=[*NO_CANDIDATES, "deep", "no text", "long"],
)
def test_a_candidate_that_makes_no_sense_is_named(text: bytes) -> None:
    store = HashStore()
    with elastic_group(store, num_ranks=2) as elastic:
        written_by(records(), store, "0/candidate/somebody", text)
        store.append("elastic/0/came", "somebody ")
        with pytest.raises(RendezvousError, match="'elastic/0/candidate/somebody' is invalid"):
            elastic.form(0, is_new=True)


def test_a_candidate_speaks_for_itself_alone() -> None:
    store = HashStore()
    with elastic_group(store, num_ranks=2) as elastic:
        written_by(records(), store, "0/candidate/other", json.dumps(asdict(SOMEBODY)).encode())
        store.append("elastic/0/came", "other ")
        with pytest.raises(RendezvousError, match="process somebody wrote the record of other"):
            elastic.form(0, is_new=True)


@pytest.mark.parametrize(
    "text",
    [*(json.dumps(each).encode() for each in NO_ROUNDS.values()), DEEP],
    ids=[*NO_ROUNDS, "deep"],
)
def test_a_round_that_makes_no_sense_is_named(text: bytes) -> None:
    store = HashStore()
    written_by(records(), store, "0/closed", text)
    with elastic_group(store) as elastic, pytest.raises(RendezvousError, match="'elastic/0/closed' is invalid"):
        elastic.form(0, is_new=True)


def test_too_many_who_want_to_be_in_a_group() -> None:
    store = HashStore()
    store.append("elastic/0/came", " ".join(f"{number:032x}" for number in range(MAX_PROCESSES)) + " ")
    with elastic_group(store, num_ranks=2) as elastic, pytest.raises(RendezvousError, match="more than 4096 processes"):
        elastic.form(0, is_new=True)


def test_rounds_that_are_closed_without_a_process_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that is always faster used to keep it there for ever."""
    monkeypatch.setattr("rpcdist.collectives.elastic_group.GROUP_TIMEOUT_S", 0.2 * UNIT_S)
    store = HashStore()
    with elastic_group(store, num_ranks=2) as elastic:
        register = ElasticRecords.register

        def register_too_late(theirs: ElasticRecords, number: int, own: Candidate) -> None:
            written_by(records(), store, f"{number}/closed", ClosedRound((SOMEBODY,), {}).to_json().encode())
            register(theirs, number, own)

        monkeypatch.setattr(ElasticRecords, "register", register_too_late)
        with pytest.raises(RendezvousError, match="were closed without this process"):
            elastic.form(0, is_new=True)


@pytest.mark.parametrize("num_closed", [0, 1, 2, 3, 7, 8, 30])
def test_the_first_open_round_is_found_from_everywhere(num_closed: int) -> None:
    found = ElasticRecords(store := HashStore(), records())
    for number in range(num_closed):
        store.set(f"{number}/closed", b"1")
    assert {found.first_open_round(after) for after in range(-1, num_closed)} == {num_closed}


def test_a_member_that_falls_silent_in_a_vote_is_left_behind() -> None:
    """It has come, its address answers, and it takes no part in making the group."""
    store = HashStore()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        elastic_group(store, num_ranks=1, timeout=timedelta(seconds=UNIT_S)) as elastic,
    ):
        member = replace(SOMEBODY, address=f"127.0.0.1:{silent.getsockname()[1]}/hub", description="", is_new=True)
        ElasticRecords(PrefixStore("elastic", store), records()).register(0, member)
        assert elastic.form(0, is_new=True).size() == 1
        assert elastic.round is not None and len(elastic.round.members) == 1


def test_who_says_that_the_job_has_ended_has_the_token() -> None:
    store = HashStore()
    written_by(records(), store, "ended", b"ended")
    with elastic_group(store, num_ranks=2) as elastic, pytest.raises(JobEnded):
        elastic.form(0, is_new=True)


# ---------------------------------------------------------------- members that send no state


class Odd:
    """An object that newcomers need as well; it refuses states that it does not know."""

    def __init__(self) -> None:
        self.loaded = {"odd": 1}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.loaded)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.keys() != {"odd"}:
            raise KeyError("odd")
        self.loaded = dict(state)


STEP = 9


def good_state() -> dict[str, Any]:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
    return {"step": STEP, "module": module.state_dict(), "others": [optimizer.state_dict(), {"odd": 2}]}


def changed(**parts: Any) -> dict[str, Any]:
    return {**good_state(), **parts}


def with_parameter(name: str, value: object) -> dict[str, Any]:
    state = good_state()
    state["module"] = {**state["module"], name: value}
    return state


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "no state": (lambda: [1, 2], "does not consist of step, module and others"),
    "another step": (lambda: changed(step=STEP + 1), "step 10"),
    "steps that are no number": (lambda: changed(step=float(STEP)), "step 9.0"),
    "another parameter": (lambda: with_parameter("2.weight", torch.ones(1)), "names of its parameters"),
    "another size": (lambda: with_parameter("1.bias", torch.ones(5)), r"1.bias differs.*\(5,\)"),
    "another dtype": (lambda: with_parameter("1.bias", torch.ones(2, dtype=torch.float64)), "float64"),
    "no tensor": (lambda: with_parameter("1.bias", "a text"), "1.bias differs"),
    "an optimizer too few": (lambda: changed(others=[{"odd": 2}]), "the states of 2 optimizers"),
    "another optimizer": (lambda: changed(others=[{"state": {}, "param_groups": []}, {"odd": 2}]), "parameter group"),
    "the last that does not fit": (lambda: changed(others=[good_state()["others"][0], {"even": 2}]), "KeyError"),
}


def newcomer(store: Store) -> tuple[ElasticDataParallel, dict[str, Any]]:
    """A rank that trains, and a copy of what it has."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = ElasticDataParallel(
        module, optimizer, store, num_ranks=2, timeout=timedelta(seconds=LIMIT_S), stateful=[Odd()]
    )
    return model, everything(model)


def everything(model: ElasticDataParallel) -> dict[str, Any]:
    state = model._state()
    return {**state, "module": {name: value.tolist() for name, value in state["module"].items()}}


@contextmanager
def liar(store: Store, description: str, send: Callable[[collectives.ProcessGroup], object]) -> Iterator[None]:
    """A member that says it has trained for `STEP` steps, and is then asked for its state."""

    def lie() -> None:
        with elastic_group(store, 2, min_ranks=2, description=description) as elastic:
            came.set_result(None)
            group = elastic.form(STEP, is_new=False)
            assert elastic.round is not None and elastic.round.behind == (1,)
            send(group)
            left.result(LIMIT_S)

    came, left = Future[None](), Future[None]()
    with ThreadPoolExecutor(1, thread_name_prefix="liar") as pool:
        lying = pool.submit(lie)
        came.result(LIMIT_S)
        try:
            yield
        finally:
            left.set_result(None)
            lying.result(LIMIT_S)


def attacked(send: Callable[[collectives.ProcessGroup], object], message: str) -> None:
    """Trains beside a liar: the error names it, and nothing was changed."""
    store = HashStore()
    with use_world(World()):
        model, before = newcomer(store)
        with (
            liar(store, model._elastic._description, send),
            pytest.raises(CollectiveMismatch, match=message) as refused,
        ):
            for _ in model.steps(STEP + 1):
                raise AssertionError("it trains")
        assert "the state that rank 0 sent does not fit this training" in str(refused.value)
        assert everything(model) == before
        assert collectives.is_initialized() is False


@pytest.mark.parametrize("state", STATES)
def test_a_wrong_state_changes_nothing(state: str) -> None:
    make, message = STATES[state]
    attacked(lambda group: send_state(make(), group, (1,)), message)


def test_a_state_that_is_no_pickle() -> None:
    attacked(lambda group: collectives.send_object_list([b"no pickle"], group=group, group_dst=1), "cannot be read")


def test_a_state_of_more_bytes_than_there_are() -> None:
    attacked(lambda group: collectives.send(torch.tensor([2**62]), group=group, group_dst=1), "cannot be read")
