"""HTTP/1.1 on a connection: uvicorn's, without two of its weaknesses."""

import math
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 256 * 1024  # of a request line and its headers, which uvicorn would collect without end
_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


class Http(HttpToolsProtocol):
    """Nothing else is spoken here, so an offer to do so is left out before the parser sees it: it would take the body
    for the other protocol's. Java's client, for one, offers HTTP/2 with the first request of a connection."""

    _head_bytes: float = 0  # of the request's so far; less than none once it is whole

    def data_received(self, data: bytes) -> None:
        if self._head_bytes >= 0:
            head, end, body = data.partition(b"\r\n\r\n")
            self._head_bytes += len(head)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers have more than {MAX_HEAD_BYTES} bytes.")
                return
            data = _UPGRADE.sub(b"", head + end[:2]) + end[2:] + body
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_bytes = -math.inf
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()
