"""Words of which one lay in the silence that is added around a piece overlapped, and TextGrids lacked one of them.

Several in that silence were at the same time, as those were that a graph puts out within one output frame.
"""

from itertools import pairwise

import pytest

from speech.alignments import Alignment, Span, textgrid
from speech.words import FrameTimes, Piece, placed_words

TIMES = FrameTimes(0.04, offset=-0.08, begin=0.0, end=0.5)
TIMES_LATER = (Piece(16, 0.55, 0.6),)


def times_of(words):
    return [(word.start, round(word.start + word.duration, 3)) for word in words]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([(3, 4), (5, 8)], [(0.04, 0.08), (0.12, 0.24)]),
        ([(12, 14), (14, 15)], [(0.4, 0.46), (0.46, 0.5)]),
        ([(0, 1), (1, 3), (3, 5)], [(0.0, 0.04), (0.04, 0.08), (0.08, 0.12)]),
        ([(12, 13), (14, 15), (15, 16)], [(0.38, 0.42), (0.42, 0.46), (0.46, 0.5)]),
        ([(5, 6), (5, 6), (6, 9)], [(0.12, 0.16), (0.16, 0.2), (0.2, 0.28)]),
    ],
)
def test_words_are_apart_and_at_least_a_frame_long(frames, expected):
    text = " ".join("abc"[: len(frames)])
    assert times_of(placed_words(text, frames, [1.0] * len(frames), TIMES)) == expected


def test_more_words_than_there_is_room_for_stay_in_order_inside_their_piece():
    spans = times_of(placed_words("a " * 40, [(frame, frame + 1) for frame in range(40)], [1.0] * 40, TIMES))
    assert all(0 <= start <= stop <= 0.5 for start, stop in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))


def test_words_of_another_piece_are_not_moved():
    (piece,) = placed_words("a", [(16, 17)], [1.0], FrameTimes(0.04, end=9.0, later=TIMES_LATER))
    _, second = placed_words("a b", [(15, 16), (16, 17)], [1.0, 1.0], FrameTimes(0.04, end=9.0, later=TIMES_LATER))
    assert (piece.start, piece.duration) == (second.start, second.duration)


def test_textgrid_has_all_tokens():
    tokens = tuple(Span(label, frame, frame + 1) for label, frame in (("i", 14), ("x", 15)))
    alignment = Alignment("u", (), tokens, frame_seconds=0.04, offset=-0.08, duration=0.5)
    grid = textgrid(alignment.duration, {"tokens": alignment.timed(alignment.units)})
    assert all(f'text = "{token.label}"' in grid for token in tokens)
    assert "xmax = 0.5000" in grid
