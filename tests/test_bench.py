"""The benchmark's client and numbers, against a server that answers from a script."""

import asyncio
import json

import pytest

from scripts.bench import parse
from scripts.bench_lib import serve
from scripts.bench_lib.client import BenchError, Client, Timing
from scripts.bench_lib.server import engine_split
from scripts.bench_lib.stats import percentiles, summarize


def event(tokens: int | None) -> str:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens}
    choices = [] if tokens else [{"index": 0, "text": "x"}]
    body = {"choices": choices, "usage": usage if tokens else None}
    return "data: " + json.dumps(body, separators=(",", ":")) + "\n\n"


def chunked(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


async def complete_against(reply: bytes, piece: int) -> Timing:
    """One request to a server that sends `reply` in pieces of that many bytes."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert json.loads(await reader.readexactly(length))["prompt"] == [5, 6, 7]
        for start in range(0, len(reply), piece):
            writer.write(reply[start : start + piece])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        return await asyncio.wait_for(Client(f"http://127.0.0.1:{port}", "m").complete([5, 6, 7], 2), 10)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"needs matplotlib: pip install -e '\.\[bench\]'"):
        serve.main(parse(["serve", "--url", "http://127.0.0.1:9"]))


@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_stream_in_any_pieces(piece: int):
    events = [event(None), event(None), event(2), "data: [DONE]\n\n"]
    reply = HEAD + b"".join(map(chunked, events)) + b"0\r\n\r\n"
    timing = asyncio.run(complete_against(reply, piece))
    assert (timing.input_tokens, timing.output_tokens, len(timing.arrivals)) == (3, 2, 2)
    assert timing.start <= timing.arrivals[0] <= timing.arrivals[1]


def test_several_events_in_one_chunk():
    reply = HEAD + chunked(event(None) + event(None) + event(2) + "data: [DONE]\n\n") + b"0\r\n\r\n"
    assert len(asyncio.run(complete_against(reply, 10_000)).arrivals) == 2


def test_an_error_reply_is_shown():
    reply = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 17\r\n\r\n{"error": "nope"}'
    with pytest.raises(BenchError, match="400 bad request .*nope"):
        asyncio.run(complete_against(reply, 10))


def test_a_cut_stream_is_an_error():
    with pytest.raises(BenchError, match="closed early"):
        asyncio.run(complete_against(HEAD + chunked(event(None)), 100))


def test_too_few_tokens_are_an_error():
    reply = HEAD + chunked(event(None) + event(1) + "data: [DONE]\n\n") + b"0\r\n\r\n"
    with pytest.raises(BenchError, match="asked for 2 tokens, got 1"):
        asyncio.run(complete_against(reply, 100))


def test_percentiles_by_hand():
    assert percentiles([0.001 * i for i in range(101)]) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([0.002]) == {"p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert percentiles([]) == {}


def test_summary_by_hand():
    timing = Timing(start=10.0, arrivals=[10.5, 10.6, 10.8], input_tokens=4, output_tokens=3)
    level = summarize(2, [(1.0, [timing, timing]), (2.0, [timing, timing]), (4.0, [timing, timing])], 0.1, {})
    assert level.output_tokens_per_second == 3.0  # 6, 3 and 1.5: the median
    assert (level.requests_per_second, level.input_tokens_per_second) == (1.0, 4.0)
    assert level.ttft_ms["p50"] == 500.0
    assert level.tpot_ms["p50"] == pytest.approx(150.0)
    assert level.itl_ms == {"p50": pytest.approx(150.0), "p95": pytest.approx(200.0), "p99": pytest.approx(200.0)}


def test_engine_split_by_hand():
    before = {"pageloom:steps_total": 10.0, "pageloom:step_seconds_total{device}": 1.0}
    after = {"pageloom:steps_total": 20.0, "pageloom:step_seconds_total{device}": 1.9,
             "pageloom:step_seconds_total{schedule}": 0.1, "pageloom:compile_misses_total": 0.0}
    assert engine_split(before, after) == {
        "steps": 10.0, "device_ms": 90.0, "schedule_ms": 10.0, "host_share": 0.1, "compile_misses": 0.0}
    assert engine_split({}, {}) == {}


def test_flags():
    args = parse(["serve", "--concurrency", "1,8", "--", "--dtype", "float32"])
    assert (args.concurrency, args.server_args) == ([1, 8], ["--dtype", "float32"])
    for wrong in (["serve", "--concurrency", "0"], ["loop", "--", "--dtype", "float32"], []):
        with pytest.raises(SystemExit):
            parse(wrong)
