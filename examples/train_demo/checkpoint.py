"""The files of the checkpoint besides its weights: tokenizer, chat template, processor, config."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from corpus import Conversation
from families import FAMILIES, LAYERS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from words import CITIES, CODE_WORDS, NAMES

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
ADDED = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
# A word never takes the space before it into its token, so that a name is the same token after a
# space and after a quote and can be copied into JSON. Punctuation may take the spaces beside it.
SPLIT = r"[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+ ?|\s*[\r\n]+|\s"


@dataclass(frozen=True)
class Size:
    """Dimensions of the model."""

    vocabulary: int = 1536
    hidden: int = 128
    layers: int = LAYERS
    feed_forward: int = 384
    heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    vision_depth: int = 2
    vision_hidden: int = 64
    vision_feed_forward: int = 128
    vision_heads: int = 2


def _texts(conversations: list[Conversation]) -> Iterator[str]:
    """What the tokenizer is trained on."""
    for conversation in conversations:
        for message in conversation.messages:
            content = message["content"]
            if isinstance(content, str):
                yield content
            else:
                yield from (part["text"] for part in content if "text" in part)
            if "tool_calls" in message:
                yield json.dumps(message["tool_calls"])
        yield from (json.dumps(tool) for tool in conversation.tools or [])
    # so often that each of them becomes one token
    template = TEMPLATE.read_text().replace("\\n", "\n").replace('\\"', '"')
    yield from [template, "user\nassistant\nsystem\n"] * 50
    for word in [*NAMES, *CITIES, *CODE_WORDS]:
        yield from [f"{word} {word}"] * 30


def make_tokenizer(conversations: list[Conversation], size: Size) -> Tokenizer:
    """A byte-level BPE tokenizer trained on the conversations."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size.vocabulary - len(SPECIAL) - len(ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    markers = re.compile("|".join(map(re.escape, SPECIAL + ADDED)))
    texts = (markers.sub("\n", text) for text in _texts(conversations))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    return tokenizer


def _tokenizer_config() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 65_536,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_start_token": "<|vision_start|>",
            "vision_end_token": "<|vision_end|>",
        },
    }


def _processor_config() -> dict:
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        # in pixels: any picture becomes 4 to 9 image tokens
        "size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 96},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


def _text_config(family: str, size: Size, vocabulary: int, end: int) -> dict:
    return {
        "model_type": f"{family}_text",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.feed_forward,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_value_heads,
        "head_dim": size.head_dim,
        "rms_norm_eps": 1e-6,
        "vocab_size": vocabulary,
        # trained on a part of it; an agent's first prompt is to be taken at all
        "max_position_embeddings": 65_536,
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "eos_token_id": end,
        **FAMILIES[family].text,
    }


def _vision_config(family: str, size: Size) -> dict:
    return {
        "model_type": family,
        "depth": size.vision_depth,
        "hidden_size": size.vision_hidden,
        "intermediate_size": size.vision_feed_forward,
        "num_heads": size.vision_heads,
        "patch_size": 16,
        "spatial_patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "out_hidden_size": size.hidden,
        "num_position_embeddings": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        **FAMILIES[family].vision,
    }


def _model_config(family: str, tokenizer: Tokenizer, size: Size) -> dict:
    token = tokenizer.token_to_id
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    return {
        "architectures": [FAMILIES[family].architecture],
        "model_type": family,
        "text_config": _text_config(family, size, vocabulary, token("<|im_end|>")),
        "vision_config": _vision_config(family, size),
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "eos_token_id": [token("<|im_end|>"), token("<|endoftext|>")],
        "pad_token_id": token("<|endoftext|>"),
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
    }


def write_files(folder: Path, family: str, tokenizer: Tokenizer, size: Size) -> None:
    """Write every file of the checkpoint but its weights."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    model = _model_config(family, tokenizer, size)
    processor = _processor_config()
    files = {
        "config.json": model,
        "generation_config.json": {
            "eos_token_id": model["eos_token_id"],
            "pad_token_id": model["pad_token_id"],
            "do_sample": False,
        },
        "tokenizer_config.json": _tokenizer_config(),
        "preprocessor_config.json": processor,
        "video_preprocessor_config.json": processor
        | {"video_processor_type": "Qwen3VLVideoProcessor"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")
