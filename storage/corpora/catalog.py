"""Catalog of freely downloadable corpora with licences, addresses and checksums.

Digests are those given by the publishers or by well-known toolkits; if none is published, only the size announced by
the server is checked.
"""

import difflib
from dataclasses import dataclass

from storage.corpora.base import CorpusError

_SLR = "https://www.openslr.org/resources"
_MLS = "https://dl.fbaipublicfiles.com/mls"


@dataclass(frozen=True)
class Archive:
    """One file to download.

    Attributes:
        url: its address.
        size: approximate size in megabytes.
        digest: "md5:…" or "sha256:…"; empty if none is published.
    """

    url: str
    size: int
    digest: str = ""

    @property
    def name(self) -> str:
        """The file name."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Download:
    """A corpus that can be downloaded.

    Attributes:
        kind: its layout, a key of `READERS`.
        licence: its licence.
        link: its web page.
        parts: archive of each part by name.
        default: parts to download by default.
        folder: folder of the unpacked archives, relative to the corpus' folder.
    """

    kind: str
    licence: str
    link: str
    parts: dict[str, Archive]
    default: tuple[str, ...]
    folder: str


def _librispeech() -> dict[str, Archive]:
    table = {
        "dev-clean": (337, "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3"),
        "dev-other": (314, "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365"),
        "test-clean": (346, "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23"),
        "test-other": (328, "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29"),
        "train-clean-100": (6300, "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2"),
        "train-clean-360": (23000, "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf"),
        "train-other-500": (30000, "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2"),
    }
    return {part: Archive(f"{_SLR}/12/{part}.tar.gz", size, f"sha256:{d}") for part, (size, d) in table.items()}


def _mls() -> dict[str, Archive]:
    sizes = {"german": 29600, "dutch": 23000, "french": 16000, "spanish": 14000, "italian": 3800}
    sizes |= {"portuguese": 2500, "polish": 1600}
    return {name: Archive(f"{_MLS}/mls_{name}_opus.tar.gz", size) for name, size in sizes.items()}


CATALOG: dict[str, Download] = {
    "mini_librispeech": Download(
        kind="librispeech",
        licence="CC BY 4.0",
        link="https://www.openslr.org/31/",
        parts={
            "dev-clean-2": Archive(f"{_SLR}/31/dev-clean-2.tar.gz", 126, "md5:6d7ab67ac6a1d2c993d050e16d61080d"),
            "train-clean-5": Archive(f"{_SLR}/31/train-clean-5.tar.gz", 333, "md5:5df7d4e78065366204ca6845bb08f490"),
        },
        default=("dev-clean-2", "train-clean-5"),
        folder="LibriSpeech",
    ),
    "librispeech": Download(
        kind="librispeech",
        licence="CC BY 4.0",
        link="https://www.openslr.org/12/",
        parts=_librispeech(),
        default=("dev-clean", "test-clean", "train-clean-100"),
        folder="LibriSpeech",
    ),
    "mls": Download(
        kind="mls",
        licence="CC BY 4.0",
        link="https://www.openslr.org/94/",
        parts=_mls(),
        default=("polish",),
        folder=".",
    ),
    "tedlium": Download(
        kind="tedlium",
        licence="CC BY-NC-ND 3.0",
        link="https://www.openslr.org/51/",
        parts={
            "release2": Archive(
                f"{_SLR}/19/TEDLIUM_release2.tar.gz",
                34300,
                "sha256:93281b5fcaaae5c88671c9d000b443cb3c7ea3499ad12010b3934ca41a7b9c58",
            ),
            "release3": Archive(
                f"{_SLR}/51/TEDLIUM_release-3.tgz",
                50600,
                "sha256:ad1e454d14d1ad550bc2564c462d87c7a7ec83d4dc2b9210f22ab4973b9eccdb",
            ),
        },
        default=("release3",),
        folder=".",
    ),
    "an4": Download(
        kind="an4",
        licence="free for any use, by Carnegie Mellon University's page",
        link="http://www.speech.cs.cmu.edu/databases/an4/",
        parts={
            "sphere": Archive(
                "https://dldata-public.s3.us-east-2.amazonaws.com/an4_sphere.tar.gz",
                64,
                "sha256:a0525579493735d32b60fb6fa5975dd0eaacde087b0a4eeb7f13b7ef33077b12",
            )
        },
        default=("sphere",),
        folder="an4",
    ),
    "speechocean762": Download(
        kind="speechocean762",
        licence="CC BY 4.0",
        link="https://www.openslr.org/101/",
        parts={"all": Archive(f"{_SLR}/101/speechocean762.tar.gz", 520)},
        default=("all",),
        folder="speechocean762",
    ),
    "fsdd": Download(
        kind="fsdd",
        licence="CC BY-SA 4.0",
        link="https://github.com/Jakobovski/free-spoken-digit-dataset",
        parts={"v1.0.8": Archive("https://github.com/Jakobovski/free-spoken-digit-dataset/archive/v1.0.8.zip", 13)},
        default=("v1.0.8",),
        folder="free-spoken-digit-dataset-1.0.8",
    ),
}


def find_download(name: str, catalog: dict[str, Download] | None = None) -> Download:
    """Look up a corpus in the catalog.

    Raises:
        CorpusError: there is no corpus of this name; the message suggests the most similar one.
    """
    known = CATALOG if catalog is None else catalog
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CorpusError(f"{name!r} cannot be downloaded: {hint}There are: {', '.join(sorted(known))}.")
    return known[name]
