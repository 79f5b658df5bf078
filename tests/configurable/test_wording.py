from configurable.wording import counted, nearest, printable, similar


def test_one_thing_is_singular_and_large_numbers_have_separators():
    assert [counted(count, "different word") for count in (0, 1, 1200)] == [
        "0 different words",
        "1 different word",
        "1,200 different words",
    ]


def test_unknown_name_is_answered_with_the_most_similar_one():
    known = ["learning_rate", "Kernel", "lr", "batch_seconds"]
    assert similar("learningrat", known) == "learning_rate"
    assert similar("KERNELS", known) == "Kernel"
    assert similar("base_seconds", known) == nearest("base_seconds", known)[16:-2] == "batch_seconds"
    assert similar("training_step", ["learning_rate"]) == "learning_rate"  # by 0.62
    assert similar("training_step", ["learning_rate"], cutoff=0.7) == ""
    assert nearest("kern", known) == "; did you mean 'Kernel'?"
    assert nearest("kern", ["Kernel"], cutoff=0.9) == "; there are: Kernel"


def test_initials_of_a_name_mean_its_abbreviation():
    assert similar("learning_rate", ["rate", "lr"]) == "lr"
    assert similar("learning_rate", ["rate", "le"]) == "rate"
    assert similar("layer", ["l", "layers"]) == "layers"  # a single initial says nothing


def test_unknown_name_without_similar_ones_is_answered_with_all():
    names = [f"name{number}" for number in range(21)]
    assert nearest("?", names[:20]) == f"; there are: {', '.join(names[:20])}"
    assert nearest("?", names) == f"; there are: {', '.join(names[:20])}, … (21 in all)"
    assert nearest("?", []) == similar("?", []) == ""


def test_long_values_are_shortened_in_the_middle():
    text = "".join(chr(ord("a") + number % 26) for number in range(1000))
    assert printable(text[:200]) == text[:200]
    assert printable(text[:201]) == f"{text[:131]} … {text[135:201]}"
    assert printable(text, 12) == f"{text[:6]} … {text[-3:]}"
    assert printable(text[:12], 12) == text[:12]
    assert all(len(printable(text, most)) == most for most in (10, 11, 12, 100))


def test_values_that_no_terminal_can_show_are_escaped():
    assert printable("caf\udce9 \x1b[31m\t'ö\nnext") == "caf\\udce9 \\x1b[31m\\t'ö\nnext"
