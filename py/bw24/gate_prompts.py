"""Texts that the gate's drafted replies begin from, a class each: the kinds of work for which drafts are made. Owns the texts; knows no model."""

from __future__ import annotations

SHORT_CODE = "def read_rows(path):\n"

MEDIUM_CODE = '''\
import csv
from dataclasses import dataclass


@dataclass
class Reading:
    """One line of a gauge: when it was read, and the level in centimetres."""

    day: str
    level: int


def load(path):
    """All readings of a file, oldest first. A line without a level is left out."""
    with open(path, newline="") as f:
        rows = [row for row in csv.reader(f) if len(row) == 2 and row[1].strip()]
    return sorted((Reading(day, int(level)) for day, level in rows), key=lambda r: r.day)


def highest(readings):
    """The reading with the highest level, or None where there is none."""
    return max(readings, key=lambda r: r.level, default=None)


def mean_level(readings):
    """The mean level; 0 where there are no readings."""
    if not readings:
        return 0
    return sum(r.level for r in readings) / len(readings)


def by_month(readings):
'''

PROSE = (
    "The ferry left at six, and those who had business on the other bank were there before the lamps were out. There was a woman with two "
    "crates of pears, a clerk who slept standing, and a boy who had been sent to fetch a doctor and had forgotten the street. Nobody spoke "
    "until the rope was loose. Then the woman with the pears said that the water was higher than yesterday, and the ferryman, without "
    "turning, said that it was"
)

CHAT = (
    "<|im_start|>user\nI have flour, two eggs, milk and a little cheese. What can I cook tonight, and how long will it take?<|im_end|>\n"
    "<|im_start|>assistant\n"
)

_FILES = ("reader", "writer", "index", "cache", "server", "client", "report", "clock", "limits", "store")


def _agentic() -> str:
    """A long exchange of a coding agent with its tools: a listing, files that are read one after the other, test output, and the next turn."""
    turns = ["<|im_start|>user\nThe tests of this project fail since this morning. Find out why and mend it.<|im_end|>\n"]
    listing = "\n".join(f"src/{name}.py {120 + 37 * i} lines" for i, name in enumerate(_FILES))
    turns.append(f"<|im_start|>assistant\nI begin with the files.\nrun: list src<|im_end|>\n<|im_start|>tool\n{listing}<|im_end|>\n")
    for i, name in enumerate(_FILES[:6]):
        body = "\n".join(f"def {name}_{part}(items, limit={10 * i + j}):\n    return [x for x in items if x.size < limit]"
                         for j, part in enumerate(("first", "next")))
        turns.append(f"<|im_start|>assistant\nNow {name}.\nrun: read src/{name}.py<|im_end|>\n<|im_start|>tool\n{body}<|im_end|>\n")
    failed = "\n".join(f"FAILED tests/test_{name}.py::test_{name}_next: expected {3 + i} items, found {2 + i}" for i, name in enumerate(_FILES[:4]))
    turns.append(f"<|im_start|>assistant\nrun: test<|im_end|>\n<|im_start|>tool\n{failed}\n4 failed, 31 passed<|im_end|>\n<|im_start|>assistant\n")
    return "".join(turns)


CLASSES = {"short code": SHORT_CODE, "medium code": MEDIUM_CODE, "long agentic": _agentic(), "prose": PROSE, "chat": CHAT}
