"""A model on a device, and its sequences. Owns the library's handles and their lifetimes, context sizing and step forming; knows nothing of text,
sampling loops or HTTP. One thread at a time drives an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from . import abi, plain
from . import device as devices
from .adapt import Learner
from .depth import Costs
from .drafter import PRE_NORM, SPARE, Draft, embedded
from .errors import Bw24Error
from .placement import E_MEMORY, UNSUPPORTED, Placement, Situation, place
from .sampling import Draw, SamplingParams, picks
from .sizes import largest_context
from .source import Model
from .tiers import Spill, Tiers

PAGE_TOKENS = 64
MAX_ROWS = 256  # of a step, where every weight is in memory
CUDA_ROWS = 1024  # the same on a card, whose tiles want more rows: 8B Q4_K at 256 rows a step 6.4, at 2048 10.6 thousand tok/s (research/cuda)
DEFAULT_KV = "f16"
MAX_LOGIT_ROWS = 64  # wanted rows of one step when a prompt's every logit is asked for: bounds the logits at 64 x vocabulary
PREFILL_CLASSES = ("exact", "fast")
KV_FORMATS = {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q5_1": "Q5_1", "e4m3": "E4M3"}

Row = tuple["Sequence", int, bool]
Part = tuple["Sequence", Seq[int], bool]
ROW = np.dtype([("seq", np.uintp), ("token", np.int32), ("want", np.int32)])  # bw24_row


def step_rows(backend: str) -> int:
    """Rows of a prompt's step where nothing else is asked for."""
    return CUDA_ROWS if backend.startswith("cuda") else MAX_ROWS


def kv_pair(kv: str) -> tuple[str, str]:
    """'q8_0/q5_1' -> ('q8_0', 'q5_1'); 'f16' -> ('f16', 'f16'). Raises Bw24Error."""
    k, _, v = kv.partition("/")
    for name in (k, v or k):
        if name not in KV_FORMATS:
            raise Bw24Error(f"--kv {kv}: unknown format '{name}', expected {', '.join(KV_FORMATS)} or two of them as K/V")
    return k, v or k


def parse_kv(kv: str | None) -> dict[str, str]:
    """`--kv`: one format for all layers, or `full=...,window=...` by layer class. Returns {'full': ..., 'window': ...}."""
    out = {"full": DEFAULT_KV, "window": DEFAULT_KV}
    if not kv:
        return out
    if "=" not in kv:
        kv_pair(kv)
        return {"full": kv, "window": kv}
    for part in kv.split(","):
        name, _, value = part.partition("=")
        if name not in out:
            raise Bw24Error(f"--kv {kv}: unknown layer class '{name}', expected full or window")
        kv_pair(value)
        out[name] = value
    return out


