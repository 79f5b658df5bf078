"""The server over real sockets: OpenAI's client, batches, limits, tokens, the log, and a model that is replaced."""

import json
import socket
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support import bundle_with_languages, load_beside, silent_system, wait_until
from websockets.exceptions import InvalidStatus

from recognition.serving.formats import FORMATS
from recognition.serving.models import LoadedModel, ModelSwitch
from recognition.serving.queue import RecordingTooLongError
from recognition.systems import SYSTEMS
from recognition.transcriber import Transcriber
from speech.vad import EnergyConfig, EverythingConfig

tones = load_beside(__file__, "running_server.py")
RATE, speak, flac, post, fetch = tones.RATE, tones.speak, tones.flac, tones.post, tones.fetch
TOKEN = "a-token-of-more-than-sixteen-characters"
TEXT = "delta alpha foxtrot"


@pytest.fixture(scope="module")
def transcriber(tmp_path_factory):
    return tones.tone_transcriber(tmp_path_factory.mktemp("tones"))


@pytest.fixture
def model(transcriber):
    transcriber.recognizer.model.__init__()
    return transcriber.recognizer.model


@pytest.fixture
def server(transcriber, model):
    with tones.running(transcriber) as server:
        yield server


def client_of(server, **options):
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", **{"api_key": "none", "max_retries": 0, **options})


def test_openais_client_gets_every_format(server):
    client, file = client_of(server), ("a.flac", flac(speak(TEXT)))
    create = client.audio.transcriptions.create
    assert create(file=file, model="tones").text == TEXT
    assert create(file=file, model="whisper-1", response_format="text").strip() == TEXT
    assert create(file=file, model="tones", response_format="srt").splitlines()[2] == TEXT
    assert create(file=file, model="tones", response_format="vtt").startswith("WEBVTT\n\n00:00:0")
    verbose = create(
        file=file,
        model="tones",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
        prompt="a prompt",
        temperature=0.0,
    )
    assert [word.word for word in verbose.words] == TEXT.split()
    assert [segment.text for segment in verbose.segments] == [TEXT]
    assert float(verbose.duration) == pytest.approx(len(speak(TEXT)) / RATE, abs=1e-3)
    assert [model.id for model in client.models.list()] == ["tones"]
    assert client.models.retrieve("tones").owned_by == "starling"


def test_openais_client_gets_its_errors(server):
    import openai

    create = client_of(server).audio.transcriptions.create
    file = ("a.flac", flac(speak(TEXT)))
    with pytest.raises(openai.NotFoundError) as missing:
        create(file=file, model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="response_format is 'yaml'"):
        create(file=file, model="tones", response_format="yaml")
    with pytest.raises(openai.BadRequestError, match="needs response_format verbose_json"):
        create(file=file, model="tones", timestamp_granularities=["word"])
    with pytest.raises(openai.APIStatusError) as odd:
        create(file=("a.flac", b"text and no audio"), model="tones")
    assert (odd.value.status_code, odd.value.code, odd.value.param) == (415, "unsupported_audio", "file")


def long_recording():
    """Words between pauses of many lengths, for more than a minute."""
    draw = np.random.default_rng(7)
    parts = [tones.silence(0.5)]
    for _ in range(40):
        parts += [speak(" ".join(draw.choice(tones.WORDS, draw.integers(1, 4)))), tones.silence(draw.uniform(0.1, 2))]
    return np.concatenate(parts)


def test_words_are_those_of_transcribe_whatever_else_is_recognized(server, transcriber):
    waves = [long_recording(), speak("echo"), speak(TEXT), long_recording()[::2].copy()]
    expected = transcriber.transcribe([flac(wave) for wave in waves], words=True)
    waiting = [
        tones.in_background(post, server, flac(wave), response_format="verbose_json",
                            **{"timestamp_granularities[]": ["word"]})
        for wave in waves
    ]  # fmt: skip
    for answer, same in zip(waiting, expected, strict=True):
        status, _, content = answer.result()
        assert status == 200
        assert content["text"] == same.text
        assert [word["word"] for word in content["words"]] == same.text.split()
        for word, other in zip(content["words"], same.words, strict=True):
            assert word["start"] == pytest.approx(other.start, abs=1e-3)


