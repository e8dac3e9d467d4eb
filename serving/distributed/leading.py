"""Host 0's side: waits for the followers, compares them with itself, and sends every step to all."""

import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from serving.config import HostPlan
from serving.distributed.connection import Connection, Gone
from serving.distributed.hosts import Hosts, describe_difference, describe_error
from serving.distributed.messages import (
    LARGEST_HELLO,
    PROTOCOL,
    Agreed,
    Failed,
    FromFollower,
    Goodbye,
    Hello,
    Mine,
    Refused,
    Welcome,
)
from serving.errors import ConfigError

HELLO_SECONDS = 5.0  # for one who has connected to say who it is
GOODBYE_SECONDS = 5.0
REFUSAL_SECONDS = 60.0  # for hosts that start together to have loaded jax


class LeaderHosts(Hosts):
    """Made by `wait_for_followers`."""

    def __init__(self, plan: HostPlan, followers: Mapping[int, Connection]):
        super().__init__(plan)
        self._followers = dict(sorted(followers.items()))
        self._encoder = msgspec.msgpack.Encoder()
        self._arrived = threading.Condition()
        self._values: dict[int, Mine] = {}
        self._open = set(self._followers)
        for rank, connection in self._followers.items():
            connection.start(lambda message, rank=rank: self._receive(rank, message),
                             lambda why, rank=rank: self._gone(rank, why))  # fmt: skip

    def send(self, message: msgspec.Struct) -> None:
        """To all followers. One that is gone is noticed by its own thread."""
        payload = self._encoder.encode(message)
        for connection in self._followers.values():
            try:
                connection.send_encoded(payload)
            except Gone:
                pass

    def agree(self, name: str, mine: Any, choose: Callable[[Sequence[Any]], Any]) -> Any:
        with self._arrived:
            self._arrived.wait_for(lambda: self.over.done() or len(self._values) == len(self._followers))
            self.check()
            values, self._values = self._values, {}
        for rank, value in values.items():
            assert value.name == name, f"host {rank} is at {value.name}, host 0 at {name}"
        chosen = choose([mine, *(values[rank].value for rank in self._followers)])
        self.send(Agreed(name, chosen))
        return chosen

    def fail(self, error: Exception) -> None:
        self.leave()
        if isinstance(error, ConfigError):
            self._part(Refused(str(error)))
        else:
            self._part(Goodbye(f"{self.plan.name(0)} has ended: {describe_error(error)}"))

    def goodbye(self, reason: str = "") -> None:
        """The service ends: as it should if there is no reason."""
        self.leave()
        self._part(Goodbye(reason))

    def _part(self, message: Refused | Goodbye) -> None:
        """Followers close first: closing while they still send could cost them the last message."""
        if not self.over.done():
            self.send(message)
            with self._arrived:
                self._arrived.wait_for(lambda: not self._open, GOODBYE_SECONDS)
        for connection in self._followers.values():
            connection.close()

    def _receive(self, rank: int, message: FromFollower) -> None:
        match message:
            case Mine():
                with self._arrived:
                    self._values[rank] = message
                    self._arrived.notify_all()
            case Failed(message=why):
                self.end(f"{self.plan.name(rank)} has ended: {why}")
            case _:
                self._gone(rank, f"it sent {type(message).__name__} out of turn")

    def _gone(self, rank: int, why: str) -> None:
        self.end(f"{self.plan.name(rank)} is gone ({why}); the service ends on all hosts")
        with self._arrived:
            self._open.discard(rank)
            self._arrived.notify_all()

    def _tell(self, message: str) -> None:
        self.send(Goodbye(message))
        with self._arrived:
            self._arrived.notify_all()


def own_address(plan: HostPlan) -> str:
    """The leader's, or that of all interfaces where it is not this machine's (a name that a proxy answers for)."""
    try:
        host = str(socket.getaddrinfo(plan.leader, None, type=socket.SOCK_STREAM)[0][4][0])
        bind(host, 0).close()
    except OSError:
        return "0.0.0.0"
    return host


