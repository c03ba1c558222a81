"""A smaller model that drafts for a larger one: greedily, with one pass of all rows for each draft
of a row. It reads up to `LONGEST` of a row's last tokens, in pieces between the larger model's
steps, into a cache that can remove rejected drafts. Rows whose caches would exceed `KV_BYTES` get
no drafts until another row has ended."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakSet

import mlx.core as mx

from mlx_provider import BadRequest, LoadOptions, PrefillChunk, Prompt
from mlx_provider.errors import MLXProviderError
from mlx_provider.families.caches import KVCache, PackedRows, RotatingKVCache
from mlx_provider.families.checkpoint import known_to_mlx_lm, read_json
from mlx_provider.families.text import TextModel, load_text
from mlx_provider.records import DeviceTokens, DraftRow

from .prompt_scoring import ScoringModel, token_bytes

LONGEST = 4096  # last tokens of a row that are read
MIN_WINDOW_TOKENS = 256  # with a shorter window, a model does not draft
AHEAD = 8  # tokens that one call adds: a row's new one and its drafts
PIECE = 256  # prompt tokens per call: about a step of the larger model
KV_BYTES = 2**31  # limit of all rows' caches; the cache of one row is always allowed
KV_SHARE = 4  # these caches take at most 1/4 of the memory for a draft model and its rows
AGREED = 0.99  # least share of tokens with equal ids in both models: releases differ in a few
NONE_GIVEN = "it needs a smaller model of the same vocabulary: name its folder (draft_model)"


def longest(cache: Sequence[Any]) -> int:
    """Number of tokens, at most `LONGEST`, up to which this row cache can remove its last ones. A
    window can until it has wrapped (mlx_lm/models/cache.py 0.32.2). 0: it never can."""
    kinds = {type(layer) for layer in cache}
    windows = [layer.max_size for layer in cache if isinstance(layer, RotatingKVCache)]
    least = min([LONGEST, *windows])
    return least if kinds <= {KVCache, RotatingKVCache} and least >= MIN_WINDOW_TOKENS else 0


class RowContext:
    """The smaller model's cache for one row, and the tokens in it."""

    def __init__(self, cache: list[Any]) -> None:
        self.cache = cache
        self.begin = 0  # index in the row of the cache's first token
        self.known = 0  # tokens of the row, from its first on, that need no reading
        self.guessed: Sequence[int] = ()
        """The last drafts. All but the last one are in the cache, after the known tokens."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Keep the drafts that the row (`tokens`) has accepted, and remove the others. The row's
        last token is not known afterwards: it must be read (again)."""
        cached = max(0, len(self.guessed) - 1)
        new = tokens[self.known : self.known + cached]
        pairs = enumerate(zip(new, self.guessed, strict=False))
        accepted = next((i for i, (token, guess) in pairs if guess != token), len(new))
        known = min(self.known + accepted, len(tokens) - 1)
        for layer in self.cache:
            layer.trim(self.known + cached - known)
        self.known, self.guessed = known, ()

    def start_again(self, cache: list[Any], begin: int) -> None:
        """Continue with an empty cache, from the token at index `begin` on."""
        self.cache, self.begin, self.known, self.guessed = cache, begin, begin, ()


DraftedRow = tuple[DraftRow, RowContext]


