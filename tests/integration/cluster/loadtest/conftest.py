"""A server that misbehaves as it is told, for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.integration.cluster.loadtest.odd_server import OddServer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[OddServer]:
    async with OddServer().running() as running:
        yield running
