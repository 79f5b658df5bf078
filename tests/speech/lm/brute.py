"""Language models by their definitions, with dictionaries: references for the fast implementations."""

from collections import Counter, defaultdict
from functools import cache

START, END, UNKNOWN = "<s>", "</s>", "<unk>"


def padded(sentences):
    return [[START, *sentence, END] for sentence in sentences]


def raw_counts(sentences, order):
    """All n-grams of each order; one <s> begins a sentence."""
    counts = [Counter() for _ in range(order + 1)]
    for words in padded(sentences):
        for n in range(1, order + 1):
            for at in range(len(words) - n + 1):
                if n > 1 or words[at] != START:
                    counts[n][tuple(words[at : at + n])] += 1
    return counts


def adjusted_counts(raw, order):
    """Kneser-Ney's: different words to the left, except at the highest order and behind <s>."""
    adjusted = [Counter() for _ in range(order + 1)]
    adjusted[order] = Counter(raw[order])
    for n in range(1, order):
        for gram in raw[n + 1]:
            if gram[1] != START:
                adjusted[n][gram[1:]] += 1
        for gram, count in raw[n].items():
            if gram[0] == START:
                adjusted[n][gram] = count
    return adjusted


class Brute:
    """p(w | h) by recursion over shorter contexts, Chen and Goodman's equations 21 to 26."""

    def __init__(self, sentences, order, method="kneser-ney", cutoffs=(), allowed=None, fallback=None):
        self.order, self.method = order, method
        self.raw = raw_counts(sentences, order)
        self.counts = adjusted_counts(self.raw, order) if method == "kneser-ney" else self.raw
        limits = [0, *cutoffs, *[cutoffs[-1] if cutoffs else 0] * order]
        words = {w for sentence in sentences for w in sentence}
        kept = {w for w in words if self.raw[1][(w,)] > limits[1] and (allowed is None or w in allowed)}
        self.words = kept | {END, UNKNOWN}
        self.kept = [
            {
                gram
                for gram, count in self.raw[n].items()
                if all(w in self.words or w == START for w in gram)
                and (count > limits[n] or (n == 1 and gram == (END,)))
            }
            for n in range(1, order + 1)
        ]
        self.discounts = [None, *(self.discount(n, fallback) for n in range(1, order + 1))]
        self.continuations = [None] + [defaultdict(dict) for _ in range(order)]
        for n in range(1, order + 1):
            for gram, count in self.counts[n].items():
                self.continuations[n][gram[:-1]][gram[-1]] = count
        self.prob = cache(self.prob)

    def discount(self, n, fallback):
        if self.method == "witten-bell":
            return {1: 0.0, 2: 0.0, 3: 0.0}
        n_ = Counter(self.counts[n].values())
        try:
            y = n_[1] / (n_[1] + 2 * n_[2])
            amounts = {k: k - (k + 1) * y * n_[k + 1] / n_[k] for k in (1, 2, 3)}
            assert all(0 <= amounts[k] <= k for k in amounts)
        except (ZeroDivisionError, AssertionError):
            if fallback is None:
                raise ValueError("no discounts") from None
            amounts = dict(zip((1, 2, 3), fallback, strict=True))
        return amounts

    def prob(self, word, context):
        """p(word | context), the context a tuple of at most order - 1 words."""
        n = len(context) + 1
        lower = self.prob(word, context[1:]) if n > 1 else 1 / len(self.words)
        seen = self.continuations[n].get(context)
        if not seen:
            return lower
        extra = len(seen) if self.method == "witten-bell" else 0
        total, own, free = sum(seen.values()) + extra, 0.0, float(extra)
        for other, count in seen.items():
            if (*context, other) in self.kept[n - 1]:
                free += self.discounts[n][min(count, 3)]
                if other == word:
                    own = count - self.discounts[n][min(count, 3)]
            else:
                free += count
        return (own + free * lower) / total
