"""A model without weights that replies from a script. Its KV cache contains the tokens so far, and
they decide which token is next.

That token has by far the highest logit, so that every sampler draws it. Where a mask bars it, lower
logits continue the reply: with the same text in other tokens, then without the text or the thought,
then with tokens that close JSON. `reply_to` chooses the reply."""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ... import BadRequest, Features, MediaItem, MediaSpan, ModelInfo, PrefillChunk, Prompt
from ...families.caches import KVCache
from ...families.tokenizer import HFTokenizer
from . import RESULT, TOOLS, TURN, TURN_END, WRITTEN, BadScript, Format, Step, script, steps_in

Tokens = NDArray[np.int64]
SCRIPTED_LOGIT = 300.0
# of the first character of the reply's rest without its leading white space, and with it
CHARACTER_LOGITS = (150.0, 200.0)
FALLBACK_FACTORS = (1.0, 0.3, 0.25)
"""Multiply the logits above, for `Reply.text` and for each of `Reply.fallbacks`."""
END_LOGIT = 70.0
CLOSER_LOGIT = 60.0
# unlikely tokens that can close JSON where a grammar demands text that the script lacks
CLOSERS = ('"', "}", "]", "1", ",", ":", " ")
CACHED = 64  # entries of each `lru_cache`
SUMMARY_WANTED = (  # words by which coding agents ask for a summary, to make room
    *("CRITICAL: Respond with TEXT ONLY", "CONTEXT CHECKPOINT", "context checkpoint"),
    *("handoff summary", "detailed summary", "anchored summary", "state_snapshot"),
    *("continuing our conversation", "Summarize the conversation"),
)
# in the system message of a request without tools, whose only purpose is a summary, or a title
SUMMARISER = re.compile(r"\bsummari[sz]", re.IGNORECASE)
TITLE_WANTED = re.compile(r'(?<!")\btitles?\b(?!")', re.IGNORECASE)  # no key in a schema


@dataclass(frozen=True)
class Turn:
    """A message, read back from the prompt."""

    role: str
    text: str

    @property
    def is_result(self) -> bool:
        return self.text.startswith(RESULT)


@dataclass(frozen=True)
class Reply:
    """What the model writes, and the step of the script that it comes from."""

    text: str
    fallbacks: tuple[str, ...] = ()  # if a grammar bars `text`: thought and calls; then calls alone
    step: Step = field(default_factory=Step)


def reply_to(turns: Sequence[Turn], calls: Format) -> Reply:
    """The reply to a conversation: a summary or title if one is wanted, else the next step, or a
    last text after all steps. A script that cannot be read is reported in the reply."""
    try:
        steps, done = _find_script(turns)
    except BadScript as error:
        return Reply(f"Bad script: {error}")
    if _summary_wanted(turns):
        rest = "Nothing." if steps is None else script(*steps[done:])
        return Reply(f"<summary>\nThe steps so far are done. What is left: {rest}\n</summary>")
    if TOOLS not in _system(turns) and TITLE_WANTED.search(_system(turns)):
        return Reply('{"title": "A scripted title"}')
    if steps is None:
        asked = [turn.text for turn in turns if turn.role == "user" and not turn.is_result]
        return Reply(f"You said: {asked[-1][-80:] if asked else ''}")
    if done >= len(steps):
        results = (turn.text for turn in reversed(turns) if turn.is_result)
        last = next(results, "none").removeprefix(RESULT).removesuffix("\n</tool_response>")
        return Reply(f"All {len(steps)} steps are done. The last result: {last[-300:]}")
    step = steps[done]
    thought = f"<think>\n{step.think}\n</think>\n\n" if step.think else ""
    blocks = "\n".join(f"<tool_call>\n{calls(call)}\n</tool_call>" for call in step.calls)
    text = thought + "\n".join(filter(None, [step.text, blocks]))
    return Reply(text, (thought + blocks, blocks) if blocks else (), step)


def _find_script(turns: Sequence[Turn]) -> tuple[tuple[Step, ...] | None, int]:
    """The steps of the newest script (`None`: there is none), and how many of them are answered.
    Leading steps whose text stands beside the script in its own message count as answered."""
    for at, turn in reversed(list(enumerate(turns))):
        found = None if turn.is_result or turn.role == "system" else steps_in(turn.text)
        if found is not None:
            around = WRITTEN.sub("", turn.text)
            unquoted = (n for n, step in enumerate(found) if not step.say or step.say not in around)
            return found, _count_answered(found, next(unquoted, len(found)), turns[at + 1 :])
    return None, 0


def _count_answered(steps: Sequence[Step], done: int, turns: Sequence[Turn]) -> int:
    """Number of answered steps; `done`: those before `turns`. The words or calls of a step identify
    it. Other texts of the assistant (its thanks for a summary, what a client keeps of earlier
    turns) are not steps."""
    for turn in turns:
        if turn.role == "assistant" and done < len(steps):
            step = steps[done]
            called = bool(step.calls) and all(call.name in turn.text for call in step.calls)
            said = bool(step.say or not step.calls) and step.say in turn.text
            done += called or said
    return done


def _summary_wanted(turns: Sequence[Turn]) -> bool:
    asked = WRITTEN.sub("", turns[-1].text) if turns and not turns[-1].is_result else ""
    system = _system(turns)
    return any(words in asked for words in SUMMARY_WANTED) or (
        TOOLS not in system and bool(SUMMARISER.search(system))
    )


def _system(turns: Sequence[Turn]) -> str:
    return turns[0].text if turns and turns[0].role == "system" else ""