def kv_bytes_per_token(model: Model, kv: dict[str, str], draft: Draft | None = None, card: bool = False) -> dict[str, int]:
    """Bytes of one token's K and V over all layers of each class, from the model's lists alone: {'full': ..., 'window': ...}.
    `draft`: those of the drafter too. Keys that are values are kept once on a `card`, in two layouts of the keys' format elsewhere."""
    out = {"full": 0, "window": 0}
    builders = [model.builder, *([draft.builder] if draft else [])]
    for heads, dim, window, shared in ((*shape, name in b.shared) for b in builders for name, shape in b.kvs.items()):
        klass = "window" if window else "full"
        pair = kv_pair(kv[klass])
        for name in (pair[:1] * (1 if card else 2) if shared else pair):
            _, block, size, _ = abi.types()[abi.type_id(KV_FORMATS[name])]
            out[klass] += heads * -(-dim // block) * size
    return out


def state_bytes(model: Model) -> int:
    """Bytes of one sequence's recurrent state: the version in use, the one before it, the one being written, and about one more of logs."""
    return 4 * 4 * sum(model.builder.states.values())


def kv_bytes(model: Model, kv: dict[str, str], ctx: int, max_rows: int, draft: Draft | None = None, card: bool = False) -> int:
    """Bytes of one sequence of `ctx` tokens: KV pages (window layers keep their window and what a step needs around it) and recurrent state."""
    per = kv_bytes_per_token(model, kv, draft, card)
    windows = [w for _, _, w in model.builder.kvs.values() if w]
    kept = min(ctx, max(windows) + 32 + 2 * max_rows + 2 * PAGE_TOKENS) if windows else 0
    pages = lambda n: -(-n // PAGE_TOKENS) * PAGE_TOKENS  # noqa: E731
    return per["full"] * pages(ctx) + per["window"] * pages(kept) + state_bytes(model)


def available_memory(reserve: bool = False) -> int:
    """Bytes that can be taken without swapping: MemAvailable, and what the limits of the process's memory cgroups leave. `reserve`: less what is
    left to the rest of the system, max(4 GiB, 8 %)."""
    return abi.lib().bw24_available_memory(reserve)


def fit_context(model: Model, kv: dict[str, str], asked: int | None, max_rows: int, room: int, draft: Draft | None = None,
                card: bool = False) -> tuple[int, str | None]:
    """Context length to use and, where it is not the model's own, a sentence that says so. `room`: bytes that KV may take, on a `card` or in the
    host's memory. Raises Bw24Error, which says what would fit."""
    own = model.context_length
    need = lambda ctx, formats=kv: kv_bytes(model, formats, ctx, max_rows, draft, card)  # noqa: E731
    if asked is not None and not 1 <= asked <= own:
        raise Bw24Error(f"--ctx {asked}: the model's context is 1..{own}")
    ctx = asked or largest_context(need, own, room, PAGE_TOKENS)
    if ctx and need(ctx) <= room:
        return ctx, None if ctx == (asked or own) else f"context reduced to {ctx} of the model's {own} tokens to fit {room >> 20} MiB of free memory"
    least, fits = ctx or min(own, PAGE_TOKENS), largest_context(need, own, room, PAGE_TOKENS)
    options = [f"--ctx {fits}"] if fits else []
    options += [f"--kv {f}" for f in ("q8_0", "q8_0/q5_1") if room > 0 and need(least, parse_kv(f)) <= min(room, need(least) - 1)][:1]
    options += ["--device cpu"] if card else []
    raise Bw24Error(f"{model.path.name}: {least} tokens of context need {need(least) >> 20} MiB, {max(room, 0) >> 20} MiB are free for them beside "
                    f"the weights{' on the card' if card else ''}; what would fit: {', '.join([*options, 'a smaller model'])}", E_MEMORY)


def situation(model: Model, choice: devices.Choice, tiers: Tiers, draft: Draft | None, kv: dict[str, str], ctx: int | None,
              rows: int | None = None) -> Situation:
    """What a placement depends on, as this machine is now. ctx, rows: what was asked for, None: nothing."""
    free = choice.facts.free if choice.cuda and choice.facts else available_memory()
    wide = rows or step_rows(choice.backend)
    need = lambda n: kv_bytes(model, kv, n, wide, draft, choice.cuda)  # noqa: E731
    return Situation(model, choice, tiers, draft, kv, ctx, wide, rows is not None, free, available_memory(reserve=True), need)


def _floats(array: np.ndarray | None) -> Any:
    """A float * over an array, NULL where there are no values."""
    return abi.ffi.NULL if array is None or not array.size else abi.ffi.cast("float *", abi.ffi.from_buffer(array))


class Engine:
    """A prepared model. `device`: "auto", "cpu", "cuda" or "cuda:N"; `backend` other than "auto" (ref) wins over it; `progress(done, total)`
    counts weight bytes while loading; `draft`: with a drafter (True: the file's MTP block), which makes sequences of its role possible; the
    engine closes it, and `owners` share its spare rows; `second`: another one over the same weights, to compare the two (its keys are not counted
    where a context is chosen; the caller closes it); `tiers`: where a mixture's experts live; `prefill`: numeric class of steps of more than 32
    rows, "exact" (decode's bits) or "fast" (approximate; backend cuda only).

    Attributes: model, ctx (tokens a sequence may hold), kv ({'full': .., 'window': ..}), backend, isa, threads, n_vocab, note (a sentence about
    the context or None), draft, n_hidden (width of hidden rows, 0: the backend has none), placement (None: every weight is in memory), spill (its
    experts that are read from files, or None). Raises Bw24Error; closing twice is fine.
    """

    def __init__(self, model: Model, *, device: str = "auto", backend: str = "auto", isa: str | None = None, threads: int | None = None,
                 ctx: int | None = None, kv: str | None = None, max_rows: int | None = None, fuse: bool = True, repack: bool = True,
                 float_activations: bool = False, draft: Draft | bool = False, owners: int = 1, tiers: Tiers | None = None, prefill: str = "exact",
                 second: Draft | None = None, progress: Callable[[int, int], None] | None = None):
        self._ctx = self._model = self.draft = self.learner = None
        self.placement: Placement | None = None
        self.spill: Spill | None = None
        self._sequences: set[Sequence] = set()
        self.owners = owners  # who learns rows of a trimmed head: adapt.py
        self._drafted: set[Any] = set()  # timelines that look ahead; closed before their sequences
        self._keep: list[Any] = []
        self._used = abi.new("bw24_memory")
        self.model, self._asked_rows, self.costs = model, max_rows, Costs()
        self.max_rows = max_rows or MAX_ROWS
        self.after_step: Callable[[int, float], None] | None = None  # (rows, seconds) of each step that has succeeded
        self.kv = parse_kv(kv)
        if prefill not in PREFILL_CLASSES:
            raise Bw24Error(f"prefill={prefill}: expected {' or '.join(PREFILL_CLASSES)}")
        self.prefill_class = prefill
        self.draft = embedded(model) if draft is True else draft or None
        self.second = replace(second, role="second") if second else None
        self.choice = devices.choose(device, backend, isa, float_activations)
        while self._model is None:
            try:
                self._start(isa, threads, ctx, fuse, repack, float_activations, tiers or Tiers(), progress)
            except BaseException as error:
                self._release()
                other = devices.fallback(self.choice, error) if isinstance(error, Bw24Error) else None
                if other is None:
                    self.close()
                    raise
                self.choice = other

    def _start(self, isa: str | None, threads: int | None, ctx: int | None, fuse: bool, repack: bool, float_activations: bool,
               tiers: Tiers, progress: Callable[[int, int], None] | None) -> None:
        """Choose the context and load onto the chosen device."""
        size = sum(t.nbytes for t in self.model.file.tensors.values()) + (self.draft.nbytes if self.draft else 0)
        self.backend = self.choice.backend
        self.spill = None
        self.placement, self.max_rows, room = place(situation(self.model, self.choice, tiers, self.draft, self.kv, ctx, self._asked_rows))
        self.ctx, self.note = fit_context(self.model, self.kv, ctx, self.max_rows, room, self.draft, self.choice.cuda)
        self._open(isa, threads, fuse, repack, float_activations)
        self._load(size, progress)

    def free_memory(self) -> int:
        """Bytes free now where the KV cache lives."""
        return devices.query(self.choice.facts.index).free if self.choice.facts else available_memory()

    def _open(self, isa: str | None, threads: int | None, fuse: bool, repack: bool, float_activations: bool) -> None:
        p = abi.new("bw24_open_params")
        names = [abi.ffi.new("char[]", s.encode()) if s else abi.ffi.NULL for s in (self.backend, isa)]
        p.backend, p.isa = names
        p.threads, p.fuse, p.repack, p.float_act = threads or 0, fuse, repack, float_activations
        p.fast_prefill = self.prefill_class == "fast"
        out = abi.ffi.new("bw24_ctx **")
        abi.check(abi.lib().bw24_open(out, p))
        self._ctx = out[0]
        self.threads = abi.lib().bw24_threads(self._ctx)
        self.device = abi.ffi.string(abi.lib().bw24_device(self._ctx)).decode()
        facts = self.choice.facts
        self.isa = self.device.split()[1].rstrip(",") if self.backend == "cpu" else f"sm_{facts.capability}" if facts else "portable"

    @property
    def device_line(self) -> str:
        """One line for a person: what computes, and why it is the processor where that was not asked for."""
        facts = self.choice.facts
        if facts:
            return f"device: {self.device}, {facts.free / 1e9:.1f} of {facts.total / 1e9:.1f} GB free"
        why = f" ({self.choice.note})" if self.choice.note else ""
        return f"device: {self.device or self.backend}{why}"

    def _load(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        lib, ffi = abi.lib(), abi.ffi
        p = abi.new("bw24_model_params")
        names = [ffi.new("char[]", self.kv[k].encode()) for k in ("full", "window")]
        p.max_rows, p.max_context, p.kv_full, p.kv_window = self.max_rows, self.ctx, *names
        out = ffi.new("bw24_model **")
        abi.check(lib.bw24_model_new(out, self._ctx, p))
        self._model = out[0]
        sizes = []
        if self.placement:
            self.spill = Spill(self._model, self.model, self.placement, progress)
        spilled = self.placement.bank.names if self.placement else ()
        drafts = [d for d in (self.draft, self.second) if d]
        for w in [*self.model.weights(spilled), *(w for d in drafts for w in d.weights())]:
            if w.data is None:
                self.spill.load(w.name, w.ne, w.scale)
                sizes.append(0)
                continue
            data = ffi.from_buffer(w.data)
            self._keep.append(data)
            ne = ffi.new("int64_t[]", list(w.ne))
            abi.check(lib.bw24_tensor_load(self._model, w.name.encode(), w.type_id, len(w.ne), ne, data, len(w.data), w.scale, w.mapped))
            sizes.append(len(w.data))
        trunk = self.model.list_text(self.draft is not None and self.draft.hidden == PRE_NORM)
        abi.check(lib.bw24_list_set(self._model, b"trunk", trunk.encode()))
        self._logits = {"trunk": lib.bw24_list_logits(self._model, b"trunk")}
        for draft in drafts:
            self._set_draft(draft)
        done = 0
        for i, n in enumerate([*sizes, 0]):
            abi.check(lib.bw24_prepare(self._model, i))
            done += n
            if progress:
                progress(done, total)
        self.n_vocab = lib.bw24_model_vocab(self._model)
        self.n_hidden = lib.bw24_model_hidden(self._model)
        if self.learner and lib.bw24_tensor_touch(self._model, SPARE.encode(), 0, 1) == UNSUPPORTED:
            self.learner = None  # a device whose weights cannot be changed drafts with the head as it is
        if self.spill:
            self.spill.warm_up()

    def _set_draft(self, draft: Draft) -> None:
        lib, role = abi.lib(), draft.role.encode()
        abi.check(lib.bw24_list_set(self._model, role, draft.builder.text().encode()))
        self._logits[draft.role] = lib.bw24_list_logits(self._model, role)
        if draft.ids is not None:
            self._set_ids(draft, draft.ids)
        if draft.spare:
            self.learner = Learner(draft.ids, draft.spare, self._put_rows, self.owners, self.model.builder.rows("token_embd.weight"))

    def _put_rows(self, first: int, tokens: list[int]) -> None:
        """Spare rows first .. of the drafter's head become those of these tokens."""
        for i, token in enumerate(tokens):
            self.draft.put_row(first + i, token)
        abi.check(abi.lib().bw24_tensor_touch(self._model, SPARE.encode(), first, len(tokens)))

    def set_draft_ids(self, ids: np.ndarray) -> None:
        """The token of each column of the drafter's logits, int32, -1: none. Between steps; Raises Bw24Error."""
        self._set_ids(self.draft, ids)

    def _set_ids(self, draft: Draft, ids: np.ndarray) -> None:
        ids = np.array(ids, np.int32)
        pointer = abi.ffi.cast("int32_t *", abi.ffi.from_buffer(ids))
        abi.check(abi.lib().bw24_list_ids(self._model, draft.role.encode(), pointer, len(ids)))
        draft.ids = ids

    def memory(self) -> dict[str, int]:
        """Bytes held: weights (packed copies), work (activation buffers), kv (pages in use), kv_at_ctx (one sequence of `ctx` tokens),
        device (all that was taken on the card since it was opened; 0 without one)."""
        m = abi.new("bw24_memory")
        abi.check(abi.lib().bw24_model_memory(self._model, m))
        at_ctx = kv_bytes(self.model, self.kv, self.ctx, self.max_rows, self.draft, self.backend == "cuda")
        return {"weights": m.weights, "work": m.work, "kv": m.kv, "kv_at_ctx": at_ctx, "device": m.device}

    def kv_used(self) -> int:
        """Bytes of pages in use, `memory()["kv"]` at the price of one call: a scheduler asks before each step."""
        abi.check(abi.lib().bw24_model_memory(self._model, self._used))
        return self._used.kv

    def state_sizes(self) -> tuple[int, int]:
        """Bytes of one version of a sequence's recurrent state, and of a log of the rows that it can go back over."""
        abi.check(abi.lib().bw24_model_memory(self._model, self._used))
        version = 4 * sum(self.model.builder.states.values())
        return version, (self._used.state - 3 * version) // 2

    def explain(self, plan: bool = False) -> str:
        """The list, or how this backend runs it."""
        out = abi.ffi.new("char **")
        abi.check(abi.lib().bw24_explain(self._model, b"trunk", int(plan), out))
        return abi.ffi.string(out[0]).decode()

    def sequence(self, role: str = "trunk", over: Sequence | None = None) -> Sequence:
        """A new, empty timeline of the model ("trunk") or of its drafter ("mtp"; "assistant" over the keys of a timeline of the model)."""
        out = abi.ffi.new("bw24_seq **")
        if over is not None:
            abi.check(abi.lib().bw24_seq_new_over(out, over._handle(), role.encode()))
        else:
            abi.check(abi.lib().bw24_seq_new_role(out, self._model, role.encode()))
        return Sequence(self, out[0], [], role)

    def step(self, rows: Seq[Row], out: np.ndarray | None = None) -> np.ndarray:
        """One step of 1..max_rows rows (sequence, token, whether its logits are wanted). Returns [wanted, n_vocab] f32 in row order, in the
        first rows of `out` where that is given.

        All or nothing: on Bw24Error no sequence has moved.
        """
        c, wanted = self._rows(rows)
        width = self._logits[rows[0][0].role]
        if out is not None and (out.dtype != np.float32 or out.shape[1:] != (width,) or len(out) < wanted or not out.flags.c_contiguous):
            raise Bw24Error(f"step: expected room for float32 {(wanted, width)}, found {out.dtype} {out.shape}")
        logits = np.empty((wanted, width), np.float32) if out is None else out[:wanted]
        self._run(rows, abi.lib().bw24_step, c, len(rows), _floats(logits))
        return logits

    def step_greedy(self, rows: Seq[Row]) -> np.ndarray:
        """As `step`, with the likeliest token of each wanted row (ties: the lowest id) instead of its logits. Returns [wanted] int32."""
        c, wanted = self._rows(rows)
        tokens = np.empty(max(wanted, 1), np.int32)
        self._run(rows, abi.lib().bw24_step_greedy, c, len(rows), abi.ffi.cast("int32_t *", abi.ffi.from_buffer(tokens)))
        return tokens[:wanted]

    def step_sample(self, rows: Seq[Row], draws: Seq[tuple[SamplingParams | Draw, Seq[int]]]) -> np.ndarray:
        """As `step`, with a token drawn from each wanted row instead of its logits: the one that `sampling.sample` draws with these
        (parameters or their Draw, history) at the position after the row, wherever it is computed. Returns [wanted] int32."""
        c, wanted = self._rows(rows)
        if len(draws) != wanted:
            raise Bw24Error(f"step_sample: {wanted} rows are wanted, {len(draws)} draws are given")
        tokens = np.empty(max(wanted, 1), np.int32)
        chosen, keep = picks(draws)
        self._run(rows, abi.lib().bw24_step_sample, c, len(rows), chosen, abi.ffi.cast("int32_t *", abi.ffi.from_buffer(tokens)))
        del keep
        return tokens[:wanted]

    def step_hidden(self, rows: Seq[Row], hidden: np.ndarray | None = None, logits: bool = True) -> tuple[np.ndarray | None, np.ndarray]:
        """As step, for rows that take and hand on hidden rows: `hidden` [rows, n_hidden] f32 for sequences of role "mtp", the row of the
        token before each. Returns the wanted rows' logits, or None without computing them, and their hidden rows [wanted, n_hidden] f32."""
        if hidden is not None:
            hidden = np.ascontiguousarray(hidden, np.float32)
            if hidden.shape != (len(rows), self.n_hidden):
                raise Bw24Error(f"hidden rows: expected shape {(len(rows), self.n_hidden)}, found {hidden.shape}")
        c, wanted = self._rows(rows)
        out = np.empty((wanted, self._logits[rows[0][0].role]), np.float32) if logits else None
        handed = np.empty((wanted, self.n_hidden), np.float32)
        self._run(rows, abi.lib().bw24_step_hidden, c, len(rows), _floats(hidden), _floats(out), _floats(handed))
        return out, handed

    def step_parts(self, parts: Seq[Part], out: np.ndarray | None = None,
                   draws: Seq[tuple[SamplingParams | Draw, Seq[int]]] | None = None) -> np.ndarray:
        """As step, or step_sample where there are draws, for tokens in a row: (sequence, 1.. tokens, whether the last one's logits are wanted). A
        prompt's rows are filled column by column."""
        filled, at = np.zeros(sum(len(tokens) for _, tokens, _ in parts), ROW), 0
        for seq, tokens, want in parts:
            one, at = filled[at : at + len(tokens)], at + len(tokens)
            one["seq"], one["token"], one["want"][-1] = int(abi.ffi.cast("uintptr_t", seq._handle())), tokens, want
        c, wanted, started = abi.ffi.from_buffer("bw24_row[]", filled), sum(want for *_, want in parts), time.perf_counter()
        if draws is None:
            made = np.empty((wanted, self.n_vocab), np.float32) if out is None else out[:wanted]
            abi.check(abi.lib().bw24_step(self._model, c, len(filled), _floats(made)))
        else:
            made, (chosen, keep) = np.empty(max(wanted, 1), np.int32), picks(draws)
            abi.check(abi.lib().bw24_step_sample(self._model, c, len(filled), chosen, abi.ffi.cast("int32_t *", abi.ffi.from_buffer(made))))
            del keep
        for seq, tokens, _ in parts:
            seq.tokens.extend(tokens)
        if self.after_step:
            self.after_step(len(filled), time.perf_counter() - started)
        return made[:wanted]

    def _run(self, rows: Seq[Row], call: Any, *arguments: Any) -> None:
        """One step of the library; its rows are part of their sequences once it has succeeded."""
        started = time.perf_counter()
        abi.check(call(self._model, *arguments))
        for seq, token, _ in rows:
            seq.tokens.append(token)
        if self.after_step:
            self.after_step(len(rows), time.perf_counter() - started)

    @staticmethod
    def _rows(rows: Seq[Row]) -> tuple[Any, int]:
        """The rows as the library takes them, and how many want logits."""
        if not rows:
            raise Bw24Error("a step needs at least one row")
        c = abi.ffi.new("bw24_row[]", len(rows))
        for i, (seq, token, want) in enumerate(rows):
            c[i].seq, c[i].token, c[i].want = seq._handle(), token, want
        return c, sum(bool(want) for _, _, want in rows)

    def cancel(self) -> None:
        """Ends the step in hand with an error; may be called from another thread or a signal handler."""
        if self._ctx:
            abi.lib().bw24_cancel(self._ctx)

    def _release(self) -> None:
        """Give back what the library holds."""
        for timeline in [*self._drafted, *self._sequences]:
            timeline.close()
        if self.spill:
            self.spill.close()
        if self._model:
            abi.lib().bw24_model_free(self._model)
        if self._ctx:
            abi.lib().bw24_close(self._ctx)
        self._ctx = self._model = None
        for view in self._keep:
            abi.ffi.release(view)
        self._keep.clear()

    def close(self) -> None:
        if self.learner:
            self.learner.save(now=True)
        self._release()
        if self.draft:
            self.draft.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Sequence:
    """One timeline: `tokens` are those it holds, `pos` their number; `role`: of its list."""

    def __init__(self, engine: Engine, handle: Any, tokens: list[int], role: str = "trunk"):
        self.engine, self.tokens, self.role = engine, tokens, role
        self._seq = handle
        engine._sequences.add(self)

    def _handle(self) -> Any:
        if self._seq is None:
            raise Bw24Error("the sequence is closed")
        return self._seq

    @property
    def pos(self) -> int:
        return abi.lib().bw24_seq_pos(self._handle())

    def prefill(self, ids: Seq[int], want: str = "last") -> np.ndarray | None:
        """Appends `ids` in steps of at most max_rows rows. `want`: "last" -> [n_vocab], "all" -> [len(ids), n_vocab], "none" -> None."""
        if want not in ("last", "all", "none"):
            raise Bw24Error(f"want={want}: expected last, all or none")
        if not len(ids):
            raise Bw24Error("nothing to prefill: the prompt has no tokens")
        width = min(self.engine.max_rows, MAX_LOGIT_ROWS) if want == "all" else self.engine.max_rows
        out = []
        for at in range(0, len(ids), width):
            part = [int(t) for t in ids[at : at + width]]
            if want == "all":
                out.append(self.engine.step([(self, t, True) for t in part]))
            else:
                out.append(self.engine.step_parts([(self, part, want == "last" and at + len(part) == len(ids))]))
        if want == "none":
            return None
        return out[-1][0] if want == "last" else np.concatenate(out)

    def decode(self, token: int) -> np.ndarray:
        """Appends one token and returns the logits after it, [n_vocab]."""
        return self.engine.step([(self, token, True)])[0]

    def draw(self, token: int, params: SamplingParams, history: Seq[int]) -> int:
        """Appends one token and returns the next, drawn without its logits leaving the device. `history`: ids for the penalties."""
        return int(self.engine.step_sample([(self, token, True)], [(params, history)])[0])

    def draws(self, token: int, params: SamplingParams | Draw, history: Seq[int], most: int, stop: Collection[int] = ()) -> list[int]:
        """As draw, going on with what was drawn for up to `most` tokens or a few milliseconds: the tokens, 1..most, the last one not appended. Ends
        with the first of `stop`. Raises Bw24Error; then nothing has moved."""
        return plain.decode(self.engine, self, token, params, history, most, stop=stop)

    def truncate(self, pos: int) -> int:
        """Goes back to `pos` or, where a window's keys are gone, to the nearest position before it that can be restored. Returns the position."""
        actual = abi.ffi.new("int64_t *")
        abi.check(abi.lib().bw24_seq_truncate(self._handle(), pos, actual))
        del self.tokens[actual[0] :]
        return actual[0]

    def fork(self) -> Sequence:
        """A second timeline with the same past; full pages are shared."""
        out = abi.ffi.new("bw24_seq **")
        abi.check(abi.lib().bw24_seq_fork(out, self._handle()))
        return Sequence(self.engine, out[0], list(self.tokens), self.role)

    def close(self) -> None:
        if self._seq is not None:
            abi.lib().bw24_seq_free(self._seq)
            self._seq = None
        self.engine._sequences.discard(self)

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

