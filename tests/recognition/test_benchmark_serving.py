"""benchmarks.serving: its arithmetic, its search, and its clients at a real server."""

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from support import load_beside, wait_until

from benchmarks.serving import Delays, Soak, joined, search
from benchmarks.serving_bad_clients import KINDS, misbehave
from benchmarks.serving_clients import Clip, OpenAiFiles, OwnStreams, SherpaStreams, Spoken, send_files, talk, uploads
from benchmarks.serving_servers import Contender, own_server, sherpa_rival

tones = load_beside(__file__, "running_server.py")
RATE = tones.RATE


def clip(text):
    return Clip(tones.pcm(np.concatenate([tones.silence(0.3), tones.speak(text), tones.silence(0.3)])), RATE)


def spoken_to(server, clips, streams, seconds):
    """What is heard; again if a busy machine has left no time to speak all of it."""

    def heard():
        talked = asyncio.run(
            talk(OwnStreams(), server.port, clips, streams, seconds, 240.0, lambda number: "127.0.0.1")
        )
        return talked if {spoken.clip for spoken in said(talked)} == set(range(len(clips))) else None

    return wait_until(heard)


def said(talked):
    return [*talked.warm_up, *talked.spoken]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tones.running(tones.tone_transcriber(tmp_path_factory.mktemp("tones"))) as server:
        yield server


def searched(first, most, limit):
    """What a search finds where so many streams are held, and what it tries."""
    steps, tried = search(first, most), []
    number = next(steps)
    try:
        while True:
            tried.append(number)
            number = steps.send(number <= limit)
    except StopIteration as end:
        return end.value, tried


@pytest.mark.parametrize("first", [1, 4, 100])
@pytest.mark.parametrize("limit", [0, 1, 2, 3, 4, 5, 17, 31, 63, 64, 1000])
def test_the_search_finds_the_largest_number_that_is_held(first, limit):
    found, tried = searched(first, 64, limit)
    assert found <= min(limit, 64)
    assert min(limit, 64) - found <= max(1, 0.1 * found) - 1
    assert len(set(tried)) == len(tried) <= 14
    assert max(tried) <= 64
    assert limit or found == 0


def test_quantiles_are_delays_that_were_measured():
    assert Delays.of(np.random.default_rng(1).permutation(np.arange(1, 101))) == Delays(50.0, 95.0, 99.0)
    assert Delays.of([3.0, 1.0, 2.0]) == Delays(2.0, 3.0, 3.0)
    assert str(Delays.of([0.25])) == "250 / 250 / 250"
    assert math.isnan(Delays.of([]).p99)


def test_growth_compares_the_last_third_with_the_first():
    assert Soak(None, 1.0, [100.0] * 10, [9]).growth == 0.0
    assert Soak(None, 1.0, [100.0, 100.0, 500.0, 120.0, 120.0, 120.0], [9]).growth == pytest.approx(0.2)


def test_short_clips_are_joined_to_utterances():
    waves = [torch.full((4000,), 0.5)] * 5
    clips = joined(waves, 8000, 1.0)
    assert [round(part.seconds, 3) for part in clips] == [1.2, 1.2, 0.5]
    assert np.frombuffer(clips[0].pcm, "<i2")[0] == 16383
    assert len(joined(waves, 8000, 0.1)) == 5
    np.testing.assert_allclose(np.frombuffer(clips[0].floats, "<f4")[:10], 0.5, atol=1e-4)


def test_streams_are_spoken_at_their_own_speed_and_their_words_heard(server):
    parts = [clip("echo"), clip("delta alpha")]
    heard = spoken_to(server, parts, 2, 1.0)
    assert {spoken.text for spoken in said(heard)} == {"echo", "delta alpha"}
    assert all(spoken.final_s >= 0 and not spoken.lost for spoken in heard.spoken)
    for before, after in zip(heard.spoken, heard.spoken[2:], strict=False):
        assert after.begin >= before.begin
    assert len(heard.lag_s) > 10


