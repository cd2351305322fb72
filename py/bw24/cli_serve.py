"""The command serve: the HTTP server in the foreground. Owns the hand-over to gunicorn; knows no request."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .cli_common import ENGINE_FLAGS, EXIT_OK, SPEC_FLAGS, TIER_FLAGS, add_command, open_drafter, open_model, say
from .errors import Bw24Error

SERVER_FLAGS = ("host", "port", "alias", "api_key_file", "cors", "cache_ram", "parallel", "queue", "drain", "lenient", "log_prompts")
EXAMPLES = """
bw24 serve                                the default model at http://127.0.0.1:8080
bw24 serve model.gguf --alias '*'         whatever model name a client asks for
bw24 serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' -d '{"messages": [{"role": "user", "content": "Hi"}]}'
"""
TEXT = """

An OpenAI and Anthropic compatible API, and a page to chat at /. docs/api.md describes both. The same server under
gunicorn: BW24_MODEL=model.gguf gunicorn -c python:bw24.server.gunicorn_conf 'bw24.server:create_app()'"""


def add_commands(commands: Any) -> None:
    """Declare serve."""
    serve = add_command(commands, "serve", run_serve, "serve a model over HTTP", EXAMPLES, (*SERVER_FLAGS, *SPEC_FLAGS, *ENGINE_FLAGS, *TIER_FLAGS))
    serve.description += TEXT


def run_serve(args: argparse.Namespace) -> int:
    """Exit code of `bw24 serve`; returns once the server has stopped."""
    from .server.settings import check_address, from_args

    settings = from_args(args)
    check_address(settings.host, settings.keys)
    with open_model(args) as model:  # fetch it and read its header here, where the person sees what is wrong
        if draft := open_drafter(model, args):
            draft.close()
    try:
        from gunicorn.app.base import BaseApplication
    except ImportError:
        raise Bw24Error("the server needs the package gunicorn: pip install gunicorn") from None
    from .server import create_app, gunicorn_conf

    class Application(BaseApplication):
        """gunicorn, configured from this command line."""

        def load_config(self) -> None:
            gunicorn_conf.settings = settings
            for name, value in gunicorn_conf.configure(settings).items():
                if name in self.cfg.settings:
                    self.cfg.set(name, value)

        def load(self) -> Any:
            return create_app(settings)

    say(f"serving {args.model} at http://{settings.host}:{settings.port} once it is loaded; Ctrl-C stops it")
    try:
        Application().run()
    except SystemExit as stop:
        return EXIT_OK if stop.code in (0, None) else int(stop.code) if isinstance(stop.code, int) else 1
    finally:
        sys.stderr.flush()
    return EXIT_OK
