"""The checks of one model: files, memory, chat template, formats, and one token through a real
proxy. `model_checks` in `__init__.py` lists them; if a check raises, its error becomes a finding
that fails. `Finding.of` with an empty problem gives a finding that is `ok`."""

import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from ..chat.output.whole_reply import read_chunks
from ..config import PREFIX
from ..families.checkpoint import known_to_mlx_lm, known_to_mlx_vlm, named_context, text_fields
from ..families.tokenizer import template_probe as probe
from ..families.tokenizer.hf_tokenizer import common_length
from ..families.tokenizer.template import fit_messages
from ..gateway.config import proxy_config, write_config
from ..gateway.engine import end_when
from ..gateway.models import device_memory, request_memory
from ..gateway.proxy import start_proxy
from ..logs import format_size
from ..serving.estimate import Footprint, context_that_fits, footprint
from ..serving.hub import full_name
from ..serving.weight_files import broken_files, stored_tensors
from .subject import Finding, State, Subject

AGENT_CONTEXT = 32_768
"""Least context for a coding agent: its tools alone take 7,000 to 20,000 tokens."""
REMEDY_MEMORY = (
    "take a smaller or more quantised model, set model_info.mlx.kv_bits: 8, close other "
    f"programs, or raise {PREFIX}MEMORY_LIMIT"
)
REMEDY_TEMPLATE = "take another conversion, or put its maker's chat_template.jinja beside it"
REMEDY_HEAD = (
    "take a conversion that keeps it (tensors `mtp.*`), or set model_info.mlx: {drafter: model, "
    "draft_model: <folder>}"
)
REMEDY_PARSER = "name a format that fits with model_info.mlx.tool_parser, or mend its parser"
REMEDY_PROXY = "see `mlx-provider engine logs`"
PROXY_MODEL = "examined"
TOKEN_SECONDS = 600.0
"""Limit for one token, the load of a large model included."""
HEAD = re.compile(r"(?:^|\.)mtp\.")  # multi-token prediction
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NOT_TEXT = re.compile(r"visual|vision|audio|encoder")
"""In names of tensors that text tokens do not use."""


def check_location(subject: Subject) -> Iterator[Finding]:
    if subject.folder is not None:
        yield Finding("model.found", "ok", f"{subject.model} is in {subject.folder}")
    elif subject.model is not None:
        weights = format_size(subject.checkpoint.weight_bytes)
        summary = f"{subject.model} is on the Hub: the first request downloads {weights}"
        yield Finding("model.found", "note", summary)


def check_files(subject: Subject) -> Iterator[Finding]:
    if subject.folder is None:
        return
    problems = broken_files(subject.folder)
    if not stored_tensors(subject.folder):
        problems.append("no weights (*.safetensors)")
    for problem in problems:
        yield Finding("model.files", "fail", f"{subject.folder}: {problem}", "download it again")
    if not problems:
        yield Finding("model.files", "ok", "the weights are whole")


def check_family(subject: Subject) -> Iterator[Finding]:
    if subject.model is None:
        return
    config = subject.checkpoint.config
    chosen, plugin = subject.registry.family_for(config)
    summary = f"family {chosen.name} of plugin {plugin.name} serves {config.get('model_type')}"
    yield Finding("model.family", "ok", summary)


def check_memory(subject: Subject) -> Iterator[Finding]:
    if subject.model is None:
        return
    config, weights = subject.checkpoint.config, subject.checkpoint.weight_bytes
    native = named_context(text_fields(config))
    memory = request_memory(device_memory(subject.environ))
    known = known_to_mlx_lm(config) or known_to_mlx_vlm(config)
    needed = footprint(config, weights) if known else Footprint(weights, 0, 0)
    fits = context_that_fits(needed, memory, native)
    length = f"{fits:,} tokens" if fits < sys.maxsize else "any length"
    sizes = f"weights take {format_size(weights)} of {format_size(memory)}"
    cache = f"the KV cache takes {needed.kv_per_token:,} bytes per token"
    summary = f"{sizes}, and {cache}: a context of {length} fits"
    if weights > memory:
        summary = f"{format_size(weights)} of weights do not fit into {format_size(memory)}"
        yield Finding("model.memory", "fail", summary, REMEDY_MEMORY)
    elif not known:
        summary = f"{sizes}; only the plugin of its family knows the size of the KV cache"
        yield Finding("model.memory", "note", summary)
    elif fits < min(AGENT_CONTEXT, native or AGENT_CONTEXT):
        summary += ": too few for coding agents"
        yield Finding("model.memory", "warn", summary, REMEDY_MEMORY)
    elif native and fits < native:
        yield Finding("model.memory", "note", f"{summary}; the model supports {native:,}")
    elif native and native < AGENT_CONTEXT:
        summary += f", as the model supports; coding agents need {AGENT_CONTEXT:,} or more"
        yield Finding("model.memory", "note", summary)
    else:
        yield Finding("model.memory", "ok", summary)


