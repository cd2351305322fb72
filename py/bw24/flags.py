"""Every setting in one typed table, and the only reader of the environment. Knows names, ranges and defaults; not what they do.

A value comes from the command line, else from the variable, else from the table. docs/FLAGS.md is printed from the table (scripts/docs.py).
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import Bw24Error
from .units import parse_size

RUNTIME, MACHINE, SEAM = "runtime", "machine", "rollback seam"
KV_FORMATS = ("f32", "f16", "q8_0", "q5_1", "e4m3")
KV_HELP = "f32, f16, q8_0, q5_1, e4m3, K/V of two (q8_0/q5_1), or full=...,window=... by layer class"
KV_SIZES = "; bytes of 32 K and 32 V values: f32 256, f16 128, q8_0 68, e4m3 64, q8_0/q5_1 58, q5_1 48"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Flag:
    """One setting. `type` is int, float, bool, str, `list` (repeatable strings), `size` (bytes: 24g), `kv` (a KV format, or K/V of two) or
    `spec` (1..16, or off: 0, auto: -1).

    Names in `numbered` may carry a number (cuda:1). An option of a bool sets it to `sets`.
    """

    name: str
    kind: str
    type: Any
    default: Any
    help: str
    option: str | None = None
    short: str | None = None
    variable: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    numbered: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    sets: bool = True
    test: str = ""
    shown_default: str = ""

    @property
    def group(self) -> str:
        """The section of the help that the option stands in."""
        return next((title for title, members in GROUPS.items() if self.name in members), "")

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; Bw24Error says what was expected."""
        return self._convert(text.strip() if self.type is not str else text)

    def _convert(self, text: str) -> Any:
        if self.type is bool:
            if text.lower() not in TRUE + FALSE:
                raise Bw24Error(f"expected 1 or 0, found {text!r}")
            return text.lower() in TRUE
        if self.type in (int, float):
            return self._number(text)
        if self.type == "kv":
            return self._kv(text)
        if self.type == "size":
            return parse_size(text, self.option or self.name)
        if self.type == "spec":
            return self._spec(text)
        name, colon, number = text.partition(":")
        numbered = bool(colon) and name in self.numbered and number.isdigit()  # cuda:1, the second device
        if self.choices and text not in self.choices and not numbered:
            raise Bw24Error(f"expected one of {', '.join(self.choices)}, found {text!r}")
        return text

    def _number(self, text: str) -> int | float:
        wanted = "a whole number" if self.type is int else "a number"
        try:
            value = self.type(text)
        except ValueError:
            raise Bw24Error(f"expected {wanted}{self.range()}, found {text!r}") from None
        # written so that NaN fails
        if not (self.low is None or value >= self.low) or not (self.high is None or value <= self.high):
            raise Bw24Error(f"expected {wanted}{self.range()}, found {text}")
        return value

    def _kv(self, text: str) -> str:
        """FORMAT or K/V for all layers, or `full=...,window=...` by layer class."""
        for part in text.split(","):
            name, equals, value = part.rpartition("=")
            formats = value.split("/")
            if len(formats) > 2 or any(f not in KV_FORMATS for f in formats) or (name not in ("full", "window") if equals else "," in text):
                raise Bw24Error(f"expected {KV_HELP}, found {text!r}")
        return text

    def _spec(self, text: str) -> int:
        if text not in ("off", "auto") and not (text.isdecimal() and int(text) <= 16):
            raise Bw24Error(f"expected a number 1..16, auto or off, found {text!r}")
        return {"off": 0, "auto": -1}.get(text) if not text.isdecimal() else int(text)

    def range(self) -> str:
        """The allowed numbers as text, with a space in front; empty where all are."""
        if self.low is None and self.high is None:
            return ""
        if self.high is None:
            return f" from {self.low} up"
        return f" {self.low}..{self.high}" if self.low is not None else f" up to {self.high}"