class DraftModel(ScoringModel):
    """The drafter `model`, a `Drafting`. `kv_bytes`: the maximum of its caches."""

    def __init__(
        self, model: TextModel, vocab: int, *, context: int | None = None, kv_bytes: int = KV_BYTES
    ) -> None:
        """`vocab`: of the larger model; `context`: maximum tokens of a row that are read."""
        super().__init__(model, vocab)
        self._context = min(longest(model.make_cache()), context or model.info.context_length)
        each = self._context * token_bytes(model, KVCache, RotatingKVCache)
        self._max_contexts = max(1, kv_bytes // each)
        self.kv_bytes = self._max_contexts * each
        self._contexts: WeakSet[RowContext] = WeakSet()
        self._together = "grouped" in model.kv_layouts  # else attention takes no separate rows

    def propose(self, rows: Sequence[DraftRow]) -> list[Sequence[int] | None]:
        contexts = [self._context_of(row) for row in rows]
        left, ready = PIECE, list[DraftedRow]()
        for row, context in zip(rows, contexts, strict=True):
            if context is not None:
                left -= self._read(row, context, left)
                if len(row.tokens) - context.known <= AHEAD:
                    ready.append((row, context))
        ready.sort(key=lambda drafted: -drafted[0].wanted)
        parts = [ready] if self._together else [[drafted] for drafted in ready]
        drafts = {row_id: found for part in parts for row_id, found in self._guess(part).items()}
        return [
            () if context is None else drafts.get(id(row))  # `None`: not read yet, ask again
            for row, context in zip(rows, contexts, strict=True)
        ]

    def _context_of(self, row: DraftRow) -> RowContext | None:
        """The row's context, without rejected drafts. `None`: no memory for another one."""
        context: RowContext | None = row.state
        if context is None:
            if len(self._contexts) >= self._max_contexts:
                return None
            context = row.state = RowContext(self._model.make_cache())
            self._contexts.add(context)
        context.follow(row.tokens)
        if len(row.tokens) + AHEAD - context.begin > self._context:
            context.start_again(self._model.make_cache(), len(row.tokens) - self._context // 2)
        return context

    def _read(self, row: DraftRow, context: RowContext, most: int) -> int:
        """If more than `AHEAD` tokens are unread, read up to `most` of them. Returns how many."""
        gap = len(row.tokens) - context.known
        count = min(gap - 1, most) if gap > AHEAD else 0
        if count:
            last = self._model.info.vocab_size - 1
            piece = row.tokens[context.known : context.known + count]
            prompt = Prompt([min(token, last) for token in piece])
            mx.eval(self._model.prefill(PrefillChunk(prompt, 0, count, context.cache)))
            context.known += count
        return count

    def _guess(self, ready: Sequence[DraftedRow]) -> dict[int, DeviceTokens]:
        """Drafts by `id(row)`. `ready`: rows with the most drafts first."""
        if not ready:
            return {}
        contexts = [context for _, context in ready]
        new = [row.tokens[context.known :] for row, context in ready]
        tokens = mx.array([token for row in new for token in row], mx.int32)
        guesses = [self._best(contexts, tokens, [*map(len, new)])]
        for done in range(1, ready[0][0].wanted):
            going = [context for row, context in ready if row.wanted > done]
            guesses.append(self._best(going, guesses[-1][: len(going)], [1] * len(going)))
        found = {}
        for i, (row, context) in enumerate(ready):
            drafts = mx.concatenate([guess[i : i + 1] for guess in guesses[: row.wanted]])
            found[id(row)] = DeviceTokens(drafts)
            context.known, context.guessed = len(row.tokens), found[id(row)]
        return found

    def _best(
        self, contexts: Sequence[RowContext], tokens: mx.array, counts: Sequence[int]
    ) -> mx.array:
        """Most likely next tokens, (rows,) int32. `counts`: new tokens of each row."""
        logits = self._pass([context.cache for context in contexts], tokens, counts)
        best = mx.argmax(logits[:, : self._shared], axis=-1).astype(mx.int32)
        mx.async_eval(best)  # type: ignore[no-untyped-call]
        return best

    def _pass(
        self, caches: Sequence[list[Any]], tokens: mx.array, counts: Sequence[int]
    ) -> mx.array:
        """Append `counts` tokens to each row's cache. Returns logits (rows, vocab) after them."""
        known = mx.minimum(tokens, self._model.info.vocab_size - 1)
        if len(caches) == 1:
            found: mx.array = self._model.model(known[None], cache=caches[0])
            return found[:, -1]
        starts = [cache[0].offset for cache in caches]
        places = [range(at, at + count) for at, count in zip(starts, counts, strict=True)]
        positions = mx.array([place for row in places for place in row], mx.int32)
        last = mx.array([end - 1 for end in accumulate(counts)], mx.int32)
        packed = [PackedRows(layer, counts, positions) for layer in zip(*caches, strict=True)]
        return self._model.decode(known, packed, positions, last)


def refusal(folder: Path, draft: Path | None, room: int | None = None) -> str:
    """Why the model in `draft` cannot draft for `folder`; empty: it can. `room`: bytes."""
    if draft is None:
        return NONE_GIVEN
    weights = _weights_bytes(draft)
    if room is not None and weights > room:
        return f"the weights in {draft} are {weights} bytes, there is room for {max(0, room)}"
    try:
        if not known_to_mlx_lm(read_json(draft / "config.json")):
            return f"{draft} holds no text model that mlx-lm has a class for"
        return _unlike(vocabulary(folder), vocabulary(draft))
    except MLXProviderError as error:
        return error.message


def load_draft_model(
    draft: Path | None, vocab: int, room: int | None = None, *, scores: bool = False
) -> ScoringModel:
    """`vocab`: of the larger model. `room`: bytes; `None`: no limit. `scores`: a model that can
    only score prompts is accepted. Raises `BadRequest` for a model that cannot draft."""
    if draft is None:
        raise BadRequest(NONE_GIVEN, param="draft_model")
    model = load_text(draft, LoadOptions(dtype=_dtype(draft, room)))
    if not longest(model.make_cache()):
        if scores:
            return ScoringModel(model, vocab)
        why = "keeps states, or windows too short, of which the last tokens cannot be taken back"
        raise BadRequest(f"{draft} cannot draft: its cache {why}", param="draft_model")
    most = KV_BYTES if room is None else min(KV_BYTES, room // KV_SHARE)
    return DraftModel(model, vocab, kv_bytes=most)


def _dtype(draft: Path, room: int | None) -> str | None:
    """float32 on a CPU, where narrower weights are many times slower, if half of `room` has it."""
    quantised = read_json(draft / "config.json").get("quantization")
    bits = quantised.get("bits", 16) if isinstance(quantised, dict) else 16
    fits = room is None or 2 * _weights_bytes(draft) * 32 <= room * bits
    return "float32" if fits and mx.default_device() == mx.cpu else None


def _weights_bytes(draft: Path) -> int:
    return sum(path.stat().st_size for path in draft.glob("*.safetensors"))


def vocabulary(folder: Path) -> dict[str, int]:
    """Token ids from tokenizer.json. Raises `BadRequest`."""
    path = folder / "tokenizer.json"
    content = read_json(path)
    model = content.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    if not listed:
        raise BadRequest(f"{path} names no tokens", param="draft_model")
    if isinstance(listed, list):  # Unigram: [token, score]
        listed = {token: number for number, (token, *_) in enumerate(listed)}
    added: list[dict[str, Any]] = content.get("added_tokens") or []
    return {**listed, **{token["content"]: token["id"] for token in added}}


def _unlike(some: dict[str, int], others: dict[str, int]) -> str:
    """Why two vocabularies are too different; empty: they are not."""
    most = max(len(some), len(others))
    agreed = len(some.items() & others.items())
    if agreed >= AGREED * most:
        return ""
    return f"of {most:,} tokens the two models have {agreed:,} in common, {AGREED:.0%} are needed"
