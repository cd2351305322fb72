"""One served model: loading, readiness, draining. Owns the engine, the scheduler and what belongs to the model for as long as the process serves;
knows no HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import abi, models, source
from ..cli_common import UNSUPPORTED, drafts_a_round, open_drafter, remember_learned
from ..engine import Engine
from ..errors import Bw24Error
from ..flags import environment
from ..grammar import Grammars
from ..scheduler import Scheduler
from ..scheduler_spec import DraftingScheduler
from .errors import ApiError
from .metrics import Metrics
from .prompting import Prompter
from .settings import Settings

LOADING, READY, DRAINING, FAILED = "loading", "ready", "draining", "failed"
log = logging.getLogger("bw24.server")


class Service:
    """The model of `settings`, loaded by a thread of its own. `on_failure(error)` is called from it where that fails.

    Once `state` is READY: model, engine, scheduler, prompter, grammars, fingerprint (revision and numeric class).
    """

    def __init__(self, settings: Settings, on_failure: Callable[[Exception], None] | None = None):
        self.settings, self.state, self.error = settings, LOADING, ""
        self.created = int(time.time())
        self.name = os.path.basename(settings.model) if os.path.sep in settings.model else settings.model
        self.metrics = Metrics(self)
        self.model: source.Model | None = None
        self.engine: Engine | None = None
        self.scheduler: Scheduler | None = None
        self._on_failure, self._changed = on_failure, threading.Event()
        self._lock = threading.Lock()
        self._loader = threading.Thread(target=self._load, name="loader", daemon=True)
        self._loader.start()

    def _load(self) -> None:
        started = time.monotonic()
        try:
            found = models.resolve(self.settings.model, progress=False, cache=environment("cache"))
            self.model = source.open_model(found.paths[0], self.settings.weights)
            self.prompter = Prompter(self.model.tokenizer, self.model.chat_template)
            engine = self._engine(self.model)
            with self._lock:
                self.engine = engine
                self.grammars = Grammars(self.model.tokenizer, engine.n_vocab, self.prompter.known, self.prompter.visible)
                self.generic_grammars = Grammars(self.model.tokenizer, engine.n_vocab, self.prompter.format_for([{}]), self.prompter.visible)
                self.fingerprint = f"bw24-{abi.version()}-{engine.prefill_class}"
                self.scheduler = self._scheduler(engine, self.model)
                self.state = READY if self.state == LOADING else self.state
            log.info("serving %s (%s): context %d tokens, KV %s, %s, %d threads; loaded in %.2f s", self.name, self.model.name, engine.ctx,
                     engine.kv["full"], engine.isa, engine.threads, time.monotonic() - started)
            log.info("%s", engine.device_line)
            for line in (engine.placement.note if engine.placement else None, engine.note):
                if line:
                    log.info("%s", line)
        except Exception as error:
            self.state, self.error = FAILED, str(error)
            log.error("cannot serve %s: %s", self.settings.model, error)
            if self._on_failure:
                self._on_failure(error)
        finally:
            self._changed.set()

    def _engine(self, model: source.Model) -> Engine:
        """With the drafter that the settings ask for; without, where nobody asked and the device runs none."""
        spec = argparse.Namespace(**self.settings.spec)
        draft = open_drafter(model, spec)
        try:
            engine = Engine(model, **self.settings.engine, **({"draft": draft, "owners": len(self.settings.keys)} if draft else {}))
            remember_learned(engine, log.warning)
            return engine
        except Bw24Error as error:
            if draft is None or spec.spec is not None or error.code != UNSUPPORTED:
                raise
            log.warning("without drafts: %s", error)
            return Engine(model, **self.settings.engine)

    def _scheduler(self, engine: Engine, model: source.Model) -> Scheduler:
        limits = {"cache_ram": self.settings.cache_ram, "queue_limit": self.settings.queue, "max_runs": self.settings.parallel}
        if not engine.draft:
            return Scheduler(engine, model.tokenizer, **limits)
        spec = argparse.Namespace(**self.settings.spec)
        return DraftingScheduler(engine, model.tokenizer, k=drafts_a_round(spec), mode=spec.spec_sampling, **limits)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until loading has ended; whether the model is ready."""
        self._changed.wait(seconds)
        return self.state == READY

    def ready(self) -> Service:
        """Itself, once the model is there. Raises ApiError 503 before and after."""
        if self.state == READY and not self.scheduler.broken:
            return self
        text = {LOADING: "the model is loading", DRAINING: "the server is shutting down", FAILED: f"the model could not be loaded: {self.error}"}
        raise ApiError(503, text.get(self.state) or self.scheduler.broken, kind=self.state, retry_after=2)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is neither the one served nor an alias of it. Raises ApiError 404."""
        names = (self.name, *self.settings.aliases)
        if name is not None and name not in names and "*" not in names:
            shown = "".join(c if c.isprintable() else "?" for c in name[:100])
            raise ApiError(404, f"the model '{shown}' does not exist; this server has {', '.join(names)} (--alias NAME adds a name)",
                           param="model", kind="model_not_found")

    def drain(self, seconds: float) -> bool:
        """Refuse new requests, let the running ones end; False where some are left after `seconds`."""
        self.state = DRAINING
        return self.scheduler.drain(seconds) if self.scheduler else True

    def close(self) -> None:
        """End what still runs and give everything back."""
        self.state = DRAINING if self.state != FAILED else FAILED
        self._loader.join()
        with self._lock:
            if self.scheduler:
                self.scheduler.close()
            if self.engine:
                self.engine.close()
            if self.model:
                self.model.close()

    def props(self) -> dict[str, Any]:
        """What the server is and can do."""
        engine, model, template = self.engine, self.model, self.model.chat_template
        return {
            "model": self.name, "model_name": model.name, "architecture": model.arch, "context": engine.ctx, "vocabulary": engine.n_vocab,
            "kv": engine.kv, "backend": engine.backend, "isa": engine.isa, "threads": engine.threads, "numeric_class": engine.prefill_class,
            "revision": abi.version(), "parallel": self.settings.parallel, "queue": self.settings.queue, "memory": engine.memory(),
            "chat_template": template.source if template else None, "chat_format": self.prompter.known.name,
            "template_variables": sorted(template.variables) if template else [], "aliases": list(self.settings.aliases),
            "draft": {"name": engine.draft.name, "k": self.scheduler.k} if engine.draft else None,
            "bos_token": model.tokenizer.bos_id, "end_tokens": sorted(self.prompter.stop_ids),
        }


def fail_with_exit(error: Exception) -> None:
    """End the worker in the way that gunicorn takes for a failed start, so that it does not start the next one."""
    os._exit(3)
