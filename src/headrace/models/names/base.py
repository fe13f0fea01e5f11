"""How a source names the decoder's tensors.

Our own names are `embed.weight`, `final_norm.weight`, `head.weight` and `layers.<i>.<module>.weight` or `.bias`, with
the modules attn_norm, q, k, v, q_norm, k_norm, o, attn_post_norm, mlp_norm, gate, up, down, mlp_post_norm. A layer with
experts has router (its bias corrects the choice), experts.<e>.gate, experts.<e>.up, experts.<e>.down, and may have
shared_gate, shared_up, shared_down and shared_expert_gate.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class NameMap:
    """One source's names."""

    modules: Mapping[str, str]  # of the whole model
    layer_prefix: str  # with {} for the layer's number
    layer_modules: Mapping[str, str]  # of a module, or of a tensor where the source's name does not end like ours
    ignored: tuple[str, ...] = ()  # patterns of tensors that are known and not needed
    aliases: tuple[tuple[str, str], ...] = ()  # (prefix in some files, what it stands for)
    infixes: tuple[tuple[str, str], ...] = ()  # likewise, anywhere in a name
    expert_modules: Mapping[str, str] = field(default_factory=dict)  # with {} for the expert's number
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer tensors that hold all experts, [E, rows, columns]: the modules whose rows are stacked in each."""

    def source_name(self, name: str) -> str:
        """The checkpoint's name of one of our tensors."""
        if name.startswith("layers."):
            _, layer, *expert, module, kind = name.split(".")
            prefix = self.layer_prefix.format(layer)
            if expert:
                return f"{prefix}{self.expert_modules[module].format(expert[1])}.{kind}"
            whole = self.layer_modules.get(f"{module}.{kind}")
            return prefix + (whole or f"{self.layer_modules[module]}.{kind}")
        module, kind = name.split(".")
        return f"{self.modules[module]}.{kind}"

    def normalise(self, source_name: str) -> str:
        """A checkpoint's name with the variant parts of it replaced."""
        for found, meant in self.infixes:
            source_name = source_name.replace(found, meant)
        for found, meant in self.aliases:
            if source_name.startswith(found):
                return meant + source_name[len(found) :]
        return source_name

    def layer_name(self, source_name: str) -> tuple[str, str] | None:
        """The number of a tensor's layer and the rest of its name; None for a tensor of the whole model."""
        before, after = self.layer_prefix.split("{}")
        layer, found, rest = source_name.removeprefix(before).partition(after)
        return (layer, rest) if source_name.startswith(before) and found and layer.isdecimal() else None

    def is_ignored(self, source_name: str) -> bool:
        return any(re.fullmatch(pattern, source_name) for pattern in self.ignored)
