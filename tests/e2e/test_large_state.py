"""States that are larger than gRPC's messages and than a buffer or two: saved, restored, and gone on from."""

from __future__ import annotations

from pathlib import Path

import pytest

from slotwire_client import Client
from tests import random_models
from tests.conftest import serving, settings

MIB = 1 << 20


@pytest.mark.parametrize(
    "tokens", [6, 120, pytest.param(1100, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids="{}MiB".format
)
async def test_a_state_of_this_size_passes(tmp_path: Path, tokens: int) -> None:
    """A token of this model takes 1 MiB."""
    model = random_models.wide(tmp_path / "wide.gguf")
    file = tmp_path / "slot.bin"
    prompt = [300 + index % 900 for index in range(tokens)]
    config = settings(slots=2, context=2 * tokens + 300, threads=2)
    async with serving(model, config) as server, Client(server.address) as client:
        async with client.generate(prompt, max_tokens=4, temperature=0, slot_id=0) as generation:
            first = await generation.complete()
        with file.open("wb") as sink:
            saved = await client.save_slot(0, sink)
        assert saved.size_bytes > tokens * MIB
        restored = await client.restore_slot(file, slot_id=1)
        assert restored.restored_tokens == saved.tokens == tokens + 3
        turn = [*prompt, *first.token_ids, 301]
        answers = []
        for slot in (0, 1):
            async with client.generate(turn, max_tokens=4, temperature=0, slot_id=slot) as generation:
                answers.append(await generation.complete())
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[1].usage.reused_tokens == tokens + 3
