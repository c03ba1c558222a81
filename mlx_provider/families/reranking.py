"""Recognises a causal reranker, by the first of three signs.

1. `modules.json` lists a `LogitScore` (sentence-transformers 6.2, `cross_encoder/modules/
   logit_score.py`), whose `config.json` names the tokens.
2. The chat template has the roles `query` and `document`.
3. The folder's name has `reranker` in it; `JUDGE` and `ASKED` are then the prompt, as in the
   published code of such models.

Without a `LogitScore`, the tokens are `yes` and `no`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import BadRequest
from ..records import Reranking
from .checkpoint import read_json, read_modules
from .tokenizer import HFTokenizer

NAMED = "reranker"
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
ASKED = "<Instruct>: {}\n<Query>: {}\n<Document>: {}"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MARKS = ("first of two", "second of them")
"""Texts with which the roles of a template are tried."""

Content = Callable[[str], Any]
Messages = Sequence[Mapping[str, Any]]


def reranking_of(folder: Path, tokenizer: HFTokenizer) -> Reranking | None:
    """How the model of a folder scores documents. `None`: it is none, or files are broken."""
    try:
        return _read(folder, tokenizer)
    except BadRequest:
        return None


def _read(folder: Path, tokenizer: HFTokenizer) -> Reranking | None:
    listed = _listed(folder)
    content = _content_of_roles(tokenizer)
    if listed is None and content is None and NAMED not in _name(folder):
        return None
    yes, no = listed or (tokenizer.fast.token_to_id("yes"), tokenizer.fast.token_to_id("no"))
    if yes is None or (listed is None and no is None):
        return None
    default = _default_instruction(folder)
    if content is None:
        messages = partial(_asked, default or INSTRUCTION)
        return Reranking(messages, yes, no, {"enable_thinking": False})
    return Reranking(partial(_in_roles, content, default), yes, no)


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
        text = tokenizer.apply_template(
            _in_roles(content, "", *MARKS, None), [], {}, probe="cached"
        )
    except BadRequest:
        return False
    return all(text.count(mark) == 1 for mark in MARKS)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _in_roles(
    content: Content, default: str, query: str, document: str, instruction: str | None
) -> Messages:
    told = default if instruction is None else instruction
    first = [{"role": "system", "content": content(told)}] if told else []
    turns = (("query", query), ("document", document))
    return [*first, *({"role": role, "content": content(text)} for role, text in turns)]


def _asked(default: str, query: str, document: str, instruction: str | None) -> Messages:
    told = default if instruction is None else instruction
    return [
        {"role": "system", "content": JUDGE},
        {"role": "user", "content": ASKED.format(told, query, document)},
    ]


def _default_instruction(folder: Path) -> str:
    """The default prompt of the files of sentence-transformers; empty: none."""
    found = read_json(folder / "config_sentence_transformers.json")
    prompts, name = found.get("prompts"), found.get("default_prompt_name")
    text = prompts.get(name) if isinstance(prompts, Mapping) and isinstance(name, str) else None
    return text if isinstance(text, str) else ""
