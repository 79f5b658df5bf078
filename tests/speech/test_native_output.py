import os

from speech.native_output import without_lines


def test_only_lines_with_the_prefixes_are_dropped(capfd):
    with without_lines((b"[I] ", b"***")):
        os.write(2, b"[I] reading\nit matters [I] \n")
        os.write(2, b"***** 100 %\nlast, without a line's end")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "it matters [I] \nlast, without a line's end"
    os.write(2, b"[I] reading\n")
    assert capfd.readouterr().err == "[I] reading\n"


def test_failing_block_prints_its_lines(capfd):
    try:
        with without_lines((b"x",)):
            os.write(2, b"x\nwhy\n")
            raise KeyError
    except KeyError:
        assert capfd.readouterr().err == "why\n"


def test_closed_descriptor_is_ignored():
    before = os.dup(2)
    os.close(2)
    try:
        with without_lines((b"x",)):
            pass
    finally:
        os.dup2(before, 2)
        os.close(before)
