"""What a program outside the cluster can learn of it: answers of its ports, words in its files.

Owns asking a worker's ports with and without a token, and looking for a secret where others could read it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import psutil

from cluster.run_directory import read_note, run_directories
from core.errors import ServingError
from core.ids import Epoch, RequestId, Role, WorkerId, WorkerRef
from core.jobs import GenerateJob, SampleStart
from core.peer_security import PeerSecurity
from core.request import Request, SamplingParams
from router.worker_clients import GrpcWorker
from tests.e2e import sockets
from tests.e2e.harness import System

CALL_S = 5.0
_TOKENS = (1, 2, 3)
_METHODS = (
    "/baton.inference.Worker/Cancel",
    "/ray.serve.ASGIService/HandleRequest",
    "/ray.rpc.CoreWorkerService/PushTask",
)


def answers(process: psutil.Process, security: PeerSecurity) -> list[type[BaseException]]:
    """What a Generate ends with on each port that the process listens on. Ray's own ports are among them."""
    return [asyncio.run(_ask(port, security)) for port in sorted(sockets.listening_ports(process.pid))]


async def _ask(port: int, security: PeerSecurity) -> type[BaseException]:
    client = GrpcWorker(WorkerRef(WorkerId("asked"), Role.DECODE, Epoch(1), f"127.0.0.1:{port}"), security)
    request = Request(RequestId("stranger"), _TOKENS, SamplingParams(max_tokens=2, seed=1), "model")
    try:
        async with asyncio.timeout(CALL_S):
            await anext(client.generate(GenerateJob(request, (SampleStart(0),), None, 1, CALL_S)))
    except (ServingError, TimeoutError) as error:
        return type(error)
    finally:
        await client.close()
    raise AssertionError(f"a stranger was answered on port {port}")


def refusals(process: psutil.Process) -> dict[int, set[str]]:
    """By port on which the process listens: the statuses with which calls of ours, of Serve's and of Ray's
    services end there without any token. A port that does not speak gRPC has UNAVAILABLE.
    """
    return {port: _refusals(port) for port in sorted(sockets.listening_ports(process.pid))}


def _refusals(port: int) -> set[str]:
    found: set[str] = set()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        for method in _METHODS:
            try:
                channel.unary_unary(method)(b"", timeout=CALL_S)
            except grpc.RpcError as error:
                found.add(error.code().name)
            else:
                found.add("OK")
    return found


def places_with(secret: str, system: System) -> list[str]:
    """Command lines, environments of child processes, logs and files of the run in which `secret` stands."""
    found = ["what it printed"] if secret in system.log() else []
    for process in system.processes():
        try:
            words = " ".join(process.cmdline())
            variables = {} if process.pid == system.process.pid else process.environ()
        except psutil.NoSuchProcess:
            continue
        found += [f"command line of {words}"] if secret in words else []
        found += [f"{name} of {words}" for name, value in variables.items() if secret in value]
    needle = secret.encode()
    for path in _run_directory(system).rglob("*"):
        if path.is_file() and needle in path.read_bytes():
            found.append(str(path))
    return found


def _run_directory(system: System) -> Path:
    (found,) = [
        path
        for path in run_directories()
        if (note := read_note(path)) is not None and note.pid == system.process.pid
    ]
    return found
