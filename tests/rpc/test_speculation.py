"""Speculation over gRPC: what a request can ask for, and what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest

from service.engine.settings import SpeculationSettings
from slotwire_client import Client, InvalidArgument, Rollback, SpeculationOptions
from tests.conftest import MODELS, serving, settings

DRAFT = MODELS / "tiny-hybrid-draft.Q8_0.gguf"
PROMPT = "The following functions are defined in the module: "


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    config = settings(speculation=SpeculationSettings(draft_model=DRAFT, draft_max=6), deterministic=True)
    async with serving(config=config) as server, Client(server.address) as client:
        yield client


async def test_a_text_does_not_change_and_says_what_was_drafted(client: Client) -> None:
    async with client.generate(
        PROMPT, max_tokens=200, temperature=0, ignore_eos=True, speculation=SpeculationOptions(enabled=False)
    ) as generation:
        plain = await generation.complete()
    assert plain.speculation is None
    async with client.generate(PROMPT, max_tokens=200, temperature=0, ignore_eos=True) as generation:
        drafted = await generation.complete()
    assert drafted.token_ids == plain.token_ids
    told = drafted.speculation
    assert told is not None  # at the latest a probe drafts
    assert told.accepted_tokens <= told.drafted_tokens
    assert sum(told.accepted_per_position) == told.accepted_tokens
    assert len(told.accepted_per_position) <= 6
    load = await client.load()
    assert load.drafted_tokens == told.drafted_tokens
    assert load.rounds == told.rounds
    assert load.decodes >= load.rounds + load.flushes


async def test_the_model_tells_how_it_takes_drafts_back(client: Client) -> None:
    can = (await client.model_info()).capabilities
    assert (can.rollback, can.deterministic) == (Rollback.CHECKPOINT, True)
    assert can.draft_model
    assert can.draft_ngram


async def test_options_bound_the_drafts_of_a_request(client: Client) -> None:
    async with client.generate(
        PROMPT, max_tokens=200, temperature=0, ignore_eos=True, speculation=SpeculationOptions(n_max=1)
    ) as generation:
        told = (await generation.complete()).speculation
    assert told is None or len(told.accepted_per_position) == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (SpeculationOptions(p_min=1.5), "speculation.p_min"),
        (SpeculationOptions(p_min=float("nan")), "speculation.p_min"),
        (SpeculationOptions(p_min=-0.1), "speculation.p_min"),
        (SpeculationOptions(n_max=2, n_min=3), "speculation.n_min"),
    ],
)
async def test_bad_options_name_the_field(client: Client, options: SpeculationOptions, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        async with client.generate(PROMPT, max_tokens=4, speculation=options) as generation:
            await generation.complete()
    assert [violation.field for violation in caught.value.violations] == [field]
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
