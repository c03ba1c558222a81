"""The Linux scheduling policy of the threads of MLX's CPU device.

MLX's CPU device runs the operations of a stream in a separate thread. The thread that builds a
graph wakes it for each operation (mlx 0.32.4, `mlx/scheduler.h`), and Linux can move the woken
thread to the core of the waking one. With small arrays, the two threads then alternate: measured,
90 context switches for a pass of one layer took a third of the processor time.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def wake_without_preemption() -> None:
    """Let this thread, and the threads that it starts later, not preempt others when they wake up.

    Call it before the first use of MLX in the thread, which starts MLX's thread. It has no effect
    if the system lacks or refuses the policy.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
