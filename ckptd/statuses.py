"""How a call ends that failed: with the status of what it raised.

One interceptor turns every error into its status, with the kind's name in the trailing metadata, so that
whoever called can raise the same class again. What is no error of ours is a bug, and goes into the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc

from ckptd import errors

log = logging.getLogger(__name__)
#: Headers have bounds of their own; a longer message would replace itself by a protocol error.
LONGEST_MESSAGE: Final = 4_000

Context = grpc.aio.ServicerContext[Any, Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic only in the stubs
    """Turns what a call raises into its gRPC status."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()
        self._ended = False

    def end(self) -> None:
        """The daemon ends: calls that still run are cut off. gRPC would do that with a traceback in the log."""
        self._ended = True
        for task in self._running:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        if handler.response_streaming:
            stream = handler.stream_stream or handler.unary_stream

            async def streaming(request: Any, context: Context) -> AsyncIterator[Any]:
                async with self._answered(context, method):
                    async for reply in stream(request, context):
                        yield reply

            make: Any = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            return make(streaming, handler.request_deserializer, handler.response_serializer)

        async def unary(request: Any, context: Context) -> Any:
            async with self._answered(context, method):
                return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(unary, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _answered(self, context: Context, method: str) -> AsyncIterator[None]:
        """Inside it, this task is a call's, and what it raises is what the call ends with."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - every error gets its status here
            await refuse(context, exc, method)
        except asyncio.CancelledError:
            if not self._ended:  # the caller has gone
                raise
            await cut_off(context)
        finally:
            self._running.discard(task)


async def cut_off(context: Context) -> None:
    """Ends a call as if the connection broke, because nobody knows what it has brought about."""
    await context.abort(grpc.StatusCode.UNAVAILABLE, "the daemon ends")


async def refuse(context: Context, exc: Exception, method: str) -> None:
    """Ends the call with the status of `exc`."""
    if isinstance(exc, grpc.aio.AbortError):
        raise exc
    if isinstance(exc, errors.CkptdError):
        for kind in type(exc).__mro__:
            if kind.__name__ in errors.TABLE:
                status = getattr(grpc.StatusCode, exc.status)
                await context.abort(status, str(exc)[:LONGEST_MESSAGE], trailing_metadata=((errors.KIND_KEY, kind.__name__),))
    log.error("%s failed", method, exc_info=exc)
    await context.abort(grpc.StatusCode.INTERNAL, f"the daemon failed on {method}: {type(exc).__name__}: {exc} (its log has more)")