# the tests that hold several settings at once
_ENGINE = "test_cli.py::test_engine_settings_reach_the_engine"
_SAMPLER = "test_cli.py::test_sampling_settings_reach_the_sampler"
_GATE = "test_gate.py::test_every_equality_passes_on_a_tiny_model"
_DEVICE = "test_device.py::test_a_card_is_taken_where_there_is_one"
_READ = "test_flags.py::test_variables_reach_their_readers"
_MAKE = "test_flags.py::test_makefile_reads_its_variables"
_PROMPT = "test_cli.py::test_gen_prompt_sources"
_CHAT = "test_cli.py::test_raw_and_chat_template"
_SERVE = "test_server_app.py::test_settings_come_from_options_and_variables"

GROUPS = {
    "prompt": ("prompt", "prompt_ids", "chat", "system"),
    "sampling": ("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                 "logit_bias", "seed", "stop"),
    "speculation": ("spec", "draft", "draft_hidden", "draft_spare", "spec_sampling"),
    "engine": ("weights", "device", "threads", "ctx", "kv", "prefill"),
    "experts beyond memory": ("vram", "ram", "nvme", "tier_policy", "profile", "stats", "trace"),
    "server": ("host", "port", "alias", "api_key_file", "cors", "cache_ram", "parallel", "queue", "drain", "lenient", "log_prompts"),
    "rollback seams (same bits, slower)": ("backend", "isa", "fuse", "repack"),
}

TABLE: tuple[Flag, ...] = (
    # ---- the model and the machine it runs on
    Flag("model", RUNTIME, str, "smollm2", "the model: a path, hf:owner/repo[:QUANT] or a name that `bw24 models` lists", "--model", "-m",
         "BW24_MODEL", "MODEL", test="test_cli.py::test_model_by_option_and_position"),
    Flag("weights", RUNTIME, str, "auto", "of a checkpoint directory: auto reads large float matrices as Q8_0, keep keeps their values, slower",
         "--weights", None, "BW24_WEIGHTS", "HOW", choices=("auto", "keep"), test="test_convert.py::test_weights_keep_is_said_and_kept"),
    Flag("device", RUNTIME, str, "auto", "where to compute: auto (a CUDA card where there is one, else the processor), cpu, cuda or cuda:N",
         "--device", None, "BW24_DEVICE", "NAME", choices=("auto", "cpu", "cuda"), numbered=("cuda",), test=_DEVICE),
    Flag("threads", RUNTIME, int, None, "threads that compute", "--threads", "-t", "BW24_THREADS", "N", low=1, high=1024,
         shown_default="physical cores", test=_ENGINE),
    Flag("ctx", RUNTIME, int, None, "most tokens of prompt and reply together", "--ctx", "-c", "BW24_CTX", "N", low=1, high=1 << 24,
         shown_default="the model's own, less where memory is short", test=_ENGINE),
    Flag("kv", RUNTIME, "kv", None, "format of the KV cache: " + KV_HELP + KV_SIZES, "--kv", None, "BW24_KV",
         "FORMAT", shown_default="chosen from the model file", test=_ENGINE),
    Flag("kv_fp8", RUNTIME, bool, False, "1: the KV cache is e4m3 where neither --kv nor BW24_KV says another", variable="BW24_KV_FP8",
         test="test_flags.py::test_kv_fp8_is_e4m3_where_nothing_else_is_said"),
    Flag("spec", RUNTIME, "spec", None, "tokens that are drafted a round: 1 to 16, auto (as many as pay) or off; the text is the same",
         "--spec", None, "BW24_SPEC_K", "K", shown_default="auto where the model has an MTP block or --draft names a drafter",
         test="test_speculation.py::test_gen_reports_rounds"),
    Flag("draft", RUNTIME, str, None, "a drafter in a file of its own: FILE or hf:owner/repo:path.gguf; the text is the same", "--draft", None,
         "BW24_DRAFT", "FILE", shown_default="the model's own MTP block", test="test_drafter.py::test_gen_with_a_draft_file"),
    Flag("draft_hidden", RUNTIME, str, "post", "hidden rows that an MTP block takes: post, after the model's last norm, or pre, before it",
         "--draft-hidden", None, "BW24_DRAFT_HIDDEN", "SIDE", choices=("post", "pre"), test="test_drafter.py::test_gen_with_a_draft_file"),
    Flag("spec_sampling", RUNTIME, str, "race", "how drafts are judged where --temperature is above 0: race gives the text of plain decoding; reject "
         "(rejection sampling) accepts more, the text has the same distribution and repeats with the same --spec K and drafter", "--spec-sampling",
         None, "BW24_SPEC_SAMPLING", "MODE", choices=("race", "reject"), test="test_draft_reject.py::test_gen_takes_the_mode"),
    Flag("draft_spare", RUNTIME, int, 256, "rows of a trimmed --draft that learn the tokens it lacks while replies are made; 0 turns that off",
         "--draft-spare", None, "BW24_DRAFT_SPARE", "N", low=0, high=65536, test="test_adapt.py::test_gen_learns_and_remembers"),
    Flag("prefill", RUNTIME, str, "exact", "numeric class of the prompt's pass: exact gives decode's bits; fast (bf16 in attention and "
         "quantised matrices, tf32 in delta nets) is approximate, backend cuda only",
         "--prefill", metavar="CLASS", choices=("exact", "fast"), test="test_prefill_class.py::test_fast_needs_backend_cuda"),
    # ---- experts beyond memory: docs/HY3-SPILL.md
    Flag("vram", RUNTIME, "size", None, "video memory for the model, such as 24g; the processor computes the experts that do not fit", "--vram", None,
         "BW24_VRAM", "SIZE", shown_default="what is free on the card", test="test_tiers.py::test_settings_reach_the_engine"),
    Flag("ram", RUNTIME, "size", None, "RAM for a mixture's experts, such as 24g; the others are read from the model's files when used", "--ram",
         None, "BW24_RAM", "SIZE", shown_default="all, where they fit", test="test_tiers.py::test_settings_reach_the_engine"),
    Flag("nvme", RUNTIME, str, None, "folders that hold copies of the model's files; two are read at once", "--nvme", None, "BW24_NVME",
         "DIR[,DIR]", shown_default="the model's own", test="test_tiers.py::test_settings_reach_the_engine"),
    Flag("tier_policy", RUNTIME, str, None, "which experts stay in RAM: lru, slru (a share for each layer), frozen (those of --profile)",
         "--tier-policy", None, "BW24_TIER_POLICY", "NAME", choices=("lru", "slru", "frozen"), shown_default="by the budget",
         test="test_tiers.py::test_settings_reach_the_engine"),
    Flag("profile", RUNTIME, str, None, "experts' use as `bw24 tiers profile` recorded it: the most used are read before the first token",
         "--profile", None, "BW24_TIER_PROFILE", "FILE", test="test_tiers.py::test_settings_reach_the_engine"),
    Flag("stats", RUNTIME, bool, False, "1: after the reply, one line a token: hits, bytes read, milliseconds", "--stats",
         test="test_tiers.py::test_gen_prints_a_line_a_token"),
    Flag("trace", RUNTIME, str, None, "write the experts of each step to a file, for `bw24 tiers replay`", "--trace", metavar="FILE",
         test="test_tiers.py::test_a_trace_replays"),
    Flag("library", MACHINE, str, None, "path of the shared library to load instead of the package's own", variable="BW24_LIBRARY",
         metavar="FILE", shown_default="libbw24.so beside the package",
         test="test_flags.py::test_another_library_is_loaded_where_the_variable_says"),
    Flag("cache", MACHINE, str, None, "folder for models fetched by name", variable="BW24_CACHE", metavar="DIR",
         shown_default="~/.cache/bw24", test=_READ),
    Flag("nvcc", MACHINE, str, None, "CUDA compiler; read by make", variable="BW24_NVCC", metavar="FILE", shown_default="nvcc in PATH",
         test=_MAKE),
    Flag("goldens", MACHINE, str, None, "folder of the golden sets; read by make test-full", variable="BW24_GOLDENS", metavar="DIR",
         shown_default="none: tests that need it skip", test=_MAKE),
    # ---- rollback seams: each turns one optimisation off, and gives the same bits
    Flag("backend", SEAM, str, "auto", "whose kernels: auto (the device's own) or ref, the plain C reference, slow; cpu, cuda and cuda:N "
         "are other words for --device", "--backend",
         None, "BW24_BACKEND", "NAME", choices=("auto", "cpu", "cuda", "ref"), numbered=("cuda",), test=_GATE),
    Flag("isa", SEAM, str, None, "instruction set of the processor's kernels: portable, avx2, avxvnni, avx512vnni", "--isa", None, "BW24_ISA", "NAME",
         choices=("portable", "avx2", "avxvnni", "avx512vnni"), shown_default="the best this machine has", test=_GATE),
    Flag("fuse", SEAM, bool, True, "0: the plan runs one op a step, nothing fused", "--no-fuse", None, "BW24_FUSE", sets=False,
         test=_GATE),
    Flag("repack", SEAM, bool, True, "0: weights stay in the file's layout, slow", "--no-repack", None, "BW24_REPACK", sets=False,
         test=_GATE),
    # ---- text in
    Flag("chat", RUNTIME, bool, None, "1: apply the model's chat template, 0: the prompt as it is", "--raw", None, "BW24_CHAT",
         sets=False, shown_default="applied when the file has one", test=_CHAT),
    Flag("prompt", RUNTIME, str, None, "the prompt; - reads standard input", "--prompt", "-p", metavar="TEXT", test=_PROMPT),
    Flag("prompt_ids", RUNTIME, str, None, "file of token ids (JSON or blanks between); - reads standard input", "--prompt-ids",
         metavar="FILE", test=_PROMPT),
    Flag("system", RUNTIME, str, None, "system message for the chat template", "--system", metavar="TEXT", test=_CHAT),
    # ---- sampling: docs/numerics.md §9
    Flag("n", RUNTIME, int, 256, "most tokens to generate; -1: until the reply or the context ends", "--n-predict", "-n", metavar="N",
         low=-1, high=1 << 24,
         test="test_generate.py::test_length_stops"),
    Flag("temperature", RUNTIME, float, 0.0, "0: always the likeliest token; higher: more variety", "--temperature", "-T", metavar="X",
         low=0, high=100, test=_SAMPLER),
    Flag("top_k", RUNTIME, int, 0, "keep the K likeliest tokens; 0: all", "--top-k", metavar="K", low=0, high=1 << 24, test=_SAMPLER),
    Flag("top_p", RUNTIME, float, 1.0, "keep the likeliest tokens that hold this share of probability", "--top-p", metavar="X", low=0,
         high=1, test=_SAMPLER),
    Flag("min_p", RUNTIME, float, 0.0, "drop tokens below this share of the likeliest one's probability", "--min-p", metavar="X", low=0,
         high=1, test=_SAMPLER),
    Flag("repetition_penalty", RUNTIME, float, 1.0, "divide or multiply the logits of tokens seen", "--repetition-penalty", metavar="X",
         low=0.01, high=100, test=_SAMPLER),
    Flag("presence_penalty", RUNTIME, float, 0.0, "subtract from the logits of tokens seen", "--presence-penalty", metavar="X", low=-100,
         high=100, test=_SAMPLER),
    Flag("frequency_penalty", RUNTIME, float, 0.0, "subtract for each time a token was seen", "--frequency-penalty", metavar="X",
         low=-100, high=100, test=_SAMPLER),
    Flag("logit_bias", RUNTIME, list, (), "add VALUE to the logit of token ID; may be repeated", "--logit-bias", metavar="ID=VALUE",
         test=_SAMPLER),
    Flag("seed", RUNTIME, int, 0, "seed of the sampler: the same seed gives the same text", "--seed", None, "BW24_SEED", "N", low=0,
         high=(1 << 64) - 1, test=_SAMPLER),
    Flag("stop", RUNTIME, list, (), "end the reply before this text; may be repeated", "--stop", metavar="TEXT",
         test="test_generate.py::test_stop_string_never_leaks"),
    Flag("json", RUNTIME, bool, False, "end with one JSON object on standard output", "--json",
         test="test_cli.py::test_json_is_one_object"),
    # ---- the server
    Flag("host", RUNTIME, str, "127.0.0.1", "address to serve at; others than this machine's own need --api-key-file", "--host", None,
         "BW24_HOST", "ADDRESS", test=_SERVE),
    Flag("port", RUNTIME, int, 8080, "port to serve at", "--port", None, "BW24_PORT", "N", low=1, high=65535, test=_SERVE),
    Flag("alias", RUNTIME, str, None, "further names that requests may give the model, with commas between; *: any", "--alias", None,
         "BW24_ALIAS", "NAMES", test=_SERVE),
    Flag("api_key_file", MACHINE, str, None, "file of API keys, one a line; requests must then carry one", "--api-key-file", None,
         "BW24_API_KEY_FILE", "FILE", shown_default="no key is asked for", test=_SERVE),
    Flag("cors", RUNTIME, str, None, "web origins whose pages may call the server, with commas between; *: any", "--cors", None,
         "BW24_CORS", "ORIGINS", shown_default="the server's own page only", test=_SERVE),
    Flag("cache_ram", RUNTIME, int, 1024, "MiB of KV cache kept for later prompts that begin alike", "--cache-ram", None,
         "BW24_CACHE_RAM", "MIB", low=0, high=1 << 24, test=_SERVE),
    Flag("parallel", RUNTIME, int, 32, "replies that are made at the same time", "--parallel", None, "BW24_PARALLEL", "N", low=1, high=32,
         test=_SERVE),
    Flag("queue", RUNTIME, int, 256, "requests that may wait; more are refused with 429", "--queue", None, "BW24_QUEUE", "N", low=1,
         high=4096, test=_SERVE),
    Flag("drain", RUNTIME, float, 30.0, "seconds that replies have to end after SIGTERM", "--drain", None, "BW24_DRAIN", "SECONDS", low=0,
         high=3600, test=_SERVE),
    Flag("lenient", RUNTIME, bool, False, "1: unknown fields of a request are reported once and ignored, instead of refused", "--lenient",
         None, "BW24_LENIENT", test=_SERVE),
    Flag("log_prompts", RUNTIME, bool, False, "1: the log shows prompts and replies", "--log-prompts", None, "BW24_LOG_PROMPTS",
         test=_SERVE),
    # ---- other programs' variables that are honoured
    Flag("hf_endpoint", MACHINE, str, None, "address of the hub or of a mirror; read by huggingface-hub", variable="HF_ENDPOINT",
         metavar="URL", shown_default="huggingface-hub's own", test="test_hub.py::test_downloads_from_a_mirror"),
    Flag("hf_offline", MACHINE, bool, False, "1: only what is in the cache already; read by huggingface-hub", variable="HF_HUB_OFFLINE",
         test="test_hub.py::test_offline"),
)
BY_NAME: Mapping[str, Flag] = {flag.name: flag for flag in TABLE}


def environment(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """Value of flag `name` from its variable, else its default. Empty counts as unset. Bw24Error names the variable and its value."""
    flag = BY_NAME[name]
    text = (os.environ if environ is None else environ).get(flag.variable or "", "")
    if not flag.variable or not text:
        return flag.default
    try:
        return flag.parse(text)
    except Bw24Error as error:
        raise Bw24Error(f"{flag.variable}={text}: {error}") from None


def add_options(parser: Any, names: Iterable[str]) -> None:
    """Declare the options of the named flags on a parser or an argument group; what was not given stays absent, for `settle` to fill."""
    for name in names:
        flag = BY_NAME[name]
        if flag.option is None:
            raise KeyError(f"flag {name} has no option")
        words = [word for word in (flag.short, flag.option) if word]
        text = flag.help.replace("%", "%%") + _default_text(flag)
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if flag.type is bool:
            common["help"] = _bool_help(flag)
            parser.add_argument(*words, action="store_const", const=flag.sets, **common)
        elif flag.type is list:
            parser.add_argument(*words, action="append", metavar=flag.metavar, **common)
        else:
            parser.add_argument(*words, type=_argument_type(flag), metavar=flag.metavar, **common)


def _argument_type(flag: Flag) -> Any:
    def convert(text: str) -> Any:
        try:
            return flag.parse(text)
        except Bw24Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def _default_text(flag: Flag) -> str:
    shown = flag.shown_default or ("" if flag.default in (None, (), False) else str(flag.default))
    return f" (default: {shown})" if shown else ""


def _bool_help(flag: Flag) -> str:
    """Help of an on/off option: what giving it means."""
    match = re.search(rf"\b{int(flag.sets)}: ([^,;]*(?:, nothing fused|, slow)?)", flag.help)
    return (match.group(1) if match else flag.help).strip()


def settle(args: argparse.Namespace, names: Iterable[str]) -> None:
    """Fill in what the command line left out, from the environment and the table."""
    names = list(names)
    for name in names:
        if not hasattr(args, name):
            setattr(args, name, environment(name))
    if getattr(args, "kv", "") is None and environment("kv_fp8"):
        args.kv = "e4m3"
    if "device" in names:
        check_device(args)


def check_device(settings: Any) -> None:
    """Refuse settings that name two places at once; `settings` has device, backend and isa. Raises Bw24Error."""
    device, backend, isa = settings.device, settings.backend, settings.isa
    if device != "auto" and backend not in ("auto", device) and (device, backend) != ("cpu", "ref"):
        raise Bw24Error(f"--device {device} and --backend {backend} name two places; give one of them")
    card = next((name for name in (device, backend) if name.startswith("cuda")), None)
    if isa is not None and card:
        raise Bw24Error(f"--isa {isa} is an instruction set of the processor; {card} has none")


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """One line for each BW24_ variable that nothing reads, with the nearest name: a typing mistake should not pass in silence."""
    known = {flag.variable for flag in TABLE if flag.variable}
    lines = []
    for name in sorted(os.environ if environ is None else environ):
        if name.startswith("BW24_") and name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f"did you mean {near[0]}?" if near else "`bw24 flags` lists the names"
            lines.append(f"{name} is set but nothing reads it; {hint}")
    return lines


@dataclass(frozen=True)
class Row:
    """One line of the printed table."""

    option: str
    variable: str
    default: str
    kind: str
    help: str
    test: str = field(default="")


def rows() -> list[Row]:
    """The table in printable form, in its own order."""
    out = []
    for flag in TABLE:
        option = ", ".join(word for word in (flag.short, flag.option) if word)
        if flag.metavar and option:
            option += f" {flag.metavar}"
        value = int(flag.default) if flag.type is bool and flag.default is not None else flag.default
        default = flag.shown_default or ("" if value in (None, ()) else str(value))
        limits = flag.range().strip() if flag.type in (int, float) else ""
        out.append(Row(option, flag.variable or "", default, flag.kind, flag.help + (f" [{limits}]" if limits else ""), flag.test))
    return out