def test_requests_that_wait_are_recognized_in_one_batch(server, model):
    model.gate.clear()
    first = tones.in_background(post, server, flac(speak("echo")))
    wait_until(lambda: model.batches == [1])
    others = [tones.in_background(post, server, flac(speak(word))) for word in ("alpha", "bravo", "delta")]
    wait_until(lambda: len(server.switch.current.queue) == 4)
    model.gate.set()
    assert [answer.result()[2]["text"] for answer in (first, *others)] == ["echo", "alpha", "bravo", "delta"]
    assert model.batches == [1, 3]


def test_a_short_file_does_not_wait_for_the_end_of_a_long_one(server, model):
    queue, batches = server.switch.current.queue, []
    model.gate.clear()
    long = queue.submit(np.concatenate([long_recording()] * 6), words=False, within_s=600)
    wait_until(lambda: model.batches)
    short = queue.submit(speak("echo"), words=False, within_s=600)
    short.add_done_callback(lambda _: batches.append(len(model.batches)))
    model.gate.set()
    assert short.result(240).text == "echo"
    assert long.result(240).text
    assert batches[0] <= 4 < 10 < len(model.batches)


def test_a_file_that_breaks_the_model_fails_alone(server, model):
    model.broken = True
    status, _, content = post(server, flac(speak("echo")))
    assert (status, content["error"]["code"]) == (500, "server_error")
    model.broken = False
    assert post(server, flac(speak("echo")))[2] == {"text": "echo"}


def test_files_are_limited_in_size_length_and_kind(transcriber, model):
    import openai

    with tones.running(transcriber, file_mb=0.1, file_seconds=5.0) as server:
        noise = np.random.default_rng(1).normal(0, 0.1, 400_000).astype(np.float32)
        cases = [
            (b"0" * 300_000, 413, "file_too_large"),
            (flac(tones.silence(6)), 413, "audio_too_long"),
            (b"GIF89a" + bytes(500), 415, "unsupported_audio"),
            (b"", 415, "unsupported_audio"),
            (flac(noise[:20_000])[:9000], 400, "unreadable_audio"),
        ]
        for audio, expected, code in cases:
            status, _, content = post(server, audio)
            assert (status, content["error"]["code"]) == (expected, code), content
        with pytest.raises(openai.APIStatusError) as large:
            client_of(server).audio.transcriptions.create(file=("a.wav", bytes(30_000_000)), model="tones")
        assert large.value.status_code == 413
        assert post(server, flac(speak("echo")))[2] == {"text": "echo"}
        assert server.service.admission.uploaded == 0


def test_a_recording_that_turns_out_to_be_too_long_is_given_up(server, model):
    wave = np.concatenate([long_recording()] * 20)
    answer = server.switch.current.queue.submit(wave, words=False, within_s=600, most_seconds=90.0)
    with pytest.raises(RecordingTooLongError, match="longer than 90 s"):
        answer.result(240)
    assert sum(model.batches) < 100  # pieces; all have 800


def test_forms_that_are_none_are_refused(server):
    url = f"{server.url}/v1/audio/transcriptions"
    assert fetch(url, b"{}", {"Content-Type": "application/json"})[0] == 415
    status, _, content = fetch(url, b"garbage", {"Content-Type": "multipart/form-data; boundary=x"})
    assert (status, content["error"]["code"]) in [(400, "malformed_form"), (400, "bad_request"), (400, "missing")]
    assert fetch(url, b"garbage", {"Content-Type": "multipart/form-data"})[0] == 400
    body, headers = tones.form(None, model="tones")
    assert fetch(url, body, headers)[2]["error"]["param"] == "file"
    body, headers = tones.form(None, model="tones", file="text")
    assert fetch(url, body, headers)[2]["error"]["param"] == "file"
    body, headers = tones.form(flac(speak("echo")), model="x" * 20_000)
    assert fetch(url, body, headers)[0] == 400
    body, headers = tones.form(flac(speak("echo")), **{f"a{number}": "b" for number in range(100)})
    assert fetch(url, body, headers)[0] == 400
    for path in ("/v1/audio/translations", "/docs", "/openapi.json", "/../etc/passwd"):
        status, _, content = fetch(server.url + path)
        assert (status, content["error"]["code"]) == (404, "not_found")
    assert fetch(url)[2]["error"]["code"] == "method_not_allowed"


