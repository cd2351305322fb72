"""The generation loop: pieces of the prompt, stop conditions, streaming, figures. The engine is a fake; sampling is the library's."""

from __future__ import annotations

import numpy as np
import pytest

from bw24 import generate
from bw24.errors import Bw24Error
from bw24.sampling import SamplingParams
from bw24.tokenizer import StreamDecoder
from fake_engine import VOCAB, FakeEngine

GREEDY = SamplingParams()


class ByteTokenizer:
    """Ids 0..39 stand for the bytes of a small alphabet with a two-byte character; 39 is special."""

    BYTES = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz .,!?ABC"] + [b"\xc3", b"\xa9", b"the ", b"end", b"<END>", b"<end>"]

    def piece(self, token: int) -> bytes:
        return self.BYTES[token]

    def is_special(self, token: int) -> bool:
        return token == 39

    def stream(self, *, skip_special: bool = False) -> StreamDecoder:
        return StreamDecoder(self, skip_special)

    def ids(self, text: bytes) -> list[int]:
        return [self.BYTES.index(bytes([b])) for b in text]


TOKENIZER = ByteTokenizer()


def reply(script: list[int], *, prompt: int = 3, ctx: int = 400, **settings) -> generate.Generation:
    """A generation whose greedy tokens are `script`, after a prompt of some tokens."""
    engine = FakeEngine(ctx=ctx, script=[0] * (prompt - 1) + script)
    seq = engine.sequence()
    logits = generate.prefill(engine, seq, [1] * prompt)[-1]
    return generate.Generation(seq, TOKENIZER, [1] * prompt, logits, settings.pop("params", GREEDY), ctx=ctx, **settings)


CHUNKS = [(1, 64, 8), (8, 64, 8), (64, 64, 8), (65, 64, 8), (130, 64, 8), (128, 64, 1), (72, 64, 8), (5, 1, 1), (9, 4, 4)]


@pytest.mark.parametrize("n, width, keep", CHUNKS)
def test_chunks_cover_the_prompt_and_keep_the_last_rows_together(n, width, keep):
    parts = generate.chunks(n, width, keep)
    assert parts[0][0] == 0 and parts[-1][1] == n
    assert all(a[1] == b[0] for a, b in zip(parts[:-1], parts[1:], strict=True))
    assert all(1 <= end - begin <= width for begin, end in parts)
    assert parts[-1][1] - parts[-1][0] >= min(keep, n)


def test_prefill_returns_the_last_rows_and_reports_progress():
    engine, seen = FakeEngine(), []
    ids = [i % VOCAB for i in range(130)]
    seq = engine.sequence()
    logits = generate.prefill(engine, seq, ids, 8, lambda done, total: seen.append((done, total)))
    assert seq.tokens == ids and logits.shape == (8, VOCAB)
    for i in range(8):
        assert np.array_equal(logits[i], engine.row(ids[: 123 + i]))
    assert seen[-1] == (130, 130) and len(seen) == 3


def test_text_streams_in_whole_characters():
    ids = TOKENIZER.ids(b"caf\xc3\xa9 a")
    out = reply(ids, limit=len(ids))
    assert list(out) == ["c", "a", "f", "é", " ", "a"] and out.ids == ids


def test_an_unfinished_character_ends_as_a_replacement():
    assert "".join(reply(TOKENIZER.ids(b"a\xc3"), limit=2)) == "a\ufffd"


def test_length_stops():
    out = reply(TOKENIZER.ids(b"abcdef"), limit=3)
    assert "".join(out) == "abc" and out.reason == generate.LENGTH
    assert out.stats.generated_tokens == 3 and out.stats.steps == 2 and out.seq.pos == 5
    nothing = reply(TOKENIZER.ids(b"abc"), limit=0)
    assert list(nothing) == [] and nothing.reason == generate.LENGTH and nothing.ids == []


def test_end_token_stops_and_is_not_part_of_the_reply():
    out = reply([*TOKENIZER.ids(b"ab"), 38, *TOKENIZER.ids(b"c")], limit=10, stop_ids={38})
    assert "".join(out) == "ab" and out.reason == generate.EOS and out.ids == TOKENIZER.ids(b"ab")


def test_special_tokens_do_not_show():
    assert "".join(reply([0, 39, 1], limit=3)) == "ab"


def test_stop_string_never_leaks():
    text = b"so far and no further"
    for stop in ("no", " and n", "further", "so"):
        out = reply(TOKENIZER.ids(text), limit=len(text), stops=[stop])
        pieces = list(out)
        assert "".join(pieces) == text.decode().split(stop)[0] and out.reason == generate.STOP
    almost = reply(TOKENIZER.ids(b"ab and"), limit=6, stops=["and so on"])
    assert "".join(almost) == "ab and" and almost.reason == generate.LENGTH


def test_a_full_context_stops():
    out = reply(TOKENIZER.ids(b"abcdefgh"), prompt=3, ctx=6)
    assert "".join(out) == "abcd" and out.reason == generate.CONTEXT and out.seq.pos == 6


def test_a_prompt_must_leave_room():
    generate.check_fits(5, 6)
    with pytest.raises(Bw24Error, match="the prompt has 6 tokens, the context holds 6"):
        generate.check_fits(6, 6)
    with pytest.raises(Bw24Error, match="no tokens"):
        generate.check_fits(0, 6)


def test_an_interrupted_reply_gives_what_was_held_back():
    out = reply(TOKENIZER.ids(b"xyz an"), limit=20, stops=["and"])
    decode, pieces = out.seq.decode, []

    def interrupted(token: int) -> np.ndarray:
        if len(out.ids) == 6:  # "an" is held: it may become a stop string
            raise KeyboardInterrupt
        return decode(token)

    out.seq.decode = interrupted
    with pytest.raises(KeyboardInterrupt):
        for piece in out:
            pieces.append(piece)
    assert "".join(pieces) == "xyz " and out.rest() == "an"


def test_a_seeded_reply_repeats_and_a_seed_matters():
    def text(seed: int) -> str:
        engine = FakeEngine()
        seq = engine.sequence()
        logits = generate.prefill(engine, seq, [1, 2, 3])[-1]
        params = SamplingParams(temperature=1.0, seed=seed)
        return "".join(generate.Generation(seq, TOKENIZER, [1, 2, 3], logits, params, ctx=400, limit=30))

    assert text(5) == text(5) != text(6)


def test_penalties_see_prompt_and_reply():
    out = reply([4, 4, 4], prompt=1, limit=3, params=SamplingParams(frequency_penalty=100.0))
    list(out)
    assert out.ids[0] == 4 and 4 not in out.ids[1:]


def test_figures():
    stats = generate.Stats(prompt_tokens=100, cached_tokens=60, prompt_seconds=0.5, generated_tokens=11, steps=10, step_seconds=2.0)
    assert stats.prompt_rate == 80 and stats.rate == 5
    assert generate.Stats().prompt_rate == 0 and generate.Stats().rate == 0
    assert stats.as_dict()["generation_tokens_per_second"] == 5


def test_common_prefix():
    assert generate.common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert generate.common_prefix([], [1]) == 0 and generate.common_prefix([1, 2], [1, 2]) == 2
