"""Search in English and 中文: words of letters, and pairs of neighbouring Chinese characters."""

from __future__ import annotations

import re

from sphinx.search import SearchLanguage

WORDS = re.compile(r"[一-鿿]+|[^\W一-鿿]+")


class Pairs(SearchLanguage):
    """A text of both languages; a Chinese phrase is found by the pairs of its characters."""

    lang = "zh"
    language_name = "Chinese"
    stopwords = frozenset({"a", "an", "and", "are", "as", "at", "be", "by", "for", "in", "is",
                           "it", "of", "on", "or", "that", "the", "to", "with"})  # fmt: skip
    js_splitter_code = """
    function splitQuery(query) {
      const words = /[\\u4e00-\\u9fff]+|[^\\s\\u4e00-\\u9fff!-\\/:-@\\[-^`{-~]+/g;
      return (query.match(words) ?? []).flatMap((word) =>
        /[\\u4e00-\\u9fff]/.test(word) && word.length > 1
          ? Array.from({ length: word.length - 1 }, (_, at) => word.slice(at, at + 2))
          : [word],
      );
    }
    """

    def split(self, input: str) -> list[str]:
        """The words of a text.

        >>> Pairs({}).split("看 attention 注意力")
        ['看', 'attention', '注意', '意力']
        """
        found = []
        for word in WORDS.findall(input):
            if "一" <= word[0] <= "鿿" and len(word) > 1:
                found += [word[at : at + 2] for at in range(len(word) - 1)]
            else:
                found.append(word)
        return found

    def stem(self, word: str) -> str:
        """The word itself: a search for a part of it finds it, too."""
        return word

    def word_filter(self, word: str) -> bool:
        """True if a word is indexed."""
        return word not in self.stopwords