def test_one_client_and_all_together_are_limited(transcriber, model):
    with tones.running(transcriber, per_client=3, waiting=2) as server:
        model.gate.clear()
        audio = flac(speak("echo"))
        waiting = [tones.in_background(post, server, audio) for _ in range(2)]
        wait_until(lambda: server.service.admission.files == 2)
        status, headers, content = post(server, audio)
        assert (status, content["error"]["code"], headers["Retry-After"]) == (503, "queue_full", "1")
        server.service.admission.clients["127.0.0.1"] += 1  # another request of this client
        status, headers, content = post(server, audio)
        assert (status, content["error"]["type"], headers["Retry-After"]) == (429, "rate_limit_error", "1")
        server.service.admission.clients["127.0.0.1"] -= 1
        model.gate.set()
        assert [answer.result()[0] for answer in waiting] == [200, 200]
        assert post(server, audio)[0] == 200
        assert not server.service.admission.clients


def test_what_is_not_recognized_in_time_is_answered(transcriber, model, monkeypatch):
    ahead = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("recognition.serving.queue.time", clock)
    with tones.running(transcriber, request_s=600.0) as server:
        model.gate.clear()
        first = tones.in_background(post, server, flac(np.concatenate([long_recording()] * 2)))
        wait_until(lambda: model.batches)
        second = tones.in_background(post, server, flac(speak("echo")))
        wait_until(lambda: len(server.switch.current.queue) == 2)
        ahead[0] = 601.0
        model.gate.set()
        for answer in (first, second):
            status, headers, content = answer.result()
            assert (status, content["error"]["code"], headers["Retry-After"]) == (503, "late", "5")


def test_a_client_that_goes_away_gives_its_place_up(server, model):
    model.gate.clear()
    body, headers = tones.form(flac(speak("echo")), model="tones")
    head = "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: {headers['Content-Type']}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.service.admission.files == 1)
    wait_until(lambda: server.service.admission.files == 0)
    model.gate.set()
    wait_until(lambda: len(server.switch.current.queue) == 0)
    wait_until(lambda: not server.service.admission.clients)


def test_a_token_is_asked_for_everywhere_but_on_the_page_and_for_health(transcriber, model, tmp_path):
    import openai

    with tones.running(transcriber, token=TOKEN, log=tmp_path / "log.jsonl") as server:
        audio = flac(speak("echo"))
        for path in ("/v1/models", "/metrics", "/v1/models/tones", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                status, about, content = fetch(server.url + path, headers=headers)
                assert (status, content["error"]["code"], about["WWW-Authenticate"]) == (
                    401,
                    "invalid_api_key",
                    "Bearer",
                )
            assert fetch(server.url + path, headers={"Authorization": f"Bearer {TOKEN}"})[0] in (200, 404)
        assert post(server, audio)[0] == 401
        with pytest.raises(openai.AuthenticationError):
            client_of(server, api_key="wrong").models.list()
        text = client_of(server, api_key=TOKEN).audio.transcriptions.create(file=("a.flac", audio), model="tones").text
        assert text == "echo"
        assert fetch(server.url + "/")[0] == 200
        assert fetch(server.url + "/healthz")[2] == {"status": "ok"}
        assert fetch(server.url + "/healthz", headers={"Authorization": f"Bearer {TOKEN}"})[2]["model"] == "tones"
    assert TOKEN not in (tmp_path / "log.jsonl").read_text()


def test_without_a_token_pages_of_other_servers_are_refused(server):
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}):
        assert post(server, flac(speak("echo")), headers)[0] == 403
        assert fetch(server.url + "/metrics", headers=headers)[0] == 403
    own = f"127.0.0.1:{server.port}"
    assert post(server, flac(speak("echo")), {"Origin": f"http://{own}"})[0] == 200


def test_the_log_has_neither_audio_nor_text_unless_wanted(transcriber, model, tmp_path):
    for with_text in (False, True):
        path = tmp_path / f"{with_text}.jsonl"
        with tones.running(transcriber, log=path, with_text=with_text) as server:
            assert post(server, flac(speak(TEXT)))[0] == 200
            assert post(server, b"no audio at all: foxtrot")[0] == 415
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [line["event"] for line in lines] == ["segment", "file", "rejected"]
        assert ("foxtrot" in path.read_text()) == with_text
        assert lines[1]["words"] == 3
        assert lines[1]["seconds"] == pytest.approx(len(speak(TEXT)) / RATE, abs=1e-3)
        assert 0.9 < lines[1]["confidence"] <= 1
        assert (lines[2]["status"], lines[2]["code"]) == (415, "unsupported_audio")


