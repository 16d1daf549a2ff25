"""Channels to the daemons of other nodes, one to each that is called; and what every call tells of its caller.

Promises: a channel that is replaced lets the calls on it go on for a while; one that was cut off fails the calls on it within seconds.
Lives on the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

import grpc

from ckptd.model import mint_token
from ckptd.v1.peer_pb2_grpc import PeerStub

#: Metadata key under which a caller tells its own address.
PEER_KEY: Final = "ckptd-peer"
#: Metadata key under which a caller tells of others, by their addresses, with commas between them.
INTRODUCES_KEY: Final = "ckptd-introduces"
#: Metadata key under which a caller tells a word that it alone knows, and the address that it calls: it may be its own.
CALLS_KEY: Final = "ckptd-calls"
#: A record has about a hundred bytes per rank.
MESSAGE_NBYTES: Final = 64 * 1024 * 1024
#: Calls on a channel that was replaced may go on for so long.
_CLOSING_SECONDS: Final = 30.0
_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MESSAGE_NBYTES),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3_000),  # this is also how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel to a peer that is back must not share what the old one knows of it
    # A peer that was cut off is noticed while a call waits for it.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class Channels:
    """`own`: this daemon's address for others, "" if it has none; without `credentials` all goes unencrypted."""

    def __init__(self, own: str, credentials: grpc.ChannelCredentials | None) -> None:
        self.own = own
        self.credentials = credentials
        #: Told with every call, and known to nobody else: who hears it has called itself.
        self.word = mint_token()
        #: The operator's name that led to an address, which its certificate has to have.
        self.named: dict[str, str] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Future[None]] = set()

    def stub(self, address: str, *, unnamed: bool = False) -> Any:
        """For calls to the daemon there; `unnamed` ones do not tell this daemon's address."""
        if address not in self._channels:
            if self.credentials is None:
                self._channels[address] = grpc.aio.insecure_channel(address, options=_OPTIONS)
            else:
                named = [("grpc.ssl_target_name_override", self.named[address])] if address in self.named else []
                self._channels[address] = grpc.aio.secure_channel(address, self.credentials, options=[*_OPTIONS, *named])
        return _Calling(cast("Any", PeerStub)(self._channels[address]), "" if unnamed else self.own, f"{self.word} {address}")

    def renew(self, address: str) -> None:
        """The next call connects anew; those that are under way may end."""
        if (stale := self._channels.pop(address, None)) is not None:
            closing = asyncio.ensure_future(stale.close(_CLOSING_SECONDS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Ends all of them, and the calls on them."""
        for closing in self._closing:
            closing.cancel()
        for channel in self._channels.values():
            await channel.close(None)


class _Calling:
    """A stub whose calls say who calls, and which address."""

    def __init__(self, stub: Any, own: str, calls: str) -> None:
        self._stub = stub
        self._metadata = ((CALLS_KEY, calls), *(((PEER_KEY, own),) if own else ()))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._stub, name)
        return lambda request, *metadata: method(request, metadata=(*self._metadata, *metadata))
