"""Serving a DecodeWorker over gRPC: the calls of routers, and beside them the bridge's."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from core.peer_security import PeerSecurity
from decode_worker.worker import DecodeWorker
from kv_transfer.grpc_transport import add_kv_transfer_servicer, add_receiver_of
from kv_transfer.receiver import Receiver
from protos.service import RoleChanger, ServedWorker, add_role_service, serve_worker


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


class EitherWorker(ServedWorker, RoleChanger, Protocol):
    """A worker that runs one phase or the other."""

    @property
    def receiver(self) -> Receiver:
        """The bridge's end of the moment."""
        ...


async def serve_either(
    worker: EitherWorker, host: str, security: PeerSecurity
) -> tuple[grpc.aio.Server, int]:
    """Serve `worker` in whatever role it has, for as long as it lives. Returns the server and its port."""

    def add_services(server: grpc.aio.Server) -> None:
        add_receiver_of(server, lambda: worker.receiver)
        add_role_service(server, worker)

    return await serve_worker(worker, host, security, add_services)
