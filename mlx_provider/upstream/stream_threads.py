"""How Linux schedules the threads of MLX's CPU device.

MLX's CPU device runs the operations of a stream in a thread of its own, and the thread that builds
a graph wakes it for each operation (mlx 0.32.4, `mlx/scheduler.h`). A woken thread may take the
core of the thread that woke it. With small arrays the two then alternate: 90 changes of thread for
one pass of one layer, which took a third of the processor time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def wake_without_preemption() -> None:
    """Let this thread, and those that it starts from now on, wait for a free core when they wake.

    Call it before the thread's first use of MLX, which starts MLX's thread. Without effect where
    the system has no such policy, or refuses it.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
