"""SystemService."""

from __future__ import annotations

from typing import Any

import grpc
import psutil

import service
from service.backend import Backend, BackendState
from service.engine.llama import RUNTIME_VERSION, system_info
from service.engine.types import Rollback
from service.rpc import sampling, wire
from slotwire.v1 import system_pb2 as pb
from slotwire.v1 import system_pb2_grpc as pb_grpc

_Context = grpc.aio.ServicerContext[Any, Any]

_STATES = {
    BackendState.LOADING: pb.SERVER_STATE_LOADING,
    BackendState.READY: pb.SERVER_STATE_READY,
    BackendState.DRAINING: pb.SERVER_STATE_DRAINING,
    BackendState.FAILED: pb.SERVER_STATE_FAILED,
}
_ROLLBACKS = {
    Rollback.TRIM: pb.ROLLBACK_TRIM,
    Rollback.SNAPSHOTS: pb.ROLLBACK_SNAPSHOTS,
    Rollback.CHECKPOINT: pb.ROLLBACK_CHECKPOINT,
}


class SystemServicer(pb_grpc.SystemServiceServicer):
    """Says what runs here and how busy it is."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._process = psutil.Process()

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            version=service.__version__,
            runtime_version=RUNTIME_VERSION,
            system_info=system_info(),
            state=_STATES[self._backend.state],
            load_progress=self._backend.load_progress,
            started_at=wire.timestamp(self._backend.started_at),
        )

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: _Context) -> pb.GetModelInfoResponse:
        info = self._backend.loaded.info
        can = info.capabilities
        return pb.GetModelInfoResponse(
            name=info.name,
            description=info.description,
            architecture=info.architecture,
            parameters=info.parameters,
            size_bytes=info.size_bytes,
            vocabulary_size=info.vocabulary_size,
            embedding_size=info.embedding_size,
            layers=info.layers,
            trained_context_tokens=info.trained_context,
            context_tokens=info.context,
            slot_context_tokens=info.slot_context,
            slots=info.slots,
            capabilities=pb.Capabilities(
                trim=can.trim,
                recurrent=can.recurrent,
                hybrid=can.hybrid,
                sliding_window=can.sliding_window,
                chat=self._backend.loaded.intake.can_chat,
                rollback=_ROLLBACKS[can.rollback],
                deterministic=can.deterministic,
                draft_ngram=self._backend.speculation.ngram,
                draft_model=self._backend.speculation.model is not None,
            ),
            sampling_defaults=sampling.write(sampling.DEFAULTS),
            chat_template=info.chat_template or "",
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: _Context) -> pb.GetLoadResponse:
        load = await self._backend.load_now()
        return pb.GetLoadResponse(
            slots=load.slots,
            busy_slots=load.busy_slots,
            queued_requests=load.queued_requests,
            queue_limit=load.queue_limit,
            cached_tokens=load.cached_tokens,
            context_tokens=load.context_tokens,
            requests=load.requests,
            prompt_tokens=load.prompt_tokens,
            reused_tokens=load.reused_tokens,
            generated_tokens=load.generated_tokens,
            steps=load.steps,
            prompt_tokens_per_second=load.prompt_rate,
            generated_tokens_per_second=load.generation_rate,
            rows_per_step=load.rows_per_step,
            step_time=wire.duration(load.step_seconds),
            memory_bytes=self._process.memory_info().rss,
            busy_time=wire.duration(load.busy_seconds),
            decode_time=wire.duration(load.decode_seconds),
            decodes=load.decodes,
            rounds=load.rounds,
            flushes=load.flushes,
            checkpoints=load.checkpoints,
            drafted_tokens=load.drafted_tokens,
            accepted_tokens=load.accepted_tokens,
            replayed_tokens=load.replayed_tokens,
            draft_time=wire.duration(load.draft_seconds),
            shelved_states=load.shelved_states,
            shelved_bytes=load.shelved_bytes,
            fetched_tokens=load.fetched_tokens,
        )