def test_the_log_has_a_line_for_each_utterance_of_a_file(transcriber, model, tmp_path):
    path, wave = tmp_path / "log.jsonl", np.concatenate([speak(TEXT), tones.silence(40), speak("echo")])
    (whole,) = transcriber.transcribe(wave, words=True)
    with tones.running(transcriber, log=path, version="7") as server:
        assert post(server, flac(wave))[0] == 200
        figures = fetch(server.url + "/metrics")[2].decode().splitlines()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["segment", "segment", "file"]
    for line, piece, words in zip(lines, whole.pieces, (whole.words[:3], whole.words[3:]), strict=False):
        assert (line["model"], line["version"], line["route"]) == ("tones", "7", "/v1/audio/transcriptions")
        assert line["words"] == len(words)
        assert line["seconds"] == pytest.approx(piece.seconds, abs=1e-3)
        assert line["words_per_second"] == pytest.approx(len(words) / piece.seconds, abs=1e-3)
        assert line["confidence"] == pytest.approx(piece.confidence, abs=1e-3)
        assert line["least_confidence"] == pytest.approx(min(word.confidence for word in words), abs=1e-3)
    route = 'route="/v1/audio/transcriptions"'
    assert f"starling_words_total{{{route}}} 4.0" in figures
    for name in ("confidence", "utterance_seconds", "words_per_second"):
        assert f"starling_{name}_count{{{route}}} 2.0" in figures


def test_figures_count_requests_rejections_and_audio(server):
    assert post(server, flac(speak(TEXT)))[0] == 200
    assert post(server, b"no audio")[0] == 415
    assert fetch(server.url + "/a/path/of/its/own")[0] == 404
    status, headers, content = fetch(server.url + "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=")
    lines = content.decode().splitlines()
    route = 'route="/v1/audio/transcriptions"'
    assert f'starling_requests_total{{{route},status="200"}} 1.0' in lines
    assert 'starling_requests_total{route="other",status="404"} 1.0' in lines
    assert 'starling_rejected_total{reason="unsupported_audio"} 1.0' in lines
    assert 'starling_model{model="tones",version="1"} 1.0' in lines
    (seconds,) = [line for line in lines if line.startswith("starling_audio_seconds_total")]
    assert float(seconds.split()[1]) == pytest.approx(len(speak(TEXT)) / RATE)


def other_version(transcriber, tmp_path, discarded):
    """A version that hears another word for each."""
    other = tones.tone_transcriber(tmp_path / "other")
    network = other.recognizer.model
    network.forward = lambda feats, lengths: type(network).forward(network, feats.flip(2), lengths)
    return LoadedModel("2", other, lambda: discarded.append("2"))


def test_a_model_is_replaced_while_requests_keep_theirs(server, model, transcriber, tmp_path):
    discarded = []
    server.switch.current.discard = lambda: discarded.append("1")
    model.gate.clear()
    old = tones.in_background(post, server, flac(speak("alpha bravo")))
    wait_until(lambda: model.batches)
    server.switch.replace(other_version(transcriber, tmp_path, discarded))
    assert post(server, flac(speak("alpha bravo")))[2] == {"text": "foxtrot echo"}
    assert fetch(server.url + "/healthz")[2]["version"] == "2"
    assert not discarded
    model.gate.set()
    assert old.result()[2] == {"text": "alpha bravo"}
    wait_until(lambda: discarded == ["1"])
    lines = fetch(server.url + "/metrics")[2].decode().splitlines()
    assert 'starling_model{model="tones",version="2"} 1.0' in lines
    assert "starling_model_replaced_total 1.0" in lines


def test_no_request_is_lost_while_models_are_replaced(server, transcriber, tmp_path):
    wrong = []

    def ask():
        for _ in range(15):
            status, _, content = post(server, flac(speak("alpha")))
            if status != 200 or content["text"] not in ("alpha", "foxtrot"):
                wrong.append((status, content))

    waiting = [tones.in_background(ask) for _ in range(3)]
    for number in range(5):
        server.switch.replace(other_version(transcriber, tmp_path / str(number), []))
    for answer in waiting:
        answer.result()
    assert wrong == []