class ScriptedModel:
    """See `mlx_provider.LoadedModel`, which describes the methods. The keys and values of its one
    layer are token ids, in float32."""

    model = None
    kv_layouts: Sequence[str] = ("solo",)

    def __init__(self, tokenizer: HFTokenizer, info: ModelInfo, calls: Format) -> None:
        self.tokenizer = tokenizer
        self.info = info
        self._calls = calls
        self._start, self._end = (tokenizer.fast.token_to_id(text) for text in (TURN, TURN_END))
        self._cached_reply = lru_cache(CACHED)(self._reply_to)
        self._cached_encode = lru_cache(CACHED)(self._encode)
        closers = np.zeros(info.vocab_size, np.float32)
        for place, text in enumerate(CLOSERS):
            closers[self._encode(text)[0]] = CLOSER_LOGIT - place
        self._closer_logits = mx.array(closers)

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]],
        media: Sequence[MediaItem], variables: Mapping[str, Any],
    ) -> Prompt:  # fmt: skip
        if media:
            raise BadRequest("a scripted model takes text only", param="messages")
        return self.tokenizer.render(messages, tools, variables)

    def embed(self, span: MediaSpan) -> Features:
        raise BadRequest("a scripted model takes text only", param="messages")

    def make_cache(self) -> list[Any]:
        return [KVCache()]

    def prefill(self, chunk: PrefillChunk) -> mx.array:
        whole = np.array(chunk.prompt.tokens, dtype=np.int64)
        step, stop = self._reply_for(whole).step, chunk.stop / len(whole)
        if step.since:  # prompts of one engine wait side by side, and not one after another
            time.sleep(max(0.0, step.since + step.prefill * stop - time.time()))
        else:
            time.sleep(step.prefill * (stop - chunk.start / len(whole)))
        history = self._append_to_cache(mx.array(whole[chunk.start : chunk.stop]), chunk.cache)
        return self._logits(history) if chunk.stop == len(whole) else self._closer_logits

    def decode(
        self, tokens: mx.array, cache: list[Any], positions: mx.array,
        logits_at: mx.array | None = None,
    ) -> mx.array:  # fmt: skip
        history = self._append_to_cache(tokens, cache)
        time.sleep(self._reply_for(history).step.slow)
        return self._logits(history)[None]

    def _append_to_cache(self, tokens: mx.array, cache: list[Any]) -> Tokens:
        """Append, and return all tokens of the cache."""
        added = tokens.astype(mx.float32).reshape(1, 1, -1, 1)
        keys, _ = cache[0].update_and_fetch(added, added)
        return np.array(keys.astype(mx.float32).reshape(-1)).astype(np.int64)

    def _logits(self, history: Tokens) -> mx.array:
        logits = self._closer_logits
        ids = mx.arange(self.info.vocab_size)
        for token, logit in self._candidates(history):
            logits = mx.where(ids == token, logit, logits)
        return logits

    def _candidates(self, history: Tokens) -> list[tuple[int, float]]:
        """Tokens that may be next, with logits. Of one token twice, the last logit counts."""
        turn = tuple(history[self._last_turn(history) :].tolist())
        head = self._cached_encode(f"{TURN}assistant\n")
        if turn[: len(head)] != head:
            return [(self._end, SCRIPTED_LOGIT)]
        said, reply = turn[len(head) :], self._reply_for(history)
        found = [(self._end, END_LOGIT)]
        texts = (reply.text, *reply.fallbacks)
        for factor, text in reversed([*zip(FALLBACK_FACTORS, texts, strict=False)]):
            found += [(token, logit * factor) for token, logit in self._continuations(text, said)]
        return found

    def _continuations(self, text: str, said: tuple[int, ...]) -> list[tuple[int, float]]:
        """Candidates with logits after `said`, the best one last: two characters (see
        `CHARACTER_LOGITS`), then the next token of `text`. Empty: `text` does not begin so."""
        whole = self._cached_encode(text)
        if whole[: len(said)] == said:
            left = whole[len(said) :]
            rest = self.tokenizer.decode(left, skip_special=False)
        else:
            after = rest_of(text, self.tokenizer.decode(said, skip_special=False))
            if after is None:
                return []
            rest, left = after, self._cached_encode(after)
        characters = zip((rest.lstrip()[:1], rest[:1]), CHARACTER_LOGITS, strict=True)
        found = [(self._cached_encode(char)[0], logit) for char, logit in characters if char]
        return [*found, ((*left, self._end)[0], SCRIPTED_LOGIT)]

    def _reply_for(self, history: Tokens) -> Reply:
        """The reply that the last turn has begun: the tokens before that turn decide."""
        return self._cached_reply(history[: self._last_turn(history)].tobytes())

    def _last_turn(self, history: Tokens) -> int:
        """The place where the last turn starts."""
        starts = np.flatnonzero(history == self._start)
        return int(starts[-1]) if len(starts) else 0

    def _reply_to(self, tokens: bytes) -> Reply:
        ids = np.frombuffer(tokens, dtype=np.int64)
        starts = np.flatnonzero(ids == self._start)
        return reply_to([self._turn(turn) for turn in np.split(ids, starts)[1:]], self._calls)

    def _turn(self, ids: Tokens) -> Turn:
        text = self.tokenizer.decode(ids.tolist(), skip_special=False)
        role, _, said = text.removeprefix(TURN).rstrip("\n").removesuffix(TURN_END).partition("\n")
        return Turn(role, said)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, special=False))


def rest_of(text: str, said: str) -> str | None:
    """The rest of a text after its beginning `said`, with differences in white space ignored.
    `None`: the text begins differently."""
    if text.startswith(said):
        return text[len(said) :]
    unread, end = iter(enumerate(text)), 0
    for letter in filter(lambda letter: not letter.isspace(), said):
        end, found = next(((i + 1, c) for i, c in unread if not c.isspace()), (0, ""))
        if found != letter:
            return None
    return text[end:].lstrip() if said[-1:].isspace() else text[end:]
