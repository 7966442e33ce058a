"""`slotwire demo`: several answers at once, side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from service.cli.connect import PRIVATE, ConnectionOptions, connect
from service.cli.failure import usage_errors
from service.cli.options import DEFAULTS, Sampling, SamplingOptions
from service.cli.output import printable
from slotwire_client import ChatMessage, Delta, Generation

PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Why is the sky blue?",
)
_SAMPLING = Sampling(max_tokens=160, temperature=0.2, top_p=0.9, seed=1)
_FRAMES = 12  # a second


@dataclass(slots=True)
class Answer:
    """An answer while it is written. Times are seconds of `time.monotonic`."""

    prompt: str
    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    done: bool = False

    def add(self, delta: Delta, now: float) -> None:
        self.text += delta.text
        self.first = self.first or now
        self.last = now
        self.tokens += len(delta.token_ids)

    @property
    def rate(self) -> float:
        """Tokens a second since the first one; 0 before there are two."""
        return rate(self.tokens - 1, self.last - self.first)


def rate(tokens: int, seconds: float) -> float:
    """Tokens a second, 0 where there is nothing to measure."""
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0


async def demo(
    prompts: Annotated[tuple[str, ...], Parameter(negative_iterable=())] = PROMPTS,
    /,
    *,
    sampling: SamplingOptions = DEFAULTS,
    connection: ConnectionOptions = PRIVATE,
) -> int:
    """Answer several prompts at once, side by side, with the speed of each and of all together.

    Args:
        prompts: What to answer. Left out: a story and an explanation.
    """
    options = sampling.over(_SAMPLING).options()
    answers = [Answer(prompt) for prompt in prompts]
    console = Console()
    async with connect(connection) as client:
        as_chat = (await client.model_info()).capabilities.chat
        with usage_errors():
            generations = [
                client.generate([ChatMessage("user", answer.prompt)] if as_chat else answer.prompt, **options)
                for answer in answers
            ]
        if console.is_terminal:
            with Live(get_renderable=lambda: _panels(answers, console), console=console, refresh_per_second=_FRAMES):
                await _together(map(_read, answers, generations))
        else:
            await _together(map(partial(_read_and_print, console), answers, generations))
    console.print(_summary(answers), highlight=False)
    return 0


async def _together(readers: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs all at once; the first error ends them all and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(reader)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _read(answer: Answer, generation: Generation) -> None:
    async with generation:
        async for event in generation.events():
            if isinstance(event, Delta):
                answer.add(event, time.monotonic())
    answer.done = True


async def _read_and_print(console: Console, answer: Answer, generation: Generation) -> None:
    await _read(answer, generation)
    text = f"> {answer.prompt}\n{answer.text.strip()}\n({_figures(answer)})\n"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _panels(answers: list[Answer], console: Console) -> RenderableType:
    """One panel for each answer, with as much of its end as fits on the screen, and all together below."""
    height = max(console.height - 3, 6)
    width = console.width // len(answers) - 4
    grid = Table.grid(expand=True)
    for _ in answers:
        grid.add_column(ratio=1)
    grid.add_row(*(_panel(answer, console, width, height) for answer in answers))
    return grid if all(answer.done for answer in answers) else Group(grid, _summary(answers))


def _panel(answer: Answer, console: Console, width: int, height: int) -> Panel:
    lines = Text(printable(answer.text.strip())).wrap(console, max(width, 1))
    return Panel(
        Text("\n").join(lines[-(height - 2) :]),
        title=Text(answer.prompt, overflow="ellipsis", no_wrap=True),
        subtitle=_figures(answer),
        height=height,
        border_style="green" if answer.done else "yellow",
    )


def _figures(answer: Answer) -> str:
    return f"{answer.tokens} tokens, {answer.rate:.1f} tokens/s"


def _summary(answers: list[Answer]) -> str:
    begun = [answer for answer in answers if answer.tokens]
    tokens = sum(answer.tokens for answer in begun)
    seconds = max((a.last for a in begun), default=0.0) - min((a.first for a in begun), default=0.0)
    return (
        f"{len(answers)} answers at once: {tokens} tokens in {seconds:.1f} s, "
        f"{rate(tokens - len(begun), seconds):.1f} tokens/s together"
    )