def check_formats(subject: Subject) -> Iterator[Finding]:
    if subject.folder is None:
        return
    if subject.tokenizer is None:
        summary = "the model has no chat template: only text completions are of use"
        remedy = "put the chat_template.jinja of the model's maker into its folder"
        yield Finding("model.formats", "fail", summary, remedy)
        return
    template, registry = subject.tokenizer.chat_template or "", subject.registry
    parser, problem = registry.detect_tool_parser(template), ""
    if parser is None:
        parser = registry.fallback_tool_parser("read")  # of a format that nobody knows
        name = parser.name if parser else "nobody"
        problem = f"the chat template shows no known tool format: calls are read by {name}"
    summary = f"tool calls are read as {parser.name}" if parser else ""
    remedy = "name one with model_info.mlx.tool_parser (`mlx-provider plugins` lists them)"
    yield Finding.of("model.tool_parser", problem, summary, remedy, "warn")
    thoughts, problem = registry.detect_reasoning_parser(template), ""
    if thoughts is None and "reasoning_content" in template:
        problem = "the template writes thoughts, but no parser knows its format"
    summary = f"thoughts are read as {thoughts.name}" if thoughts else "the model shows no thoughts"
    remedy = "name one with model_info.mlx.reasoning_parser, or write a plugin for it"
    yield Finding.of("model.reasoning_parser", problem, summary, remedy, "warn")


def check_messages(subject: Subject) -> Iterator[Finding]:
    """Whether all texts reach the prompt, and a later turn begins with the text of the first."""
    if (tokenizer := subject.tokenizer) is None:
        return
    texts = (("user", probe.ASKED), ("assistant", probe.SAID), ("user", probe.AGAIN))
    turns = [{"role": role, "content": text} for role, text in texts]
    first, later = (
        tokenizer.apply_template(fit_messages(turns[:count], tokenizer.form), [], {})
        for count in (1, 3)
    )
    problem = ""
    state: State = "warn"
    if probe.ASKED not in first or not all(turn["content"] in later for turn in turns):
        problem, state = "the chat template drops messages", "fail"
    elif common_length(first, later) < first.index(probe.ASKED) + len(probe.ASKED):
        problem = "a later turn writes the first message otherwise: nothing of a prompt is reused"
    summary = "all messages reach the prompt"
    yield Finding.of("template.messages", problem, summary, REMEDY_TEMPLATE, state)


def check_tools(subject: Subject) -> Iterator[Finding]:
    """What of tools the template leaves out, and whether the parser reads calls that it writes."""
    if (tokenizer := subject.tokenizer) is None:
        return
    for note in tokenizer.notes:
        yield Finding("template.tools", "warn", f"{note}: agents work worse", REMEDY_TEMPLATE)
    form = tokenizer.form
    parser = subject.registry.detect_tool_parser(tokenizer.chat_template or "")
    if parser is None or not form.takes_calls or form.shows_tools != "always":
        return
    prompt, text = (
        tokenizer.apply_template(fit_messages(turns, form), [probe.TOOL], {})
        for turns in (probe.called_once()[:1], probe.called_once())
    )
    written = text[common_length(prompt, text) :]
    reply = read_chunks([written], tools=[probe.TOOL], tool_parser=parser)
    problem, same = "", reply.whole_calls == [(probe.NAME, {probe.KEY: probe.VALUES[0]})]
    if reply.faults or reply.cut_calls or not same:
        problem = f"calls as the template writes them are not read back by {parser.name}: "
        problem += str(list(reply.calls))
    summary = f"calls in the history are read back by {parser.name}"
    yield Finding.of("template.round_trip", problem, summary, REMEDY_PARSER)


def check_proxy(subject: Subject) -> Iterator[Finding]:
    """One token through LiteLLM, our handler, an engine and the model. Uses the user's engine, so
    that no model is loaded twice. Ends an engine that it started."""
    if subject.folder is None:
        return
    environ = subject.environ
    with ExitStack() as ending:
        folder = Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="mlxp-doctor-")))
        if not subject.runtime.listens():
            ending.callback(end_when, environ, "`mlx-provider doctor` has ended", "alone")
        config = proxy_config(PROXY_MODEL, full_name(subject.model or ""))
        proxy = start_proxy(write_config(config, folder), environ)
        ending.callback(proxy.stop)
        proxy.wait_ready()
        proxy.generate_token(PROXY_MODEL, TOKEN_SECONDS)
    yield Finding("proxy.token", "ok", "one token came through LiteLLM, the handler and the engine")


def has_head(tensors: Iterable[str], layers: object) -> bool:
    """Whether names of tensors show a head for drafts: `mtp`, or more layers than `layers`."""
    count = layers if isinstance(layers, int) and layers > 0 else float("inf")
    text = [name for name in tensors if not NOT_TEXT.search(name)]
    numbers = [int(match[1]) for name in text if (match := LAYER.search(name))]
    return any(map(HEAD.search, text)) or max(numbers, default=-1) >= count


def check_draft_head(subject: Subject) -> Iterator[Finding]:
    if subject.folder is None:
        return
    text = text_fields(subject.checkpoint.config)
    head = has_head(stored_tensors(subject.folder), text.get("num_hidden_layers"))
    named = text.get("mtp_num_hidden_layers") or text.get("num_nextn_predict_layers")
    lost = "config.json names a head for drafts, and the weights have none"
    problem = lost if named and not head else ""
    kind = "a head for drafts" if head else "no head for drafts: only text that repeats is drafted"
    yield Finding.of("speculation.head", problem, f"the checkpoint has {kind}", REMEDY_HEAD, "warn")