def bind(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def listen(plan: HostPlan) -> socket.socket:
    try:
        return bind(own_address(plan), plan.channel_port)
    except OSError as error:
        raise ConfigError(f"cannot bind port {plan.channel_port} (--master-port + 1): {error.strerror}; choose "
                          "another") from error


def refuse_followers(plan: HostPlan, message: str) -> None:
    """Instead of serving: they need not wait for a host 0 that cannot start. Returns once all know, or those that came
    in REFUSAL_SECONDS."""
    seconds, told = min(plan.timeout_seconds, REFUSAL_SECONDS), set()
    end = time.monotonic() + seconds
    print(f"Host 0 cannot start, and tells the others for up to {seconds:g} s: {message}", file=sys.stderr, flush=True)
    try:
        listener = listen(plan)
    except ConfigError:
        return
    with listener:
        while len(told) < plan.count - 1 and (left := end - time.monotonic()) > 0:
            listener.settimeout(left)
            try:
                connection = Connection(listener.accept()[0], FromFollower)
                hello = connection.receive(HELLO_SECONDS, LARGEST_HELLO)
            except (Gone, OSError):  # time is up, or it is not one of us
                continue
            _tell([connection], Refused(f"{plan.name(0)} cannot start: {message}"))
            if isinstance(hello, Hello | Failed):
                told.add(hello.rank)


def wait_for_followers(plan: HostPlan, listener: socket.socket, fingerprint: Mapping[str, str]) -> LeaderHosts:
    """Raises ConfigError if they differ from this host, or are not there after the plan's timeout."""
    with listener:
        followers = _Gathering(plan, listener).run()
    hosts, differing = {rank: connection for rank, (connection, _) in followers.items()}, ""
    addresses = (known or (hosts[rank].peer if rank else "") for rank, known in enumerate(plan.addresses))
    plan = replace(plan, addresses=tuple(addresses))
    for rank, (_, hello) in sorted(followers.items()):
        if not differing and (difference := describe_difference(fingerprint, hello.fingerprint)):
            differing = f"{plan.name(rank)} differs from host 0 in {difference}"
    _tell(hosts.values(), Refused(differing) if differing else Welcome())
    if differing:
        raise ConfigError(differing)
    return LeaderHosts(plan, hosts)


class _Gathering:
    """Accepts connections; each says hello in a thread of its own, so that a silent one holds nobody up."""

    def __init__(self, plan: HostPlan, listener: socket.socket):
        self._plan, self._listener = plan, listener
        self._changed = threading.Condition()
        self._here: dict[int, tuple[Connection, Hello]] = {}
        self._failed: Failed | None = None
        self._stopped = False

    def run(self) -> dict[int, tuple[Connection, Hello]]:
        accepting = threading.Thread(target=self._accept, daemon=True)
        accepting.start()
        wanted = self._plan.count - 1
        with self._changed:
            self._changed.wait_for(lambda: self._failed or len(self._here) == wanted, self._plan.timeout_seconds)
            self._stopped = True
        accepting.join()
        if len(self._here) == wanted:
            return self._here
        message = self._why_not()
        _tell((connection for connection, _ in self._here.values()), Refused(message))
        raise ConfigError(message)

    def _why_not(self) -> str:
        if self._failed is not None:
            return f"{self._plan.name(self._failed.rank)} cannot start: {self._failed.message}"
        missing = ", ".join(self._plan.name(rank) for rank in range(1, self._plan.count) if rank not in self._here)
        return (f"of {self._plan.count} hosts these did not come within {self._plan.timeout_seconds:g} s "
                f"(--distributed-timeout-seconds): {missing}; they must reach {self._plan.leader} on ports "
                f"{self._plan.port} and {self._plan.channel_port}")  # fmt: skip

    def _accept(self) -> None:
        self._listener.settimeout(0.2)
        while not self._stopped:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            connection = Connection(sock, FromFollower)
            hello = connection.receive(HELLO_SECONDS, LARGEST_HELLO)
        except (Gone, OSError):  # not one of us
            sock.close()
            return
        with self._changed:
            reason = self._refusal(hello)
            if not reason:
                self._take(connection, hello)
                self._changed.notify_all()
                return
        print(f"pageloom: refused {connection.peer}: {reason}", file=sys.stderr, flush=True)
        _tell([connection], Refused(reason))

    def _take(self, connection: Connection, hello: Hello | Failed) -> None:
        self._forget_the_gone()
        if isinstance(hello, Hello):
            self._here[hello.rank] = connection, hello
        else:
            self._failed = hello
            _tell([connection], Refused(hello.message))

    def _forget_the_gone(self) -> None:
        """Before anybody else is counted: one that has closed comes again, or never."""
        for rank in [rank for rank, (connection, _) in self._here.items() if not connection.is_silent()]:
            self._here.pop(rank)[0].close()

    def _refusal(self, hello: Any) -> str:
        if not isinstance(hello, Failed) and (not isinstance(hello, Hello) or hello.protocol != PROTOCOL):
            return f"it speaks another protocol than host 0's {PROTOCOL}; install the same version on all hosts"
        if not 0 < hello.rank < self._plan.count:
            return f"it is host {hello.rank}, host 0 knows of {self._plan.count} hosts; give all the same --nnodes"
        if hello.rank in self._here and self._here[hello.rank][0].is_silent():  # else it has closed, and comes again
            peer = self._here[hello.rank][0].peer
            return f"host {hello.rank} is here already, from {peer}; give each host a --node-rank of its own"
        if self._stopped:
            return "it came too late"
        return ""


def _tell(connections: Any, message: msgspec.Struct) -> None:
    for connection in connections:
        try:
            connection.send(message)
            if isinstance(message, Refused):
                connection.close()
        except Gone:
            pass


