"""Log-probabilities of prompt tokens, computed during the prefill."""

from __future__ import annotations

import mlx.core as mx

from ..errors import RequestFailed
from ..protocol.events import TokenLogprob
from ..records import LoadedModel, PrefillChunk, ShowsLogits
from .execution.decode_batch import read_logprobs
from .execution.sampler import scored
from .request import Request
from .step_output import TokenNames


def prompt_logprobs(
    model: LoadedModel, chunk: PrefillChunk, request: Request, names: TokenNames
) -> tuple[list[TokenLogprob], mx.array]:
    """Append a chunk. Returns the prompt tokens that its logits predict, and logits (vocab,) after
    its last token. The first chunk includes the first token of the prompt. A restarted prefill
    sends no token again."""
    if not isinstance(model, ShowsLogits):
        raise RequestFailed("the model does not tell how likely a prompt's tokens were")
    tokens, logits = chunk.prompt.tokens, model.prefill_logits(chunk)
    following = list(tokens[chunk.start + 1 : chunk.stop + 1])
    drawn = scored(logits[: len(following)], mx.array(following, dtype=mx.int32), request.rows[0])
    found = read_logprobs(drawn) if following else {}
    described_tokens = [names.described(token, found[at]) for at, token in enumerate(following)]
    whole = [names.given(tokens[0]), *described_tokens] if chunk.start == 0 else described_tokens
    ends = chunk.start + 1 + len(following)
    new = max(0, ends - request.prompt_logprobs_sent)
    request.prompt_logprobs_sent += new
    return whole[len(whole) - new :], logits[-1]
