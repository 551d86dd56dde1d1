"""Starts the processes of a job on this machine, one per rank.

    def train(rank: int) -> float:
        init_process_group()  # finds the other ranks without arguments
        ...

    if __name__ == "__main__":
        losses = launch(train, workers=4)

The same program also runs under torchrun, which then starts the processes instead. This module imports no other of its
folder: each rank reads its place (`placement`) when it imports `rpcdist.collectives`, and starts no processes.
"""
