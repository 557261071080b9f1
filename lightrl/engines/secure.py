"""Who may talk to an engine: those who know its token.

Both sides derive CURVE key pairs from the shared token, so that it never travels, everything is encrypted, and a peer
without it does not get past the handshake (libzmq ends those that say nothing or nonsense).
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import secrets
from typing import Any
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from lightrl.engines.messages import MAX_FRAME_BYTES

TOKEN_VARIABLE = "LIGHTRL_TOKEN"
LOOPBACK_TOKEN = "loopback without a secret"
"""Of engines that only this host can reach and that were given no token."""
_SHORTEST_TOKEN = 16
_DOMAIN = "lightrl"
_HANDSHAKE_MS = 5000
_HEARTBEAT_MS, _SILENCE_MS = 1000, 4000

log = logging.getLogger(__name__)


def new_token() -> str:
    """Return a fresh secret."""
    return secrets.token_urlsafe(32)


def token_for(address: str) -> str:
    """Return the shared token that the environment holds.

    Raises:
        ValueError: there is none, or one that could be guessed.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if len(token) < _SHORTEST_TOKEN:
        state = "is not set" if not token else f"has only {len(token)} characters"
        raise ValueError(
            f"{address}: the environment variable {TOKEN_VARIABLE} {state}. Engines and trainer need one secret of at "
            f"least {_SHORTEST_TOKEN} characters in common: export {TOKEN_VARIABLE}=$(openssl rand -hex 32)"
        )
    return token


def own_token(address: str) -> str:
    """Return the token of an engine that listens on ``address``: none that is secret is needed where nobody else comes.

    Raises:
        ValueError: see :func:`token_for`.
    """
    return LOOPBACK_TOKEN if is_local(address) and TOKEN_VARIABLE not in os.environ else token_for(address)


def check_address(address: str, *, bind: bool = False) -> str:
    """Return an address like ``tcp://127.0.0.1:5555`` or ``ipc:///run/engine.sock``.

    Args:
        address: to look at.
        bind: it is to listen on, where port 0 stands for any free one.

    Raises:
        ValueError: it is neither.
    """
    parts = urlsplit(address)
    try:
        port = parts.port is not None and (bind or parts.port > 0)
        fine = (parts.scheme == "ipc" and (parts.netloc or parts.path)) or (
            parts.scheme == "tcp" and parts.hostname and port
        )
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"{address!r} is no engine address: write tcp://HOST:PORT or ipc://PATH")
    return address


def is_local(address: str) -> bool:
    """Whether only this host can reach ``address``."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" or parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def server_socket(context: Any, token: str) -> Any:
    """Return a ROUTER socket that only holders of ``token`` can talk to; bind it afterwards."""
    socket = context.socket(zmq.ROUTER)
    _limit(socket)
    socket.curve_secretkey, socket.curve_publickey = _keys(token, "engine")
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()
    socket.router_mandatory = True
    return socket


def client_socket(context: Any, token: str) -> Any:
    """Return a DEALER socket for an engine that knows ``token``; connect it afterwards."""
    socket = context.socket(zmq.DEALER)
    _limit(socket)
    socket.curve_secretkey, socket.curve_publickey = _keys(token, "trainer")
    socket.curve_serverkey = _keys(token, "engine")[1]
    return socket


class Doorman:
    """Lets in, on ``context``, clients whose key comes from ``token``; others are refused and logged."""

    def __init__(self, context: Any, token: str) -> None:
        from zmq.auth.thread import ThreadAuthenticator

        self._welcome = _keys(token, "trainer")[1]
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Answer the authenticator."""
        allowed = secrets.compare_digest(key, self._welcome)
        if not allowed:
            log.warning("refused a client whose key does not come from this engine's token")
        return allowed

    def close(self) -> None:
        """End the authenticator's thread."""
        self._authenticator.stop()


def _keys(token: str, side: str) -> tuple[bytes, bytes]:
    seed = hashlib.blake2b(token.encode(), digest_size=32, person=f"lightrl-{side}".encode()).digest()
    secret = z85.encode(seed)
    return secret, zmq.curve_public(secret)


def _limit(socket: Any) -> None:
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MS, _SILENCE_MS
    socket.sndhwm = socket.rcvhwm = 0  # what may be under way is bounded by who sends, not by dropping
    socket.linger = 0
