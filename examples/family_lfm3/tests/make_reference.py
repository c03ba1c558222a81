"""Write `reference/`: a tiny checkpoint as transformers saves it, and what transformers computes.

`python make_reference.py FOLDER`, where torch and transformers >= 5.23 are. It is rather small than
random: a window and a convolution that its prompt leaves behind several times, kept in bfloat16,
computed in float32.
"""

import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Lfm3Config, Lfm3ForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|pad|>", "<|startoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
LAYERS = ["conv", "conv", "full_attention", "conv", "sliding_attention", "full_attention"]
PROMPT = "What does a window keep of a text?"
REPLY = 24
"""Tokens that are drawn greedily."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, and the special ones."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(SPECIAL) + len(alphabet)
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    made.train_from_iterator(
        [], BpeTrainer(vocab_size=size, special_tokens=specials, initial_alphabet=alphabet)
    )
    pad, bos, _, eos = SPECIAL
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def config() -> Lfm3Config:
    """Every kind of layer, each behind another one."""
    return Lfm3Config(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        sliding_window=12,
        layer_types=LAYERS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=3,
    )


def model(config: Lfm3Config) -> Lfm3ForCausalLM:
    """Random weights under which the next token hangs on many of those before it."""
    torch.manual_seed(0)
    made = Lfm3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():
            if "norm" in name:
                wanted = 1.0 + 0.2 * torch.randn_like(value)
                wanted *= 2.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
            elif "conv.conv" in name:
                wanted = 0.4 * torch.randn_like(value)
            elif "embed_tokens" in name:
                wanted = 0.3 * torch.randn_like(value)
            else:
                wanted = torch.randn_like(value) / value.shape[-1] ** 0.5
            value.copy_(wanted.to(torch.bfloat16).float())
        made.model.embed_tokens.weight[: len(SPECIAL)] *= 0.125  # no reply ends by itself
    return made


@torch.no_grad()
def answers(made: Lfm3ForCausalLM, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Logits after each token of the prompt, and the reply."""
    prompt = torch.tensor([tokens])
    logits = made(prompt).logits[0]
    whole = made.generate(prompt, max_new_tokens=REPLY, do_sample=False)
    assert whole.shape[1] == len(tokens) + REPLY, "a reply that ends early tells less"
    return {"prompt": prompt[0], "logits": logits, "reply": whole[0, len(tokens) :]}


def write(folder: Path) -> Path:
    """The checkpoint, with `answers.safetensors` in it."""
    from safetensors.torch import save_file

    words, made = tokenizer(), model(config())
    chat = [{"role": "user", "content": PROMPT}]
    text = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    found = answers(made, words.encode(text, add_special_tokens=False))
    made.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    save_file({k: v.contiguous() for k, v in found.items()}, folder / "answers.safetensors")
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
