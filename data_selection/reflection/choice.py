"""Which version of a row the student prefers (arXiv 2402.10110, section 3.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["ORIGINS", "Origin", "VersionScores", "excluded", "preferred"]

Origin = Literal["original", "instruction", "response", "both"]
"""What of a version the teacher wrote: nothing; instruction and answer, by reflecting on the instruction; the answer
alone; or, by reflecting on both in turn, the answer to its own instruction."""
ORIGINS: tuple[Origin, ...] = ("original", "instruction", "response", "both")


@dataclass(frozen=True)
class VersionScores:
    """What the student says of one version.

    Attributes:
        ifd: Instruction-following difficulty.
        r_ifd: Reversed IFD.
    """

    ifd: float
    r_ifd: float


def preferred(versions: Mapping[Origin, VersionScores]) -> Origin:
    """Returns the version that is kept: of two instructions the harder one, of two answers that which fits better.

    The instruction is the teacher's where its IFD is higher. Its answer is that of the reflection on the response
    where its r-IFD is lower.

    Args:
        versions: Those that there are, ``original`` among them.
    """
    harder = "instruction" in versions and versions["instruction"].ifd > versions["original"].ifd
    asked: Origin = "instruction" if harder else "original"
    answered: Origin = "both" if harder else "response"
    fits_better = answered in versions and versions[answered].r_ifd < versions[asked].r_ifd
    return answered if fits_better else asked


def excluded(origin: Origin, scores: VersionScores, *, keep: Literal["improved", "all"]) -> str:
    """Returns why the preferred version is left out, or nothing.

    Args:
        origin: Which version it is.
        scores: What it scores.
        keep: ``improved`` keeps only answers that come of a reflection on the response, as the published code does.
    """
    if scores.ifd >= 1:
        return "the instruction does not help to predict the answer"
    if scores.r_ifd >= 1:
        return "the answer does not help to guess the instruction"
    if keep == "improved" and origin not in ("response", "both"):
        return "no answer of the teacher fits better"
    return ""
