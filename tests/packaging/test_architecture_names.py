"""The core names no architecture: what is to be known of one stands in its plugin."""

import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "mlx_provider"
APART = ("demo", "testing")
"""Packages that build and measure models of architectures by name."""

NAMES = re.compile(
    r"afmoe|apertus|baichuan|bailing|bitnet|codegen|cohere|dbrx|deepseek|dinov|ernie"
    r"|exaone|falcon|florence|gemma|glm|gpt.?(?:j|neox|oss|bigcode)|granite|hunyuan|idefics"
    r"|internlm|internvl|jamba|kimi|llada|llama|llava|longcat|mamba|mimo|minicpm|minimax"
    r"|ministral|mistral|mixtral|molmo|moondream|nanochat|nemotron|olmo|openelm|paddleocr|phi.?[34]"
    r"|phimoe|phixtral|pixtral|plamo|qwen|rwkv|seed.?oss|siglip|smollm|smolvlm|solar|stablelm"
    r"|starcoder|step.?3|telechat|ui.tars|zaya",
    re.IGNORECASE,
)
"""Architectures of mlx-lm, mlx-vlm and transformers, as they are written in names and in prose."""


def named(name: str) -> list[str]:
    """Lines of a file of the core that name an architecture; its path counts as one."""
    text = (CORE / name).read_text(encoding="utf-8")
    return [line.strip() for line in (name, *text.splitlines()) if NAMES.search(line)]


def test_the_core_names_no_architecture() -> None:
    paths = (path.relative_to(CORE) for path in CORE.rglob("*") if path.suffix in (".py", ".md"))
    names = [path.as_posix() for path in paths if path.parts[0] not in APART]
    assert {name: named(name) for name in names if named(name)} == {}
