"""The code blocks of the README."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^```\w+\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = FENCED.findall((ROOT / "README.md").read_text(encoding="utf-8"))
CONFIG = "model_list:"
START = "export LITELLM_MASTER_KEY="
SCRIPT = "import litellm"
OPTIONS = FENCED.findall((ROOT / "docs/reference/options.md").read_text(encoding="utf-8"))[0]
"""Options of a model, in the reference's page."""
SMALL = {
    "mlx/mlx-community/Qwen3-VL-8B-Instruct-4bit": "mlx/demo"  # nothing is downloaded
}


def block(start: str) -> str:
    (found,) = (text for text in BLOCKS if text.startswith(start))
    return found


def small_config() -> str:
    """The README's config, with the options of the reference's page and the shipped model."""
    config = block(CONFIG).replace("litellm_settings:\n", f"{OPTIONS}litellm_settings:\n")
    for large, small in SMALL.items():
        assert large in config
        config = config.replace(large, small)
    return config
