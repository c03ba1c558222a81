"""The prompt of Qwen3-Reranker, as its published code writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_provider.families.reranking import RerankerPrompt

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
ASKED = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def asked(query: str, document: str, instruction: str | None) -> Sequence[Mapping[str, Any]]:
    told = INSTRUCTION if instruction is None else instruction
    return [
        {"role": "system", "content": JUDGE},
        {"role": "user", "content": ASKED.format(told, query, document)},
    ]


PROMPTS = {"qwen3": RerankerPrompt(asked, {"enable_thinking": False})}
"""By `model_type`."""
