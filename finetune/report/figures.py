"""In words and short numbers: bytes, seconds, shares, counts."""

from __future__ import annotations

import math

__all__ = ["bytes_in_words", "count_in_words", "is_cost", "metric_in_words", "seconds_in_words", "share_in_words"]

_UNMEASURED = "–"


def bytes_in_words(size: float | None) -> str:
    """Returns a size with a decimal unit and three digits: ``1.61 GB``; a dash for None."""
    if size is None:
        return _UNMEASURED
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size) >= factor:
            scaled = size / factor
            digits = 2 if abs(scaled) < 10 else 1 if abs(scaled) < 100 else 0
            return f"{scaled:,.{digits}f} {unit}"
    return f"{size:.0f} bytes"


def seconds_in_words(seconds: float | None) -> str:
    """Returns a duration: ``47 s``, ``14 min 02 s``, ``3 h 05 min``; a dash for None."""
    if seconds is None:
        return _UNMEASURED
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(whole / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def count_in_words(count: float | None) -> str:
    """Returns a count: digits in groups up to a million, above that ``134.5 M``; a dash for None."""
    if count is None:
        return _UNMEASURED
    for unit, factor in (("G", 1e9), ("M", 1e6)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:,.0f}"


def share_in_words(share: float | None) -> str:
    """Returns a share in [0, 1] as a percentage with as many digits as tell it from zero; a dash for None."""
    if share is None or not math.isfinite(share):
        return _UNMEASURED
    digits = 1 if share == 0 or share >= 0.01 else 2 if share >= 0.001 else 4
    return f"{share:.{digits}%}".replace("%", " %")


def metric_in_words(metric: str, value: float | None) -> str:
    """Returns a metric's value: a percentage, except for losses and perplexities; a dash for None."""
    if value is None or not math.isfinite(value):
        return _UNMEASURED
    return f"{value:.3f}" if is_cost(metric) else share_in_words(value)


def is_cost(metric: str) -> bool:
    """Returns whether smaller is better, and the value is no share."""
    return metric.rpartition("/")[2] in ("loss", "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")