def test_a_version_that_cannot_be_loaded_is_reported_and_the_old_one_goes_on(server):
    server.switch.fail("version 3 cannot be loaded: it is damaged")
    status, _, health = fetch(server.url + "/healthz")
    assert (status, health["status"]) == (200, "degraded")
    assert health["problem"] == "version 3 cannot be loaded: it is damaged"
    assert post(server, flac(speak("echo")))[0] == 200
    assert "starling_model_failures_total 1.0" in fetch(server.url + "/metrics")[2].decode().splitlines()
    server.switch.recovered()
    assert fetch(server.url + "/healthz")[2]["status"] == "ok"


def test_the_page_loads_nothing_from_elsewhere(server):
    status, headers, page = fetch(server.url + "/")
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert b"http://" not in page
    assert b"https://" not in page


def test_a_model_with_tokens_of_languages_is_told_the_one_that_a_client_names(tmp_path):
    bundle_with_languages(tmp_path)
    audio = flac(speak("echo"))
    model = LoadedModel("1", Transcriber(tmp_path, vad=EverythingConfig()))
    with tones.serving(ModelSwitch("tones", model)) as server:
        for given, told in (("de", "de"), ("en-US", "en")):
            assert post(server, audio, response_format="verbose_json", language=given)[2]["language"] == told
        found = post(server, audio, response_format="verbose_json")[2]["language"]
        assert found in ("de", "en")
        status, _, content = post(server, audio, language="fr")
        error = content["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid_value", "language")
        assert "knows the languages de, en, not 'fr'" in error["message"]
        with pytest.raises(InvalidStatus) as refused, tones.stream(server, "&language=fr"):
            pass
        assert refused.value.response.status_code == 400
        with tones.stream(server, "&language=de&partial_ms=0") as connection:
            connection.send(tones.pcm(speak("echo")))
            connection.send(json.dumps({"type": "end"}))
            assert tones.messages(connection)[-1]["type"] == "done"


def test_times_that_have_their_costs_are_found_for_formats_that_have_them(tmp_path, monkeypatch):
    bundle_with_languages(tmp_path)
    transcriber, asked, open_recording = Transcriber(tmp_path, vad=EverythingConfig()), [], Transcriber.open

    def opened(self, *args, words, **options):
        asked.append(words)
        return open_recording(self, *args, words=words, **options)

    monkeypatch.setattr(Transcriber, "open", opened)
    with tones.serving(ModelSwitch("tones", LoadedModel("1", transcriber))) as server:
        for name in FORMATS:
            assert post(server, flac(speak("echo")), response_format=name)[0] == 200
        assert dict(zip(FORMATS, asked, strict=True)) == {name: name not in ("json", "text") for name in FORMATS}
        free = transcriber.recognizer.cfg.model_copy(update={"times": "none"})
        monkeypatch.setattr(transcriber.recognizer, "cfg", free)
        assert post(server, flac(speak("echo")))[0] == 200
        assert asked[-1]


def test_a_model_without_tokens_of_languages_repeats_the_one_that_a_client_names(server):
    answer = post(server, flac(speak("echo")), response_format="verbose_json", language="fr")[2]
    assert (answer["text"], answer["language"]) == ("echo", "fr")


def test_a_model_without_word_times_gives_what_needs_none(tmp_path, monkeypatch):
    monkeypatch.setitem(SYSTEMS, "silent", silent_system())
    tones.tone_transcriber(tmp_path)
    text = (tmp_path / "bundle.json").read_text()
    value = json.loads(text) | {"system": {"kind": "silent"}}
    del value["checksum"]
    (tmp_path / "bundle.json").write_text(json.dumps(value))
    transcriber = Transcriber(tmp_path, vad=EnergyConfig())
    transcriber.recognizer.model = tones.LoudestOfSix()
    with tones.running(transcriber) as server:
        audio = flac(speak("echo"))
        assert post(server, audio)[2] == {"text": "echo"}
        (segment,) = post(server, audio, response_format="verbose_json")[2]["segments"]
        assert segment["text"] == "echo"
        for fields in (
            {"response_format": "srt"},
            {"response_format": "verbose_json", "timestamp_granularities[]": "word"},
        ):
            status, _, content = post(server, audio, **fields)
            assert (status, content["error"]["code"]) == (400, "times_unknown")
