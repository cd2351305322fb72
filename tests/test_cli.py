"""The command line as its user meets it: streams, exit codes, one-line errors, prompts, settings. Most tests run it in this process."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bw24 import cli, cli_common, engine, flags, sampling, source
from tiny_model import write_tiny

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def errors(err: str) -> list[str]:
    """Lines of standard error without the one that names the device."""
    return [line for line in err.splitlines() if not line.startswith("device: ")]


@pytest.fixture
def run(monkeypatch, capsys):
    """run(words..., stdin=text) -> (exit code, stdout, stderr). Standard input is empty unless given; no BW24_ variable leaks in."""
    for name in [n for n in os.environ if n.startswith("BW24_")]:
        monkeypatch.delenv(name)

    def call(*words: str, stdin: str = "") -> tuple[int, str, str]:
        raw = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", raw)
        monkeypatch.setattr("bw24.cli_text.select.select", lambda r, w, x, t: (r, w, x))
        code = cli.main(list(words))
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def external(*words: str, **settings) -> subprocess.Popen:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BW24_")} | {"PYTHONPATH": str(ROOT / "py")}
    # a shell that starts a job in the background lets it ignore SIGINT, and children inherit that: the tests' program must hear it
    return subprocess.Popen([sys.executable, "-m", "bw24", *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            errors="replace", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **settings)


# ---- gen


def test_gen_writes_only_the_reply_to_stdout(run, tiny):
    code, out, err = run("gen", tiny, "-p", "Hello", "-n", "12")
    assert code == 0 and out.endswith("\n")
    lines = err.splitlines()
    assert lines.pop(0).startswith("device: ")
    assert lines[0].startswith("verify-prefill argmax=") and lines[0].endswith("logit maxdiff=0.000e+00 MATCH")
    assert lines[-1].startswith("prompt ") and "tok/s" in lines[-1] and "load" in lines[-1] and "peak memory" in lines[-1]
    assert len(lines) == 2


def test_gen_without_any_prompt_uses_the_built_in_one_and_says_so(run, tiny):
    code, out, err = run("gen", tiny, "-n", "4", "--json")
    assert code == 0 and "no prompt given, using the built-in one: 'Explain KV caches.'" in err
    assert json.loads(out) == json.loads(run("gen", tiny, "-n", "4", "--json", "-p", "Explain KV caches.")[1]) | timings(out)


def timings(text: str) -> dict:
    return {k: v for k, v in json.loads(text).items() if "second" in k or "peak" in k}


def test_gen_prompt_sources(run, tiny, tmp_path):
    def ids(*words: str, stdin: str = "") -> tuple[list[int], int]:
        code, out, err = run("gen", tiny, "-n", "6", "--raw", "--json", *words, stdin=stdin)
        assert code == 0, err
        report = json.loads(out)
        return report["ids"], report["prompt_tokens"]

    listed, spaced = tmp_path / "ids.json", tmp_path / "ids.txt"
    listed.write_text(json.dumps(list(b"river")))
    # byte-level ids follow the byte-to-text order, so 'river' by its bytes is the same ids
    spaced.write_text(" ".join(map(str, b"river")))
    by_text = ids("-p", "river")
    assert by_text[1] == 5
    assert ids(stdin="river") == ids("-p", "-", stdin="river") == by_text
    assert ids("--prompt-ids", str(listed)) == ids("--prompt-ids", str(spaced)) == by_text
    assert ids("--prompt-ids", "-", stdin=spaced.read_text()) == by_text


@pytest.mark.parametrize("content, message", [
    ("[1, 2", "expected token ids"), ("1 two", "expected token ids"), ("[1.5]", "expected token ids"), ("[true]", "expected token ids"),
    ("[1, 5000]", "token 1 of the prompt: expected an id 0..259, found 5000"), ("-3", "found -3"), ("", "no tokens"),
])
def test_bad_prompt_ids(run, tiny, tmp_path, content, message):
    path = tmp_path / "ids"
    path.write_text(content)
    code, out, err = run("gen", tiny, "--prompt-ids", str(path))
    assert (code, out) == (2, "") and message in err and len(errors(err)) == 1


def test_raw_and_chat_template(run, tiny, tmp_path, monkeypatch):
    def tokens(*words: str, model: str = tiny) -> int:
        code, out, err = run("gen", model, "-p", "Hi", "-n", "1", "--json", *words)
        assert code == 0, err
        return json.loads(out)["prompt_tokens"]

    raw, chat, system = tokens("--raw"), tokens(), tokens("--system", "Be brief")
    assert raw == 2 < chat < system
    plain = str(write_tiny(tmp_path / "plain.gguf", template=None))
    assert tokens(model=plain) == 2
    code, out, err = run("gen", plain, "-p", "Hi", "--system", "x")
    assert code == 2 and "the model file has none" in err
    code, out, err = run("gen", tiny, "-p", "Hi", "--system", "x", "--raw")
    assert code == 2 and "--raw turns it off" in err
    monkeypatch.setenv("BW24_CHAT", "0")
    assert tokens() == 2
    monkeypatch.setenv("BW24_CHAT", "1")
    assert tokens() == chat
    code, out, err = run("gen", plain, "-p", "Hi")
    assert code == 2 and "BW24_CHAT=1, but the model file has no chat template" in err


def test_json_is_one_object(run, tiny):
    code, out, err = run("gen", tiny, "-p", "Hi", "-n", "5", "--json", "--seed", "4", "-T", "1")
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and report["seed"] == 4 and report["gate"]["match"] is True
    assert len(report["ids"]) == report["generated_tokens"] == 5 and report["reason"] == "length" and report["threads"] >= 1
    assert {"text", "model", "kv", "context", "backend", "isa", "load_seconds", "peak_memory_bytes"} <= set(report)


def test_a_seed_gives_the_same_text_and_settings_change_it(run, tiny):
    def text(*words: str) -> str:
        return json.loads(run("gen", tiny, "-p", "Hi", "-n", "16", "--json", *words)[1])["text"]

    assert text("-T", "1", "--seed", "1") == text("-T", "1", "--seed", "1") != text("-T", "1", "--seed", "2")
    for seam in (["--no-fuse"], ["--no-repack"], ["--backend", "ref"], ["--isa", "portable"], ["--threads", "1"]):
        assert text("-T", "1", "--seed", "1", *seam) == text("-T", "1", "--seed", "1"), seam


def test_a_mismatch_prints_no_text_and_exits_3(run, tiny, monkeypatch):
    honest = engine.Engine.step

    def wrong(self, rows):
        logits = honest(self, rows)
        return np.nextafter(logits, np.float32(1e9)) if len(rows) == 1 else logits

    monkeypatch.setattr(engine.Engine, "step", wrong)
    code, out, err = run("gen", tiny, "-p", "Hello", "-n", "5")
    assert (code, out) == (3, "") and "MISMATCH" in err and "no text is printed" in err
    code, out, err = run("bench", tiny, "--sizes", "4", "--tokens", "2")
    assert (code, out) == (3, "") and "no number is printed" in err
    code, out, err = run("gate", tiny)
    assert code == 3 and "FAIL prefill = decode" in out


def test_control_characters_do_not_reach_a_terminal():
    assert cli_common.terminal_safe("a\x1b[31mb\tc\nd\x9b\x07é") == "a\ufffd[31mb\tc\nd\ufffd\ufffdé"


# ---- settings


def test_model_by_option_and_position(run, tiny, monkeypatch):
    assert run("tokenize", "-m", tiny, "-p", "a")[1] == run("tokenize", tiny, "-p", "a")[1] != ""
    monkeypatch.setenv("BW24_MODEL", tiny)
    assert run("tokenize", "-p", "a")[0] == 0
    code, _, err = run("tokenize", tiny, "-m", tiny, "-p", "a")
    assert code == 2 and "two models named" in err


class Stopped(Exception):
    pass


def test_engine_settings_reach_the_engine(run, tiny, monkeypatch):
    seen = {}

    def engine_made(model, *, progress=None, **settings):
        seen.update({name: value for name, value in settings.items() if name != "draft"})
        raise Stopped

    monkeypatch.setattr(engine, "Engine", engine_made)
    words = ["--threads", "3", "--ctx", "99", "--kv", "q8_0/q5_1", "--device", "cpu", "--backend", "ref", "--isa", "avx2", "--no-fuse",
             "--no-repack"]
    with pytest.raises(Stopped):
        run("gen", tiny, "-p", "x", *words)
    assert seen == {"device": "cpu", "threads": 3, "ctx": 99, "kv": "q8_0/q5_1", "backend": "ref", "isa": "avx2", "fuse": False, "repack": False,
                    "prefill": "exact"}
    variables = {"DEVICE": "cpu", "THREADS": "3", "CTX": "99", "KV": "q8_0/q5_1", "BACKEND": "ref", "ISA": "avx2", "FUSE": "0", "REPACK": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"BW24_{name}", value)
    by_option = dict(seen)
    with pytest.raises(Stopped):
        run("gen", tiny, "-p", "x")
    assert seen == by_option
    for name in variables:
        monkeypatch.delenv(f"BW24_{name}")
    with pytest.raises(Stopped):
        run("gen", tiny, "-p", "x")
    assert seen == {name: flags.BY_NAME[name].default for name in (*cli_common.ENGINE_FLAGS, "prefill")}


def test_sampling_settings_reach_the_sampler(run, tiny, monkeypatch):
    seen = []
    honest = sampling.sample
    monkeypatch.setattr(sampling, "sample", lambda logits, params, *rest: (seen.append(params), honest(logits, params, *rest))[1])
    words = ["-T", "0.7", "--top-k", "9", "--top-p", "0.8", "--min-p", "0.05", "--repetition-penalty", "1.2", "--presence-penalty", "0.3",
             "--frequency-penalty", "0.4", "--logit-bias", "5=-2", "--logit-bias", "7=1.5", "--seed", "11"]
    assert run("gen", tiny, "-p", "x", "-n", "1", *words)[0] == 0
    assert seen[0] == sampling.SamplingParams(0.7, 9, 0.8, 0.05, 1.2, 0.3, 0.4, {5: -2.0, 7: 1.5}, 11)
    monkeypatch.setenv("BW24_SEED", "12")
    run("gen", tiny, "-p", "x", "-n", "1")
    assert seen[1] == sampling.SamplingParams(seed=12)
    code, _, err = run("gen", tiny, "-p", "x", "--logit-bias", "five=2")
    assert code == 2 and "expected ID=VALUE, found 'five=2'" in err


def test_a_mistyped_variable_is_reported(run, tiny, monkeypatch):
    monkeypatch.setenv("BW24_THREAD", "2")
    code, _, err = run("tokenize", tiny, "-p", "a")
    assert code == 0 and "BW24_THREAD is set but nothing reads it; did you mean BW24_THREADS?" in err


# ---- errors


@pytest.mark.parametrize("words, message", [
    (["gen", "MODEL", "--threads", "0"], "expected a whole number 1..1024"),
    (["gen", "MODEL", "--nonsense"], "gen: unknown argument '--nonsense'"),
    (["gen", "MODEL", "-p", "x", "--prefill", "fast"], "the fast prefill class exists in backend cuda only"),
    (["bench", "MODEL", "--prefill", "fast"], "the fast prefill class exists in backend cuda only"),
    (["bench", "MODEL", "--prefill", "quick"], "expected one of exact, fast"),
    (["gen", "MODEL", "--kv", "e5m2"], "expected f32, f16, q8_0, q5_1, e4m3"),
    (["gen", "MODEL", "-p", "x", "--ctx", "100000"], "--ctx 100000"),
    (["gen", "MODEL", "-p", "x" * 400, "--raw"], "the prompt has 400 tokens, the context holds 320"),
    (["gen", "MODEL", "-p", "x", "--prompt-ids", "y"], "--prompt and --prompt-ids: give one of them"),
    (["gen", "MODEL", "--prompt-ids", "/nonexistent/ids"], "/nonexistent/ids: cannot read: No such file or directory"),
    (["gen", "/nonexistent.gguf"], "nonexistent.gguf"),
    (["gen", "Explain this", "-n", "1"], "a prompt goes in --prompt"),
    (["gen", "MODEL", "-p", "x", "--stop", ""], "stop"),
    (["perplexity", "MODEL", "/nonexistent.txt"], "/nonexistent.txt: cannot read"),
    (["perplexity", "MODEL"], "expected UTF-8 text"),
    (["bench", "MODEL", "--rounds", "2"], "5..1000"),
    (["bench", "MODEL", "--sizes", "9999"], "9999 tokens, the context holds 320"),
    (["bench", "MODEL", "--peer-bin", "/x"], "add --vs llama.cpp"),
    (["frobnicate"], "invalid choice"),
    (["gen", "MODEL", "--temp", "0.5"], "did you mean --temperature?"),
])
def test_an_error_is_one_line_and_exit_2(run, tiny, words, message):
    code, out, err = run(*[tiny if w == "MODEL" else w for w in words])
    assert (code, out) == (2, ""), err
    assert errors(err)[0].startswith("bw24: ") and len(errors(err)) == 1 and message in err and "Traceback" not in err


def test_broken_files_are_refused(run, tiny, tmp_path):
    whole = Path(tiny).read_bytes()
    for name, data in {"cut": whole[:3000], "magic": b"GGML" + whole[4:], "empty": b""}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        for command in ("gen", "info", "explain"):
            code, out, err = run(command, str(path))
            assert code == 2 and out == "" and len(err.splitlines()) == 1 and f"{name}.gguf" in err


def test_an_unknown_architecture_is_named(run, tmp_path):
    path = str(write_tiny(tmp_path / "odd.gguf", arch="mamba9"))
    code, _, err = run("gen", path, "-p", "x")
    assert code == 2 and f"'mamba9' is not supported; supported are {', '.join(source.architectures())}" in err
    code, out, err = run("info", path)
    assert code == 0 and "bw24 cannot run it: architecture 'mamba9' is not supported" in out


# ---- the other commands


def test_tokenize(run, tiny):
    code, out, err = run("tokenize", tiny, "-p", "the é")
    assert (code, err) == (0, "")
    assert [line.split("\t")[1] for line in out.splitlines()] == ['"th"', '"e"', '" "', "bytes c3", "bytes a9"]
    ids = run("tokenize", tiny, "--ids", stdin="the é")[1]
    report = json.loads(run("tokenize", tiny, "--json", "-p", "the é")[1])
    assert ids.split() == [line.split("\t")[0] for line in out.splitlines()] == list(map(str, report["ids"]))
    assert run("tokenize", tiny, "--prompt-ids", "-", stdin=ids)[1] == "the é\n"
    assert run("tokenize", tiny, "--ids", "--special", "-p", "<|im_end|>")[1] == "259\n"
    assert len(run("tokenize", tiny, "--ids", "-p", "<|im_end|>")[1].split()) == 10


def test_perplexity(run, tiny, tmp_path):
    path = tmp_path / "text"
    path.write_text("A short text, scored twice.")
    code, out, err = run("perplexity", tiny, str(path))
    assert code == 0 and out.startswith("perplexity ") and "over 26 tokens" in out
    whole = json.loads(run("perplexity", tiny, str(path), "--json")[1])
    assert whole["tokens"] == 26 and abs(whole["perplexity"] - np.exp(whole["nll"])) < 1e-9
    halves = json.loads(run("perplexity", "-m", tiny, str(path), "--json", "--window", "14")[1])
    assert halves["tokens"] == 25 and halves["nll"] != whole["nll"]
    stdin = json.loads(run("perplexity", tiny, "-", "--json", stdin=path.read_text())[1])
    assert stdin == whole
    path.write_bytes(b"ab\xff")
    code, _, err = run("perplexity", tiny, str(path))
    assert code == 2 and "expected UTF-8 text, found byte 0xff at 2" in err


def test_info(run, tiny):
    code, out, err = run("info", tiny, "--metadata")
    assert (code, err) == (0, "") and "Tiny" in out and "llama" in out and "chat template yes" in out and "fits" in out
    assert "tokenizer.ggml.merges = ['t h'] (1 values)" in out
    report = json.loads(run("info", tiny, "--json", "--kv", "q8_0")[1])
    full = json.loads(run("info", tiny, "--json", "--kv", "f32")[1])
    assert report["context_length"] == 320 and report["tensor_types"]["Q8_0"]["tensors"] == 16 and report["refusal"] is None
    # 2 layers of 2 KV heads of 32 values, K and V, 320 positions and the page that a fork copies: 4 bytes a value, or 34 bytes for 32
    assert full["memory"][-1]["kv"] == 2 * 2 * 32 * 2 * (320 + 64) * 4
    assert report["memory"][-1]["kv"] * 32 * 4 == full["memory"][-1]["kv"] * 34


def test_explain(run, tiny):
    code, out, _ = run("explain", tiny)
    assert code == 0 and "LINEAR" in out and "blk.1.ffn_down.weight" in out and "llama.py:" in out
    plan, unfused = run("explain", tiny, "--plan")[1], run("explain", tiny, "--plan", "--no-fuse")[1]
    assert plan != unfused and len(plan.splitlines()) < len(unfused.splitlines())


def test_models_and_flags(run, tmp_path, monkeypatch):
    monkeypatch.setenv("BW24_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, _ = run("models")
    assert code == 0 and "smollm2" in out and "not fetched yet" in out
    code, out, _ = run("flags")
    assert code == 0 and all(flag.variable in out for flag in flags.TABLE if flag.variable)
    assert len(json.loads(run("flags", "--json")[1])["flags"]) == len(flags.TABLE)


def test_version_and_help(run, capsys):
    for words in (["--version"], ["--help"], ["gen", "--help"], ["chat", "--help"], ["bench", "--help"]):
        with pytest.raises(SystemExit) as caught:
            run(*words)
        out = capsys.readouterr().out
        assert caught.value.code == 0
        if words == ["--version"]:
            assert out.startswith("bw24 0.") and "revision" in out and "ABI" in out
        else:
            assert "examples:" in out and "bw24 " in out and "%(" not in out
    code, out, _ = run()
    assert code == 0 and "examples:" in out


def test_bench(run, tiny):
    code, out, err = run("bench", tiny, "--sizes", "16,32", "--tokens", "4", "--depths", "0,8", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert "MATCH" in err and report["decode_ratio"] is None and report["prefill_ratio_256"] is None and report["gate"]["match"]
    assert len(report["cells"]) == 6 and all(cell["ours"]["median"] > 0 for cell in report["cells"])
    code, out, err = run("bench", tiny, "--sizes", "16", "--tokens", "4")
    assert code == 0 and "prefill 16" in out and "decode 4" in out


# ---- chat


def test_chat_in_a_pipe(run, tiny):
    code, out, err = run("chat", tiny, "-n", "6", stdin="Hi\nAnd again \\\nin two lines\n/undo\n/reset\nHi\n/exit\nnever read\n")
    assert code == 0, err
    notes = [line for line in err.splitlines() if line.startswith("[")]
    assert len(notes) == 3 and "0 of them kept" in notes[0] and "never" not in out
    kept = int(notes[1].split(" prompt tokens, ")[1].split()[0])
    assert kept > 10
    first, last = out.splitlines()[0], out.splitlines()[-1]
    assert first == last  # the same question after /reset gives the same bytes, whatever was kept


def test_chat_needs_a_template(run, tmp_path):
    path = str(write_tiny(tmp_path / "plain.gguf", template=None))
    code, _, err = run("chat", path, stdin="Hi\n")
    assert code == 2 and "no chat template" in err


def test_a_chat_that_overflows_the_context_ends_with_one_line(run, tiny):
    code, out, err = run("chat", tiny, stdin="x" * 500 + "\n")
    assert (code, out) == (2, "") and "the context holds 320" in err


# ---- signals and pipes, in a process of its own

ENDLESS = ("--logit-bias", "257=-1e6", "--logit-bias", "259=-1e6")  # never an end token


def wait_for(process: subprocess.Popen, stream, text: str) -> None:
    seen = ""
    while text not in seen:
        char = stream.read(1)
        assert char, f"ended before {text!r}: {seen!r}"
        seen += char


def test_ctrl_c_ends_gen_with_130_and_keeps_what_was_said(tmp_path):
    slow = str(write_tiny(tmp_path / "long.gguf", context=1 << 20))
    process = external("gen", slow, "-p", "Hello", "-n", "-1", "--ctx", "60000", *ENDLESS, stdin=subprocess.DEVNULL)
    try:
        wait_for(process, process.stderr, "MATCH")
        assert process.stdout.read(1)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and len(out) > 0 and "(interrupted)" in err and "Traceback" not in err


def test_a_reader_that_leaves_ends_gen_quietly(tmp_path):
    slow = str(write_tiny(tmp_path / "long.gguf", context=1 << 20))
    process = external("gen", slow, "-p", "Hello", "-n", "3000", "--ctx", "60000", *ENDLESS, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in err and "Exception ignored" not in err
