"""llama.cpp as the other side of a measurement: llama-bench from a directory, or the llama_cpp Python module.

Owns how the peer is started, warmed up and read. Refuses to know how our side runs and what is made of the figures.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .errors import Bw24Error

KV_TYPES = {"f32": 0, "f16": 1, "q5_1": 7, "q8_0": 8}  # cache formats that both engines have -> ggml type id
MODULE = "llama_cpp"
# flags besides the default that have been faster for some cells of some models (docs/COMPETITOR-SETUP.md); tried for each cell before it is measured
ALTERNATIVES = {"cpu": (("--repack", "0"),), "cuda": (("-ub", "2048"),)}
FASTER = 1.02  # an alternative is taken where it is at least so much faster in its trial
HOW = "give --peer-bin DIR with llama-bench in it, or type: pip install llama-cpp-python"


@dataclass(frozen=True)
class Cell:
    """One thing to time: `kind` "prefill" or "decode" of `tokens` tokens after `depth` tokens that are already in the cache."""

    kind: str
    tokens: int
    depth: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.tokens}" + (f" @ {self.depth}" if self.depth else "")


class Peer(Protocol):
    """The other engine. `name` and `build` say which one; `settle` chooses its best flags for the cells; `round` times every cell once, warm, and
    returns seconds by cell."""

    name: str
    build: str

    def settle(self, cells: Sequence[Cell]) -> None: ...

    def round(self, cells: Sequence[Cell]) -> dict[Cell, float]: ...


def _check_kv(kv: str, known: Sequence[str], who: str) -> str:
    """The KV format's name if the peer has it too: both sides must read the same number of bytes."""
    if kv not in known:
        raise Bw24Error(f"{who} has no KV format {kv}: compare with one of {', '.join(known)}")
    return kv


class LlamaBench:
    """Runs the llama-bench executable, a process for each set of flags in a round: it loads the file, warms up each test and times it once."""

    name = "llama.cpp (llama-bench)"

    def __init__(self, binary: Path, model: Path, threads: int, kv: str, device: str = "cpu", timeout: float = 900.0):
        self.binary, self.model, self.threads, self.device, self.timeout = binary, model, threads, device, timeout
        self.kv = _check_kv(kv, [name for name in KV_TYPES if name != "f32"], "llama-bench")  # its -ctk knows no f32
        self.build = "unknown build"
        self._flags: dict[tuple[str, int], tuple[str, ...]] = {}  # (kind, tokens) -> flags that were faster in the trial

    def command(self, cells: Sequence[Cell], flags: Sequence[str] = (), repeat: int = 1) -> list[str]:
        """Command line for cells of one depth."""

        def counts(kind: str) -> str:
            return ",".join(dict.fromkeys(str(c.tokens) for c in cells if c.kind == kind)) or "0"

        where = ["-dev", "none"] if self.device == "cpu" else ["-ngl", "999", "-fa", "1"]
        return [str(self.binary), "-m", str(self.model), "-t", str(self.threads), "-p", counts("prefill"), "-n", counts("decode"),
                "-d", str(cells[0].depth), "-r", str(repeat), "-ctk", self.kv, "-ctv", self.kv, *where, *flags, "-o", "json"]

    def settle(self, cells: Sequence[Cell]) -> None:
        """Two repetitions of each cell, at the smallest depth, with the default flags and with each alternative; the faster flags are those of its
        rounds. An alternative that this build does not know is left out."""
        trial = [c for c in cells if c.depth == min(c.depth for c in cells)]
        best = self._trial(trial, ())
        for flags in ALTERNATIVES["cpu" if self.device == "cpu" else "cuda"]:
            try:
                found = self._trial(trial, flags)
            except Bw24Error:
                continue
            for cell in trial:
                if found[cell] * FASTER < best[cell]:
                    best[cell], self._flags[cell.kind, cell.tokens] = found[cell], flags

    def _trial(self, cells: Sequence[Cell], flags: tuple[str, ...]) -> dict[Cell, float]:
        rows = self._run(cells, flags, 2)
        return {cell: self._seconds(rows, cell) for cell in cells}

    def _how(self, cell: Cell) -> tuple[int, tuple[str, ...]]:
        return cell.depth, self._flags.get((cell.kind, cell.tokens), ())

    def round(self, cells: Sequence[Cell]) -> dict[Cell, float]:
        times: dict[Cell, float] = {}
        for (_, flags), group in itertools.groupby(sorted(cells, key=self._how), key=self._how):
            together = list(group)
            rows = self._run(together, flags)
            for cell in together:
                times[cell] = self._seconds(rows, cell)
        return times

    def _run(self, cells: Sequence[Cell], flags: Sequence[str] = (), repeat: int = 1) -> list[dict[str, Any]]:
        try:
            done = subprocess.run(self.command(cells, flags, repeat), capture_output=True, text=True, errors="replace", timeout=self.timeout,
                                  check=False)
        except subprocess.TimeoutExpired:
            raise Bw24Error(f"{self.binary}: no result within {self.timeout:.0f} s") from None
        except OSError as error:
            raise Bw24Error(f"{self.binary}: cannot run: {error.strerror}") from None
        if done.returncode:
            said = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise Bw24Error(f"{self.binary}: exit status {done.returncode}: {said[-1][:200]}")
        try:
            rows = json.loads(done.stdout)
        except ValueError:
            raise Bw24Error(f"{self.binary}: expected JSON, found {done.stdout[:60]!r}") from None
        if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
            raise Bw24Error(f"{self.binary}: expected a list of results, found {done.stdout[:60]!r}")
        self._check(rows[0])
        return rows

    def _check(self, row: dict[str, Any]) -> None:
        """The first row must describe what was asked for; it also names the build."""
        asked = {"model_filename": str(self.model), "n_threads": self.threads, "type_k": self.kv, "type_v": self.kv}
        for key, wanted in asked.items():
            if row.get(key) != wanted:
                raise Bw24Error(f"{self.binary}: {key}: asked for {wanted}, it measured {row.get(key)}")
        commit = row.get("build_commit")
        self.build = f"build {row.get('build_number', 'unknown')}" + (f" ({commit})" if commit not in (None, "", "unknown") else "")
        if row.get("backends"):
            self.build += f", {row['backends']}"
        for flags in dict.fromkeys(self._flags.values()):
            where = ", ".join(f"{kind} {n}" for (kind, n), used in self._flags.items() if used == flags)
            self.build += f"; {' '.join(flags)} for {where}"

    def _seconds(self, rows: list[dict[str, Any]], cell: Cell) -> float:
        wanted = (cell.tokens, 0) if cell.kind == "prefill" else (0, cell.tokens)
        for row in rows:
            if (row.get("n_prompt"), row.get("n_gen")) == wanted and row.get("n_depth", 0) == cell.depth:
                samples = row.get("samples_ns")
                if isinstance(samples, list) and samples and all(isinstance(t, (int, float)) and t > 0 for t in samples):
                    return min(samples) / 1e9
        raise Bw24Error(f"{self.binary}: no time for {cell} in its output")


