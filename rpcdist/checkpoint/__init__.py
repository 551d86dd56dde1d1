"""Checkpoints: the state of a job on all of its workers, in one folder that is always complete.

    checkpoint.save("out/checkpoint", {"model": model, "optimizer": optimizer, "table": rref, "step": 7})
    checkpoint.load("out/checkpoint", state)        # the same keys: objects are changed in place, `step` is replaced

The format is that of `torch.distributed.checkpoint`. docs/checkpoints.md is the guide.
"""

from __future__ import annotations

from rpcdist.checkpoint._saving_and_loading import load, load_async, save, save_async

__all__ = ["load", "load_async", "save", "save_async"]
