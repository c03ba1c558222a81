"""Write the functions and records of `mlx_provider/records` into `plugins/hooks.md` of the site."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "mlx_provider" / "records"
PAGE = "plugins/hooks.md"
FUNCTIONS, RECORDS = "<!-- functions -->", "<!-- records -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != PAGE:
        return markdown
    markdown = markdown.replace(FUNCTIONS, "\n".join(map(describe_function, functions().values())))
    return markdown.replace(RECORDS, "\n\n".join(map(describe_class, classes().values())))


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for node in public_nodes() if isinstance(node, ast.ClassDef)}


def functions() -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in public_nodes() if isinstance(node, ast.FunctionDef)}


def public_nodes() -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions in the order of the source."""
    lists = re.findall(r"__all__ \+?= (\[.*?\])", (FOLDER / "__init__.py").read_text(), re.DOTALL)
    public = {name for names in lists for name in ast.literal_eval(names)}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in public:
                yield node


def describe_class(node: ast.ClassDef) -> str:
    text = one_line(ast.get_docstring(node) or "")
    head = [f"### `{node.name}`", "", *([text, ""] if text else [])]
    members = (f"- `{code}`" + (f": {note}" if note else "") for code, note in members_of(node))
    return "\n".join([*head, *members]).rstrip()


def describe_function(node: ast.FunctionDef) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    note = one_line((ast.get_docstring(node) or "").split("\n\n")[0])
    return f"- `{node.name}({arguments(node)}){returns}`: {note}"


def members_of(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Fields and public methods of a class, each with its docstring."""
    for member, after in pairwise([*node.body, ast.Pass()]):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
            note = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                note = str(after.value.value)
            yield ast.unparse(member), one_line(note)
        elif isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            returns = ast.unparse(member.returns) if member.returns else "None"
            if any(ast.unparse(mark) == "property" for mark in member.decorator_list):
                code = f"{member.name}: {returns}"
            else:
                code = f"{member.name}({arguments(member)}) -> {returns}"
            yield code, one_line(ast.get_docstring(member) or "")


def arguments(function: ast.FunctionDef) -> str:
    return re.sub(r"^(self|cls)(, )?", "", ast.unparse(function.args))


def one_line(text: str) -> str:
    return " ".join(text.split())
