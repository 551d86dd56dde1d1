"""`ShardedEmbedding`: a table of vectors on servers, of which trainers look up the rows that they need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

import rpcdist.rpc as rpc
from rpcdist.errors import ConfigError
from rpcdist.parallel.parameter_server._shard import Mode, ParameterShard, new_embedding_shard
from rpcdist.parallel.parameter_server._sharded_parameters import RowLayout, ShardedParameters, make_config
from rpcdist.rpc._executors.blocking import async_form, off_loop
from rpcdist.torch_optimizers import take_step

WEIGHT = "weight"


class ShardedEmbedding(ShardedParameters):
    """A table like that of `torch.nn.Embedding`, too large for one worker, or used by several.

        words = ShardedEmbedding(10_000_000, 64, ["server0", "server1"], torch.optim.SparseAdam, lr=0.001)

        loss = model(words(ids)).sum()                      # on each trainer: only these rows are sent
        loss.backward()
        words.step()                                        # only their gradients go back, and are applied

    Row `i` lives on server `i % len(servers)`. A lookup sends each server the numbers of the rows that are needed, each
    once; a step sends sparse gradients, which the optimizer must take (SGD, SparseAdam, Adagrad). The rest, modes,
    trainers and failures, is as for `ParameterServer`.

    Args:
        num_embeddings: number of rows.
        embedding_dim: length of a row.
        servers, optimizer_class, mode, staleness, trainers, device, timeout, **defaults: as for `ParameterServer`.
        weight: the initial table (num_embeddings, embedding_dim), which is copied. Without one, each server draws its
            rows from the normal distribution, so the table is never in one place.
        dtype: of a table that is drawn.
        seed: for the servers' drawing. The same seed gives the same table on the same number of servers.

    Raises:
        ConfigError: the arguments do not fit together.
        Exception: a server could not make its part.
    """

    @off_loop("await asyncio.to_thread(ShardedEmbedding, ...)")
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        servers: Sequence[str],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        weight: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        mode: Mode = "async",
        staleness: int | None = None,
        trainers: Sequence[str] = (),
        device: str | torch.device = "cpu",
        timeout: float = rpc.constants.UNSET_RPC_TIMEOUT,
        **defaults: Any,
    ) -> None:
        config = make_config(servers, optimizer_class, defaults, mode, staleness, trainers, device)
        shape = (num_embeddings, embedding_dim)
        if not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(f"num_embeddings and embedding_dim must be whole numbers of at least 1, but got {shape}")
        _check_takes_sparse(optimizer_class, defaults)
        if weight is not None and tuple(weight.shape) != shape:
            raise ConfigError(f"weight has the shape {tuple(weight.shape)}, but the table must have {shape}")
        if num_embeddings < len(servers):
            raise ConfigError(f"{num_embeddings} rows are too few for {len(servers)} servers: name fewer servers")
        self.num_embeddings, self.embedding_dim = shape
        self._dtype = dtype if weight is None else weight.dtype
        self._arrived: list[tuple[Tensor, Tensor]] = []  # (ids, gradients) of backward passes since the last step
        layout = RowLayout.in_turns(shape, len(servers))
        if weight is None:
            shards = [
                rpc.remote(
                    server,
                    new_embedding_shard,
                    (config, layout.part_shape(index), dtype, seed + index),
                    timeout=timeout,
                )
                for index, server in enumerate(servers)
            ]
        else:
            shards = [
                rpc.remote(server, ParameterShard, (config, [part.contiguous()], [True]), timeout=timeout)
                for server, part in zip(servers, layout.split(weight.detach().cpu()), strict=True)
            ]
        super().__init__(shards, {WEIGHT: layout}, [WEIGHT], config, timeout)

    @off_loop("await table.look_up_async(...)")
    def __call__(self, ids: Tensor) -> Tensor:
        """Looks up rows.

        Args:
            ids: numbers of rows, int64 or int32, of any shape and on any device.

        Returns:
            The rows (*ids.shape, embedding_dim) on the device of `ids`. In grad mode, `backward` collects their
            gradients here, and `step` sends them.

        Raises:
            TypeError: `ids` is not a tensor of whole numbers.
            IndexError: a row does not exist.
            DeadlineExceeded, OwnerLost, WorkerLost: a server did not answer, or died.
        """
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            found = ids.dtype if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            raise TypeError(f"ids are {found}: pass a tensor of int64 or int32, such as torch.tensor([3, 5])")
        needed, positions = torch.unique(ids.detach().cpu(), return_inverse=True)
        if len(needed) and not 0 <= int(needed[0]) <= int(needed[-1]) < self.num_embeddings:
            wrong = int(needed[0] if needed[0] < 0 else needed[-1])
            raise IndexError(f"row {wrong} does not exist: this table has the rows 0 to {self.num_embeddings - 1}")
        needed = needed.long()
        device = ids.device
        rows = torch.empty(len(needed), self.embedding_dim, dtype=self._dtype, device=device)
        asked = []
        for index, shard in enumerate(self._shards):
            chosen = needed % len(self._shards) == index
            if chosen.any():
                local = needed[chosen] // len(self._shards)
                asked.append((chosen, shard.rpc_async(self._timeout).pull_rows(local)))
        for (chosen, _), found in zip(asked, rpc.wait_all([call for _, call in asked]), strict=True):
            rows[chosen.to(device)] = found.to(device)  # it may be on the servers' device
        if torch.is_grad_enabled():
            self._collect_gradient(needed, rows)
        return embedding(positions.to(device), rows)

    async def look_up_async(self, ids: Tensor) -> Tensor:
        """`table(ids)` for coroutines."""
        return await _look_up_async(self, ids)

    def _collect_gradient(self, needed: Tensor, rows: Tensor) -> None:
        """Makes a backward pass store the gradient of these rows here; rows whose graph is dropped store nothing."""

        def arrived(rows: Tensor) -> None:
            if rows.grad is not None:
                self._arrived.append((needed, rows.grad))
                rows.grad = None  # so that the next pass over the same graph adds only its own gradient

        rows.requires_grad_().register_post_accumulate_grad_hook(arrived)

    @off_loop("await table.step_async(...)")
    def step(self) -> None:
        """Pushes the gradients of all lookups since the last step, and waits until the next step may be taken.

        Raises like `ParameterServer.push`; then the gradients have been pushed and are forgotten.
        """
        arrived, self._arrived = self._arrived, []
        if arrived:
            needed = torch.cat([needed for needed, _ in arrived])
            devices = {gradient.device for _, gradient in arrived}
            gradients = torch.cat([gradient if len(devices) == 1 else gradient.cpu() for _, gradient in arrived])
        else:
            needed = torch.empty(0, dtype=torch.long, device="cpu")
            gradients = torch.empty(0, self.embedding_dim, dtype=self._dtype, device="cpu")
        chosen = [needed % len(self._shards) == index for index in range(len(self._shards))]
        values = self._sendable([gradients[rows] for rows in chosen])
        parts = [[(needed[rows] // len(self._shards), part)] for rows, part in zip(chosen, values, strict=True)]
        self._push(parts, wants_values=False)  # to all servers, since each of them counts the steps

    step_async = async_form(step)

    def zero_grad(self) -> None:
        """Forgets the gradients of backward passes."""
        self._arrived.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_arrived": []}


_look_up_async = async_form(ShardedEmbedding.__call__)


def _check_takes_sparse(optimizer_class: Callable[..., torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """Tries one step of such an optimizer with a sparse gradient, before the servers make theirs.

    Raises:
        ConfigError: the optimizer takes only dense gradients.
    """
    cpu = torch.device("cpu")
    probe = torch.zeros(2, 1, device=cpu, requires_grad=True)
    row, value = torch.tensor([[0]], device=cpu), torch.ones(1, 1, device=cpu)
    probe.grad = torch.sparse_coo_tensor(row, value, (2, 1), device=cpu, check_invariants=False)
    optimizer = optimizer_class([probe], **defaults)
    try:
        take_step(optimizer)
    except RuntimeError as exc:
        raise ConfigError(
            f"the gradients of a table are sparse: pass torch.optim.SGD, SparseAdam or Adagrad ({exc})"
        ) from exc
