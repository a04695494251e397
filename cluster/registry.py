"""The registry actor and both of its sides: workers announce, routers look.

One named Ray actor with soft state. Ray restarts it after a death, the next announcements fill it again, and
routers go on with the table they last saw. Nothing on the way of a token asks it. Coroutines run on the
caller's loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from cluster.autoscaler.news import ScalingCounts, ScalingNews
from cluster.awake_watch import AwakeWatch
from cluster.drain_table import DrainOrder, DrainTable
from cluster.limit_table import LimitTable
from cluster.registry_table import Membership, MembershipView, RegistryTable
from cluster.role_config import RoleConfig
from cluster.role_table import RoleTable
from core.clock import MonotonicClock
from core.errors import ServingError
from core.ids import Epoch, Role, WorkerId, WorkerRef
from core.role_change import RoleCause, RoleOrder
from core.worker_status import Announcement
from router.limits import Orders, Report

NAMESPACE = "baton"
NAME = "registry"
ANNOUNCE_PERIOD_S = 1.0
CALL_TIMEOUT_S = 1.0

# what a call to a dead, restarting, unknown or frozen actor ends with
_UNREACHABLE = (RayError, GetTimeoutError, TimeoutError, ValueError)

_log = logging.getLogger(__name__)


class Registry:
    """Actor shell around the tables of workers, roles, drains and limits; its methods run one after the
    other.

    A refusal is returned, not raised: Ray would wrap it.
    """

    def __init__(self, roles: RoleConfig | None = None) -> None:
        clock = MonotonicClock()
        self._watch = AwakeWatch(clock)
        self._watch.start()
        self._table = RegistryTable(clock, awake=self._watch.awake)
        self._roles = RoleTable(roles or RoleConfig(), clock, self._table)
        self._drains = DrainTable(clock, self._table)
        self._limits = LimitTable(clock)
        self._scaling: ScalingNews | None = None
        self._scaling_counts = ScalingCounts()

    def announce(self, announcement: Announcement) -> RoleOrder | DrainOrder | None:
        self._table.announce(announcement)
        role_order = self._roles.heard(announcement)
        return self._drains.heard(announcement) or role_order

    def fill_role(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        return self._roles.fill(role, unusable)

    def order_role(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | ServingError | None:
        try:
            return self._roles.order(worker_id, role, cause, is_forced)
        except ServingError as error:
            return error

    def order_drain(
        self, worker_id: WorkerId, within_s: float | None, is_forced: bool = False
    ) -> DrainOrder | ServingError:
        try:
            return self._drains.order(worker_id, within_s, is_forced)
        except ServingError as error:
            return error

    def withdraw(self, worker_id: WorkerId, epoch: Epoch) -> None:
        self._table.withdraw(worker_id, epoch)

    def exchange(self, report: Report) -> Orders:
        return self._limits.exchange(report)

    def note_scaling(self, news: ScalingNews) -> None:
        self._scaling = news
        self._scaling_counts = self._scaling_counts.after(news)

    def scaling(self) -> tuple[ScalingNews | None, ScalingCounts]:
        return self._scaling, self._scaling_counts

    def end_in(self, seconds: float) -> None:
        self._table.end_in(seconds)

    def membership(self) -> Membership:
        return self._table.membership()


def start_registry(roles: RoleConfig | None = None, is_detached: bool = False) -> Any:
    """Create the named actor, or find it. The caller's Ray job owns it: keep the handle for as long as it
    shall live, unless it `is_detached`, which outlives it. `roles`: when workers change their role.
    """
    options = ray.remote(Registry).options(
        name=NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        lifetime="detached" if is_detached else None,
    )
    return options.remote(roles)


class RegistryClient:
    """Calls to the named actor, each bounded in time. The handle is looked up anew after a failure.

    The look-up blocks for as long as Ray's control service does not answer: it has a thread of its own, so
    that it never takes those that others work in.
    """

    def __init__(self) -> None:
        self._actor: Any = None
        self._look_up = ThreadPoolExecutor(max_workers=1, thread_name_prefix="registry")

    async def call(self, method: str, *arguments: object) -> Any:
        """The method's result. Raises ConnectionError if the actor does not answer in CALL_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                actor = self._actor
                if actor is None:
                    actor = await asyncio.get_running_loop().run_in_executor(self._look_up, self._find)
                return await getattr(actor, method).remote(*arguments)
        except _UNREACHABLE as error:
            self._actor = None
            raise ConnectionError(f"registry: {type(error).__name__}") from error

    def _find(self) -> Any:
        # kept even if the call that asked has given up: else a slow service would never be reached
        self._actor = ray.get_actor(NAME, NAMESPACE)
        return self._actor


