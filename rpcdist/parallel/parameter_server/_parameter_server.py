"""`ParameterServer`: a model's parameters on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError
from rpcdist.parallel.parameter_server._shard import Mode, ParameterShard
from rpcdist.parallel.parameter_server._sharded_parameters import RowLayout, ShardedParameters, make_config, values_of
from rpcdist.rpc._executors.blocking import async_form, off_loop


class ParameterServer(ShardedParameters):
    """The parameters of a model on one or several workers, for trainers that push gradients and get new values.

        server = ParameterServer(Net(), ["server0", "server1"], torch.optim.SGD, lr=0.1, trainers=["trainer0", ...])

        def train(server: ParameterServer) -> None:         # on each trainer, which gets the object in a call
            model = Net()
            server.load_into(model)
            for images, labels in batches:
                cross_entropy(model(images), labels).backward()
                server.step(model)                          # pushes the gradients, and gets the new values
            server.leave()

    The rows of each parameter are divided among the servers, whose optimizers step them. With `mode="async"`
    each gradient is applied at once; with a `staleness` of k, a trainer that is more than k steps ahead of the slowest
    one waits for it. With `mode="sync"` the servers wait for all trainers, and take one step with the mean of their
    gradients (summed in the order of the trainers' names): with one trainer, the results are bitwise those of one
    process.

    A trainer is a worker with a name. If it dies or leaves the job, others do not wait for it; its replacement, and any
    other worker, takes part from its first step on. If a server dies, its rows are lost: all trainers get an error, and
    a new `ParameterServer` starts from the last `state_dict`.

    Args:
        parameters: a module, or tensors by name, which are copied. The optimizer gets those that require gradients.
        servers: names of workers.
        optimizer_class: makes the optimizer at each server, for its rows. An optimizer of whole matrices (LARS, Muon)
            would work on parts of them.
        mode: "async" or "sync".
        staleness: steps that a trainer may be ahead; None for any number.
        trainers: names of the workers that take part from the start; required if trainers wait for each other.
        device: the device of the servers' tensors; `"cuda"` is the current one of a server's threads, usually `cuda:0`.
            Gradients on the GPU of a trainer that leads to it, by the device map or the same index, go there directly,
            and others by the CPU; values come back to the same GPU.
        timeout: limit in seconds of each call, with the wait for other trainers; 0 for none, by default that of
            `init_rpc`.
        **defaults: options of `optimizer_class`.

    Raises:
        ConfigError: the arguments do not fit together.
        Exception: a server could not make its rows.
    """

    @off_loop("await asyncio.to_thread(ParameterServer, ...)")
    def __init__(
        self,
        parameters: Mapping[str, Tensor] | nn.Module,
        servers: Sequence[str],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        mode: Mode = "async",
        staleness: int | None = None,
        trainers: Sequence[str] = (),
        device: str | torch.device = "cpu",
        timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
        **defaults: Any,
    ) -> None:
        config = make_config(servers, optimizer_class, defaults, mode, staleness, trainers, device)
        values = values_of(parameters)
        is_module = isinstance(parameters, nn.Module)
        trained = [name for name, value in values.items() if value.requires_grad or not is_module]
        if not trained:
            raise ConfigError("no parameter of the module requires gradients: there is nothing to train")
        self._dtypes = {name: value.dtype for name, value in values.items()}
        layouts = {name: RowLayout.in_blocks(value.shape, len(servers)) for name, value in values.items()}
        parts = [layouts[name].split(value.detach().cpu()) for name, value in values.items()]
        shards = [
            rpc.remote(
                server,
                ParameterShard,
                (config, [part[index] for part in parts], [name in trained for name in values]),
                timeout=timeout,
            )
            for index, server in enumerate(servers)
        ]
        super().__init__(shards, layouts, trained, config, timeout)

    # ------------------------------------------------------------ values

    @off_loop("await server.pull_async(...)")
    def pull(self, requires_grad: bool = False) -> dict[str, Tensor]:
        """Returns the values by name, on the CPU; does not wait for other trainers.

        Args:
            requires_grad: whether gradients flow back to the servers, within `autograd.context()`; a
                `DistributedOptimizer` over `parameter_rrefs()` steps with them.
        """
        return self._merged(self._ask("pull", requires_grad))

    pull_async = async_form(pull)

    @off_loop("await server.load_into_async(...)")
    def load_into(self, module: nn.Module) -> None:
        """Copies the values into the parameters of a module with the same names and shapes, on any device."""
        self._write(self._ask("pull"), module)

    load_into_async = async_form(load_into)

    def parameter_rrefs(self) -> list[rpc.RRef[Tensor]]:
        """Returns references to the parts of all trained parameters, for `DistributedOptimizer`."""
        numbers = [number for number, name in enumerate(self._layouts) if name in self._trained]
        return [shard.remote(self._timeout).parameter(number) for shard in self._shards for number in numbers]

    # ------------------------------------------------------------ steps

    @off_loop("await server.push_async(...)")
    def push(self, gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Pushes gradients by name; missing parameters have no gradient.

        Returns:
            The new values, when this trainer may take its next step.

        Raises:
            ConfigError: a gradient does not fit its parameter.
            DeadlineExceeded: the limit passed; the text names the trainers for which the servers waited. The gradients
                count.
            OwnerLost, WorkerLost: a server died.
        """
        return self._merged(self._push(self._divided(gradients), wants_values=True))

    push_async = async_form(push)

    @off_loop("await server.step_async(...)")
    def step(self, module: nn.Module) -> None:
        """Pushes the `.grad` of a module's parameters, copies the new values into them, and clears the gradients.

        Raises like `push`, and then keeps the gradients.
        """
        gradients = {name: parameter.grad for name, parameter in values_of(module).items()}
        self._write(self._push(self._divided(gradients), wants_values=True), module)
        module.zero_grad(set_to_none=True)

    step_async = async_form(step)

    @off_loop("await server.tick_async(...)")
    def tick(self) -> None:
        """Counts a step whose gradients were applied by a `DistributedOptimizer`, and waits like `push`."""
        self._push([[]] * len(self._shards), wants_values=False)

    tick_async = async_form(tick)

    # ------------------------------------------------------------ inside

    def _divided(self, gradients: Mapping[str, Tensor | None]) -> list[list[Tensor | None]]:
        """Returns the gradients for each server, in the order of the parameters."""
        if not isinstance(gradients, Mapping):
            raise ConfigError(f"gradients are a {type(gradients).__name__}: pass a dictionary of tensors by name")
        if unknown := gradients.keys() - self._layouts.keys():
            raise ConfigError(f"the servers have no parameters {sorted(unknown)}; they have {list(self._layouts)}")
        parts: list[list[Tensor | None]] = [[] for _ in self._shards]
        for name, layout in self._layouts.items():
            gradient = gradients.get(name)
            if gradient is None:
                divided: Sequence[Tensor | None] = [None] * len(parts)
            else:
                _check_gradient(name, layout, self._dtypes[name], gradient)
                divided = self._sendable(layout.split(gradient.detach()))
            for part, piece in zip(parts, divided, strict=True):
                part.append(piece)
        return parts

    def _merged(self, of_servers: Sequence[Sequence[Tensor]]) -> dict[str, Tensor]:
        return {
            name: layout.merge([part.cpu() for part in parts])
            for (name, layout), parts in zip(self._layouts.items(), zip(*of_servers, strict=True), strict=True)
        }

    @torch.no_grad()
    def _write(self, of_servers: Sequence[Sequence[Tensor]], module: nn.Module) -> None:
        targets = values_of(module)
        shapes = {name: tuple(target.shape) for name, target in targets.items()}
        if shapes != {name: layout.shape for name, layout in self._layouts.items()}:
            raise ConfigError(f"the module's parameters {shapes} are not those of {self!r}")
        for (name, layout), parts in zip(self._layouts.items(), zip(*of_servers, strict=True), strict=True):
            layout.write(parts, targets[name])


def _check_gradient(name: str, layout: RowLayout, dtype: torch.dtype, gradient: Tensor) -> None:
    if not isinstance(gradient, Tensor) or gradient.dtype is not dtype:
        found = gradient.dtype if isinstance(gradient, Tensor) else f"a {type(gradient).__name__}"
        raise ConfigError(f"the gradient of {name!r} is {found}: pass a tensor of its parameter's dtype, {dtype}")
    if gradient.layout is not torch.strided:
        raise ConfigError(f"the gradient of {name!r} is sparse; a ShardedEmbedding pushes sparse gradients")
    if tuple(gradient.shape) != layout.shape:
        raise ConfigError(
            f"the gradient of {name!r} has shape {tuple(gradient.shape)}, but its parameter has {layout.shape}"
        )
