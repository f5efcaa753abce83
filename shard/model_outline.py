"""How a model names its parts, and which tensors of a checkpoint a layer range of it needs: names alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile

from shared.layers import LayerRange


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """How a model names the parts that decide which tensors a range needs.

    Args:
        layer_list: Dotted path of the list of decoder layers, for example ``model.layers``.
        num_layers: Decoder layers of the whole model.
        embedding: Dotted name of the input embedding's weight.
        head: Dotted name of the output head's weight.
        tied: The head computes with the embedding's weight.
        ties: Parameter → the one whose tensor it shares; head and embedding may be among them.
        embeds_everywhere: Every range needs the embedding, not only the first.
        other_parts: Dotted paths of what has nothing to do with text: towers for images or sound, and what joins them.
    """

    layer_list: str
    num_layers: int
    embedding: str
    head: str
    tied: bool
    ties: Mapping[str, str] = field(default_factory=dict)
    embeds_everywhere: bool = False
    other_parts: tuple[str, ...] = ()

    @property
    def embedding_module(self) -> str:
        """Dotted path of the input embedding."""
        return self.embedding.removesuffix(".weight")

    @property
    def head_module(self) -> str:
        """Dotted path of the output head."""
        return self.head.removesuffix(".weight")

    def is_last(self, layers: LayerRange) -> bool:
        """Whether a range ends with the model's last layer."""
        return layers.end == self.num_layers

    def embeds(self, layers: LayerRange) -> bool:
        """Whether a range has the input embedding."""
        return layers.start == 0 or self.embeds_everywhere

    def holds(self, parameter: str, layers: LayerRange) -> bool:
        """Whether a range has this parameter of the model."""
        if parameter.startswith(f"{self.head_module}."):
            return self.is_last(layers)
        if parameter.startswith(f"{self.embedding_module}."):
            return self.embeds(layers)
        return not parameter.startswith(f"{self.layer_list}.") or layer_index(parameter, self.layer_list) in layers

    def ties_within(self, layers: LayerRange) -> dict[str, str]:
        """`ties` among the parameters that a range has, whether or not it has the one that all share with."""
        ties: dict[str, str] = {}
        for group in self.tied_groups():
            held = [parameter for parameter in group if self.holds(parameter, layers)]
            ties.update((parameter, held[0]) for parameter in held[1:])
        return ties

    def tied_as_stored(self, names: Iterable[str]) -> ModelOutline:
        """Head and embedding are tied exactly if the checkpoint has no tensor for the head."""
        tied = not any(_same_parameter(name, self.head) for name in names)
        others = {parameter: source for parameter, source in self.ties.items() if parameter != self.head}
        return replace(self, tied=tied, ties=others | ({self.head: self.embedding} if tied else {}))

    def tied_groups(self) -> list[list[str]]:
        """Parameters that share one tensor, the one that all share with first."""
        groups: dict[str, list[str]] = {}
        for parameter, source in self.ties.items():
            groups.setdefault(source, [source]).append(parameter)
        return list(groups.values())


def find_other_parts(modules: Iterable[str], outline: ModelOutline) -> tuple[str, ...]:
    """Of a model with more than text: what stands beside the path to layers and embedding, the head apart.

    Args:
        modules: Dotted paths of all modules.
        outline: Of the model.
    """
    text = common_prefix(outline.layer_list, outline.embedding)
    found: list[str] = []
    for name in modules:
        parent, _, _ = name.rpartition(".")
        is_beside = text.startswith(f"{parent}." if parent else "") and not text.startswith(f"{name}.")
        is_within_text = name.startswith(text) or not text
        if name and is_beside and not is_within_text and name != outline.head_module:
            found.append(name)
    return tuple(found)


def layer_index(name: str, layer_list: str) -> int | None:
    """Which decoder layer a tensor belongs to; None for embeddings, norms and heads.

    The number that follows the last name of the list's path for the first time: a checkpoint may have another
    prefix than the model, and experts and the like have their own numbers further right.
    """
    list_name = layer_list.rpartition(".")[2]
    for part, following in pairwise(name.split(".")):
        if part == list_name and following.isdecimal():
            return int(following)
    return None


