"""Recognises a causal reranker, by the first of three signs.

1. `modules.json` lists a `LogitScore` (sentence-transformers 6.2, `cross_encoder/modules/
   logit_score.py`), whose `config.json` names the tokens.
2. The chat template has the roles `query` and `document`.
3. The folder's name has `reranker` in it.

Without a template with roles, the prompt is the one that the model's family knows; a model of a
family that knows none is no reranker. Without a `LogitScore`, the tokens are `yes` and `no`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..records import Judge, Reranking
from .checkpoint import read_json, read_modules
from .tokenizer import HFTokenizer

NAMED = "reranker"
MARKS = ("first of two", "second of them")
"""Texts with which the roles of a template are tried."""

Content = Callable[[str], Any]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RerankerPrompt:
    """Prompt of a family's rerankers whose chat template has no roles for query and document."""

    messages: Judge
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template."""


NO_PROMPTS: Mapping[str, RerankerPrompt] = {}


def reranking_of(
    folder: Path, tokenizer: HFTokenizer, prompt: RerankerPrompt | None = None
) -> Reranking | None:
    """How the model of a folder scores documents. `None`: it is none, or files are broken."""
    try:
        return _read(folder, tokenizer, prompt)
    except BadRequest:
        return None


def _read(folder: Path, tokenizer: HFTokenizer, prompt: RerankerPrompt | None) -> Reranking | None:
    listed = _listed(folder)
    content = _content_of_roles(tokenizer)
    if content is not None:
        prompt = RerankerPrompt(partial(_in_roles, content))
    elif listed is None and NAMED not in _name(folder):
        return None
    yes, no = listed or (tokenizer.fast.token_to_id("yes"), tokenizer.fast.token_to_id("no"))
    if prompt is None or yes is None or (listed is None and no is None):
        return None
    messages = partial(_instructed, prompt.messages, _default_instruction(folder))
    return Reranking(messages, yes, no, prompt.variables)


def _listed(folder: Path) -> tuple[int, int | None] | None:
    """The tokens of a `LogitScore`."""
    for each in read_modules(folder):
        if str(each.get("type")).endswith(".LogitScore"):
            tokens = read_json(folder / Path(str(each.get("path"))).name / "config.json")
            yes, no = tokens.get("true_token_id"), tokens.get("false_token_id")
            if type(yes) is int:
                return yes, no if type(no) is int else None
    return None


def _name(folder: Path) -> str:
    """The model's name. In the Hub's cache, a folder above has it."""
    above = (part for part in folder.parts if part.startswith("models--"))
    return " ".join((folder.name, *above)).lower()


def _content_of_roles(tokenizer: HFTokenizer) -> Content | None:
    """The form of a content that the template shows in both roles. `None`: it has no such roles."""
    template = tokenizer.chat_template or ""
    if not all(re.search(rf"""['"]{role}['"]""", template) for role in ("query", "document")):
        return None
    return next((form for form in (str, _parts) if _shows_roles(tokenizer, form)), None)


def _shows_roles(tokenizer: HFTokenizer, content: Content) -> bool:
    try:
        text = tokenizer.apply_template(_in_roles(content, *MARKS, None), [], {}, probe="cached")
    except BadRequest:
        return False
    return all(text.count(mark) == 1 for mark in MARKS)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_roles(content: Content, query: str, document: str, instruction: str | None) -> Messages:
    first = [{"role": "system", "content": content(instruction)}] if instruction else []
    turns = (("query", query), ("document", document))
    return [*first, *({"role": role, "content": content(text)} for role, text in turns)]


def _instructed(
    judge: Judge, default: str | None, query: str, document: str, instruction: str | None
) -> Messages:
    return judge(query, document, default if instruction is None else instruction)


def _default_instruction(folder: Path) -> str | None:
    """The default prompt of the files of sentence-transformers."""
    found = read_json(folder / "config_sentence_transformers.json")
    prompts, name = found.get("prompts"), found.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    return text if isinstance(text, str) and text else None
