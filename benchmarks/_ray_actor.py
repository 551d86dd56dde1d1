"""Started by benchmarks/_ray.py with an interpreter that has Ray: times an actor's method for each line it reads."""

from __future__ import annotations

import json
import statistics
import sys
import time

import ray

NUM_WARM_UP, NUM_CALLS = 20, 300


class Counter:
    """As in `_rpc_cases.py`."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        self.count += 1
        return self.count


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    counter = ray.remote(Counter).remote()
    ray.get(counter.increment.remote())
    print("ready", flush=True)
    for line in sys.stdin:
        for _ in range(NUM_WARM_UP):
            ray.get(counter.increment.remote())
        times_s = []
        for _ in range(max(2, round(NUM_CALLS * float(line)))):
            began = time.perf_counter()
            ray.get(counter.increment.remote())
            times_s.append(time.perf_counter() - began)
        print(json.dumps({"p50": statistics.median(times_s)}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
