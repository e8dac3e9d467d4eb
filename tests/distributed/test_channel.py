"""Hosts as threads of this process, over real sockets, without jax: how they meet, agree, notice and part."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import serve
from serving.config import EngineConfig, HostPlan, ServerConfig
from serving.distributed import connection, hosts, leading
from serving.distributed.connection import Connection
from serving.distributed.following import FollowerHosts, join_leader, report_failure
from serving.distributed.hosts import describe_difference
from serving.distributed.leading import LeaderHosts, listen, refuse_followers, wait_for_followers
from serving.distributed.messages import HEADER, FromFollower, FromLeader, Hello, Refused, Step
from serving.errors import ConfigError, EngineDead

SAME = {"jax": "1", "--dtype": "float32"}


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What processes would have printed before they ended themselves, at once instead of after a grace period."""
    messages: list[str] = []
    monkeypatch.setattr(hosts.Hosts, "_exit", lambda self, message: messages.append(message))
    monkeypatch.setattr(hosts, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(connection, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(leading, "GOODBYE_SECONDS", 0.2)
    return messages


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ranks that the leader has let in."""
    ranks: set[int] = set()
    take = leading._Gathering._take

    def taking(self: leading._Gathering, line: Connection, hello: Any) -> None:
        take(self, line, hello)
        ranks.add(hello.rank)

    monkeypatch.setattr(leading._Gathering, "_take", taking)
    return ranks


def plan(rank: int, count: int, timeout: float = 60.0, addresses: tuple[str, ...] = ()) -> HostPlan:
    return HostPlan(count=count, rank=rank, port=PORT - 1, timeout_seconds=timeout,
                    addresses=addresses or ("127.0.0.1",) + ("",) * (count - 1))  # fmt: skip


PORT = 0  # of the listener, set by `meeting`


@contextmanager
def meeting(count: int, timeout: float = 60.0, **fields: Any) -> Iterator[tuple[ThreadPoolExecutor, Future]]:
    """Host 0 waits in a thread; followers may come."""
    global PORT
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        PORT = probe.getsockname()[1]
    leader_plan = plan(0, count, timeout, **fields)
    listener = listen(leader_plan)
    with ThreadPoolExecutor() as pool:
        yield pool, pool.submit(wait_for_followers, leader_plan, listener, SAME)


def follower(rank: int, count: int, fingerprint: dict[str, str] = SAME, timeout: float = 60.0) -> FollowerHosts:
    return join_leader(plan(rank, count, timeout), fingerprint)


@contextmanager
def joined(count: int) -> Iterator[tuple[LeaderHosts, list[FollowerHosts]]]:
    with meeting(count) as (pool, led):
        followers = list(pool.map(lambda rank: follower(rank, count), range(1, count)))
        leader = led.result()
        yield leader, followers
        leader.goodbye()
        for one in followers:
            one.leave()
            one._connection.close()


def everywhere(leader: LeaderHosts, followers: list[FollowerHosts], act: Callable[[Any], Any]) -> list[Any]:
    """What `act` returns on each host, or raises."""

    def attempt(host: Any) -> Any:
        try:
            return act(host)
        except Exception as error:
            if isinstance(host, LeaderHosts):
                host.fail(error)
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(attempt, [leader, *followers]))


def test_steps_arrive_whole_and_in_order():
    with joined(3) as (leader, followers):
        steps = [Step((32, 2), bytes([number % 256]) * size) for number, size in enumerate([0, 1, 1000, 5_000_000, 3])]
        with ThreadPoolExecutor() as pool:
            reading = [pool.submit(lambda one=one: [one.next_step() for _ in steps]) for one in followers]
            for step in steps:
                leader.send(step)
            assert [done.result(60) for done in reading] == [steps, steps]
            reading = [pool.submit(one.next_step) for one in followers]
            leader.goodbye()
            assert [done.result(60) for done in reading] == [None, None], "the end, as it should be"


def test_agreement():
    with joined(3) as (leader, followers):
        ranks = [leader, *followers].index
        assert everywhere(leader, followers, lambda host: host.least("pages", 7 - host.plan.rank)) == [5, 5, 5]
        assert everywhere(leader, followers, lambda host: host.as_leader("dtype", f"d{ranks(host)}")) == ["d0"] * 3
        assert everywhere(leader, followers, lambda host: host.check_same("built", {"a": "1"})) == [None] * 3
        *_, third = failed = everywhere(
            leader, followers, lambda host: host.check_same("built", {"a": "1", "b": str(host.plan.rank // 2)}))
        assert all(isinstance(error, ConfigError) for error in failed)
        assert str(third) == "host 2 (127.0.0.1) differs from host 0 in b: 1 there, 0 on host 0"


def test_a_difference_is_named_on_both():
    with meeting(3) as (pool, led):
        same = pool.submit(follower, 1, 3)
        other = pool.submit(follower, 2, 3, {**SAME, "jax": "2"})
        for one in (led, same, other):
            with pytest.raises(ConfigError, match=r"^host 2 \(127.0.0.1\) differs from host 0 in jax: 2 there, 1 on"):
                one.result(60)


def test_differences():
    assert describe_difference({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == ""
    assert describe_difference({"a": "1"}, {"a": "1", "b": "2"}) == "b: 2 there, nothing on host 0"
    assert describe_difference({"a": "1", "b": "2"}, {"b": "2"}) == "a: nothing there, 1 on host 0"


def test_the_missing_are_named():
    with meeting(4, timeout=2, addresses=("127.0.0.1", "a", "b", "c")) as (pool, led):
        came = pool.submit(follower, 2, 4)
        for one in (led, came):
            with pytest.raises(ConfigError, match=r"of 4 hosts .* within 2 s .*: host 1 \(a\), host 3 \(c\); they"):
                one.result(60)


def test_one_that_cannot_start_says_so_at_once(counted: set[int]):
    with meeting(3, timeout=30) as (pool, led):
        waiting = pool.submit(follower, 1, 3)
        wait_until(lambda: 1 in counted)
        report_failure(plan(2, 3), "--model: /x: no such folder")
        for one in (led, waiting):
            with pytest.raises(ConfigError, match=r"^host 2 cannot start: --model: /x: no such folder$"):
                one.result(60)


def test_a_leader_that_cannot_start_tells_those_who_wait():
    """They look for it before it is there, and it stays until all know."""
    global PORT
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        PORT = probe.getsockname()[1]
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as taken:
        waiting = pool.submit(follower, 1, 3)
        failing = pool.submit(report_failure, plan(2, 3), "--model: no such folder")
        config = ServerConfig(engine=EngineConfig(hosts=plan(0, 3)), port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"^cannot bind 127.0.0.1:"):
            serve._lead(config, 0.0)
        assert failing.result(60) is None
        with pytest.raises(ConfigError, match=r"^host 0 \(127.0.0.1\) cannot start: cannot bind 127.0.0.1:"):
            waiting.result(60)
    refuse_followers(plan(0, 2, timeout=0.1), "nobody comes")


def test_a_leader_that_dies_before_all_are_there():
    """Not a mistake in the configuration: it may start again."""
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as dying:
        joining = pool.submit(join_leader, replace(plan(1, 3), port=dying.getsockname()[1] - 1), SAME)
        dying.accept()[0].close()
        with pytest.raises(EngineDead, match=r"^host 0 \(127.0.0.1\) is gone before the service has started: "):
            joining.result(60)


def test_a_leader_that_fails_is_no_mistake_of_the_others():
    """Where the configuration is to blame all end with code 2, which launchers take for final; else with code 1."""
    for error, kind, line in ((ConfigError("--mesh 9x1"), ConfigError, r"^--mesh 9x1$"),
                              (RuntimeError("out of memory"), EngineDead, r"^host 0 .* has ended: RuntimeError\('out")):
        with joined(2) as (leader, followers):
            leader.fail(error)
            with pytest.raises(kind, match=line):
                followers[0].least("pages", 3)


def test_a_leader_that_is_not_there():
    start = time.monotonic()
    with meeting(2, timeout=0.1) as (_, led):
        with pytest.raises(ConfigError):
            led.result(60)
        with pytest.raises(ConfigError, match=r"host 0 \(127.0.0.1\) did not answer on port \d+ within 0.5 s .*efused"):
            follower(1, 2, timeout=0.5)
    assert time.monotonic() - start < 30


def test_strangers_hold_nobody_up():
    with meeting(2) as (pool, led):
        silent = socket.create_connection(("127.0.0.1", PORT))
        for junk in (b"GET / HTTP/1.1\r\n\r\n", HEADER.pack(3) + b"abc", HEADER.pack(2**31)):
            with socket.create_connection(("127.0.0.1", PORT)) as stranger:
                stranger.sendall(junk)
        one = follower(1, 2)
        led.result(60).goodbye()
        assert one.next_step() is None
        silent.close()


def test_ranks_that_cannot_be(counted: set[int]):
    def refusal(rank: int) -> str:
        line = Connection(socket.create_connection(("127.0.0.1", PORT)), FromLeader)
        line.send(Hello(rank, SAME))
        answer = line.receive(5)
        assert isinstance(answer, Refused)
        line.close()
        return answer.message

    with meeting(3) as (pool, led):
        first = pool.submit(follower, 1, 3)
        wait_until(lambda: 1 in counted)
        assert "host 1 is here already, from 127.0.0.1" in refusal(1)
        assert "it is host 3, host 0 knows of 3 hosts" in refusal(3)
        second = follower(2, 3)
        led.result(60).goodbye()
        assert first.result(60).next_step() is second.next_step() is None


def test_one_that_comes_again_before_all_are_there(counted: set[int]):
    with meeting(3) as (pool, led):
        gone = Connection(socket.create_connection(("127.0.0.1", PORT)), FromLeader)
        gone.send(Hello(1, SAME))
        wait_until(lambda: 1 in counted)
        gone.close()
        other = pool.submit(follower, 2, 3)  # comes first: it must not look as if all were there
        wait_until(lambda: 2 in counted)
        time.sleep(0.3)  # to end, if it thought so
        assert not led.done() and not other.done()
        again = follower(1, 3)
        led.result(60).goodbye()
        assert again.next_step() is other.result(60).next_step() is None


def test_a_follower_that_dies(exits: list[str]):
    with joined(3) as (leader, followers):
        followers[0]._connection.close()
        with pytest.raises(EngineDead, match=r"^host 1 \(127.0.0.1\) is gone \(.*\); the service ends on all hosts$"):
            leader.wait(Future())  # as a collective, it would never end
        with pytest.raises(EngineDead, match=r"^host 1 \(127.0.0.1\) is gone"):  # not: host 0 is gone
            followers[1].next_step()
        wait_until(lambda: len(exits) == 2)
        assert len({*exits}) == 1 and exits[0].startswith("host 1"), "both would end by themselves"


def test_a_leader_that_dies(exits: list[str]):
    with joined(2) as (leader, followers):
        leader.leave()
        leader._followers[1].close()
        with pytest.raises(EngineDead, match=r"^host 0 \(127.0.0.1\) is gone \(.*\); this host ends too$"):
            followers[0].next_step()
        wait_until(lambda: exits)


def test_a_host_that_falls_silent(exits: list[str], monkeypatch: pytest.MonkeyPatch):
    """Without power nobody closes a connection."""
    monkeypatch.setattr(connection, "LOST_AFTER_SECONDS", 1.0)
    with meeting(2) as (_, led):
        silent = Connection(socket.create_connection(("127.0.0.1", PORT)), FromLeader)
        silent.send(Hello(1, SAME))
        leader = led.result(60)
        with pytest.raises(EngineDead, match=r"^host 1 \(127.0.0.1\) is gone \(nothing came for 1 s\)"):
            leader.wait(Future())
        leader.goodbye()
        silent.close()


def test_beats_keep_an_idle_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "LOST_AFTER_SECONDS", 3.0)
    with joined(2) as (leader, followers):
        time.sleep(4.0)
        assert not leader.over.done() and not followers[0].over.done()


def test_a_follower_that_fails_says_why():
    with joined(2) as (leader, followers):
        followers[0].fail(ConfigError("--model: no such folder"))
        with pytest.raises(EngineDead, match=r"^host 1 \(127.0.0.1\) has ended: --model: no such folder$"):
            leader.least("pages", 3)


def test_work_that_fails_because_a_host_is_gone(monkeypatch: pytest.MonkeyPatch):
    """The runtime may notice first, in its own words."""
    with joined(2) as (leader, followers), monkeypatch.context() as patient:
        patient.setattr(hosts, "GRACE_SECONDS", 30.0)
        broken: Future[None] = Future()
        broken.set_exception(RuntimeError("gloo: connection reset by peer"))
        timer = threading.Timer(0.05, followers[0]._connection.close)
        timer.start()
        with pytest.raises(EngineDead, match="^host 1"):
            leader.wait(broken)
    with joined(2) as (leader, _), pytest.raises(RuntimeError, match="a bug"):
        broken = Future()
        broken.set_exception(RuntimeError("a bug"))
        leader.wait(broken)


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_messages_of_followers_cannot_be_large():
    """Before anybody is known, so that a stranger cannot fill the memory."""
    server = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(server.getsockname()) as theirs:
        line = Connection(server.accept()[0], FromFollower)
        theirs.sendall(HEADER.pack(2_000_000))
        with pytest.raises(connection.Gone, match="none of our messages"):
            line.receive(2, largest=1_000_000)
        line.close()
    server.close()


def test_a_host_that_reads_no_more(exits: list[str], monkeypatch: pytest.MonkeyPatch):
    """It beats, as a frozen machine's kernel may acknowledge, but host 0 is stuck in sending it a step."""
    with meeting(3) as (pool, led):
        stuck = Connection(socket.create_connection(("127.0.0.1", PORT)), FromLeader)
        stuck.send(Hello(1, SAME))
        other = pool.submit(follower, 2, 3)
        leader = led.result(60)
        sending = pool.submit(leader.send, Step((1, 1), bytes(30_000_000)))
        time.sleep(0.3)
        assert not sending.done()
        other.result(60)._connection.close()
        with pytest.raises(EngineDead, match="^host 2"):
            leader.wait(sending)
        wait_until(lambda: exits)
        stuck.close()
        leader.goodbye()
