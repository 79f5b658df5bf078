"""A stream with a wrong parameter was refused in words of the code: `partial_s` in seconds for `partial_ms`, or "cannot
convert float NaN to integer". A stream at another path was refused without a word."""

import json

import pytest
from support import load_beside
from websockets.exceptions import InvalidStatus

server_of_tones = load_beside(__file__, "../recognition/running_server.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    transcriber = server_of_tones.tone_transcriber(tmp_path_factory.mktemp("tones"))
    with server_of_tones.running(transcriber) as server:
        yield server


def refusal(server, path):
    address = f"ws://127.0.0.1:{server.port}{path}"
    with pytest.raises(InvalidStatus) as refused, server_of_tones.connect(address, proxy=None, open_timeout=240):
        pass
    answer = refused.value.response
    return answer.status_code, json.loads(answer.body)["error"]


@pytest.mark.parametrize(
    ("name", "value", "bounds"),
    [
        ("sample_rate", "nan", "1000 to 768000"),
        ("sample_rate", "-inf", "1000 to 768000"),
        ("sample_rate", "5", "1000 to 768000"),
        ("sample_rate", "", "1000 to 768000"),
        ("partial_ms", "-1", "0 to 60000"),
        ("silence_ms", "50", "100 to 2500"),
        ("longest_ms", "soon", "2000 to 30000"),
        ("longest_ms", "nan", "2000 to 30000"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_bounds(server, name, value, bounds):
    status, error = refusal(server, f"/stream?{name}={value}")
    assert (status, error["param"]) == (400, name)
    assert error["message"] == f"{name} is {value!r}: give a number from {bounds}"


@pytest.mark.parametrize("path", ["/v1/stream", "/stream/", "/healthz", "/"])
def test_a_stream_at_another_path_is_told_the_right_one(server, path):
    status, error = refusal(server, path)
    assert (status, error["code"]) == (404, "not_found")
    assert "open /stream" in error["message"]


def test_a_request_without_a_websocket_is_told_to_open_one(server):
    status, _, content = server_of_tones.fetch(f"{server.url}/stream")
    assert status == 426
    assert "WebSocket" in content["error"]["message"]
