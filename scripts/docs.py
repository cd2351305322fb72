"""Writes the pages that are made from tables: docs/FLAGS.md from bw24.flags, docs/OPS.md from libbw24/ops.def and the comments of libbw24/ref. With
--check: writes nothing, exits 1 where one is stale."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24 import flags  # noqa: E402

FLAGS_HEAD = """\
# Settings

<!-- made by scripts/docs.py from py/bw24/flags.py; change the table there, then run it -->

A value comes from the command line, else from the variable, else from the default. `bw24 flags` prints this table. A variable that begins
with `BW24_` and is not in it is reported when a command starts. A rollback seam turns one optimisation off; results keep their bits.
"""
KINDS = {
    flags.RUNTIME: "Runtime: what to run and how",
    flags.MACHINE: "Machine: where things are",
    flags.SEAM: "Rollback seams",
}


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def flags_page() -> str:
    parts = [FLAGS_HEAD]
    for kind, title in KINDS.items():
        parts.append(f"\n## {title}\n\n| option | variable | default | meaning | test |\n|---|---|---|---|---|\n")
        for row in flags.rows():
            if row.kind == kind:
                names = [f"`{name}`" if name else "" for name in (cell(row.option), row.variable)]
                parts.append(f"| {names[0]} | {names[1]} | {cell(row.default)} | {cell(row.help)} | `{row.test}` |\n")
    return "".join(parts)


OPS_HEAD = """\
# Ops

<!-- made by scripts/docs.py from libbw24/ops.def and libbw24/ref/; change them there, then run it -->

What a list is made of. Operands as the list's text writes them, `key:kind`: y output buffer, x input buffer, b buffer read and written, w tensor,
k KV cache, s state, i integer, f number, e one of names; `?` optional, `=` its default. State: NONE; APPEND (KV: goes back by length); FOLD
(overwritten by each step). The mathematics stands above `ref_<op>`, the function that every other backend is compared with; orders of operations
are in [numerics](numerics.md).
"""


def op_notes() -> dict[str, str]:
    """Op -> the comment that opens with its name, from libbw24/ref."""
    notes = {}
    for path in sorted((ROOT / "libbw24" / "ref").glob("*.[ch]")):
        for comment in re.findall(r"/\*\n(.*?)\*/", path.read_text(encoding="utf-8"), re.S):
            lines = [re.sub(r"^ \* ?", "", line).rstrip() for line in comment.splitlines()]
            if lines and (found := re.match(r"([A-Z_]{3,})  ", lines[0])):
                notes[found[1]] = "\n".join(lines).strip()
    return notes


def ops_page() -> str:
    notes, parts = op_notes(), [OPS_HEAD]
    for name, operands, state in re.findall(r'^OP\((\w+),\s*"([^"]*)",\s*(\w+)\)', (ROOT / "libbw24" / "ops.def").read_text(encoding="utf-8"), re.M):
        parts.append(f"\n## {name}\n\n`{operands}` · {state}\n")
        if name in notes:
            parts.append(f"\n```text\n{notes[name]}\n```\n")
    return "".join(parts)


def main() -> int:
    pages = {ROOT / "docs" / "OPS.md": ops_page(), ROOT / "docs" / "FLAGS.md": flags_page()}
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is out of date: run python scripts/docs.py", file=sys.stderr)
        else:
            path.write_text(pages[path], encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