class RegistryMembership:
    """A router's source of announcements; answers from memory while the registry is away.

    `on_ending` is called once, with the seconds that are left, when the registry says that the service stops.
    """

    def __init__(self, client: RegistryClient, on_ending: Callable[[float], None] | None = None) -> None:
        self._client = client
        self._on_ending = on_ending
        self._view = MembershipView()
        self._is_reachable = True

    async def announcements(self) -> tuple[Announcement, ...]:
        try:
            membership: Membership = await self._client.call("membership")
            self._view.update(membership)
            if membership.ends_in_s is not None and self._on_ending is not None:
                self._on_ending(membership.ends_in_s)
                self._on_ending = None
            self._note(is_reachable=True)
        except ConnectionError as error:
            self._note(is_reachable=False, why=str(error))
        return self._view.announcements

    def _note(self, is_reachable: bool, why: str = "") -> None:
        if is_reachable != self._is_reachable:
            self._is_reachable = is_reachable
            _log.warning(
                "registry answers again" if is_reachable else f"keeping the last membership table: {why}"
            )


class RegistryLimitOwner:
    """A router's way to the owner of the tenants' limits, which lives in the registry's process."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client

    async def exchange(self, report: Report) -> Orders:
        """Raises ConnectionError while the registry is away."""
        orders: Orders = await self._client.call("exchange", report)
        return orders


class RegistryRoles:
    """Whoever wants a worker in another role asks here; the registry decides, the worker hears of it with its
    next announcement, within a second, or sooner from whoever calls it.
    """

    def __init__(self, client: RegistryClient) -> None:
        self._client = client

    async def fill(self, role: Role, unusable: Sequence[WorkerRef]) -> RoleOrder | None:
        """See RoleTable.fill. Raises ConnectionError while the registry is away."""
        order: RoleOrder | None = await self._client.call("fill_role", role, tuple(unusable))
        return order

    async def order(
        self, worker_id: WorkerId, role: Role, cause: RoleCause, is_forced: bool = False
    ) -> RoleOrder | None:
        """See RoleTable.order. Raises UnknownWorker, LastOfRole, or ConnectionError while the registry is
        away.
        """
        answer: RoleOrder | ServingError | None = await self._client.call(
            "order_role", worker_id, role, cause, is_forced
        )
        if isinstance(answer, ServingError):
            raise answer
        return answer


class RegistryDrains:
    """A router's way to have a worker drained, which hears of it with its next announcement."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client

    async def drain(self, worker_id: WorkerId, within_s: float | None, is_forced: bool) -> Epoch:
        """See DrainTable.order. Raises UnknownWorker, LastOfRole, or ConnectionError while the registry is
        away.
        """
        answer: DrainOrder | ServingError = await self._client.call(
            "order_drain", worker_id, within_s, is_forced
        )
        if isinstance(answer, ServingError):
            raise answer
        return answer.process_epoch


class RegistryHerald:
    """A worker's side: announces it and withdraws it. A registry that is away is tried again or left to
    forget.
    """

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._view = MembershipView()

    async def announce(self, announcement: Announcement) -> RoleOrder | DrainOrder | None:
        """Once, now; what the worker is to do. Raises ConnectionError."""
        order: RoleOrder | DrainOrder | None = await self._client.call("announce", announcement)
        return order

    async def keep_announcing(
        self,
        announcement: Callable[[], Announcement],
        follow: Callable[[RoleOrder | DrainOrder], None] = lambda order: None,
    ) -> None:
        """Announce at once and then every second, until cancelled; `follow` hears each order."""
        has_warned = False
        while True:
            try:
                order = await self.announce(announcement())
                has_warned = False
                if order is not None:
                    follow(order)
            except ConnectionError as error:
                if not has_warned:
                    _log.warning("not announced, trying again: %s", error)
                    has_warned = True
            await asyncio.sleep(ANNOUNCE_PERIOD_S)

    async def withdraw(self, announcement: Announcement) -> None:
        """Leave the table at once."""
        try:
            await self._client.call("withdraw", announcement.ref.worker_id, announcement.ref.epoch)
        except ConnectionError as error:
            _log.warning("not withdrawn, the line will lapse: %s", error)

    async def members(self) -> tuple[Announcement, ...] | None:
        """From memory while the registry is away; None before it was heard."""
        try:
            self._view.update(await self._client.call("membership"))
        except ConnectionError as error:
            _log.debug("the members are those of before: %s", error)
        return self._view.announcements or None
