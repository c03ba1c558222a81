"""Byte-level BPE tokenizers and chat templates for tiny models, in three dialects."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEXT = (
    "The quick brown fox asks the lazy dog what the weather in Paris is like today. "
    "Hello there, how are you? I am fine, thank you, and what is your name? "
    "You are an assistant. Answer the question: which colour is the circle in the image? "
    "The circle is red, the square is blue, and the triangle is green.\n"
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
)
"""Text for the merges; every other byte stays a token of its own."""

MERGES = 72


@dataclass(frozen=True)
class Dialect:
    """Special tokens and chat template of one line of models."""

    name: str
    special: tuple[str, ...]
    eos: tuple[str, ...]
    template: str
    added: tuple[str, ...] = ()
    """Tokens of their own that decoded text keeps."""
    bos: str | None = None
    pad: str = ""
    names: dict[str, str] = field(default_factory=dict)
    """Tokenizer attributes for media tokens."""


_QWEN_CONTENT = """\
{%- macro said(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}{%- for part in content or [] -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""

_QWEN_TEMPLATE = (
    _QWEN_CONTENT
    + """\
{%- set first = said(messages[0].content) if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{ '<|im_start|>system\\n' ~ first ~ '\\n# Tools\\n<tools>' }}
{%- for tool in tools -%}{{ '\\n' ~ (tool | tojson) }}{%- endfor -%}
{{ '\\n</tools>\\nCall one as <tool_call>\\n{"name": <function-name>, ' }}
{{- '"arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif first -%}
{{ '<|im_start|>system\\n' ~ first ~ '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- elif message.role == 'tool' -%}
{{ '<|im_start|>user\\n<tool_response>\\n' ~ said(message.content) }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.reasoning_content -%}
{{ '<think>\\n' ~ message.reasoning_content ~ '\\n</think>\\n' }}
{%- endif -%}
{{ said(message.content) }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{%- if call.function.arguments is string -%}{{ call.function.arguments }}
{%- else -%}{{ call.function.arguments | tojson }}{%- endif -%}
{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{ '<think>\\n\\n</think>\\n' }}
{%- endif -%}
{%- endif -%}
"""
)

_GEMMA_TEMPLATE = """\
{{- bos_token -}}
{%- set head = namespace(text='') -%}
{%- set turns = messages -%}
{%- if messages[0].role == 'system' -%}
{%- set turns = messages[1:] -%}
{%- if messages[0].content is string -%}{%- set head.text = messages[0].content ~ '\\n\\n' -%}
{%- else -%}{%- set head.text = messages[0].content[0].text ~ '\\n\\n' -%}{%- endif -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{%- endif -%}
{{ '<start_of_turn>' ~ ('model' if message.role == 'assistant' else message.role) ~ '\\n' }}
{{- head.text if loop.first else '' }}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<start_of_image>' }}
{%- elif part.type == 'text' -%}{{ part.text | trim }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

_LLAMA_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
{%- if message.content is string -%}{{ message.content | trim }}
{%- else -%}{%- for part in message.content or [] -%}{{ part.text }}{%- endfor -%}{%- endif -%}
{{ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}
"""

QWEN = Dialect(
    name="qwen",
    special=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
        *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    ),
    added=(
        *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        *("<think>", "</think>"),
    ),
    eos=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    template=_QWEN_TEMPLATE,
    names={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
)

GEMMA = Dialect(
    name="gemma",
    special=(
        *("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    eos=("<end_of_turn>", "<eos>"),
    bos="<bos>",
    pad="<pad>",
    template=_GEMMA_TEMPLATE,
    names={
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)

LLAMA = Dialect(
    name="llama",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eot_id|>", "<|pad|>"),
    ),
    eos=("<|eot_id|>", "<|end_of_text|>"),
    bos="<|begin_of_text|>",
    pad="<|pad|>",
    template=_LLAMA_TEMPLATE,
)


def write_tokenizer(
    folder: Path,
    dialect: Dialect,
    *,
    texts: Callable[[], Iterable[str]] = lambda: (TEXT,),
    merges: int = MERGES,
) -> dict[str, int]:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja. `merges` of pairs are
    learnt from `texts`. Returns the ids of special and added tokens, and under `""` the number of
    all tokens. Special tokens have the first ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=len(dialect.special) + 256 + merges,
        special_tokens=list(dialect.special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in dialect.added])
    if dialect.bos:
        pairs = [(dialect.bos, tokenizer.token_to_id(dialect.bos))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{dialect.bos} $A", special_tokens=pairs
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_config(dialect), indent=1))
    (folder / "chat_template.jinja").write_text(dialect.template)
    ids = {t: int(tokenizer.token_to_id(t)) for t in (*dialect.special, *dialect.added)}
    return ids | {"": int(tokenizer.get_vocab_size())}


def _config(dialect: Dialect) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1_000_000,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(dialect.bos),
        "bos_token": dialect.bos,
        "eos_token": dialect.eos[0],
        "pad_token": dialect.pad,
        "extra_special_tokens": dialect.names,
    }