class LlamaModule:
    """Runs the llama_cpp Python module inside this process; it costs the peer a few microseconds a token against llama-bench."""

    name = "llama.cpp (llama-cpp-python)"

    def __init__(self, module: Any, model: Path, threads: int, kv: str, context: int, device: str = "cpu",
                 clock: Callable[[], float] = time.perf_counter):
        kind, self._clock = KV_TYPES[_check_kv(kv, list(KV_TYPES), "llama.cpp")], clock
        self.build = f"llama-cpp-python {getattr(module, '__version__', 'unknown')}"
        try:
            self._llm = module.Llama(model_path=str(model), n_ctx=context, n_batch=2048, n_ubatch=512, n_threads=threads,
                                     n_threads_batch=threads, type_k=kind, type_v=kind, flash_attn=kv not in ("f32", "f16"),
                                     n_gpu_layers=0 if device == "cpu" else -1, verbose=False)
        except (ValueError, RuntimeError, TypeError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise Bw24Error(f"{self.build}: cannot load {model}: {reason}") from None
        self._warm: set[Cell] = set()

    def settle(self, cells: Sequence[Cell]) -> None:
        """Nothing to choose: the module has no flag that was faster in our sweeps."""

    def round(self, cells: Sequence[Cell]) -> dict[Cell, float]:
        times = {}
        for cell in cells:
            if cell not in self._warm:
                self._once(cell)
                self._warm.add(cell)
            times[cell] = self._once(cell)
        return times

    def _once(self, cell: Cell) -> float:
        # ids 16..: past the few special tokens that every vocabulary starts with or lacks, below the size of the smallest one
        self._llm.reset()
        if cell.depth:
            self._llm.eval([16 + i % 200 for i in range(cell.depth)])
        tokens = [16 + i % 200 for i in range(cell.tokens)]
        start = self._clock()
        for chunk in [tokens] if cell.kind == "prefill" else [[token] for token in tokens]:
            self._llm.eval(chunk)
        return self._clock() - start


def find_peer(peer_bin: str | Path | None, model: Path, threads: int, kv: str, context: int, device: str = "cpu") -> Peer:
    """llama-bench where `peer_bin` (a directory, or the executable) is given, else the llama_cpp module, else an error that says how."""
    if peer_bin is not None:
        binary = Path(peer_bin)
        if binary.is_dir():
            binary = binary / "llama-bench"
        if not binary.is_file() or not os.access(binary, os.X_OK):
            raise Bw24Error(f"{binary}: no such executable: {HOW}")
        return LlamaBench(binary, model, threads, kv, device)
    try:
        module = importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError):  # its shared library may be missing or built for another machine
        raise Bw24Error(f"no llama.cpp to measure against: {HOW}") from None
    return LlamaModule(module, model, threads, kv, context, device)
