from configurable.wording import counted


def test_one_thing_is_singular_and_large_numbers_have_separators():
    assert [counted(count, "different word") for count in (0, 1, 1200)] == [
        "0 different words",
        "1 different word",
        "1,200 different words",
    ]
