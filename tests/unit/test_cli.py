"""The commands: what they take, what they write, how they fail."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2

from service.cli import main
from service.cli.output import printable, size
from slotwire.v1 import system_pb2
from tests.unit.fake_server import FakeServer, running

LIMIT = 60.0
"""Seconds for anything that must happen; starting an interpreter takes most of it."""
TINY_MODEL = Path(__file__).parents[1] / "models" / "tiny-hybrid.Q8_0.gguf"


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
async def address(fake: FakeServer) -> AsyncIterator[str]:
    async with running(fake) as bound:
        yield bound


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """`slotwire` with these arguments, as a process with pipes."""
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "service.cli", *arguments, stdin=pipe, stdout=pipe, stderr=pipe
    )


async def run(*arguments: str, typed: str = "") -> tuple[int | None, str, str]:
    """Exit code, output and errors of a command."""
    async with asyncio.timeout(LIMIT):
        process = await start(*arguments)
        output, errors = await process.communicate(typed.encode())
    return process.returncode, output.decode(), errors.decode()


def test_help_lists_the_commands_and_groups_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = capsys.readouterr().out
    assert all(name in commands for name in ("serve", "generate", "chat", "demo", "slots", "models"))

    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    titles = re.findall(r"╭─ (\w+) ─", text)
    assert titles == ["Parameters", "Server", "Model", "Context", "Scheduling", "Speculation", "State"]
    assert "Conversations that generate at the same time." in text
    assert "SLOTWIRE_SLOTS=8" in text


@pytest.mark.parametrize("command", ["generate", "chat", "demo", "slots"])
def test_every_client_command_can_name_a_server(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "─ Connection ─" in text
    assert "SLOTWIRE_SERVER" in text


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--slots", "0"], "slots: 0 is less than 1"),
        (["serve", "--slots", "x"], 'Invalid value for --slots: unable to convert "x" into int.'),
        (["serve", "--no-such-option"], "Unknown option: --no-such-option."),
        (["slotz"], 'Unknown command "slotz". Did you mean "slots"?'),
        (["generate", "Hi", "--seed"], "--seed requires an argument"),
        (["generate", "Hi", "--server", "x", "--model", "y"], "--model is for a private server"),
        (["generate", "Hi", "--grammar-file", "/no/such"], "--grammar-file: cannot read /no/such: No such file"),
        (["slots", "--interval", "0"], "Must be >= 0.05"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("slotwire: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


async def test_generate_writes_the_text_of_a_chat(fake: FakeServer, address: str) -> None:
    assert await run("generate", "Hi", "--server", address, "--temperature", "0") == (0, "Once upon a time\n", "")
    (message,) = fake.requests[0].prompt.chat.messages
    assert (message.role, message.content) == ("user", "Hi")
    assert fake.requests[0].sampling.HasField("temperature")


async def test_generate_takes_the_text_as_it_is_where_there_is_no_template(fake: FakeServer, address: str) -> None:
    fake.chat = False
    await run("generate", "--server", address, typed="from standard input")
    assert fake.requests[0].prompt.text.text == "from standard input"


async def test_raw_overrides_the_template(fake: FakeServer, address: str) -> None:
    await run("generate", "Hi", "--raw", "--server", address)
    assert fake.requests[0].prompt.text.text == "Hi"


async def test_json_is_one_object_for_each_event(address: str) -> None:
    code, output, errors = await run("generate", "Hi", "--json", "--timings", "--seed", "3", "--server", address)

    events = [json.loads(line) for line in output.splitlines()]
    assert (code, errors) == (0, "")
    assert [event["event"] for event in events] == ["started", "delta", "delta", "delta", "delta", "finished"]
    assert events[0] == {
        "event": "started",
        "request_id": "r1",
        "slot_id": 2,
        "prompt_tokens": 5,
        "reused_tokens": 3,
        "seed": 3,
    }
    assert events[1] == {"event": "delta", "text": "Once", "token_ids": [100], "logprobs": []}
    assert events[-1]["reason"] == "stop"
    assert events[-1]["timings"] == {"queue": 0.001, "prompt": 0.02, "generation": 0.3}


async def test_an_error_of_the_server_names_the_fields(fake: FakeServer, address: str) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field="stop", description="70 strings; at most 64")
    fake.failure = (grpc.StatusCode.INVALID_ARGUMENT, (error_details_pb2.BadRequest(field_violations=[violation]),))
    code, output, errors = await run("slots", "--server", address)
    assert (code, output) == (1, "")
    assert errors == "slotwire: it failed\n  stop: 70 strings; at most 64\n"


async def test_a_server_that_is_not_there_is_named() -> None:
    code, output, errors = await run("generate", "Hi", "--server", "127.0.0.1:1")
    assert (code, output) == (1, "")
    assert errors.startswith("slotwire: cannot reach 127.0.0.1:1: ")
    assert errors.count("\n") == 1


async def test_a_value_that_cannot_be_sent_is_wrong_usage(address: str) -> None:
    code, _, errors = await run("generate", "Hi", "--max-tokens", "-1", "--server", address)
    assert (code, errors) == (2, "slotwire: max_tokens: Value out of range: -1\n")


async def test_a_command_waits_until_the_model_is_loaded(fake: FakeServer, address: str) -> None:
    loading = system_pb2.SERVER_STATE_LOADING
    fake.states[:] = [(loading, 0.1), (loading, 0.9), (system_pb2.SERVER_STATE_READY, 1.0)]
    code, output, _ = await run("generate", "Hi", "--server", address)
    assert (code, output) == (0, "Once upon a time\n")


async def test_ctrl_c_stops_the_generation(fake: FakeServer, address: str) -> None:
    fake.hold_after = 1
    async with asyncio.timeout(LIMIT):
        process = await start("generate", "Hi", "--server", address)
        assert process.stdout is not None
        assert await process.stdout.readexactly(4) == b"Once"
        process.send_signal(signal.SIGINT)
        await fake.cancelled.wait()
        output, errors = await process.communicate()
    assert (process.returncode, output, errors) == (130, b"\n", b"")


async def test_a_chat_keeps_its_session_until_reset(fake: FakeServer, address: str) -> None:
    code, output, _ = await run("chat", "--server", address, typed="one\ntwo\n/reset\nthree\n/quit\nfour\n")

    assert (code, output) == (0, "Once upon a time\n" * 3)
    first, second, third = fake.requests
    assert first.session == second.session != third.session
    assert [message.content for message in second.prompt.chat.messages] == ["one", "Once upon a time", "two"]
    assert [message.content for message in third.prompt.chat.messages] == ["three"]


async def test_slots_are_a_table_or_json(address: str) -> None:
    code, output, _ = await run("slots", "--server", address)
    assert code == 0
    assert [line.split()[:3] for line in output.splitlines()[1:]] == [["0", "idle", "0"], ["1", "generating", "120"]]

    code, output, _ = await run("slots", "--json", "--server", address)
    (idle, busy) = json.loads(output)
    assert (idle["state"], busy["session"], busy["last_used"]) == ("idle", "alpha", "2023-11-14T22:13:20+00:00")


async def test_the_demo_answers_all_prompts_at_once_and_sums_up(fake: FakeServer, address: str) -> None:
    code, output, _ = await run("demo", "First?", "Second?", "--temperature", "1", "--server", address)
    assert code == 0
    assert "> First?\nOnce upon a time\n(4 tokens, " in output
    assert "> Second?\nOnce upon a time\n(4 tokens, " in output
    assert "2 answers at once: 8 tokens in " in output.splitlines()[-1]
    first, second = fake.requests
    assert first.sampling == second.sampling
    assert (first.max_tokens, first.sampling.temperature, first.sampling.seed) == (160, 1, 1)


def test_models_tells_where_the_embedded_one_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert set(json.loads(line)) == {"name", "path", "licence", "size"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose path no process of another test names."""
    return Path(shutil.copy(TINY_MODEL, tmp_path / "tiny.gguf"))


