"""Streams over real WebSockets: results, limits, tokens, and how they end."""

import base64
import json
from contextlib import suppress

import numpy as np
import pytest
from support import load_beside, wait_until
from websockets.exceptions import ConnectionClosed, InvalidStatus

from recognition.serving.models import LoadedModel

tones = load_beside(__file__, "running_server.py")
RATE, speak, silence, pcm = tones.RATE, tones.speak, tones.silence, tones.pcm
TOKEN = "a-token-of-more-than-sixteen-characters"
SPEECH = np.concatenate([silence(1), speak("delta alpha"), silence(1.5), speak("echo echo bravo"), silence(0.5)])
END = json.dumps({"type": "end"})


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


@pytest.fixture
def server(transcriber):
    transcriber.recognizer.model.__init__()
    with tones.running(transcriber) as server:
        yield server


def send(connection, wave, size=800):
    data = pcm(wave)
    for start in range(0, len(data), size):
        connection.send(data[start : start + size])


def finals(heard):
    return [message["text"] for message in heard if message["type"] == "final"]


@pytest.mark.parametrize("size", [801, 5000, 10**6])
def test_results_come_as_json_for_messages_of_any_size(server, transcriber, size):
    with tones.stream(server, "&partial_ms=300") as connection:
        send(connection, SPEECH, size)
        connection.send(END)
        heard = tones.messages(connection)
        assert connection.close_code == 1000
    assert heard[0] == {"type": "ready", "model": "tones", "version": "1", "sample_rate": RATE}
    assert finals(heard) == ["delta alpha", "echo echo bravo"]
    assert heard[-1] == {"type": "done", "seconds": round(len(SPEECH) / RATE, 3), "segments": 2}
    (whole,) = transcriber.transcribe(SPEECH, RATE, words=True)
    words = [word for message in heard if message["type"] == "final" for word in message["words"]]
    assert [word["word"] for word in words] == whole.text.split()
    for word, same in zip(words, whole.words, strict=True):
        assert word["start"] == pytest.approx(same.start, abs=0.05)
        assert word["confidence"] > 0.9


def test_finals_come_while_somebody_still_speaks(server):
    with tones.stream(server) as connection:
        send(connection, SPEECH[: int(3.5 * RATE)])
        while (message := json.loads(connection.recv(240)))["type"] != "final":
            pass
        assert message["text"] == "delta alpha"
        assert message["segment"] == 0
        assert 0 <= message["start"] <= message["words"][0]["start"] < message["end"] < 3.5


def test_streams_are_counted_and_logged_without_text(transcriber, tmp_path):
    path = tmp_path / "log.jsonl"
    with tones.running(transcriber, log=path) as server:
        with tones.stream(server) as connection:
            send(connection, SPEECH)
            connection.send(END)
            tones.messages(connection)
        wait_until(lambda: "stream" in [json.loads(line)["event"] for line in path.read_text().splitlines()])
        wait_until(lambda: server.service.admission.streams == 0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["segment", "segment", "stream"]
    assert (lines[2]["segments"], lines[2]["words"], lines[2]["end"]) == (2, 5, "client")
    assert lines[2]["seconds"] == pytest.approx(len(SPEECH) / RATE, abs=0.01)
    assert "echo" not in path.read_text()


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("&partial_ms=soon", 400, "invalid_value"),
        ("&longest_ms=1e9", 400, "invalid_value"),
        ("&silence_ms=nan", 400, "invalid_value"),
        ("&model=other", 404, "model_not_found"),
    ],
)
def test_wrong_parameters_are_refused(server, query, status, code):
    with pytest.raises(InvalidStatus) as refused, tones.stream(server, query):
        pass
    answer = refused.value.response
    assert answer.status_code == status
    assert json.loads(answer.body)["error"]["code"] == code


def test_impossible_rates_are_refused(server):
    for rate in ("0", "-8000", "1e30", "nan", "inf"):
        with (
            pytest.raises(InvalidStatus) as refused,
            tones.connect(f"ws://127.0.0.1:{server.port}/stream?sample_rate={rate}", proxy=None),
        ):
            pass
        assert refused.value.response.status_code == 400


def test_a_token_is_asked_for_and_browsers_may_send_it_as_a_subprotocol(transcriber):
    coded = base64.urlsafe_b64encode(TOKEN.encode()).decode().rstrip("=")
    with tones.running(transcriber, token=TOKEN) as server:
        for options in ({}, {"subprotocols": ["starling", "bearer.d3Jvbmc"]}, {"subprotocols": ["bearer.ä"[:7]]}):
            with pytest.raises(InvalidStatus) as refused, tones.stream(server, **options):
                pass
            assert refused.value.response.status_code == 401
        with tones.stream(server, subprotocols=["starling", f"bearer.{coded}"]) as connection:
            assert connection.subprotocol == "starling"
            assert json.loads(connection.recv(240))["type"] == "ready"
        with tones.stream(server, additional_headers={"Authorization": f"Bearer {TOKEN}"}) as connection:
            assert json.loads(connection.recv(240))["type"] == "ready"


