"""`<function=NAME><parameter=KEY>value</parameter></function>`: Qwen3-Coder and related models."""

from __future__ import annotations

from mlx_provider import CallGrammar, TaggedArguments, ToolParser
from mlx_provider.records import Reading, TextReader, Tools

from .blocks import JsonBlock
from .lookahead import behind
from .tagged import TagFormat

QWEN3_CODER = TagFormat()
_JSON = JsonBlock(openers=("<tool_call>",), end="</tool_call>")
SEED_OSS = TagFormat(
    blocks=("<seed:tool_call>",), block_end="</seed:tool_call>", bare=False, lines=False
)
NEMOTRON = TagFormat(undeclared=False, forgiving=False)
_TAGS = ("<function=", "</function>", "<parameter=", "</parameter>")

_WRITTEN = CallGrammar(
    "<tool_call>\n<function={name}>\n",
    "</function>\n</tool_call>",
    between="\n",
    tagged=TaggedArguments("<parameter=", ">\n", "\n</parameter>\n", barred=QWEN3_CODER.traps),
)
_SEED_WRITTEN = CallGrammar(
    "<seed:tool_call>\n<function={name}>\n",
    "</function>\n</seed:tool_call>",
    between="\n",
    tagged=TaggedArguments("<parameter=", ">", "</parameter>\n", barred=SEED_OSS.traps),
)


def scan_coder(reader: TextReader, tools: Tools) -> Reading[None]:
    """Tags, or JSON between the same markers: these models were trained on both."""
    json = yield from behind(reader, "<tool_call>", "{")
    yield from (_JSON if json else QWEN3_CODER).scan(reader, tools)


PARSERS = (
    ToolParser(
        name="qwen3_coder",
        start="<tool_call>",
        starts=("<function=",),
        end="</tool_call>",
        scan=scan_coder,
        detect=lambda template: "<function=" in template and "<parameter=" in template,
        aliases=(
            *("qwen3_xml", "qwen3_coder_xml", "qwen3_5", "mimo"),
            *("step3p5", "step", "olmo_hybrid"),
        ),
        markers=_TAGS,
        rank=2,
        grammar=_WRITTEN,
    ),
    ToolParser(
        name="seed_oss",
        start="<seed:tool_call>",
        end="</seed:tool_call>",
        scan=SEED_OSS.scan,
        markers=_TAGS,
        detect=lambda template: "<seed:tool_call>" in template,
        aliases=("seed",),
        rank=3,
        grammar=_SEED_WRITTEN,
    ),
    ToolParser(
        name="nemotron",
        start="<tool_call>",
        starts=("<function=",),
        end="</tool_call>",
        scan=NEMOTRON.scan,
        markers=_TAGS,
        detect=lambda template: "nemotron" in template.lower() and "<function=" in template,
        aliases=("nemotron3", "nemotron_v3"),
        rank=3,
        grammar=_WRITTEN,
    ),
)
