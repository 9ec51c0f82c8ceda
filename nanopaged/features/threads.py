"""How long torch's threads on a CPU wait in a loop. The command line and the server set it, before they import torch.

torch computes with OpenMP threads, and between two operations a thread waits in a loop before it sleeps. libgomp's
default is 300,000 rounds. On x86 a round takes about 30 ns, so a thread keeps its core for 8 ms. Where no other program
computes, that is fastest. Beside another program the threads keep each other from computing. SPIN_ROUNDS take 30 us, as
long as the gap between two operations of a step. (On ARM a round takes about 1 ns.)
"""
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

SPIN_ROUNDS = 1000


def start() -> None:
    """Set GOMP_SPINCOUNT, which libgomp reads when torch is imported: on a busy machine, unless the user has set it."""
    if ("torch" not in sys.modules and sys.platform == "linux" and os.uname().machine == "x86_64"
            and os.environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS"))):
        with suppress(OSError, ValueError, IndexError):  # a system without /proc
            if is_shared():
                os.environ["GOMP_SPINCOUNT"] = str(SPIN_ROUNDS)


def is_shared() -> bool:
    """Whether other programs compute on cores that torch's threads would take, in each of three looks."""
    for _ in range(3):
        num_running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1  # without this program
        if num_running <= (os.cpu_count() or 1) - len(os.sched_getaffinity(0)):
            return False
        time.sleep(0.005)
    return True