def test_without_a_token_pages_of_other_servers_get_no_stream(server):
    with pytest.raises(InvalidStatus) as refused, tones.stream(server, origin="http://evil.example"):
        pass
    assert refused.value.response.status_code == 403


def test_the_number_of_streams_is_limited(transcriber):
    with tones.running(transcriber, streams=1) as server:
        with tones.stream(server) as first:
            first.recv(240)
            with pytest.raises(InvalidStatus) as refused, tones.stream(server):
                pass
            assert refused.value.response.status_code == 503
            assert json.loads(refused.value.response.body)["error"]["code"] == "too_many_streams"
        wait_until(lambda: server.service.admission.streams == 0)
        with tones.stream(server) as second:
            assert json.loads(second.recv(240))["type"] == "ready"


def test_a_stream_without_audio_ends_with_what_it_has(transcriber):
    with tones.running(transcriber) as server, tones.stream(server) as connection:
        connection.recv(240)
        object.__setattr__(server.service.limits, "idle_s", 0.5)  # from the next message on
        connection.send(pcm(SPEECH))
        heard = tones.messages(connection)
        assert connection.close_code == 1008
    assert finals(heard) == ["delta alpha", "echo echo bravo"]
    assert [message["error"]["code"] for message in heard if message["type"] == "error"] == ["idle"]


def test_a_stream_that_is_too_long_ends_with_what_it_has(transcriber):
    with tones.running(transcriber, stream_seconds=3.5) as server, tones.stream(server) as connection:
        send(connection, SPEECH[: int(4 * RATE)])
        heard = tones.messages(connection)
    assert finals(heard)[0] == "delta alpha"
    assert [message["error"]["code"] for message in heard if message["type"] == "error"] == ["too_long"]


def test_garbage_does_not_disturb_a_stream_and_an_oversized_message_ends_it(server):
    with tones.stream(server) as connection:
        for text in ("", "{", "[" * 100_000, json.dumps({"type": "unknown"}), json.dumps([1])):
            connection.send(text)
        connection.send(b"")
        connection.send(np.random.default_rng(1).bytes(20_001))
        connection.send(END)
        assert tones.messages(connection)[-1]["type"] == "done"
    with tones.stream(server) as connection:
        with suppress(ConnectionClosed):
            connection.send(bytes(3 << 20))
        tones.messages(connection)
        # the server closes while data still come: the reset may overtake the close frame with the reason
        assert connection.close_code in (1009, 1006)
    wait_until(lambda: server.service.admission.streams == 0)


def test_a_client_that_vanishes_gives_its_stream_up(server):
    connection = tones.stream(server)
    send(connection, SPEECH)
    connection.socket.close()
    wait_until(lambda: server.service.admission.streams == 0)
    assert tones.post(server, tones.flac(speak("echo")))[2] == {"text": "echo"}


def test_a_model_that_fails_ends_the_stream_with_an_error(server, transcriber):
    transcriber.recognizer.model.broken = True
    with tones.stream(server) as connection:
        with suppress(ConnectionClosed):  # the stream may end before all is sent
            send(connection, SPEECH)
            connection.send(END)
        heard = tones.messages(connection)
    assert heard[-1]["type"] == "error"
    assert heard[-1]["error"]["code"] == "server_error"


def test_streams_keep_the_version_that_they_began_with(server, tmp_path):
    discarded = []
    server.switch.current.discard = lambda: discarded.append("1")
    with tones.stream(server) as connection:
        assert json.loads(connection.recv(240))["version"] == "1"
        server.switch.replace(LoadedModel("2", tones.tone_transcriber(tmp_path)))
        with tones.stream(server) as other:
            assert json.loads(other.recv(240))["version"] == "2"
        send(connection, SPEECH)
        connection.send(END)
        assert finals(tones.messages(connection)) == ["delta alpha", "echo echo bravo"]
    wait_until(lambda: discarded == ["1"])


def test_a_server_that_ends_gives_streams_their_results(transcriber):
    with tones.running(transcriber) as server, tones.stream(server, "&silence_ms=2500") as connection:
        connection.send(pcm(SPEECH[: 2 * RATE]))  # without the pause after it
        while json.loads(connection.recv(240)).get("text") != "delta alpha":
            pass
        server.server.should_exit = True
        heard = tones.messages(connection)
        assert connection.close_code == 1012
    assert finals(heard) == ["delta alpha"]
    assert heard[-2]["error"]["code"] == "stopping"


@pytest.mark.slow
def test_long_streams_beside_files_take_bounded_memory(transcriber):
    import psutil

    with tones.running(transcriber) as server:
        process, rounds = psutil.Process(), 120
        with tones.stream(server, "&partial_ms=1000", max_size=None) as connection:
            heard = tones.in_background(tones.messages, connection)
            for number in range(rounds):
                send(connection, SPEECH, 8000)
                if number % 20 == 10:
                    assert tones.post(server, tones.flac(speak("echo")))[2] == {"text": "echo"}
                if number == 20:
                    begin = process.memory_info().rss
            connection.send(END)
            heard.thread.join(600)
        assert finals(heard.result()) == ["delta alpha", "echo echo bravo"] * rounds
        assert process.memory_info().rss - begin < 50_000_000
