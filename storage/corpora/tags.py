"""Removes the tags of transcripts: `<unk>`, `[noise]` and `(laughs)` are a transcriber's notes, not words.

One rule holds for all layouts:

- `<…>` is a tag if it starts with a letter or one of / ! ? | % _ # @: `<s>`, `</s>`, `<SPOKEN_NOISE>`;
- `[…]` and `{…}` are tags, unless a letter that has upper and lower case is attached to them: "th[at]-" is a word. Of
  Switchboard's `[laughter-yeah]` the word stays;
- `(…)` and `*…*` are tags if all their words describe sounds: `(laughs)`, `*clears throat*`. Other words in
  parentheses were said;
- `++…++` (fillers in SphinxTrain's transcripts), `!SIL`, and a number in parentheses that is attached to a word, the
  pronunciation in CMU's dictionaries: "the(2)".
"""

import re
from collections import Counter

_LONGEST = 80
"""Characters inside the brackets of the longest tag."""
_MOST_KINDS = 200
"""Different tags that are counted by themselves: some contain times."""
OTHERS = "others"
"""Under this name, further different tags are counted."""
_TAG = re.compile(
    rf"""
      <(?=[^\W\d_]|[/!?|%_\#@])[^<>\n]{{0,{_LONGEST}}}>
    | (?P<bracket>[\[［【][^\[\]［］【】\n]{{0,{_LONGEST}}}[\]］】] | \{{[^{{}}\n]{{0,{_LONGEST}}}\}})
    | (?P<variant>(?<=[^\W\d_])\(\d{{1,2}}\)(?!\w))
    | (?P<sound>[(（][^()（）\n]{{1,{_LONGEST}}}[)）] | (?<![\w*])\*[^\s*](?:[^*\n]{{0,{_LONGEST}}}[^\s*])?\*(?![\w*]))
    | \+\+\w{{1,{_LONGEST}}}\+\+
    | (?<!\S)!(?:SIL|NULL|ENTER|EXIT|UNK)(?!\S)
    """,
    re.VERBOSE,
)
_LAUGHED = re.compile(r"\[laughter-([^\s\[\]]+)\]")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SOUNDS = _words(
    """
    aplausos applauding applaudissements applauds applaus applause applausi atmen atmet bark barking barks beep
    beeping beeps blank_audio breath breathes breathing breaths bruit burp buzzing chatter cheering cheers chime
    chimes chuckle chuckles chuckling clap clapping claps clears click clicking clicks cough coughing coughs crackle
    cross-talk crosstalk cry crying disfluency echo eps exhale exhales fil filler foreign fp gasp gasps giggle
    giggles giggling groan groans growl grunt grunts gulp hes hesitation hiccup hiccups hiss hum humming hums husten
    hustet inaudible incomprehensible indiscernible indistinct inhale inhales jingle lachen lacht laugh laughing
    laughs laughter lip lip-smack lipsmack moan moans muffled mumble mumbles mumbling music musica musical musik
    musique noise noises non-speech nonspeech ns nse nsn oov overlap overlapping pause pauses rauschen redacted
    respiration ringing rings rire rires risa risas risate risos ruido rumore rustle rustling screaming screams
    seufzt sigh sighing sighs sil silence silencio silent sing singing sings siren smack smacking smacks sneeze
    sneezes sneezing sniff sniffing sniffle sniffles sniffs snort snorts sob sobbing sobs soupir spk spn
    spoken_noise stille suspiro throat-clearing tos toux tsk tut typing unclear unintelligible unk unknown
    vocalized-noise vocalized_noise vocnoise wheeze whispering whispers whistle whistles whistling yawn yawning
    yawns gelächter geräusch geräusche música ruído räuspern räuspert unverständlich аплодисменты вздох кашель
    музыка смеется смех смеётся тишина шум 咳 噪音 拍手 掌声 笑 笑声 静音 音乐 音楽
    """
)
"""Words for sounds and for what was not understood, in the languages of public corpora."""
_WITH_SOUNDS = _words(
    """
    a all an and at audience background bell bells both clearing clock crowd dial dog door from further heavily
    heavy horn in light lightly loud loudly man mouth noisily of on people phone playing quietly soft softly speaker
    speakers static the throat together tone wind woman
    """
)
"""Words that occur beside them: "audience laughing loudly"."""


class Tags:
    """Removes tags from transcripts, and counts them.

    Attributes:
        counts: How often each tag was removed.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def without(self, text: str) -> str:
        """The words of a transcript."""
        if not any(mark in text for mark in "<[{(*+!［【（"):
            return text
        removed = _TAG.sub(self._replaced, text)
        return text if removed == text else " ".join(removed.split())

    def _replaced(self, match: re.Match[str]) -> str:
        """What stays of a match: nothing of a tag, all of other text."""
        tag = match[0]
        if match["bracket"] and (laughed := _LAUGHED.fullmatch(tag)):
            self.add("[laughter-…]")
            return laughed[1]
        if match["bracket"] and _in_word(match):
            return tag
        if match["sound"] and not _is_sound(tag):
            return tag[0] + _TAG.sub(self._replaced, tag[1:-1]) + tag[-1]
        self.add("(2)" if match["variant"] else tag)
        return "" if match["variant"] else " "

    def add(self, tag: str, count: int = 1) -> None:
        """Count a tag."""
        self.counts[tag if tag in self.counts or len(self.counts) < _MOST_KINDS else OTHERS] += count


def _in_word(match: re.Match[str]) -> bool:
    """Whether letters are attached to a bracket; writing systems without case also write words without spaces."""
    text = match.string
    around = text[max(0, match.start() - 1) : match.start()] + text[match.end() : match.end() + 1]
    return any(character.islower() or character.isupper() for character in around)


def _is_sound(tag: str) -> bool:
    words = re.findall(r"[^\s,;.…]+", tag[1:-1].lower())
    return any(word in _SOUNDS for word in words) and all(word in _SOUNDS or word in _WITH_SOUNDS for word in words)
