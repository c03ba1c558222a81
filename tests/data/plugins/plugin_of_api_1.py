"""A plugin as strangers wrote them for API version 1: it must load and serve, never edited.

It uses every hook and most of what records offer, and notes who calls it.
"""

import json
import threading
from dataclasses import replace

from mlx_provider import (
    BadRequest,
    CallGrammar,
    Client,
    Kernels,
    LoadedModel,
    ModelFamily,
    Profile,
    ReasoningParser,
    Replacement,
    ToolCall,
    ToolParser,
    hookimpl,
)
from mlx_provider.records import (
    Drafter,
    NotACall,
    TextEnded,
    TextReader,
    listed_parameters,
    value_types,
)

mlx_provider_api = 1
CALLS = []
"""What was called, and the thread that did."""


def noted(name):
    CALLS.append((name, threading.current_thread().name))


def matches(config):
    noted("matches")
    return 10 if config.get("model_type") == "yesterday" else 0


def load(folder, options):
    noted("load")
    from mlx_lm.models import llama

    from mlx_provider.families.text import load_text

    if options.extra.get("refuse"):
        raise BadRequest("extra says no", param="model_info.mlx.extra")
    return load_text(folder, options, classes=lambda config: (llama.Model, llama.ModelArgs))


@hookimpl
def mlx_model_families():
    noted("mlx_model_families")
    yield ModelFamily("yesterday", matches, load, "models of yesterday", {"some/model": 1})


def parse(text, tools):
    noted("parse")
    call = json.loads(text)
    function = next((t["function"] for t in tools if t["function"]["name"] == call["name"]), {})
    schema = function.get("parameters", {})
    properties, required = listed_parameters(schema)
    assert required <= properties.keys()
    assert all(isinstance(value_types(x, schema), frozenset) for x in properties.values())
    return [ToolCall(call["name"], json.dumps(call["args"]))]


def detect(template):
    noted("detect")
    return "<yesterday>" in template


def scan(reader: TextReader, tools):
    yield from reader.expect("[[")
    name = yield from reader.pass_until([" ", "]]"], lambda text: None)
    if not name:
        raise TextEnded
    raise NotACall("it never is", whole=True)


@hookimpl
def mlx_tool_parsers():
    noted("mlx_tool_parsers")
    grammar = CallGrammar.json("<yesterday>", "</yesterday>", key="args")
    yield ToolParser(
        "yesterday",
        "<yesterday>",
        "</yesterday>",
        parse,
        detect,
        aliases=("day_before",),
        grammar=grammar,
        rank=1,
    )
    yield ToolParser("yesterday_scan", "[[", "]]", scan=scan, atomic=True, cut="drop")


@hookimpl
def mlx_reasoning_parsers():
    noted("mlx_reasoning_parsers")
    yield ReasoningParser("yesterday", "<hm>", "</hm>", detect, unmarked="content")


def replacements():
    noted("replacements")
    return [Replacement("mlx_lm.models.activations", "swiglu", lambda original: original)]


@hookimpl
def mlx_kernels():
    noted("mlx_kernels")
    yield Kernels("yesterday", lambda device, precision: device == "abacus", replacements, rank=9)


class Drafting:
    def propose(self, rows):
        noted("propose")
        found = []
        for row in rows:
            row.state = (row.state or 0) + 1
            found.append(row.tokens[-row.wanted :] if row.wanted else [])
        return found


def refuses(folder, model: LoadedModel, options):
    noted("refuses")
    return "" if (folder / "config.json").is_file() and model.info.vocab_size else "no model"


def start(folder, model, options):
    noted("start")
    return Drafting()


@hookimpl
def mlx_drafters():
    noted("mlx_drafters")
    drafter = Drafter("yesterday", refuses, start, keeps=lambda drafting: 0, automatic=0)
    yield replace(drafter, serves="any model")


@hookimpl
def mlx_clients():
    noted("mlx_clients")
    yield Client(
        "yesterday",
        "yesterday-agent",
        "pip install yesterday-agent",
        lambda gateway: Profile({"KEY": gateway.key}, {"a.json": "{}"}, ("--quiet",), ("OLD_*",)),
        api="chat",
    )


@hookimpl
def mlx_register_commands(cli):
    noted("mlx_register_commands")

    @cli.command()
    def yesterday(name: str) -> None:
        print(f"hello {name}")
