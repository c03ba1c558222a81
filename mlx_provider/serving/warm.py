"""The operator's warm prompts as requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocol.options import WarmPrompt
from ..protocol.requests import GenerateRequest
from ..protocol.sampling import Sampling


def warm_requests(
    first: GenerateRequest, given: Sequence[str | WarmPrompt]
) -> list[GenerateRequest]:
    options = first.options.model_copy(update={"warm": []})
    prompts = [
        WarmPrompt(messages=[{"role": "system", "content": each}])
        if isinstance(each, str)
        else each
        for each in given
    ]
    return [
        GenerateRequest(
            model=first.model,
            messages=_with_user(prompt.messages),
            tools=prompt.tools,
            max_tokens=1,
            sparse_prefill=False,
            sampling=Sampling(temperature=0),
            template=first.template,
            origin=first.origin,
            tenant=first.tenant,
            account=first.account,
            share=first.share,
            options=options,
        )
        for prompt in prompts
    ]


def _with_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds a user message: a template may refuse a conversation without one."""
    if messages and messages[-1].get("role") == "system":
        return [*messages, {"role": "user", "content": "."}]
    return messages
