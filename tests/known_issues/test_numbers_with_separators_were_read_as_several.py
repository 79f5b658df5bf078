"""Numbers with separators were read as several ("1.000" as one, zero, zero, zero), and per cent signs were lost."""

import pytest

from speech.text import NormalizerConfig, TextNormalizer

SPOKEN = TextNormalizer(NormalizerConfig(kind="auto", numbers="words"))
ENGLISH = TextNormalizer()


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("de", "1.000 Euro", "eintausend euro"),
        ("de", "1.234.567", "eine million zweihundertvierunddreißigtausendfünfhundertsiebenundsechzig"),
        ("de", "12\u202f345", "zwölftausenddreihundertfünfundvierzig"),
        ("de", "1.000.", "eintausend"),
        ("de", "1,000", "eins komma null null null"),
        ("de", "1000 und 10.00", "eintausend und zehn null null"),
        (
            "de",
            "192.168.0.1 und 1,2,3",
            "einhundertzweiundneunzig einhundertachtundsechzig null eins und eins zwei drei",
        ),
        ("de-CH", "1'000 und 1’234.5", "eintausend und eintausendzweihundertvierunddreißig komma fünf"),
        ("fr", "12\u202f345 euros", "douze mille trois cent quarante cinq euros"),
        ("fr", "12\u00a0345 et 12 345", "douze mille trois cent quarante cinq et douze mille trois cent quarante cinq"),
        ("fr", "en 2010 300 personnes", "en deux mille dix trois cents personnes"),
        ("fr", "le 06 12 34", "le zéro six douze trente quatre"),
        ("es", "1.000 y 3,14", "mil y tres coma catorce"),
        ("es-MX", "1,000 y 3.5", "mil y tres coma cinco"),
        ("it", "2.000", "duemila"),
        ("pt-BR", "1.500,75", "mil e quinhentos vírgula setenta e cinco"),
        ("ru", "1 000", "одна тысяча"),
        ("pl", "1 000", "tysiąc"),
        ("tr", "1.000", "bin"),
        ("ja", "1,000円", "千円"),
        ("ko", "1,000", "천"),
    ],
)
def test_separators_of_thousands_are_those_of_the_language(language, text, expected):
    pytest.importorskip("num2words")

    assert SPOKEN(text, language) == expected


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("de", "20 % und 1%", "zwanzig prozent und ein prozent"),
        ("de", "2,5\u00a0%", "zwei komma fünf prozent"),
        ("de", "in %", "in prozent"),
        ("fr", "20 %", "vingt pour cent"),
        ("es", "21%", "veintiuno por ciento"),
        ("it", "50 %", "cinquanta per cento"),
        (
            "ru",
            "1% 2% 5% 11% 21%",
            "один процент два процента пять процентов одиннадцать процентов двадцать один процент",
        ),
        ("pl", "2 $ 21 $ 1 $", "dwa dolary dwadzieścia jeden dolarów jeden dolar"),
        ("de", "12,50 €, 1 € und €5", "zwölf euro fünfzig ein euro und fünf euro"),
        ("fr", "12,50 € 1 € 3,00 €", "douze euros cinquante un euro trois euros"),
        ("es", "21 € 12,50 €", "veintiún euros doce euros con cincuenta"),
        ("it", "1.000 € 12,50 €", "mille euro dodici euro e cinquanta"),
        ("pt", "$2", "dois dólares"),
        ("de", "100 EUR", "einhundert euro"),
        ("de", "A4 und 20m", "a4 und 20m"),
    ],
)
def test_per_cent_signs_and_currencies_are_spoken_with_numbers(language, text, expected):
    pytest.importorskip("num2words")
    assert SPOKEN(text, language) == expected


def test_signs_are_dropped_where_digits_stay():
    assert TextNormalizer(NormalizerConfig(kind="auto"))("20 %", "de") == "20"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("1/2 cup", "one half cup"),
        ("1 1/2 cups", "one and one half cups"),
        ("1½ or 2¾", "one and one half or two and three quarters"),
        ("⅔ and ⅐", "two thirds and one seventh"),
        ("7 1/2%", "seven and one half percent"),
        ("9/11, 24/7, 1/2/2020", "nine eleven twenty four seven one two two thousand twenty"),
        ("$1.5bn", "one point five billion dollars"),
        ("$20k, £3m", "twenty thousand dollars three million pounds"),
        ("$5 bn", "five billion dollars"),
        ("$5 bills", "five dollars bills"),
        ("5€ and 20 $", "five euros and twenty dollars"),
        ("¥100", "one hundred yen"),
        ("12\u202f345 and 12\u00a0345", "twelve thousand three hundred forty five and " * 2),
        ("1,00,000", "one hundred thousand"),
    ],
)
def test_english_sums_fractions_and_groups_are_read(typed, said):
    said = said.removesuffix(" and ")
    assert ENGLISH(typed) == said
    assert ENGLISH(said) == said


def test_english_in_a_family_speaks_per_cent_too():
    text = "50% of ½ for $3"
    assert TextNormalizer(NormalizerConfig(kind="latin", numbers="words"))(text, "en") == (
        "fifty percent of one half for three dollars"
    )


@pytest.mark.timeout(60)
def test_long_texts_of_signs_take_linear_time():
    """Each opening quotation mark was compared with the rest of the text, and so would each group of digits be."""
    assert ENGLISH.normalize("‘" * 80_000) == ""
    assert ENGLISH.normalize("1" + "\u00a0111" * 20_000 + "1").startswith("one")
