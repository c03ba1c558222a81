"""The bound on a plugin's work counts the main thread alone."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest

from mlx_provider.testing.conformance import Nonconformity
from mlx_provider.testing.conformance.parsers import bounded


def test_work_of_other_threads_is_not_counted() -> None:
    stop = threading.Event()
    data = bytes(1 << 22)

    def busy() -> None:
        while not stop.is_set():
            hashlib.sha256(data)  # without the interpreter's lock

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        before = time.process_time()
        with bounded(0.1, "the wait"):
            while time.process_time() < before + 0.3:
                time.sleep(0.01)
    finally:
        stop.set()
        thread.join()


def test_endless_work_ends() -> None:
    def loop() -> None:
        while True:
            pass

    with pytest.raises(Nonconformity, match="the loop was not done"), bounded(0.05, "the loop"):
        loop()
