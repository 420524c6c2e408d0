"""Models by name: in the local cache, or on the hub if it can be reached."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

__all__ = ["unreachable"]


def unreachable() -> str:
    """The reason why the hub can't be asked, found at once and not after five retries; else "".

    Needs huggingface_hub, which comes with transformers.
    """
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    host = urlsplit(ENDPOINT)
    try:
        socket.create_connection((host.hostname or "", host.port or 443), timeout=5).close()
    except OSError as error:
        return f"{host.hostname} can't be reached: {error.strerror or error}"
    return ""
