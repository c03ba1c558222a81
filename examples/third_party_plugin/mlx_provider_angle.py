import json

from mlx_provider import CallGrammar, ToolCall, ToolParser, hookimpl

GRAMMAR = CallGrammar.json("<call>", "</call>", key="args")


def parse(text, tools):
    call = json.loads(text)
    return [ToolCall(call["name"], json.dumps(call["args"]))]


def detect(template):
    return "<call>" in template


@hookimpl
def mlx_tool_parsers():
    yield ToolParser("angle", "<call>", "</call>", parse, detect, grammar=GRAMMAR)
