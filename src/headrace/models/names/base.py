"""How a source names the decoder's tensors.

Our own names are `embed.weight`, `final_norm.weight`, `head.weight` and `layers.<i>.<module>.weight` or `.bias`, with
the modules attn_norm, q, k, v, q_norm, k_norm, o, attn_post_norm, mlp_norm, gate, up, down, mlp_post_norm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NameMap:
    """One source's names."""

    modules: Mapping[str, str]  # of the whole model
    layer_prefix: str  # with {} for the layer's number
    layer_modules: Mapping[str, str]
    ignored: tuple[str, ...] = ()  # patterns of tensors that are known and not needed
    aliases: tuple[tuple[str, str], ...] = ()  # (prefix in some files, what it stands for)

    def source_name(self, name: str) -> str:
        """The checkpoint's name of one of our tensors."""
        if name.startswith("layers."):
            _, layer, module, kind = name.split(".")
            return f"{self.layer_prefix.format(layer)}{self.layer_modules[module]}.{kind}"
        module, kind = name.split(".")
        return f"{self.modules[module]}.{kind}"

    def normalise(self, source_name: str) -> str:
        """A checkpoint's name with its variant prefix replaced."""
        for found, meant in self.aliases:
            if source_name.startswith(found):
                return meant + source_name[len(found) :]
        return source_name

    def is_ignored(self, source_name: str) -> bool:
        return any(re.fullmatch(pattern, source_name) for pattern in self.ignored)