def select_names(
    names: Collection[str], outline: ModelOutline, layers: LayerRange, *, is_part: bool = False
) -> dict[str, str]:
    """Choose the tensors that a range needs: name in the checkpoint → name to load it as.

    The two names differ where a checkpoint keeps once what the model has twice: of tied parameters, a range loads the
    one that is stored as the one that it has. What belongs to no layer and is neither embedding nor head (final norm,
    learned positions, per-layer embeddings) is small or needed everywhere, and is loaded by every range.

    Args:
        names: Of all tensors in the checkpoint.
        outline: Of the model.
        layers: The range.
        is_part: The checkpoint is of a larger model, of which this one is the text part: its tensors are found by
            where the embedding is, and named as in this model; all others are left out.
    """
    as_model = _names_as_model(names, outline) if is_part else {name: name for name in names}
    root = checkpoint_root(as_model.values(), outline)
    embeddings = [name for name in as_model if _same_parameter(as_model[name], outline.embedding)]
    heads = [name for name in as_model if _same_parameter(as_model[name], outline.head)]
    special = {*embeddings, *heads}
    chosen = {
        name: known
        for name, known in as_model.items()
        if name not in special and _is_in_range(known, root, outline, layers)
    }
    if outline.tied:
        embeddings = heads = embeddings or heads
    if outline.embeds(layers):
        chosen.update((name, outline.embedding) for name in embeddings)
    if outline.is_last(layers) and not (outline.tied and outline.embeds(layers)):
        chosen.update((name, outline.head) for name in heads)
    return chosen | _select_tied(as_model, outline, layers, chosen)


def checkpoint_root(names: Iterable[str], outline: ModelOutline) -> str | None:
    """What stands in the checkpoint before the path that leads to the layers and to the embedding alike.

    For example ``language_model.model.`` where the model has ``model.``; None when it cannot be told.
    """
    common = common_prefix(outline.layer_list, outline.embedding)
    embedding, layer_list = outline.embedding.removeprefix(common), outline.layer_list.removeprefix(common)
    known = set(names)
    roots = {name.removesuffix(embedding) for name in known if name == embedding or name.endswith(f".{embedding}")}
    having_layers = [root for root in roots if any(name.startswith(f"{root}{layer_list}.0.") for name in known)]
    return min(having_layers, key=lambda root: (root != common, len(root), root), default=None)


def _names_as_model(names: Collection[str], outline: ModelOutline) -> dict[str, str]:
    root = checkpoint_root(names, outline)
    if root is None:
        return {}
    common = common_prefix(outline.layer_list, outline.embedding)
    as_model = {name: f"{common}{name.removeprefix(root)}" for name in names if name.startswith(root)}
    return as_model | {name: outline.head for name in names if _same_parameter(name, outline.head)}


def _select_tied(
    as_model: Mapping[str, str], outline: ModelOutline, layers: LayerRange, chosen: Collection[str]
) -> dict[str, str]:
    """Of parameters that share one tensor, and are neither embedding nor head: what is stored, as what is held."""
    extra: dict[str, str] = {}
    for group in outline.tied_groups():
        if outline.embedding in group:
            continue
        held = [parameter for parameter in group if outline.holds(parameter, layers)]
        stored = [name for name, known in as_model.items() if any(_same_parameter(known, each) for each in group)]
        if held and stored and not any(name in chosen for name in stored):
            extra[stored[0]] = held[0]
    return extra


def _is_in_range(name: str, root: str | None, outline: ModelOutline, layers: LayerRange) -> bool:
    """Other parts of a larger model have numbered layers too: only those below the root are decoder layers."""
    below = outline.layer_list.removeprefix(common_prefix(outline.layer_list, outline.embedding))
    if root is not None and not name.startswith(f"{root}{below}."):
        return True
    layer = layer_index(name, outline.layer_list)
    return layer is None or layer in layers


def common_prefix(one: str, other: str) -> str:
    """The dotted path that both begin with, with a dot behind it; empty when there is none."""
    common = [
        a for a, b in takewhile(lambda pair: pair[0] == pair[1], zip(one.split("."), other.split("."), strict=False))
    ]
    return "".join(f"{part}." for part in common)


def _same_parameter(name: str, parameter: str) -> bool:
    """Whether a checkpoint's name means the model's parameter: one may carry a prefix that the other lacks."""
    return name == parameter or name.endswith(f".{parameter}") or parameter.endswith(f".{name}")
