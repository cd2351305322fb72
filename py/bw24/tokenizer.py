"""Text to token ids and back, from GGUF metadata; streams of tokens to text; stop strings.

Owns special tokens, BOS and EOS, and the bytes that wait for the rest of their character. Knows nothing of tensors, files or requests.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from .errors import Bw24Error
from .tokenizer_vocab import CONTROL, PREFIX, UNKNOWN, USER_DEFINED, Vocab, read, read_strings, read_vocab, show

if TYPE_CHECKING:
    from .tokenizer_bpe import BytePairs
    from .tokenizer_spm import Pieces

__all__ = ["StopFilter", "StreamDecoder", "Tokenizer", "from_metadata"]

# Characters by which special tokens are looked for: six tell the usual `<|...|>` apart, and 6000 tokens `<unusedN>` cost one search.
_HEAD = 6
_SPM_ROLES = {"unk": 0, "bos": 1, "eos": 2}  # what a SentencePiece vocabulary means without saying so


class _Cutter:
    """Cuts text at special tokens: longest token first over the whole text, tokens of one length from left to right.

    The cost is linear in the text, times the number of different lengths whose first characters occur in it.
    """

    def __init__(self, texts: dict[str, int]):
        sizes: dict[tuple[int, int], dict[str, int]] = {}
        for text, token in texts.items():
            sizes.setdefault((len(text.encode()), len(text)), {})[text] = token
        self.classes = [(size, table, {t[:_HEAD] for t in table}) for (_, size), table in sorted(sizes.items(), reverse=True)]

    def cut(self, text: str) -> list[str | int]:
        """The text's fragments, in order, ids where special tokens stood; empty fragments are left out."""
        parts: list[str | int] = [text] if text else []
        for size, table, heads in self.classes:
            live = [re.escape(h) for h in heads if h in text]
            if not live:
                continue
            find, after = re.compile("|".join(live)).search, []
            for part in parts:
                if isinstance(part, int):
                    after.append(part)
                else:
                    _cut_part(part, size, table, find, after)
            parts = after
        return parts


def _cut_part(part: str, size: int, table: dict[str, int], find: Callable, out: list[str | int]) -> None:
    """Append the fragments of one part to `out`; find: where a token of the table may start."""
    start = at = 0
    while (hit := find(part, at)) is not None:
        at = hit.start()
        token = table.get(part[at : at + size])
        if token is None:
            at += 1
            continue
        if at > start:
            out.append(part[start:at])
        out.append(token)
        start = at = at + size
    if start < len(part):
        out.append(part[start:])


class Tokenizer:
    """One vocabulary's text interface. Made by from_metadata; may be used by several threads at once.

    n_tokens: size of the vocabulary. bos_id, eos_id, eot_id: ids or None. eog_ids: every id that ends generation.
    adds_bos, adds_eos: what encode(add_special=True) puts round the text.
    """

    def __init__(self, vocab: Vocab, coder: BytePairs | Pieces, adds_bos: bool, adds_eos: bool):
        self._vocab, self._coder = vocab, coder
        self.n_tokens = len(vocab.texts)
        self.bos_id, self.eos_id, self.eot_id = (vocab.roles.get(r) for r in ("bos", "eos", "eot"))
        self.eog_ids, self.roles = vocab.eog, dict(vocab.roles)
        self.adds_bos, self.adds_eos = adds_bos, adds_eos
        kinds, texts = vocab.kinds, vocab.texts
        self._user = _Cutter({texts[i]: i for i, k in enumerate(kinds) if k == USER_DEFINED})
        self._all = _Cutter({texts[i]: i for i, k in enumerate(kinds) if k in (USER_DEFINED, CONTROL, UNKNOWN)})

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of a text. add_special: BOS and EOS as the vocabulary wants them. parse_special: the text of a control token gives the token.

        User-defined tokens are always recognised. Raises Bw24Error for text with lone surrogates.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"U+{ord(text[error.start]):04X} at {error.start}"
            raise Bw24Error(f"text: expected valid Unicode, found the lone surrogate {found}") from None
        ids = [self.bos_id] if add_special and self.adds_bos else []
        lead = self._coder.lead_space
        for part in (self._all if parse_special else self._user).cut(text):
            if isinstance(part, int):
                ids.append(part)
                lead = self._coder.lead_space
            else:
                ids += self._coder.encode(" " + part if lead else part)
                lead = False
        if add_special and self.adds_eos:
            ids.append(self.eos_id)
        return ids

    def _checked(self, token: int) -> int:
        if not 0 <= token < self.n_tokens:
            raise Bw24Error(f"token id: expected 0 to {self.n_tokens - 1}, found {token}")
        return int(token)

    def piece(self, id: int) -> bytes:
        """The bytes of one token, a special token's text included; not always whole characters."""
        return self._coder.piece(self._checked(id))

    def is_special(self, id: int) -> bool:
        """Whether skip_special hides the token: control and unknown tokens, not user-defined ones."""
        return self._vocab.is_special(self._checked(id))

    def decode(self, ids: Iterable[int], *, skip_special: bool = False, clean_spaces: bool = False) -> str:
        """Text of a token sequence; what is not UTF-8 becomes U+FFFD, judged over the whole result.

        Where encoding puts a space in front of the text, it is taken off the first token again, unless skip_special removed a BOS there.
        clean_spaces: drop the space before `.,!?`, in " ' " and before 's 'm 're 've, as some tokenizer configurations ask for.
        """
        ids = [self._checked(i) for i in ids]
        lead = self._coder.lead_space
        if skip_special:
            if self.adds_bos and ids and ids[0] == self.bos_id:
                lead, ids = False, ids[1:]
            if self.adds_eos and ids and ids[-1] == self.eos_id:
                ids = ids[:-1]
        pieces = [b"" if skip_special and self._vocab.is_special(i) else self._coder.piece(i) for i in ids]
        if lead and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces).decode("utf-8", "replace")
        return _clean(text) if clean_spaces else text

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        """A decoder for tokens that arrive one at a time."""
        return StreamDecoder(self, skip_special)

    def token_text(self, id: int) -> str:
        """A token's text as the vocabulary spells it, stand-ins for bytes and spaces included."""
        return self._vocab.texts[self._checked(id)]

    def id_of(self, text: str) -> int | None:
        """The token that the vocabulary spells this way, or None."""
        return self._vocab.ids.get(text)


