"""A program for torch's RPC: a recurrent net whose embedding and decoder are on a parameter server.

`test_ported_scripts.py` runs it on rpcdist after changing its import lines, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, rpc_sync

WORLD_SIZE = 2
NUM_TOKENS = 11
NUM_STEPS = 60
Hidden = tuple[Tensor, Tensor]


def _call_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    return method(rref.local_value(), *args, **kwargs)


def _remote_method(method: Callable[..., Any], rref: Any, *args: Any, **kwargs: Any) -> Any:
    return rpc_sync(rref.owner(), _call_method, args=[method, rref, *args], kwargs=kwargs)


def _parameter_rrefs(module: nn.Module) -> list[Any]:
    return [RRef(parameter) for parameter in module.parameters()]


class EmbeddingTable(nn.Module):
    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Embedding(num_tokens, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(tokens).cpu()  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.decoder = nn.Linear(width, num_tokens)

    def forward(self, output: Tensor) -> Tensor:
        return self.decoder(output)  # type: ignore[no-any-return]


class RNNModel(nn.Module):
    def __init__(self, ps: str, num_tokens: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb_table_rref = rpc.remote(ps, EmbeddingTable, args=(num_tokens, width))
        self.rnn = nn.LSTM(width, width)
        self.decoder_rref = rpc.remote(ps, Decoder, args=(num_tokens, width))

    def forward(self, tokens: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        embedded = _remote_method(EmbeddingTable.forward, self.emb_table_rref, tokens)
        output, hidden = self.rnn(embedded, hidden)
        return _remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self) -> list[Any]:
        remote_params: list[Any] = []
        remote_params.extend(_remote_method(_parameter_rrefs, self.emb_table_rref))
        remote_params.extend(_parameter_rrefs(self.rnn))
        remote_params.extend(_remote_method(_parameter_rrefs, self.decoder_rref))
        return remote_params


def _run_trainer() -> None:
    """It learns to go on in sequences that count in steps of three."""
    generator = torch.Generator().manual_seed(0)
    model = RNNModel("ps", NUM_TOKENS, 16)
    optimizer = DistributedOptimizer(optim.Adam, model.parameter_rrefs(), lr=0.03)
    criterion = nn.CrossEntropyLoss()
    hidden = (torch.zeros(1, 8, 16), torch.zeros(1, 8, 16))
    losses = []
    for _ in range(NUM_STEPS):
        starts = torch.randint(NUM_TOKENS, (8,), generator=generator)
        sequence = (starts + 3 * torch.arange(7)[:, None]) % NUM_TOKENS
        with dist_autograd.context() as context_id:
            hidden[0].detach_()
            hidden[1].detach_()
            output, hidden = model(sequence[:-1], hidden)
            loss = criterion(output.flatten(0, 1), sequence[1:].flatten())
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    print(f"next token: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)


def run_worker(rank: int, world_size: int) -> None:
    if rank == 1:
        rpc.init_rpc("trainer", rank=rank, world_size=world_size)
        _run_trainer()
    else:
        rpc.init_rpc("ps", rank=rank, world_size=world_size)
    rpc.shutdown()


if __name__ == "__main__":
    mp.spawn(run_worker, args=(WORLD_SIZE,), nprocs=WORLD_SIZE, join=True)
