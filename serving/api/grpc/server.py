"""The gRPC server: the engine service, grpc.health.v1, reflection."""

import asyncio
from collections.abc import AsyncGenerator

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from serving.api.grpc.servicer import VllmEngineServicer
from serving.api.service import Service
from serving.errors import ConfigError, EngineDead

SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"].full_name
WATCH_POLL_SECONDS = 0.5
# Gateways ping idle connections; a server that counts those as abuse would drop them in the middle of a long prompt.
KEEPALIVE = (
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


class HealthServicer(health_pb2_grpc.HealthServicer):
    """grpc.health.v1, asked from the service itself."""

    def __init__(self, service: Service):
        self._service = service

    def _status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus | None:
        if name not in ("", SERVICE):
            return None
        try:
            self._service.check_admission()
        except EngineDead:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    async def Check(self, request: health_pb2.HealthCheckRequest,
                    context: grpc.aio.ServicerContext) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest,
                    context: grpc.aio.ServicerContext) -> AsyncGenerator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            status = self._status(request.service)
            if status is None:
                status = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(WATCH_POLL_SECONDS)


def create_grpc_server(service: Service, address: str) -> grpc.aio.Server:
    """Not started yet. Raises `ConfigError` when the address cannot be bound."""
    limit = service.config.max_body_bytes
    server = grpc.aio.server(options=[*KEEPALIVE, ("grpc.max_receive_message_length", limit),
                                      ("grpc.max_send_message_length", -1)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngineServicer(service), server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(service), server)
    names = (SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot serve gRPC at {address}: {error}") from error
    return server
