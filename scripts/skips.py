"""Counts the skipped tests of a pytest run by reason and holds them to tests/skips.json: a reason that is not listed, or more skips than its
budget, is red, so that no test is lost silently. usage: scripts/skips.py REPORT.xml [--write]   --write: make the budgets what this run skipped"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

BUDGET = Path(__file__).resolve().parent.parent / "tests" / "skips.json"


def kind(reason: str) -> str:
    """A reason without what differs from test to test: numbers, paths and quoted names. A module that is not installed keeps its name."""
    if found := re.match(r"could not import '([\w.]+)'", reason):
        return f"could not import {found[1]}"
    return re.sub(r"\b\d+\b", "N", re.sub(r"(/[\w.\-]+)+", "PATH", re.sub(r"'[^']*'", "NAME", reason))).strip()


def count(report: Path) -> tuple[Counter[str], int]:
    """Skips by kind of reason, and the number of tests, from a JUnit report of pytest."""
    found: Counter[str] = Counter()
    total = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        total += 1
        for skip in case.findall("skipped"):
            found[kind(skip.get("message") or "no reason")] += 1
    return found, total


def judge(found: Counter[str], budget: dict[str, int]) -> list[str]:
    """What is over its budget."""
    return [f"{n} skips, budget {budget.get(reason, 0)}: {reason}" for reason, n in sorted(found.items()) if n > budget.get(reason, 0)]


def main(argv: list[str]) -> int:
    found, total = count(Path(argv[0]))
    if "--write" in argv:
        BUDGET.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    for reason, n in found.most_common():
        print(f"{n:5} of {budget.get(reason, 0):<5} {reason}")
    over = judge(found, budget)
    print(f"{sum(found.values())} of {total} tests skipped" + ("" if not over else "; OVER BUDGET:\n" + "\n".join(over)))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
