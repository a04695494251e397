"""Whether a request may come from a page of somebody else's, open in a browser on this machine.

Where no keys are asked for the service listens on loopback only, but a browser there reaches it for any page
that it shows: one can send (a form needs no consent), and one whose name was made to mean 127.0.0.1 can read
the answers, too. What changes or tells how the service works is not for them. With keys, no page of others
has one. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

from core.errors import Forbidden

_OWN_SITES = ("same-origin", "none")


def refuse_foreign_pages(headers: Mapping[str, str]) -> None:
    """Raises Forbidden for a request that another site's page had sent, or that was sent to a name instead of
    an address or `localhost`. `headers` by lower-case name.
    """
    host = headers.get("host", "")
    if not _is_unmistakable(host):
        raise Forbidden(
            f"without API keys this is only for requests to localhost or an address, not to {host[:100]!r}"
        )
    site, origin = headers.get("sec-fetch-site", "none"), headers.get("origin")
    origins = (f"http://{host}".lower(), f"https://{host}".lower())
    if site not in _OWN_SITES or (origin is not None and origin.lower() not in origins):
        raise Forbidden("without API keys this is not for pages of other sites")


def _is_unmistakable(host: str) -> bool:
    """Whether no name server has a say in where it is."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost" or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
