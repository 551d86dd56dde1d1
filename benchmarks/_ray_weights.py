"""Started by benchmarks/weights.py with an interpreter that has Ray and torch: spreads weights for each line it reads.

As programs do it: a `state_dict` is put into Ray's store, and each of four actors gets it, and copies it into its own.
"""

from __future__ import annotations

import json
import sys
import time

import ray
import torch

NUM_ACTORS, NUM_TENSORS = 4, 16


def state_dict(mib: int) -> dict[str, torch.Tensor]:
    size = (mib << 18) // NUM_TENSORS
    return {f"t{number}": torch.zeros(size) for number in range(NUM_TENSORS)}


class Generator:
    """Has weights of its own, as a generator's model does."""

    def __init__(self, mib: int) -> None:
        torch.set_num_threads(1)
        self.weights = state_dict(mib)

    def pull(self, published: dict[str, torch.Tensor]) -> float:
        for name, tensor in self.weights.items():
            tensor.copy_(published[name])
        return time.monotonic()


def main() -> None:
    mib = int(sys.argv[1])
    torch.set_num_threads(1)
    ray.init(
        num_cpus=1 + NUM_ACTORS,
        object_store_memory=(8 * mib + 256) << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
    )
    generators = [ray.remote(Generator).remote(mib) for _ in range(NUM_ACTORS)]
    weights = state_dict(mib)
    print("ready", flush=True)
    for _ in sys.stdin:
        began = time.monotonic()
        published = ray.put(weights)
        ended = ray.get([generator.pull.remote(published) for generator in generators])
        print(json.dumps({"s": max(ended) - began}), flush=True)
        del published
    ray.shutdown()


if __name__ == "__main__":
    main()
