"""Serving a PrefillWorker over gRPC. The bridge's service is not here: a prefill worker only sends."""

from __future__ import annotations

import grpc.aio

from core.peer_security import PeerSecurity
from prefill_worker.worker import PrefillWorker
from protos.service import serve_worker


async def serve(worker: PrefillWorker, host: str, security: PeerSecurity) -> tuple[grpc.aio.Server, int]:
    """Serve `worker` on a free port of `host` to those whom `security` admits; the server and its port."""
    return await serve_worker(worker, host, security)
