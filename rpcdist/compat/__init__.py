"""Makes `torch.distributed` mean rpcdist: programs written for torch run unchanged.

    import rpcdist.compat

    rpcdist.compat.install()  # before the program's own imports

or, without a change to the program:

    $ python -m rpcdist run --compat train.py --epochs 3
    $ torchrun --nproc-per-node 4 -m rpcdist run --compat train.py --epochs 3

Parts that cannot be replaced are refused by name (`docs/coming_from_torch.md`).
"""

from __future__ import annotations

from rpcdist.compat._aliases import install, is_installed

__all__ = ["install", "is_installed"]
