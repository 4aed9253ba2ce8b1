"""
The part of HTTP/1.1 that an OTLP receiver needs: one request from a stream, within limits, and one answer.

Stricter than `http.server`: what RFC 9112 says may be refused (folded headers, two lengths, a space before the colon)
is refused, and nothing is held in memory that was not counted before.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import io

Charge = Callable[[int], None]
"""Called before bytes are kept; raises `HttpError` (429) where there is no room for that many more."""

MAX_HEAD: Final = 32 * 1024
"""Bytes of request line and headers."""

CODINGS: Final = frozenset({"identity", "gzip", "x-gzip", "deflate"})

_MAX_CHUNK_LINE: Final = 1024
_STEP: Final = 64 * 1024
_REQUEST_LINE: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.([01])\r?\n")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00\r\n]*?)[ \t]*\r?\n")
_LENGTH: Final = re.compile(r"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?\r?\n")
_SINGLE: Final = frozenset({"content-length", "transfer-encoding", "content-type", "content-encoding", "authorization"})


class HttpError(Exception):
    """
    An answer other than 200: the status, a sentence for the sender, and further headers.
    """

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = HTTPStatus(status)
        self.text = text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@dataclass(frozen=True, slots=True)
class Head:
    """
    Request line and headers; names in lower case. `minor` is 1 for HTTP/1.1, 0 for HTTP/1.0.
    """

    method: str
    path: str
    minor: int
    headers: dict[str, str]

    @property
    def keep_alive(self) -> bool:
        """
        Whether the client wants to send more requests on this connection.
        """
        wish = {word.strip().lower() for word in self.headers.get("connection", "").split(",")}
        return "close" not in wish if self.minor else "keep-alive" in wish

    @property
    def media_type(self) -> str:
        """
        The Content-Type without parameters, in lower case; "" where there is none.
        """
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


def read_head(stream: io.BufferedReader) -> Head:
    """
    Request line and headers. Raises `HttpError` (400, 431), EOFError where the stream ends, OSError.
    """
    # RFC 9112, 2.2: an empty line before the request line is passed over.
    lines = _lines(stream, blanks=1)
    match = _REQUEST_LINE.fullmatch(next(lines, b""))
    if match is None:
        raise HttpError(400, "malformed request line")
    method, target, minor = match.groups()
    headers: dict[str, str] = {}
    for line in lines:
        pair = _HEADER.fullmatch(line)
        if pair is None:
            raise HttpError(400, "malformed header")
        name, value = pair[1].decode("ascii").lower(), pair[2].decode("latin-1")
        if name in headers and name in _SINGLE:
            raise HttpError(400, f"more than one {name} header")
        headers[name] = f"{headers[name]},{value}" if name in headers else value
    path = target.decode("ascii").partition("?")[0]
    return Head(method.decode("ascii"), path, int(minor), headers)


def _lines(stream: io.BufferedReader, *, blanks: int) -> Iterator[bytes]:
    """
    Lines up to an empty one, `MAX_HEAD` bytes at most; so many `blanks` before the first line are passed over.
    """
    left = MAX_HEAD
    while True:
        line = stream.readline(left + 1)
        left -= len(line)
        if left < 0:
            raise HttpError(431, f"request line and headers are longer than {MAX_HEAD} bytes")
        if not line.endswith(b"\n"):
            raise EOFError
        if line not in {b"\r\n", b"\n"}:
            yield line
            blanks = 0
        elif blanks:
            blanks -= 1
        else:
            return


def check_framing(head: Head, limit: int) -> None:
    """
    Refuse a body that cannot be read, or is longer than `limit` bytes, before anything of it is read (400, 413, 501).
    """
    coding, length = head.headers.get("transfer-encoding"), head.headers.get("content-length")
    if coding is not None and length is not None:
        raise HttpError(400, "both Transfer-Encoding and Content-Length")
    if coding is not None and (coding.lower() != "chunked" or not head.minor):
        raise HttpError(501, "the only transfer coding is chunked")
    if length is not None and not _LENGTH.fullmatch(length):
        raise HttpError(400, "malformed Content-Length")
    if length is not None and int(length) > limit:
        raise too_large(limit)


def read_body(stream: io.BufferedReader, head: Head, limit: int, charge: Charge) -> bytearray:
    """
    The body, at most `limit` bytes. Raises `HttpError` (400, 413, 429), EOFError where the stream ends, OSError.
    """
    body = bytearray()
    if "transfer-encoding" not in head.headers:
        _read_exactly(stream, int(head.headers.get("content-length", "0")), body, charge)
        return body
    while size := _chunk_size(stream):
        if len(body) + size > limit:
            raise too_large(limit)
        _read_exactly(stream, size, body, charge)
        if stream.readline(2) not in {b"\r\n", b"\n"}:
            raise HttpError(400, "malformed chunk")
    for _ in _lines(stream, blanks=0):
        pass
    return body


def _chunk_size(stream: io.BufferedReader) -> int:
    line = stream.readline(_MAX_CHUNK_LINE)
    if not line:
        raise EOFError
    match = _CHUNK.fullmatch(line)
    if match is None:
        raise HttpError(400, "malformed chunk size")
    return int(match[1], 16)


def _read_exactly(stream: io.BufferedReader, size: int, body: bytearray, charge: Charge) -> None:
    while size:
        part = stream.read1(min(size, _STEP))
        if not part:
            raise EOFError
        charge(len(part))
        body += part
        size -= len(part)


def content_coding(head: Head) -> str:
    """
    The coding of the body, in lower case; raises `HttpError` (415) for one that is not in `CODINGS`.
    """
    coding = head.headers.get("content-encoding", "identity").strip().lower() or "identity"
    if coding not in CODINGS:
        raise HttpError(415, "Content-Encoding is gzip, deflate or identity", Accept_Encoding="gzip, deflate")
    return coding


def inflate(body: bytes | bytearray, coding: str, limit: int) -> bytes | bytearray:
    """
    The body without its coding. Raises `HttpError`: 400 if it is damaged, 413 beyond `limit` bytes.
    """
    if coding == "identity":
        return body
    # RFC 9110, 8.4.1.2: "deflate" is the zlib format; some senders leave its header out. 32 + 15: gzip or zlib.
    window = -15 if coding == "deflate" and not _has_zlib_header(body) else 32 + 15
    found = bytearray()
    rest: bytes | bytearray = body
    try:
        while rest:  # a gzip file may have several members
            rest = _inflate_member(rest, window, found, limit)
    except zlib.error as error:
        raise HttpError(400, f"damaged {coding} body") from error
    return found


def _has_zlib_header(body: bytes | bytearray) -> bool:
    # RFC 1950, 2.2: the method is 8, and the first two bytes are a multiple of 31.
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0  # noqa: PLR2004


def _inflate_member(body: bytes | bytearray, window: int, found: bytearray, limit: int) -> bytes:
    engine = zlib.decompressobj(window)
    rest: bytes | bytearray = body
    while not engine.eof:
        part = engine.decompress(rest, limit - len(found) + 1)
        rest = engine.unconsumed_tail
        found += part
        if len(found) > limit:
            raise HttpError(413, f"the body inflates to more than {limit} bytes")
        if not part and not rest and not engine.eof:
            raise HttpError(400, "truncated compressed body")
    return engine.unused_data


def too_large(limit: int) -> HttpError:
    """
    The refusal of a body that is longer than `limit` bytes.
    """
    return HttpError(413, f"the body is longer than {limit} bytes")


def answer(status: HTTPStatus, media_type: str, body: bytes, headers: dict[str, str], *, minor: int = 1) -> bytes:
    """
    A whole answer. `headers` are further ones, such as Connection.
    """
    lines = [
        f"HTTP/1.{minor} {status.value} {status.phrase}",
        f"Content-Type: {media_type}",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body