async def test_a_private_server_generates_and_is_gone_afterwards(model: Path) -> None:
    code, output, errors = await run("generate", "def", "--model", str(model), "--raw", "--max-tokens", "4")
    assert (code, errors) == (0, "")
    assert output.strip()
    assert not processes_of(model)


async def test_ending_a_command_ends_its_private_server(model: Path) -> None:
    async with asyncio.timeout(LIMIT):
        process = await start("slots", "--watch", "--json", "--model", str(model))
        assert process.stdout is not None
        await process.stdout.readline()
        assert len(processes_of(model)) == 2
        process.terminate()
        await process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not processes_of(model)


async def test_a_private_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"PK\x03\x04")
    code, _, errors = await run("generate", "Hi", "--model", str(wrong))
    assert code == 2
    assert errors.startswith("slotwire: the private server stopped: model: ")
    assert "is no GGUF file" in errors


def processes_of(model: Path) -> list[str]:
    """The running commands that name this model."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended just now
        if str(model).encode() in arguments and b"service.cli" in arguments:
            found.append(path.parent.name)
    return found


def test_text_of_a_model_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\tc\nd\x9b") == "a\ufffd[2Jb\tc\nd\ufffd"


def test_sizes_are_told_in_units_that_people_read() -> None:
    assert (size(98_362_432), size(3 << 30)) == ("93.8 MiB", "3.0 GiB")
