"""The site's pages from files of the repository, and links that hold there and in the repository.

Pages are written for a reader of the repository: a link leads to a file. The site shows some files
beside `docs/` as pages of their own; of any other it names the path, or leads to `repo_url` where
`mkdocs.yml` has one.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/agents/CLIENTS.md": "clients.md",
}
"""Files of the repository that are pages of the site, and their names there."""
RELEASES = "<!-- towncrier release notes start -->"
DRAFT = ("-m", "towncrier", "build", "--draft")
SOURCES = {page: file for file, page in BESIDE.items()}
CODE = r"^```.*?^```|`[^`\n]+`"
LINK = re.compile(rf"\[([^\]\[]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)|{CODE}", re.DOTALL | re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the files beside `docs/`."""
    root = Path(config.docs_dir).parent
    for file, page in BESIDE.items():
        text = (root / file).read_text(encoding="utf-8")
        if file == "CHANGELOG.md":
            text = text.replace(RELEASES, f"{RELEASES}\n\n{unreleased(root)}")
        files.append(File.generated(config, page, content=text))
    return files


def unreleased(root: Path) -> str:
    """What the next version brings, as its release will write it."""
    drafted = [*DRAFT, "--version", "Next", "--date", "not yet released"]
    return subprocess.run(
        [sys.executable, *drafted], cwd=root, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page's text with its links as the site has them."""
    here = page.file.src_uri
    source = SOURCES.get(here, posixpath.join("docs", here))
    root = Path(config.docs_dir).parent

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if target is None:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (root / path).exists():
            raise PluginError(f"{source} leads to {target}, which is not there")
        inside = BESIDE.get(path) or (path.startswith("docs/") and path.removeprefix("docs/"))
        if inside:
            return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{anchor})"
        return outside(text, path, config.repo_url)

    return LINK.sub(led, markdown)


def outside(text: str, path: str, repository: str | None) -> str:
    """A link to a file that is no page, as the site shows it."""
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
