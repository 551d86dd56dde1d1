"""Options, worker infos, the backend registry and constants: the parts of the API that need no agent."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch

from rpcdist.errors import ConfigError
from rpcdist.rpc import TlsOptions, backend_registry, constants
from rpcdist.rpc.functions import async_execution, is_async_execution
from rpcdist.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions
from rpcdist.rpc.worker_info import WorkerInfo

CUDA = [torch.device("cuda", index) for index in range(4)]
CPU = torch.device("cpu")


def as_any(value: object) -> int:
    """Pass a value of the wrong type by the type checker."""
    return value  # type: ignore[return-value]


def test_defaults_are_those_of_torch() -> None:
    options = TensorPipeRpcBackendOptions()
    assert (options.rpc_timeout, options.init_method, options.num_worker_threads) == (60.0, "env://", 16)
    assert (options.device_maps, options.devices) == ({}, [])
    assert (constants.UNSET_RPC_TIMEOUT, constants.DEFAULT_SHUTDOWN_TIMEOUT) == (-1.0, 0)


def test_every_options_class_is_an_rpc_backend_options() -> None:
    assert isinstance(TensorPipeRpcBackendOptions(), RpcOptions)
    assert isinstance(RpcOptions(), RpcBackendOptions)


def test_attributes_may_change_after_construction() -> None:
    options = TensorPipeRpcBackendOptions(_transports=["shm", "uv"])
    options.init_method += "/x"
    options.rpc_timeout = 3
    options.num_worker_threads = 4
    options.devices = [CUDA[1]]
    assert (options.init_method, options.rpc_timeout, options.num_worker_threads) == ("env:///x", 3.0, 4)
    assert options.devices == [CUDA[1]]
    assert isinstance(options.rpc_timeout, float)


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: TensorPipeRpcBackendOptions(num_worker_threads=0), RuntimeError, "num_worker_threads must be positive"),
    (lambda: TensorPipeRpcBackendOptions(num_worker_threads=as_any("a")), TypeError, "num_worker_threads"),
    (lambda: TensorPipeRpcBackendOptions(rpc_timeout=-5), RuntimeError, "RPC Timeout must be non-negative"),
    (lambda: RpcOptions(rpc_timeout=float("nan")), RuntimeError, "Timeout must be a number of seconds, but got nan"),
    (
        lambda: TensorPipeRpcBackendOptions(rpc_timeout=as_any(timedelta(seconds=3))),
        TypeError,
        "incompatible constructor arguments",
    ),
    (lambda: RpcBackendOptions(init_method=as_any(3)), TypeError, "incompatible constructor arguments"),  # type: ignore[arg-type]
    (lambda: TensorPipeRpcBackendOptions(_transports=["bogus"]), RuntimeError, "Unknown transport: bogus"),
    (lambda: TensorPipeRpcBackendOptions(_channels=["bogus"]), RuntimeError, "Unknown channel: bogus"),
    (lambda: TensorPipeRpcBackendOptions(devices=["cpu"]), ValueError, "expect a list of CUDA devices"),
    (
        lambda: TensorPipeRpcBackendOptions(device_maps={"w": {CUDA[0]: CUDA[1], CUDA[2]: CUDA[1]}}),
        ValueError,
        "`device_map` only supports 1-to-1 mapping, trying to map cuda:2 and cuda:0 to cuda:1",
    ),
    (lambda: RpcOptions(max_worker_threads=0), ConfigError, "max_worker_threads must be positive"),
    (lambda: RpcOptions(peer_timeout=0), ConfigError, "peer_timeout must be a positive number of seconds"),
    (lambda: RpcOptions(shutdown_timeout=-1), ConfigError, "shutdown_timeout must be a positive number"),
    (lambda: RpcOptions(port=70000), ConfigError, "port must be 0"),
    (lambda: RpcOptions(token=""), ConfigError, "token must not be empty"),
    (lambda: RpcOptions(token=as_any(3)), TypeError, "token must be str or bytes"),  # type: ignore[arg-type]
    (lambda: RpcOptions(tls=as_any("off")), TypeError, "tls must be True, False, TlsOptions or None"),  # type: ignore[arg-type]
    (lambda: TlsOptions("a", as_any(None), "b"), TypeError, "key must be the path of a PEM file, but it is a NoneType"),  # type: ignore[arg-type]
    (lambda: RpcOptions(allow_functions=["torch"]), ConfigError, "module:qualname"),
    (lambda: RpcOptions(allow_functions=[as_any(dict)]), ConfigError, "<class 'dict'>"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("make", "error", "text"), REFUSED)
def test_bad_options_are_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


def test_setters_check_as_the_constructor_does() -> None:
    options = RpcOptions()
    with pytest.raises(TypeError, match="incompatible function arguments"):
        options.rpc_timeout = as_any(timedelta(seconds=3))
    with pytest.raises(ConfigError, match="must be positive"):
        options.num_worker_threads = 0
    with pytest.raises(ValueError, match="CUDA devices"):
        options.set_devices([CPU])
    assert (options.rpc_timeout, options.num_worker_threads, options.devices) == (60.0, 16, [])


def test_device_maps_grow_and_stay_one_to_one() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w": {CUDA[0]: CUDA[1]}})
    options.set_device_map("w", {CUDA[1]: CUDA[2]})
    options.set_device_map("v", {"cpu": "cuda:0"})
    expected = {"w": {CUDA[0]: CUDA[1], CUDA[1]: CUDA[2]}, "v": {CPU: CUDA[0]}}
    assert options.device_maps == expected
    with pytest.raises(ValueError, match="trying to map cuda:0 to cuda:3 and cuda:1"):
        options.set_device_map("w", {CUDA[0]: CUDA[3]})
    with pytest.raises(ValueError, match="1-to-1"):
        options.set_device_map("w", {CUDA[3]: CUDA[1]})
    assert options.device_maps == expected


def test_what_the_getters_return_is_a_copy() -> None:
    options = TensorPipeRpcBackendOptions(device_maps={"w": {CUDA[0]: CUDA[1]}}, devices=[CUDA[0]])
    options.device_maps["w"].clear()
    options.devices.clear()
    assert (options.device_maps, options.devices) == ({"w": {CUDA[0]: CUDA[1]}}, [CUDA[0]])


def test_the_token_is_kept_as_bytes_and_never_shown() -> None:
    options = RpcOptions(token="swordfish")
    assert options.token == b"swordfish"
    assert "swordfish" not in repr(options)


ALLOWED: list[tuple[list[str] | None, str, str, bool]] = [
    (None, "anything", "at.all", True),
    ([], "jobs", "train", False),
    (["jobs:train"], "jobs", "train", True),
    (["jobs:train"], "jobs", "train_more", False),
    (["torch:*"], "torch", "add", True),
    (["torch:*"], "torch.nn", "Linear", False),
    (["jobs:Trainer.*", "torch*:*"], "torch.nn", "Linear", True),
]


@pytest.mark.parametrize(("patterns", "module", "qualname", "expected"), ALLOWED)
def test_allowed_functions(patterns: list[str] | None, module: str, qualname: str, expected: bool) -> None:
    assert RpcOptions(allow_functions=patterns).allows(module, qualname) is expected


def test_worker_info_is_a_value() -> None:
    info = WorkerInfo("w0", 0)
    assert repr(info) == "WorkerInfo(id=0, name=w0)"
    assert info == WorkerInfo(name="w0", id=0) == WorkerInfo("w0", worker_id=0)
    assert info not in (WorkerInfo("w0", 1), WorkerInfo("w1", 0), "w0")
    assert {info: 1}[WorkerInfo("w0", 0)] == 1
    assert pickle.loads(pickle.dumps(info)) == info
    with pytest.raises(AttributeError):
        info.name = "w1"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["", " ", "a b", "abc*", "a\n", "é", "a" * 128])
def test_worker_names_are_checked(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"^Worker name must (match|be non-empty|be shorter than 128)"):
        WorkerInfo(name, 0)


def test_worker_names_may_be_long_and_odd() -> None:
    assert WorkerInfo("trainer:1-a_B" + "x" * 114, 0).name.startswith("trainer:1")


@pytest.mark.parametrize("worker_id", [None, "0", 1.0, 2**15])
def test_worker_ids_are_small_integers(worker_id: object) -> None:
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        WorkerInfo("w", as_any(worker_id))


@pytest.fixture
def registry() -> Iterator[None]:
    before = backend_registry.BackendType
    yield
    backend_registry.BackendType = before


class OtherOptions(RpcBackendOptions):
    """Options of some other backend."""


def start_nothing(
    store: object, name: str, rank: int, world_size: int | None, rpc_backend_options: RpcBackendOptions
) -> tuple[str, int]:
    return name, rank


def test_the_built_in_backend() -> None:
    backend = backend_registry.BackendType["TENSORPIPE"]
    assert repr(backend) == "BackendType.TENSORPIPE"
    assert backend_registry.backend_registered("TENSORPIPE")
    options = backend_registry.construct_rpc_backend_options(
        backend, rpc_timeout=5, init_method="file:///x", num_worker_threads=3, some_other_backends_option=1
    )
    assert isinstance(options, TensorPipeRpcBackendOptions)
    assert (options.rpc_timeout, options.init_method, options.num_worker_threads) == (5.0, "file:///x", 3)
    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        backend_registry.init_backend(
            backend, store=None, name="w", rank=0, world_size=1, rpc_backend_options=OtherOptions()
        )


@pytest.mark.usefixtures("registry")
def test_a_backend_can_be_registered_once() -> None:
    with pytest.raises(TypeError, match="Could not infer backend for options"):
        backend_registry.infer_backend(OtherOptions())
    added = backend_registry.register_backend("OTHER", lambda *_args, **_kwargs: OtherOptions(), start_nothing)
    assert set(backend_registry.BackendType.__members__) == {"OTHER", "TENSORPIPE"}
    assert backend_registry.infer_backend(OtherOptions()) is added
    assert backend_registry.infer_backend(RpcOptions()).name == "TENSORPIPE"
    agent = backend_registry.init_backend(added, None, "w", 3, None, OtherOptions())
    assert agent == ("w", 3)
    with pytest.raises(RuntimeError, match=r"^RPC backend OTHER: already registered$"):
        backend_registry.register_backend("OTHER", OtherOptions, start_nothing)


@pytest.mark.usefixtures("registry")
def test_a_backend_travels_by_its_name() -> None:
    added = backend_registry.register_backend("LATER", OtherOptions, start_nothing)
    known = backend_registry.BackendType["TENSORPIPE"]
    for each in (added, known):
        assert pickle.loads(pickle.dumps(each)) is each


def test_backends_with_equal_handlers_are_not_one(registry: None) -> None:
    first = backend_registry.register_backend("ONE", OtherOptions, start_nothing)
    second = backend_registry.register_backend("TWO", OtherOptions, start_nothing)
    assert (first.name, second.name) == ("ONE", "TWO")


class Methods:
    """Methods of every kind, marked."""

    @staticmethod
    @async_execution
    def static() -> int:
        return 1

    @classmethod
    @async_execution
    def of_class(cls) -> int:
        return 2

    @async_execution
    def bound(self) -> int:
        return 3


def test_async_execution_marks_functions_and_methods() -> None:
    assert all(map(is_async_execution, (Methods.static, Methods.of_class, Methods.bound, Methods().bound)))
    assert not is_async_execution(test_async_execution_marks_functions_and_methods)
    assert (Methods.static(), Methods.of_class(), Methods().bound()) == (1, 2, 3)
    assert Methods.bound.__qualname__ == "Methods.bound"
