"""
OTLP requests over HTTP to one endpoint, kept while it does not take them.

The SDK's own exporter does more than a guest may: it draws from the global `random` for each request, which moves the
host's shuffles, writes its troubles to logging, where they land on the job's terminal, and drops a batch whose
endpoint restarts.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 -- the first look-up of a host name imports it, on whatever thread that is
import gzip
import ssl
import urllib.error
import urllib.request
import zlib
from collections import deque
from http.client import HTTPException
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ckpt_sentry.transport.otel_env import Target

__all__ = ["Route"]

_PENDING: Final = 256
"""Requests kept for an endpoint that does not answer; the oldest go first."""

_TRY_AGAIN: Final = frozenset({408, 429, 502, 503, 504})


class Route:
    """
    Requests to one target, in order. What the target could not take stays, up to a bound, for the next time.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.problem: str | None = None
        """Why a request was not taken, the last time that one was not, in a few words."""
        self._pending: deque[bytes] = deque(maxlen=_PENDING)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=_tls(target)))

    def __bool__(self) -> bool:
        """
        Whether requests wait for the target to come back.
        """
        return bool(self._pending)

    def add(self, request: bytes) -> None:
        self._pending.append(request)

    def send(self) -> bool:
        """
        Send what is there, until something is to be tried again later; each request takes up to the target's timeout.

        True if all was taken. What the target refuses for good is dropped.
        """
        taken = True
        while self._pending:
            request = self._pending[0]
            try:
                self._post(request)
            except urllib.error.HTTPError as error:
                error.close()
                self.problem = f"HTTP {error.code}"
                if error.code in _TRY_AGAIN:
                    return False
                taken = False
            except (OSError, ValueError, HTTPException) as error:
                self.problem = str(getattr(error, "reason", error)) or type(error).__name__
                return False
            if self._pending and self._pending[0] is request:
                self._pending.popleft()
        return taken

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/x-protobuf", "User-Agent": "ckpt_sentry"} | dict(self.target.headers)
        if self.target.compression == "gzip":
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        elif self.target.compression == "deflate":
            body, headers["Content-Encoding"] = zlib.compress(body), "deflate"
        request = urllib.request.Request(self.target.url, body, headers, method="POST")  # noqa: S310 -- OTEL_* says it
        with self._opener.open(request, timeout=self.target.timeout) as response:
            response.read()


def _tls(target: Target) -> ssl.SSLContext | None:
    """
    What the certificates in the environment ask for; None for the default. Raises OSError for a file that is no use.
    """
    if not target.url.lower().startswith("https:"):
        return None
    context = ssl.create_default_context(cafile=target.certificate)
    if target.client_certificate:
        context.load_cert_chain(target.client_certificate, target.client_key)
    return context
