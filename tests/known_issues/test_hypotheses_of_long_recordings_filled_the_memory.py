"""Joining the hypotheses of pieces built every combination's whole text: 100 hypotheses of an hour took gigabytes.

The time grew with the square of the recording's length.
"""

import tracemalloc

from recognition.alternatives import TimedAlternative, joined_alternatives

PIECES, COUNT, SAID = 100, 30, "x" * 200


def test_combinations_that_are_not_chosen_need_little_memory():
    pieces = [
        [TimedAlternative(f"{SAID} {number} {rank}", -float(rank), 1 / COUNT) for rank in range(COUNT)]
        for number in range(PIECES)
    ]
    tracemalloc.start()
    try:
        alternatives = joined_alternatives(pieces, COUNT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(alternatives) == COUNT
    assert alternatives[0].text == " ".join(f"{SAID} {number} 0" for number in range(PIECES))
    assert peak < 5 * sum(len(alternative.text) for alternative in alternatives)
