"""Adaptive trim: spare rows of a trimmed head, given to tokens that the head lacks as replies use them. Owns which token has which row, and the file
beside the draft that keeps this; the text of a reply never depends on it, only how many drafts are right.

Owners (API keys) have slots of their own and draft with their own alone: what one learned changes neither the drafts nor the speed of another."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .errors import Bw24Error
from .gguf_writer import atomic_file

FORMAT = 1
SAVE_EVERY = 5.0  # seconds between two writes of the file
ROUNDS = 50_000  # of PBKDF2, so that the file does not help to guess keys


class Learner:
    """ids: tokens of the head's columns, int32, the last `spare` of them -1. rows(first, tokens): puts the model's rows of these tokens into spare
    rows first .. of the head. owners: how many share the slots. Not thread-safe; the engine's thread owns it."""

    def __init__(self, ids: np.ndarray, spare: int, rows: Callable[[int, list[int]], None], owners: int, vocabulary: int):
        self.ranked, self.spare, self._rows, self.vocabulary = len(ids) - spare, spare, rows, vocabulary
        self.owners, self.each = max(owners, 1), spare // max(owners, 1)
        self._base = np.array(ids, np.int32)
        self._known = set(self._base[: self.ranked].tolist())
        self._slots: dict[str, OrderedDict[int, int]] = {}  # owner -> token -> slot, least recently used first
        self._ids: dict[str, np.ndarray] = {}
        self._saved = 0.0
        self.path: Path | None = None
        self._identity: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._kept: dict[str, list[int]] = {}  # read from the file, of owners that have not come yet
        self._dirty = False
        self.seen = self.missed = 0  # tokens of replies, and those of them that could not be drafted

    def ids(self, owner: str = "") -> np.ndarray:
        """The tokens of the columns that an owner drafts with."""
        if owner not in self._ids:
            self._ids[owner] = self._base.copy()
            if kept := self._kept.pop(self._name(owner), []):
                self._learn(owner, kept)
        return self._ids[owner]

    def observe(self, owner: str, tokens: Iterable[int]) -> None:
        """Tokens of a reply. Those that the head lacks get a row, in place of the owner's least recently used."""
        self.ids(owner)
        learned = False
        for token in tokens:
            self.seen += 1
            if token in self._known:
                continue
            slots = self._slots.get(owner, ())
            if token in slots:
                slots.move_to_end(token)
                continue
            self.missed += 1
            learned = self._learn(owner, [token]) or learned
        if learned:
            self._dirty = True
            self.save()

    def _learn(self, owner: str, tokens: Iterable[int]) -> bool:
        """Gives tokens rows; an owner's slots are taken with its first. False where all slots are other owners'."""
        if not self.each or (owner not in self._slots and len(self._slots) >= self.owners):
            return False
        slots, ids = self._slots.setdefault(owner, OrderedDict()), self._ids[owner]
        first = list(self._slots).index(owner) * self.each
        for token in dict.fromkeys(tokens):
            if token in slots or token in self._known:
                continue
            slot = first + len(slots) if len(slots) < self.each else slots.popitem(last=False)[1]
            self._rows(slot, [token])
            slots[token] = slot
            ids[self.ranked + slot] = token
        return True

    # ---- the file

    def keep(self, path: Path, model: str) -> None:
        """Read what was learned before and write from now on. model: its fingerprint. Raises Bw24Error where the file is another model's or no such
        file; then nothing is read or written."""
        identity = {"model": model, "head": hashlib.sha256(self._base[: self.ranked].tobytes()).hexdigest()}
        found = self._read(path, identity) if path.exists() else {"salt": secrets.token_hex(16), "owners": {}}
        self.path, self._identity, self._salt = path, identity, found["salt"]
        self._kept = found["owners"]

    def _read(self, path: Path, identity: dict[str, str]) -> dict[str, Any]:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError("not a file of learned rows")
            owners = {str(k): [int(t) for t in v] for k, v in found["owners"].items()}
            bytes.fromhex(found["salt"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Bw24Error(f"{path}: what was learned cannot be read: {error}") from None
        for key, value in identity.items():
            if found.get(key) != value:
                raise Bw24Error(f"{path}: what was learned belongs to another {key} ({str(found.get(key))[:16]}, here {value[:16]})")
        top = self.vocabulary - 1
        bad = next((t for tokens in owners.values() for t in tokens if not 0 <= t <= top), None)
        if bad is not None:
            raise Bw24Error(f"{path}: token {bad} is outside the vocabulary 0..{top}")
        return {"salt": found["salt"], "owners": owners}

    def _name(self, owner: str) -> str:
        """An owner's name in the file."""
        if self.path is None or not owner:
            return owner
        if owner not in self._names:
            digest = hashlib.pbkdf2_hmac("sha256", owner.encode(), bytes.fromhex(self._salt), ROUNDS)
            self._names[owner] = hmac.new(digest, b"owner", "sha256").hexdigest()[:32]
        return self._names[owner]

    def save(self, now: bool = False) -> None:
        """Write the file if something was learned, at most every few seconds unless `now`. It is replaced whole: a program that dies while it
        writes leaves the file before. A disk that refuses costs what was learned, not the reply."""
        if self.path is None or not self._dirty or (not now and time.monotonic() - self._saved < SAVE_EVERY):
            return
        owners = {**self._kept, **{self._name(o): list(slots) for o, slots in self._slots.items()}}
        text = json.dumps({"format": FORMAT, **self._identity, "salt": self._salt, "owners": owners})
        try:
            with atomic_file(self.path) as out:
                out.write(text.encode())
            os.chmod(self.path, 0o600)
        except (OSError, Bw24Error):
            self.path = None
        self._dirty, self._saved = False, time.monotonic()


def beside(draft: Path) -> Path:
    """The file that keeps what a draft file has learned."""
    return draft.with_name(draft.name + ".learned.json")
