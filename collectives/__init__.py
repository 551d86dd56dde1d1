"""Collectives and the store. It is installed as `rpcdist.collectives`."""

if __name__ != "rpcdist.collectives":
    raise ImportError(
        "this folder is installed as rpcdist.collectives; write `import rpcdist.collectives`, and take the "
        "repository's root off sys.path (run your script from another folder, or install the project with pip)"
    )

from importlib import import_module
from typing import TYPE_CHECKING

# At once and not lazily: later, importing the module of this name would hide the function behind the module.
from rpcdist.collectives.rendezvous import register_rendezvous_handler, rendezvous
from rpcdist.errors import DistBackendError, DistError, DistNetworkError, DistStoreError, QueueEmptyError, StoreTimeout

if TYPE_CHECKING:
    from rpcdist.collectives.store import FileStore, HashStore, PrefixStore, Store, TCPStore, TorchStoreAdapter

__all__ = [
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "StoreTimeout",
    "TCPStore",
    "TorchStoreAdapter",
    "register_rendezvous_handler",
    "rendezvous",
]

# Name to module: imported on first use, so that `import rpcdist.collectives` loads neither grpc nor torch.
_LAZY = {
    "FileStore": "rpcdist.collectives._store._file",
    "HashStore": "rpcdist.collectives._store._hash",
    "PrefixStore": "rpcdist.collectives._store._prefix",
    "Store": "rpcdist.collectives._store._base",
    "TCPStore": "rpcdist.collectives._store._tcp",
    "TorchStoreAdapter": "rpcdist.collectives._store._torch",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
