"""A worker with the token says of the tensors that it sends what cannot be: the calls of all others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from peer_timeouts import CALM_S

from rpcdist import rpc
from rpcdist.autograd import _context, context
from rpcdist.testing import InProcessCluster
from rpcdist.transport.wire_messages import History

ATTACKER, THIRD = 1, 2

FORGERIES: dict[str, Callable[[History], History]] = {
    "the end of time": lambda true: true._replace(stamp=(1 << 64) - 1),
    "a message of another worker": lambda true: true._replace(message=_context.make_id(THIRD, 1)),
}


def add_at_third(tensor: torch.Tensor) -> torch.Tensor:
    return rpc.rpc_sync("third", torch.add, (tensor, 1))


@pytest.mark.parametrize("forgery", FORGERIES)
def test_what_cannot_be_true_of_a_tensor_is_refused(forgery: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = _context.Context.sending

    def forge(self: _context.Context, tensors: Sequence[torch.Tensor], to: int) -> History | None:
        true = sending(self, tensors, to)
        return FORGERIES[forgery](true) if true is not None and self._worker_id == ATTACKER else true

    with InProcessCluster("victim", "attacker", "third", peer_timeout=CALM_S) as cluster:
        with cluster.use("attacker"), context():
            with monkeypatch.context() as patch:
                patch.setattr(_context.Context, "sending", forge)
                with pytest.raises(RuntimeError, match=r"worker 1 as message .* which it cannot have sent"):
                    rpc.rpc_sync("victim", add_at_third, (torch.ones(2, requires_grad=True),))
            assert rpc.rpc_sync("victim", add_at_third, (torch.ones(2, requires_grad=True),)).sum() == 4
