"""Ranks of one scenario, forked from a process that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import torch.distributed as dist

LIMIT_S = 90
PRELOADED = ["torch.distributed", "mooncake.ep", "mooncake.pg", "pg_faults"]


class Forked:
    """Processes that run a function of a module, ended with the block.

    The function gets its rank, the size of the group, the port of torch's store, and a pipe.
    """

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def __init__(self, module, scenario, size):
        self.module, self.scenario, self.size = module, scenario, size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = {}

    def start(self, *ranks):
        for rank in ranks or range(self.size):
            ours, theirs = self.context.Pipe()
            arguments = (self.scenario, rank, self.size, self.store.port, theirs)
            process = self.context.Process(target=self.module.run, args=arguments)
            process.start()
            theirs.close()
            self.ranks[rank] = (process, ours)
        return self

    def signal(self, rank, number):
        os.kill(self.ranks[rank][0].pid, number)

    def send(self, message, *ranks):
        for rank in ranks or self.ranks:
            self.ranks[rank][1].send(message)

    def expect(self, message, *ranks):
        for rank in ranks or self.ranks:
            pipe = self.ranks[rank][1]
            assert pipe.poll(LIMIT_S), f"rank {rank} sends nothing"
            assert pipe.recv() == message

    def check(self, *dead):
        end = time.monotonic() + LIMIT_S
        for rank, (process, _) in self.ranks.items():
            process.join(max(end - time.monotonic(), 0))
            wanted = -signal.SIGKILL if rank in dead else 0
            assert process.exitcode == wanted, f"rank {rank} ended with {process.exitcode}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process, pipe in self.ranks.values():
            process.kill()
            process.join()
            pipe.close()
