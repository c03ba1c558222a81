"""A process that tries grammars for the engine: `python trial_process.py LIMITS`. It imports
nothing of this package, so that it stays small. A signal ends it if a grammar takes too much
processor time, memory or stack."""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

BYTES = 256
CHOICES = 32
"""Random bytes drawn under a grammar: some errors show only later."""
STEPS = 200
"""Most bytes written, including those without a choice."""
SPACES = b" \t\r\n"
"""Written only if no other byte is allowed: they would use up the choices."""
ENDS = b',"}]:'
"""Preferred, because errors show after the end of a value."""
DEAD_ENDS = ("NoExtension", "NoExtensionBias")
"""llguidance's errors for a text that cannot be completed."""
STEP_SECONDS = 0.25
"""Processor time for all steps. A token costs more in a real vocabulary."""
STACK = 4 << 20
"""Bytes. The threads that compile for the engine have twice as many."""
LEAST_STACK_BYTES = 1 << 20
"""glibc gives a thread 2 MiB if the stack of a process has no limit."""


class Vocabulary:
    """The special tokens of a real vocabulary under their own ids, which may be below 256, and
    single bytes after them."""

    bos_token_id = None

    def __init__(self, size: int, names: dict[str, int]) -> None:
        self.first_byte = max(size, *(at + 1 for at in names.values()), 0)
        self.eos_token_id = self.first_byte + BYTES
        self.tokens = [b""] * self.first_byte + [bytes([i]) for i in range(BYTES)] + [b"<end>"]
        for name, at in names.items():
            self.tokens[at] = name.encode()
        self.special_token_ids = [self.eos_token_id, *names.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [self.first_byte + byte for byte in data]


def tried(lark: str, tokenizer: Any, first_byte: int, limits: Any) -> str:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
    dice, choices, text = random.Random(0), 0, bytearray()  # noqa: S311
    for step in range(STEPS):
        if matcher.is_error() or choices == CHOICES:
            break
        if matcher.is_stopped():  # another text may show more
            matcher.reset()
            text.clear()
        mask = matcher.compute_bitmask()
        if step == 0:
            signal.setitimer(signal.ITIMER_PROF, STEP_SECONDS)
        ids = range(first_byte, first_byte + BYTES)
        allowed = [i - first_byte for i in ids if mask[i // 8] >> i % 8 & 1]
        if matcher.is_error() or not allowed:
            break
        choices += len(allowed) > 1
        drawn = dice.choice([i for i in allowed if i not in SPACES] or allowed)
        ends = [i for i in allowed if i in ENDS]
        drawn = dice.choice(ends) if ends and dice.random() < 0.5 else drawn
        text.append(drawn)
        matcher.consume_token(first_byte + drawn)
    error = matcher.get_error() if matcher.is_error() else ""
    if text and error.strip().startswith(DEAD_ENDS):
        shown = bytes(text[-80:]).decode(errors="replace")
        return f"error: it allows texts that cannot be completed: nothing can follow {shown!r}"
    return error


def answer(asked: BinaryIO, said: BinaryIO, limits: Any) -> None:
    """Try grammars until the input ends. The first message is the vocabulary."""
    vocabulary = Vocabulary(**json.loads(_read(asked)))
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), slices=[])
    while message := _read(asked):
        grammar = json.loads(message)
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, grammar["seconds"])
        wrong = tried(grammar["lark"], tokenizer, vocabulary.first_byte, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply = json.dumps({"wrong": wrong, "seconds": time.process_time() - began}).encode()
        said.write(b"%d\n" % len(reply) + reply)
        said.flush()


def _read(asked: BinaryIO) -> bytes:
    """Empty: the input has ended."""
    size = asked.readline()
    return asked.read(int(size)) if size else b""


def main() -> None:
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    threading.stack_size(
        LEAST_STACK_BYTES if stack < 0 else max(LEAST_STACK_BYTES, min(STACK, stack // 2))
    )
    space = int(sys.argv[1])
    with suppress(ValueError, OSError):  # macOS defines the limit, but does not accept it
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = LLParserLimits(**json.loads(sys.argv[2]))
    given = sys.stdin.buffer, sys.stdout.buffer, limits
    worker = threading.Thread(target=answer, args=given)
    worker.start()
    worker.join()


if __name__ == "__main__":
    main()
