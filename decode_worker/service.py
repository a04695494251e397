"""Serving a DecodeWorker over gRPC: the calls of routers, and beside them the bridge's."""

from __future__ import annotations

import grpc.aio

from core.peer_security import PeerSecurity
from decode_worker.worker import DecodeWorker
from kv_transfer.grpc_transport import add_kv_transfer_servicer
from protos.service import serve_worker


async def serve(worker: DecodeWorker, host: str, security: PeerSecurity) -> tuple[grpc.aio.Server, int]:
    """Serve `worker` and its receiver on a free port of `host` to those whom `security` admits.

    Returns the started server and its port. Raises InvalidConfig where a way for KV is required and
    cannot be had.
    """
    worker.offer_shared_memory()
    worker.offer_groups(host, security)
    return await serve_worker(
        worker,
        host,
        security,
        add_services=lambda server: add_kv_transfer_servicer(server, worker.receiver),
    )