def _clean(text: str) -> str:
    text = re.sub(r" (?=[?!.,])", "", text)
    text = text.replace(" ' ", "'")
    return re.sub(r" (?='(?:[sm]|re|ve))", "", text)


class StreamDecoder:
    """Tokens in, text out, never half a character. The concatenation equals the concatenated pieces decoded at once."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        """The text that this token completes, possibly empty."""
        if self._skip and self._tokenizer.is_special(id):
            return ""
        return self._bytes.decode(self._tokenizer.piece(id))

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing. The decoder may be used again."""
        text = self._bytes.decode(b"", True)
        self._bytes.reset()
        return text


class StopFilter:
    """Streamed text up to the first stop string, which itself never comes out.

    The first stop string is the one that is complete first; of several complete at once, the longest. So the result does not depend on
    how the text is cut. `matched` is that string once one was found.
    """

    def __init__(self, stops: list[str]):
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise Bw24Error(f"stop: expected a string of at least one character, found {show(str(stop))}")
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can no longer become part of a stop string, whether a stop string was found)."""
        if self.matched is not None:
            return "", True
        text = self._held + text
        best = min(((at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0), default=None)
        if best is not None:
            self.matched, self._held = best[2], ""
            return text[: best[1]], True
        keep = max((self._overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep], False

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for size in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:size]):
                return size
        return 0

    def flush(self) -> str:
        """The text held back, once the stream has ended without a stop string."""
        text, self._held = self._held, ""
        return text


def from_metadata(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer that a GGUF's metadata describes: `tokenizer.ggml.*`.

    Models: gpt2 (byte-level BPE, `pre` names the pre-tokenizer), gemma4 (BPE over characters), llama (SentencePiece).
    Raises Bw24Error naming the key where metadata is missing, of the wrong type, inconsistent or of an unknown kind.
    """
    model = read(metadata, "model", str)
    if model is None:
        raise Bw24Error(f"{PREFIX}model: the key is missing")
    if model not in ("gpt2", "gemma4", "llama"):
        raise Bw24Error(f"{PREFIX}model: expected gpt2, gemma4 or llama, found {show(model)}")
    adds_bos = read(metadata, "add_bos_token", bool)
    adds_eos = read(metadata, "add_eos_token", bool, False)
    if model == "llama":
        from .tokenizer_spm import Pieces  # here, because each library takes some 50 ms to load and a vocabulary needs one of them

        vocab = read_vocab(metadata, _SPM_ROLES)
        coder = Pieces(vocab, read(metadata, "add_space_prefix", bool, True))
        adds_bos = True if adds_bos is None else adds_bos
    else:
        from .tokenizer_bpe import SCHEMES, BytePairs

        pre = "gemma4" if model == "gemma4" else read(metadata, "pre", str)
        if pre not in SCHEMES:
            found = "the key is missing" if pre is None else f"found {show(pre)}"
            raise Bw24Error(f"{PREFIX}pre: expected one of {', '.join(sorted(SCHEMES))}; {found}")
        vocab = read_vocab(metadata, {})
        merges = read_strings(metadata, "merges")
        if merges is None:
            raise Bw24Error(f"{PREFIX}merges: the key is missing")
        coder = BytePairs(vocab, merges, SCHEMES[pre], raw=pre == "gemma4")
        # gemma4 files exist that deny it: without BOS the model is useless, so the file is not asked
        adds_bos = SCHEMES[pre].adds_bos if adds_bos is None or pre == "gemma4" else adds_bos
    for role, adds in (("bos", adds_bos), ("eos", adds_eos)):
        if adds and role not in vocab.roles:
            raise Bw24Error(f"{PREFIX}{role}_token_id: the key is missing, but the vocabulary adds {role.upper()}")
    return Tokenizer(vocab, coder, adds_bos, adds_eos)
