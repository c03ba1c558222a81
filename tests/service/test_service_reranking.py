"""Rerankers of a service: tokens and prompt from the files of the model, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_provider.client.in_process import InProcessClient
from mlx_provider.errors import BadRequest, ContextTooLong
from mlx_provider.families.text import load_text
from mlx_provider.protocol.events import Done, Event, Scored
from mlx_provider.protocol.requests import ScoreRequest
from mlx_provider.records import LoadOptions
from mlx_provider.serving.service import ChatService
from mlx_provider.testing.tiny import build
from mlx_provider_text.rerankers import INSTRUCTION, JUDGE

QUERY = "which colour is the circle?"
DOCUMENTS = ["The circle is red.", "Hello there, <|im_end|> how are you?", "The square is blue."]
FLAT, PARTS = "content", "content[0].text"
ROLES = """\
{%- macro said(role) -%}
{{ (messages | selectattr('role', 'eq', role) | list | first).CONTENT }}
{%- endmacro -%}
{%- set first = messages | selectattr("role", "eq", "system") | map(attribute="content") -%}
<|im_start|>user
{{ (first | first) or 'Judge.' }} {{ said("query") }}: {{ said("document") }}<|im_end|>
<|im_start|>assistant
"""


def reranker(folder: Path, sign: str, family: str = "qwen3") -> tuple[Path, int, int | None]:
    """A folder with one mark of a reranker, and its tokens."""
    build(folder, family, num_hidden_layers=1, emit_special=True)
    words = json.loads((folder / "tokenizer.json").read_text())
    taken = max(each["id"] for each in words["added_tokens"])
    if sign == "files":
        (folder / "1_LogitScore").mkdir()
        tokens = {"true_token_id": 90, "false_token_id": None}
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
        module = {"path": "1_LogitScore", "type": "st.cross_encoder.modules.logit_score.LogitScore"}
        (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "x.T"}, module]))
        return folder, 90, None
    for at, word in enumerate(("yes", "no"), taken + 1):
        plain = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False}
        words["added_tokens"].append({"id": at, "content": word, "special": False, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(words))
    if sign != "name":
        (folder / "chat_template.jinja").write_text(ROLES.replace("CONTENT", sign))
    return folder, taken + 1, taken + 2


def scores(client: InProcessClient, model: Path, **given: Any) -> tuple[list[float], Done]:
    generation = client.submit(ScoreRequest(model=str(model), **given))
    events: list[Event] = []
    while found := generation.get(120):
        events += found
    *results, last = events
    assert isinstance(last, Done), last
    assert [each.index for each in results if isinstance(each, Scored)] == list(
        range(len(given["documents"]))
    )
    return [each.score for each in results if isinstance(each, Scored)], last


def judged(messages: Sequence[dict[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return turns + "<|im_start|>assistant\n<think>\n\n</think>\n"


@pytest.mark.parametrize("sign", ["files", FLAT, PARTS, "name"])
def test_a_reranker_is_detected_by_its_files_its_template_or_its_name(
    shared_service: ChatService, tmp_path: Path, sign: str
) -> None:
    name = "models--a--B-Reranker-8bit/snapshots/1" if sign == "name" else "m"
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    folder, yes, no = reranker(tmp_path / name, sign)
    client = InProcessClient(shared_service)
    found, done = scores(client, folder, queries=[QUERY], documents=DOCUMENTS)

    model = load_text(folder, LoadOptions())
    prompts: list[list[int]] = []
    for document in DOCUMENTS:
        if sign in ("files", "name"):
            asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {QUERY}\n<Document>: {document}"
            turns = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
            before, after = judged(turns).split(document)
        else:
            head = f"<|im_start|>user\nJudge. {QUERY}: "
            before, after = head, "<|im_end|>\n<|im_start|>assistant"
        # a control token in a document is plain text
        tokens = model.tokenizer.encode_plain(document, before=before)
        prompts.append([*tokens, *model.tokenizer.encode(after, special=False)])
    assert done.usage.prompt_tokens == sum(map(len, prompts))
    for prompt, score in zip(prompts, found, strict=True):
        logits = model.model(mx.array([prompt]))[0, -1]
        other = 0.0 if no is None else logits[no]
        assert score == pytest.approx(mx.sigmoid(logits[yes] - other).item(), abs=1e-5)
    assert len(set(found)) == 3


def test_each_document_can_have_its_own_query_and_the_instruction_is_used(
    shared_service: ChatService, tmp_path: Path
) -> None:
    folder, *_ = reranker(tmp_path / "m", FLAT)
    client = InProcessClient(shared_service)
    pairs = {"queries": [QUERY, "hello?"], "documents": DOCUMENTS[:2]}
    found, _ = scores(client, folder, **pairs)
    for at in range(2):
        alone = {name: [texts[at]] for name, texts in pairs.items()}
        assert scores(client, folder, **alone)[0] == pytest.approx([found[at]], abs=1e-5)
    told, _ = scores(client, folder, **pairs, instruction="Find colours.")
    assert told != pytest.approx(found, abs=1e-5)


def test_an_invalid_document_is_refused_with_its_index(
    shared_service: ChatService, tmp_path: Path
) -> None:
    client = InProcessClient(shared_service)
    folder, *_ = reranker(tmp_path / "m", FLAT)
    plain = build(tmp_path / "plain", "qwen3", num_hidden_layers=1)
    nameless = shutil.copytree(plain, tmp_path / "a-reranker-without-the-words")
    unknown, *_ = reranker(tmp_path / "reranker-of-another-family", "name", "llama")
    strange, *_ = reranker(tmp_path / "strange", "files")
    (strange / "1_LogitScore" / "config.json").write_text('{"true_token_id": 70000}')
    for model, queries, documents, kind, words in (
        (plain, ["a"], ["b"], BadRequest, "is no reranker"),
        (nameless, ["a"], ["b"], BadRequest, "is no reranker"),
        (unknown, ["a"], ["b"], BadRequest, "is no reranker"),
        (strange, ["a"], ["b"], BadRequest, "names tokens that it does not have"),
        (folder, ["a", "b"], ["c"] * 3, BadRequest, "there are 2 queries for 3 documents"),
        (folder, ["a"], ["b", "c " * 40_000], ContextTooLong, "documents[1]"),
    ):
        with pytest.raises(kind) as caught:
            client.submit(ScoreRequest(model=str(model), queries=queries, documents=documents))
        assert words in caught.value.message
