"""A stream that was sent faster than the server recognizes it ended after 40 seconds, without an error.

The server stops reading while much audio waits. The answer to its ping lay behind that audio, and was taken for
missing.
"""

import json
import time

import numpy as np
from support import load_beside, wait_until

server_of_tones = load_beside(__file__, "../recognition/running_server.py")
speak, silence, pcm = server_of_tones.speak, server_of_tones.silence, server_of_tones.pcm


def test_a_stream_whose_audio_waits_is_kept_open(tmp_path):
    transcriber = server_of_tones.tone_transcriber(tmp_path)
    model = transcriber.recognizer.model
    sentence = pcm(np.concatenate([speak("delta alpha"), silence(1.5)]))
    with server_of_tones.running(transcriber, idle_s=0.2) as server:
        object.__setattr__(server.service.limits, "idle_s", 240.0)  # but the server's pings go on every 0.2 s
        model.gate.clear()
        with server_of_tones.stream(server, "&partial_ms=0", ping_interval=None) as connection:

            def send():
                for _ in range(10):
                    for start in range(0, len(sentence), 8000):
                        connection.send(sentence[start : start + 8000])
                connection.send(json.dumps({"type": "end"}))

            sending = server_of_tones.in_background(send)
            (stream,) = server.server.server_state.connections
            wait_until(lambda: stream.read_paused and stream.pending_ping_payload)
            time.sleep(2)  # of which the answer to a ping had a tenth
            model.gate.set()
            heard = server_of_tones.messages(connection)
            sending.thread.join(240)
    assert [message["text"] for message in heard if message["type"] == "final"] == ["delta alpha"] * 10
    assert heard[-1]["type"] == "done"
