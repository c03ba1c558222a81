"""`python tests/packaging/count_lines.py`: the size of the package and its plugins, and names that
say neither what is done nor what it is.

The ceilings only fall: a change that adds lines removes more, and lowers them.
"""

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

CEILINGS = {"files": 272, "lines": 47_383, "lines of code": 33_826, "bare participles": 0}
IRREGULAR = (
    "asked begun bound chosen drawn found given gone held kept known led left lost made meant paid "
    "seen sent shown spent stood taken told thrown understood won written"
).split()
VERBS = ("embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed")
ROOT = Path(__file__).parents[2]
COMMAND = ("git", "ls-files", "mlx_provider/*.py", "plugins/*.py")
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def lines_of_code(source: str) -> int:
    """Without blank lines, comments, docstrings and strings that describe an attribute."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*NO_CODE, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str())):
                lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def bare_participles(source: str) -> int:
    """Functions such as `shown`; a truth (`finished`) and a verb with its object are neither."""
    return sum(
        name in IRREGULAR or (name.endswith("ed") and name not in VERBS)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not (node.returns and ast.unparse(node.returns) == "bool")
        and "_" not in (name := node.name.strip("_"))
    )


def main() -> int:
    listed = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sources = [(ROOT / path).read_text(encoding="utf-8") for path in listed.split()]
    counts = (
        len(sources),
        sum(source.count("\n") for source in sources),
        sum(map(lines_of_code, sources)),
        sum(map(bare_participles, sources)),
    )
    above = False
    for (name, ceiling), count in zip(CEILINGS.items(), counts, strict=True):
        above |= count > ceiling
        print(f"{count:,} {name} of at most {ceiling:,}")
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
