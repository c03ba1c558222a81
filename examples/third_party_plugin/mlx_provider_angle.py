import json

from mlx_provider import ToolCall, ToolParser, hookimpl


def parse(text, tools):
    call = json.loads(text)
    return [ToolCall(call["name"], json.dumps(call["args"]))]


@hookimpl
def mlx_tool_parsers():
    yield ToolParser("angle", "<call>", "</call>", parse, lambda template: "<call>" in template)
