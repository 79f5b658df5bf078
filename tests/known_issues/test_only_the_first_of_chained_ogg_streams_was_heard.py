"""Of an Ogg file with several streams one after another, all but the first were dropped without a word.

Recorders that are paused, web radio, and `cat a.opus b.opus` make such files. libsndfile reads the first stream; the
transcript of the whole recording went with it.
"""

import io

import pytest
import soundfile

from speech.audio import AudioError, decode_samples, stream_audio
from speech.truncation import has_chained_streams


def ogg(subtype, rate=16000, seconds=0.5):
    soundfile.write(file := io.BytesIO(), [0.1, -0.1] * int(seconds * rate / 2), rate, format="OGG", subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [ogg("VORBIS") * 2, ogg("OPUS") + ogg("OPUS", seconds=1), ogg("VORBIS") + ogg("VORBIS", 8000)],
    ids=["vorbis", "opus", "other rate"],
)
def test_file_with_several_streams_is_refused_with_a_remedy(tmp_path, data):
    (tmp_path / "two.ogg").write_bytes(data)
    for source in (data, tmp_path / "two.ogg"):
        with pytest.raises(AudioError, match=r"several Ogg streams .*ffmpeg -i OLD NEW"):
            decode_samples(source)
        with pytest.raises(AudioError, match="several Ogg streams"):
            list(stream_audio(source))


def test_segment_within_the_first_stream_is_read_and_a_later_one_refused():
    data = ogg("VORBIS") * 2
    assert len(decode_samples(data, end=0.3)[0]) == 4800
    with pytest.raises(AudioError, match="several Ogg streams"):
        decode_samples(data, start=0.6, end=0.9)


def test_one_stream_of_many_pages_is_not_chained():
    assert not has_chained_streams(ogg("VORBIS", seconds=20))
    assert not has_chained_streams(b"OggS")
    assert len(decode_samples(ogg("OPUS"))[0]) == 8000
