"""The daemons of other nodes: who is known, who is gone, and calls to them.

Peers are known from ``--peer``, from receipts, from what readers bring, and from those that call.
Promises: every call has a deadline, and every error names the peer; one that cannot be reached is
not waited for again within a second. Keeps no truth: what a peer says is a hint about what it holds.
Lives on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import grpc

from ckptd import errors, tls
from ckptd.addresses import host_of, is_peer, shown
from ckptd.channels import INTRODUCES_KEY, Channels
from ckptd.lookup import behind, is_numeric
from ckptd.v1.peer_pb2 import WatchRequest

log = logging.getLogger(__name__)

#: How long a peer may take to answer what costs it nothing.
ANSWER_SECONDS: Final = 3.0
#: One that could not be reached is asked again after this time, later and later.
AGAIN_SECONDS: Final = 1.0
LONGEST_AGAIN_SECONDS: Final = 15.0
#: Known by nobody's configuration and gone for so long: forgotten.
FORGET_SECONDS: Final = 600.0
#: Names of peers are looked up so often, and all peers are asked whether they are there.
LOOK_UP_SECONDS: Final = 15.0
#: One of the operator's list that has not answered for so long, and never before, is worth a warning.
UNANSWERED_SECONDS: Final = 30.0
_TRY_SECONDS: Final = 0.2
#: After a failure gRPC refuses calls for as long as it waits with the next connection: see `max_reconnect_backoff_ms`.
_REFUSED_SECONDS: Final = 1.5
_WATCH: Final = methodcaller("Watch", WatchRequest())

Reply = TypeVar("Reply")
Make: TypeAlias = Callable[[Any], Awaitable[Reply]]


class _Gone(NamedTuple):
    """One that could not be reached."""

    #: When a call to it failed first since the last that worked, and when last; both monotonic.
    since: float
    last: float
    #: What was wrong, to follow "the ckptd daemon at X".
    how: str
    #: The same, if TLS is the reason; else "".
    tls: str


class Peers:
    """`own`: this daemon's address for others, "" if it has none. `configured`: addresses given by the operator."""

    def __init__(self, own: str, *, configured: Sequence[str] = (), credentials: grpc.ChannelCredentials | None = None) -> None:
        self.own = own
        self.configured = tuple(address for address in configured if address != own)
        self._channels = Channels(own, credentials)
        self._known: dict[str, None] = dict.fromkeys(self.configured)
        self._closed = False
        self._gone: dict[str, _Gone] = {}
        #: When each was heard of last, and since when it has not answered, whoever asked; both monotonic.
        self._heard, self._missed = dict[str, float](), dict[str, float]()
        #: Addresses that lead to this daemon, beside `own`.
        self._selves: set[str] = set()
        self._warned: set[str] = set()

    # -- who --------------------------------------------------------------------------------

    @property
    def known(self) -> list[str]:
        """Addresses of all peers, reachable or not."""
        return list(self._known)

    def called(self, address: str) -> None:
        """The daemon at this address has called, or somebody has just spoken to it: it is there."""
        self.learn([address])
        if is_peer(address) and self._there(address):  # else its channel may wait a second, and refuses calls until then
            self._channels.renew(address)

    def met(self, address: str) -> bool:
        """Whether there ever was a daemon at this address, as far as is known."""
        return address in self._heard or address not in self.configured

    def learn(self, addresses: Iterable[str]) -> None:
        """There are daemons at these addresses; the own one is fine, and what is none is nothing."""
        fresh = set(filter(is_peer, addresses)) - {self.own, *self._selves}  # others may say anything
        self._known |= dict.fromkeys(sorted(fresh - self._known.keys()))

    def came_back(self, told: str) -> None:
        """A call has come in that told this of itself: if it is this daemon's own call, the address that it called is no peer's."""
        word, _, address = told.partition(" ")
        if word == self._channels.word:
            self._selves.add(address)
            self._known.pop(address, None)
            self._gone.pop(address, None)

    def gone_seconds(self, address: str) -> float:
        """For how long it has not been reached, though tried; 0 if it answered last time."""
        return time.monotonic() - self._gone[address].since if address in self._gone else 0.0

    def missed_seconds(self, address: str) -> float:
        """For how long nothing was heard of one that does not answer; 0 if it answered last time. For people: nobody decides by it."""
        since = self._missed.get(address)
        return 0.0 if since is None else time.monotonic() - self._heard.get(address, since)

    def never_answered(self, address: str) -> bool:
        """Whether it is of the operator's list, was tried, and has never been there."""
        return address in self._gone and not self.met(address)

    def distrust(self, address: str) -> str:
        """Why it cannot be reached, to follow "the ckptd daemon at X", if TLS is the reason; else ""."""
        return self._gone[address].tls if address in self._gone else ""

    def reachable(self) -> list[str]:
        """Those that are worth a call: not the ones that failed a moment ago, the later again the longer they have been gone."""
        now = time.monotonic()
        return [address for address in self._known if address not in self._gone or self._is_due(self._gone[address], now)]

    async def look_up_forever(self) -> None:
        """Finds out from time to time who is there, what lies behind the operator's names, and warns of those that never answer."""
        names = [address for address in self.configured if not is_numeric(address)]
        asked = self.known
        while True:
            others = [address for address in self.known if address not in asked]
            await asyncio.gather(self.ask(asked, "know of this node", _WATCH), self.ask(others, "say that it is there", _WATCH, idle=True))
            self._warn()
            for address in names:
                try:
                    found = await behind(address)
                except OSError as exc:
                    log.debug("%s is not known: %s", address, exc)
                    continue
                if len(found) > 1 or address in self._selves:  # each daemon behind it is a peer of its own
                    self._known.pop(address, None)
                    # Of an address that is known from nowhere else, the certificate has to have the name that led to it.
                    self._channels.named.update({one: host_of(address) for one in found if one not in self._known})
                    self.learn(found)
            await asyncio.sleep(LOOK_UP_SECONDS)
            now = time.monotonic()
            self._known = {one: None for one in self._known if one in self.configured or now - self._missed.get(one, now) <= FORGET_SECONDS}
            asked = [address for address in self.known if not self.met(address)]

    # -- calls ------------------------------------------------------------------------------

    async def call(
        self,
        address: str,
        doing: str,
        make: Make[Reply],
        seconds: float = ANSWER_SECONDS,
        *,
        patience_seconds: float = 0,
        idle: bool = False,
    ) -> Reply:
        """One call: ``make`` gets the peer's stub. Raises what the peer raised, or Unavailable; both name it.

        `patience_seconds`: so long it is tried again to reach a peer that may just be starting; then calling twice must be harmless.
        `idle`: nobody needs it. Who does finds out by himself whether the peer is gone, and its time counts from then.
        """
        until = time.monotonic() + patience_seconds
        while True:
            try:
                async with asyncio.timeout(seconds):
                    reply = await make(self._stub(address, idle=idle))
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError) as exc:
                failure = self._failed(address, doing, exc, idle=idle)
                if not (isinstance(failure, errors.Unavailable) and address in self._gone) or time.monotonic() >= until:
                    raise failure from exc
            else:
                self._there(address)
                return reply
            await asyncio.sleep(_TRY_SECONDS)

    async def ask(
        self, addresses: Iterable[str], doing: str, make: Make[Reply], seconds: float = ANSWER_SECONDS, *, idle: bool = False
    ) -> dict[str, Reply]:
        """The same call to many at the same time; who does not answer well is left out, with a line in the log."""

        async def one(address: str) -> tuple[str, Reply | None]:
            try:
                return address, await self.call(address, doing, make, seconds, idle=idle)
            except errors.CkptdError as exc:
                log.debug("%s", exc)
                return address, None

        found = await asyncio.gather(*(one(address) for address in dict.fromkeys(addresses) if address != self.own))
        return {address: reply for address, reply in found if reply is not None}

    async def introduce(self, addresses: Iterable[str]) -> None:
        """Tells each of these daemons of the others, as far as they can be reached."""
        others = sorted(set(filter(is_peer, addresses)))
        await self.ask(others, "learn of other daemons", lambda stub: stub.Watch(WatchRequest(), (INTRODUCES_KEY, ",".join(others))))

    async def stream(self, address: str, doing: str, make: Callable[[Any], Any], stall_seconds: float) -> AsyncIterator[Any]:
        """The replies of a streaming call; a pause of more than `stall_seconds` between two ends it with Unavailable.

        Calling twice must be harmless: a peer that refuses may be back already, and is tried again for a moment.
        """
        until, begun = time.monotonic() + _REFUSED_SECONDS, False
        while True:
            call = make(self._stub(address))
            try:
                while True:
                    async with asyncio.timeout(stall_seconds):
                        reply = await call.read()
                    if reply is _EOF:
                        return
                    self._there(address)
                    begun = True
                    yield reply
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.CancelledError) as exc:
                failure = self._failed(address, doing, exc)
                refused = isinstance(exc, grpc.aio.AioRpcError) and isinstance(failure, errors.Unavailable) and address in self._gone
                if begun or not refused or time.monotonic() >= until:
                    raise failure from exc
            finally:
                call.cancel()
            await asyncio.sleep(_TRY_SECONDS)

    async def close(self) -> None:
        """Ends all channels; who calls still, or again, gets Unavailable."""
        self._closed = True
        await self._channels.close()

    @staticmethod
    def _is_due(gone: _Gone, now: float) -> bool:
        """Whether it is worth another try: when it is back it calls, as a rule."""
        return now - gone.last >= min(max(AGAIN_SECONDS, (gone.last - gone.since) / 2), LONGEST_AGAIN_SECONDS)

    # -- inside -----------------------------------------------------------------------------

    def _there(self, address: str) -> bool:
        """It was heard of; whether it was gone."""
        self._heard[address] = time.monotonic()
        self._missed.pop(address, None)
        return self._gone.pop(address, None) is not None

    def _stub(self, address: str, *, idle: bool = False) -> Any:
        if self._closed:
            raise errors.Unavailable(f"this ckptd daemon ends, and does not call the one at {address} any more")
        if not is_peer(address):  # somebody else's word: gRPC would raise what no caller expects
            raise errors.Unavailable(f"no ckptd daemon can be called at {shown(address)}: it is no address")
        # One that was missed may have forgotten this daemon while they were cut off.
        return self._channels.stub(address, unnamed=idle and address not in self._missed)

    def _warn(self) -> None:
        """Names once each of the operator's peers that have never answered: a list that is wrong shows in nothing else."""
        for address in [one for one in self.configured if one in self._known and one not in self._warned]:
            if self.never_answered(address) and self.gone_seconds(address) >= UNANSWERED_SECONDS:
                self._warned.add(address)
                log.warning(
                    "--peer %s has never answered: it %s; check the address, that the daemon there has it among its --listen "
                    "and the way to that port is open, and that either all nodes have --tls-cert, --tls-key and --tls-ca or none has",
                    *(address, self._gone[address].how),
                )

    def _failed(self, address: str, doing: str, exc: BaseException, *, idle: bool = False) -> errors.CkptdError:
        """What a call's end means. Raises it as it is if it was this task that was cancelled."""
        why = ""
        if isinstance(exc, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise exc
            # The channel was closed under the call: see `called`. That the daemon is there somebody knows better.
            return errors.Unavailable(f"the ckptd daemon at {address} does not answer: it was asked to {doing}")
        if isinstance(exc, grpc.aio.AioRpcError):
            if (kind := errors.kind_of(exc)) is not None:  # it answered
                self._there(address)
                return kind(f"the ckptd daemon at {address}: {exc.details()}")
            details = exc.details() or exc.code().name
            why = tls.meaning(details, with_tls=self._channels.credentials is not None)
            how = f"{why} [{details}]" if why else f"cannot be reached ({details})"
        else:
            how = "does not answer"
        now = time.monotonic()
        self._missed.setdefault(address, now)
        if idle and isinstance(exc, grpc.aio.AioRpcError):
            self._channels.renew(address)  # as if nobody had called
        elif not idle:
            self._gone[address] = _Gone(self._gone[address].since if address in self._gone else now, now, how, why)
        return errors.Unavailable(f"the ckptd daemon at {address} {how}: it was asked to {doing}")


_EOF: Final[object] = cast("Any", grpc.aio).EOF