def test_streams_that_are_refused_are_lost(server):
    limits = server.service.admission.limits
    server.service.admission.streams = limits.streams
    try:
        heard = spoken_to(server, [clip("echo")], 1, 0.3)
    finally:
        server.service.admission.streams = 0
    assert {spoken.lost for spoken in said(heard)} == {"InvalidStatus"}


def test_files_are_sent_and_answered(server):
    def sent_both():  # again if a busy machine has left no time for one of them
        sent, took_s = send_files(lambda: OpenAiFiles(server.port), [clip("echo"), clip("bravo")], 2, 0.3)
        return len({file.clip for file in sent}) == 2 and (sent, took_s)

    sent, took_s = wait_until(sent_both)
    assert {(file.clip, file.text) for file in sent} == {(0, "echo"), (1, "bravo")}
    assert took_s > 0.3
    wrong, _ = send_files(lambda: OpenAiFiles(server.port, "another"), [clip("echo")], 1, 0.05)
    assert all("404" in file.lost for file in wrong)
    with uploads(lambda: OpenAiFiles(server.port), [clip("echo")], 0.05) as now_and_then:
        wait_until(lambda: now_and_then)
    assert now_and_then[0].text == "echo"


def test_results_of_sherpa_onnx_are_understood():
    spoken, protocol = Spoken(0, begin=10.0), SherpaStreams()
    for second, segment, text in ((10.5, 0, ""), (11.0, 0, "one"), (12.0, 0, " one two"), (13.0, 1, "six")):
        assert not protocol.hear(json.dumps({"text": text, "segment": segment, "is_final": False}), spoken, second)
    assert protocol.hear("Done!", spoken, 14.0)
    assert (spoken.text, spoken.first_s) == ("one two six", 1.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.variants(2)
def test_bad_clients_do_not_disturb_good_ones(server, kind):
    async def beside():
        bad = asyncio.create_task(misbehave(kind, server.port, 30))
        try:
            return await talk(OwnStreams(), server.port, [clip("echo")], 1, 0.1, 240.0, lambda number: "127.0.0.1")
        finally:
            bad.cancel()
            await asyncio.gather(bad, return_exceptions=True)

    heard = wait_until(lambda: said(asyncio.run(beside())))  # nothing if a busy machine has left no time to speak
    assert {(spoken.text, spoken.lost) for spoken in heard} == {("echo", "")}
    wait_until(lambda: not server.service.admission.streams)


def test_rivals_are_started_as_they_are_given():
    given = Contender.parse("openai:base=serve --port {port}")
    assert (given.command, given.files, given.model) == (("serve", "--port", "{port}"), OpenAiFiles, "base")
    for wrong in ("serve --port {port}", "openai=serve", "starling=serve {port}"):
        with pytest.raises(ValueError, match="give KIND=COMMAND"):
            Contender.parse(wrong)
    assert "connections=4000" in own_server(Path("model"), 1000).command


def test_sherpa_onnx_is_started_with_what_the_exported_model_needs(tmp_path):
    def rival(files, **more):
        (tmp_path / "model.json").write_text(json.dumps(about | more))
        return sherpa_rival(tmp_path, tmp_path, files)

    about = {"graphs": ["model"], "system": "ctc", "sample_rate": 8000}
    about["sherpa_onnx"] = {"features": {"feature_dim": 40}, "search": {"decoding_method": "greedy_search"}}
    stream = {"tail_s": 0.5}
    command = rival(files=False, stream=stream).command
    assert command[0].endswith("sherpa-onnx-online-websocket-server")
    wanted = {"--sample-rate=8000", "--end-tail-padding=0.5", f"--zipformer2-ctc-model={tmp_path}/model.onnx"}
    assert wanted | {"--decoding-method=greedy_search", "--feat-dim=40"} <= set(command)
    command = rival(files=True, sample_rate=16000).command
    assert command[0].endswith("sherpa-onnx-offline-websocket-server")
    assert f"--zipformer-ctc-model={tmp_path}/model.onnx" in command
    with pytest.raises(ValueError, match="16000 Hz only"):
        rival(files=True)
    with pytest.raises(ValueError, match="for streams only"):
        rival(files=True, stream=stream)
    with pytest.raises(ValueError, match="for files only"):
        rival(files=False)
