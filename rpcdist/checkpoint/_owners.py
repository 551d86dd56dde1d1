"""Values behind remote references: their owners save and load them, so that they do not travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.checkpoint._entries import Entries, Stateful, entries_of, restore
from rpcdist.checkpoint._storage import CheckpointPart, StoredEntries
from rpcdist.errors import ConfigError
from rpcdist.rpc import RRef

References = dict[str, RRef[Any]]


def by_owner(state: Mapping[str, object]) -> tuple[dict[str, object], dict[str, References]]:
    """The values of this process, and the references, by their owner's name.

    Raises:
        ConfigError: it is no dictionary of values by key.
    """
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        what = f"a {type(state).__name__}" if not isinstance(state, Mapping) else f"of keys {list(state)!r:.80}"
        raise ConfigError(f"the state is {what}: give a dictionary of values by name, such as {{'model': model}}")
    here: dict[str, object] = {}
    there: dict[str, References] = {}
    for key, value in state.items():
        if isinstance(value, RRef):
            there.setdefault(value.owner_name(), {})[key] = value
        else:
            here[key] = value
    return here, there


def entries_at_owner(references: References) -> Entries:
    """At the owner: the entries of its values."""
    entries: Entries = {}
    for key, reference in references.items():
        entries |= entries_of(key, reference.local_value())
    return entries


def new_part(folder: str, references: References, algorithm: str) -> CheckpointPart:
    """At the owner: what it will write."""
    return CheckpointPart(folder, entries_at_owner(references), algorithm)


def load_at_owner(folder: str, references: References) -> None:
    """At the owner: its values get what was stored.

    Raises:
        ConfigError: one of them cannot be changed in place.
    """
    stored = StoredEntries(folder)
    for key, reference in references.items():
        value = reference.local_value()
        if not isinstance(value, (Tensor, nn.Module, Stateful)):
            raise ConfigError(
                f"{key!r} refers to a {type(value).__name__} on {rpc.get_worker_info().name!r}, which cannot be "
                "changed in place; refer to a tensor, a module, or an object with state_dict() and load_state_dict()"
            )
        restore(key, value, stored)
