"""One process without Ray: nobody can speak to its workers but through HTTP."""

from __future__ import annotations

from core.errors import WorkerLost
from core.peer_security import PeerSecurity
from tests.e2e import profiles, sockets, strangers
from tests.e2e.fleet import Fleet


def test_it_listens_on_its_http_port_alone_and_answers_no_worker_call_there(fleet: Fleet) -> None:
    system = fleet.system(profiles.STD)
    (process,) = system.processes()
    assert sockets.listening_ports(process.pid) == {system.port}
    assert strangers.answers(process, PeerSecurity()) == [WorkerLost]
