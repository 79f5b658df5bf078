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


@pytest.mark.parametrize("value", ["maybe", "", "2"])
def test_a_switch_that_is_neither_on_nor_off_is_named(server, value):
    status, error = refusal(server, f"/stream?words={value}")
    assert (status, error["param"]) == (400, "words")
    assert error["message"] == f"words is {value!r}: give true or false"


@pytest.mark.parametrize("name", ["rate", "samplerate", "partial_s", "Words", ""])
def test_an_unknown_parameter_is_named_with_the_known_ones(server, name):
    """It was ignored: audio at `rate=8000` was heard at 16 kHz."""
    status, error = refusal(server, f"/stream?sample_rate=8000&{name}=8000")
    assert (status, error["param"], error["code"]) == (400, name, "unknown_parameter")
    assert "language, longest_ms, model, partial_ms, sample_rate, silence_ms, words" in error["message"]


@pytest.mark.parametrize("words", ["true", "1", "YES", "false", "0", "no"])
def test_a_switch_is_on_or_off(server, words):
    with server_of_tones.connect(f"ws://127.0.0.1:{server.port}/stream?words={words}", proxy=None) as stream:
        assert json.loads(stream.recv())["type"] == "ready"


@pytest.mark.parametrize("path", ["/v1/stream", "/stream/", "/healthz", "/"])
def test_a_stream_at_another_path_is_told_the_right_one(server, path):
    status, error = refusal(server, path)
    assert (status, error["code"]) == (404, "not_found")
    assert "open /stream" in error["message"]


def test_a_request_without_a_websocket_is_told_to_open_one(server):
    status, _, content = server_of_tones.fetch(f"{server.url}/stream")
    assert status == 426
    assert "WebSocket" in content["error"]["message"]
