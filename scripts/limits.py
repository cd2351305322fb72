"""The limits on length: no file over 800 lines, no function over 100, no line of C over 180. Prints each breach, exits 1 if there is one.

Python functions are measured by the parser. C and CUDA functions are found by the house layout: a body opens on a line that is not
indented and closes with a } in the first column.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES, LINE_LENGTH = 800, 100, 180
C_SUFFIXES = {".c", ".h", ".cu", ".cuh", ".def"}
C_BODY = re.compile(r"^(?!(?:typedef|struct|enum|union|static const|extern|namespace)\b)[A-Za-z_].*\)\s*\{\s*$|^\{\s*$")


def c_functions(lines: list[str]) -> Iterator[tuple[int, int]]:
    start = None
    for number, line in enumerate(lines, 1):
        if start is None and C_BODY.match(line):
            start = number
        elif start is not None and line.startswith("}"):
            yield start, number - start + 1
            start = None


def python_functions(text: str) -> Iterator[tuple[int, int]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1


def breaches(path: Path) -> Iterator[str]:
    name, text = path.relative_to(ROOT), path.read_text(encoding="utf-8")
    lines = text.splitlines()
    if len(lines) > FILE_LINES:
        yield f"{name}: {len(lines)} lines, the limit is {FILE_LINES}"
    for line, length in python_functions(text) if path.suffix == ".py" else c_functions(lines):
        if length > FUNCTION_LINES:
            yield f"{name}:{line}: function of {length} lines, the limit is {FUNCTION_LINES}"
    if path.suffix in C_SUFFIXES:  # ruff measures Python's lines
        for number, line in enumerate(lines, 1):
            if len(line) > LINE_LENGTH:
                yield f"{name}:{number}: line of {len(line)} characters, the limit is {LINE_LENGTH}"


def main() -> int:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    # research/ holds one-off measuring programs; they are kept as they ran
    paths = [ROOT / n for n in names if Path(n).suffix in C_SUFFIXES | {".py"} and not n.startswith("research/")]
    found = [line for path in sorted(paths) if path.exists() for line in breaches(path)]
    print("\n".join(found) if found else f"limits: {len(paths)} files within {FILE_LINES} lines, functions within {FUNCTION_LINES}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
