"""The server's settings, from the command line or from the environment. Owns what they mean together; knows no request."""

from __future__ import annotations

import argparse
import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import flags, tiers
from ..errors import Bw24Error

ENGINE = ("device", "threads", "ctx", "kv", "backend", "isa", "fuse", "repack")
SERVER = ("host", "port", "alias", "api_key_file", "cors", "cache_ram", "parallel", "queue", "drain", "lenient", "log_prompts")
TIERS = ("vram", "ram", "nvme", "tier_policy", "profile")
SPEC = ("spec", "draft", "draft_hidden", "draft_spare", "spec_sampling")
PLACE = ("device", "backend", "isa", "kv", "ctx", *TIERS)  # where experts are decides whether drafts pay
NAMES = ("model", "weights", *SPEC, *ENGINE, *TIERS, *SERVER)
MAX_BODY = 32 << 20  # bytes of a request: a million tokens of text and their JSON
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """One server. `engine`, `spec`: settings of the engine and of drafting, by name. `keys`: SHA-256 digests of the API keys, empty where none is
    asked for. cache_ram: bytes."""

    model: str
    weights: str = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=lambda: {"spec": 0})
    host: str = "127.0.0.1"
    port: int = 8080
    aliases: tuple[str, ...] = ()
    keys: tuple[bytes, ...] = ()
    cors: tuple[str, ...] = ()
    cache_ram: int = 1 << 30
    parallel: int = 32
    queue: int = 256
    drain: float = 30.0
    lenient: bool = False
    log_prompts: bool = False
    max_body: int = MAX_BODY
    ping: float = 5.0  # seconds without output after which a stream says that it lives
    body_seconds: float = 60.0  # for a request's head and body to arrive

    @property
    def threads(self) -> int:
        """Of the HTTP server: one for each request that runs or waits, and some for those that only ask."""
        return self.parallel + self.queue + 16


def from_args(args: argparse.Namespace) -> Settings:
    """Settings of a parsed command line whose flags are settled. Raises Bw24Error."""
    key_file, where = args.api_key_file, tiers.from_args(args)
    engine = {**{n: getattr(args, n) for n in ENGINE}, **({"tiers": where} if where.asked else {})}
    flags.check_device(args)
    return Settings(
        model=args.model, weights=args.weights, engine=engine, spec={n: getattr(args, n) for n in (*SPEC, *PLACE)}, host=args.host, port=args.port,
        aliases=_names(args.alias),
        keys=read_keys(key_file) if key_file else (), cors=_names(args.cors), cache_ram=args.cache_ram * MIB, parallel=args.parallel,
        queue=args.queue, drain=args.drain, lenient=args.lenient, log_prompts=args.log_prompts,
    )


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from BW24_ variables. Raises Bw24Error naming the variable."""
    return from_args(argparse.Namespace(**{name: flags.environment(name, environ) for name in NAMES}))


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def read_keys(path: str) -> tuple[bytes, ...]:
    """Digests of the keys in a file: one a line; blank lines and lines that begin with # do not count. Raises Bw24Error."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise Bw24Error(f"--api-key-file {path}: cannot read: {getattr(error, 'strerror', None) or error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise Bw24Error(f"--api-key-file {path}: no key in it; put one on a line")
    short = [k for k in keys if len(k) < 8]
    if short:
        raise Bw24Error(f"--api-key-file {path}: a key of {len(short[0])} characters; use at least 8")
    return tuple(hashlib.sha256(k.encode()).digest() for k in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to bind."""
    if host in ("localhost", ""):
        return host == "localhost"
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_address(host: str, keys: tuple[bytes, ...]) -> None:
    """Refuse to serve other machines without a key."""
    if not is_loopback(host) and not keys:
        raise Bw24Error(f"--host {host or '*'} is open to other machines; that needs --api-key-file FILE (or keep 127.0.0.1)")
