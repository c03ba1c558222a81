"""Tries grammars for the engine, in a child of `bounded_process`, which calls `make_answerer` and
`stack_bytes`. A signal ends the child if a grammar takes too much processor time, memory, stack."""

import json
import random
import resource
import signal
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

BYTES = 256
CHOICES = 32
"""Maximum number of random bytes in the texts of a grammar: some errors show only after a text."""
STEPS = 200  # maximum number of bytes in these texts, including those without a choice
SPACES = b" \t\r\n"  # written only if no other byte is allowed: they would use up the choices
ENDS = b',"}]:'  # preferred, because errors show after the end of a value
DEAD_ENDS = ("NoExtension", "NoExtensionBias")  # errors for a text that cannot be completed
STEP_SECONDS = 0.25  # processor time for all steps; a token costs more in a real vocabulary
STACK = 4 << 20  # bytes; the threads that compile for the engine have twice as many
LEAST_STACK_BYTES = 1 << 20  # half of what glibc gives a thread if there is no limit


class Vocabulary:
    """For llguidance: the special tokens (`names`) of a real vocabulary under their own ids, which
    may be below 256, then one token for each byte. Called with a text, returns its tokens."""

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


def try_grammar(lark: str, tokenizer: Any, first_byte: int, limits: Any) -> str:
    """Write random texts that the grammar allows. Returns the error that shows; empty: none."""
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


def make_answerer(limits: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Returns the function that answers messages. The first message holds the arguments of
    `Vocabulary`. Each further one is a grammar (`lark`) and the most processor `seconds` to compile
    it; the answer has what is `wrong` with it (empty: nothing), and the `seconds` that it took."""
    bounds = LLParserLimits(**json.loads(limits))
    vocabulary: Vocabulary | None = None
    tokenizer: Any = None

    def answer(message: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal vocabulary, tokenizer
        if vocabulary is None:
            vocabulary = Vocabulary(**message)
            tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), slices=[])
            return None
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, message["seconds"])
        wrong = try_grammar(message["lark"], tokenizer, vocabulary.first_byte, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return {"wrong": wrong, "seconds": time.process_time() - began}

    return answer


def stack_bytes() -> int:
    """For the thread that answers: half of the stack that the engine's threads have."""
    most, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return LEAST_STACK_BYTES if most < 0 else max(LEAST_STACK_BYTES, min(STACK, most // 2))
