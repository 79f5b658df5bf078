"""Forms that the server refused did not say why, and one that was cut off was said to have no file.

A client that sent two files, a hundred fields or a long prompt read "the form is malformed"; one whose upload ended
before the form's last boundary was told to send the audio in the field file, which it had.
"""

import pytest
from support import load_beside

tones = load_beside(__file__, "../recognition/running_server.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with tones.running(tones.tone_transcriber(tmp_path_factory.mktemp("tones"))) as server:
        yield server


def part(name, value, file=""):
    place = f'name="{name}"' + (f'; filename="{file}"' if file else "")
    return f"--B\r\nContent-Disposition: form-data; {place}\r\n\r\n".encode() + value + b"\r\n"


def refused(server, body):
    about = {"content-type": "multipart/form-data; boundary=B"}
    status, _, content = tones.fetch(f"{server.url}/v1/audio/transcriptions", body, about)[:3]
    assert status == 400
    return str(content)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (part("file", b"x", "b.wav"), "Too many files"),
        (b"".join(part(f"f{number}", b"x") for number in range(100)), "Too many fields"),
        (part("prompt", b"x" * 100_000), "exceeded maximum size"),
    ],
    ids=["files", "fields", "size"],
)
def test_reason_is_in_the_answer(server, more, reason):
    assert reason in refused(server, part("model", b"tones") + part("file", b"x", "a.wav") + more + b"--B--\r\n")


def test_form_that_was_cut_off_is_named_so(server):
    audio = tones.flac(tones.speak("echo"))
    body = part("model", b"tones") + part("file", audio, "a.flac")
    for cut in (body, body[:-100], body[: len(body) // 2]):
        assert "the form has no end: the upload was cut off" in refused(server, cut)
    assert "the form has no file" in refused(server, part("model", b"tones") + b"--B--\r\n")
    assert "the form has no file" in refused(server, part("model", b"tones") + b"--B--")
