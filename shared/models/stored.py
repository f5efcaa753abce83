"""Checkpoints that are stored quantized: of which stored tensors each weight of the model is made. Pure.

A format says two things. From names alone, which stored tensors make up one weight (`group`), so that a layer range
knows what is its own; then, from the files' headers, whether they fit each other and what comes out (`join`). The
arithmetic is in `shard.dequantize`; planners need only shapes and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from shared.models.errors import ModelUnavailable
from shared.models.tensors import TensorEntry

Encoding = Literal["scaled", "int4", "mxfp4"]
"""``scaled``: numbers of 8 bits, each times the scale of its block; ``int4``: the same of 4 bits, from -8 to 7, two to
a byte; ``mxfp4``: floats of 4 bits, two to a byte, 32 to a scale."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight that is stored in few bits beside its scales, and held as a float once it is loaded.

    Args:
        name: The weight's, as if it were stored plain.
        shape: The weight's.
        codes: The stored numbers.
        scales: What they are to be multiplied by.
        encoding: How a weight is made of both.
        block: Rows and columns of the stored matrix that share a scale.
    """

    name: str
    shape: tuple[int, ...]
    codes: TensorEntry
    scales: TensorEntry
    encoding: Encoding
    block: tuple[int, int]

    @property
    def parts(self) -> tuple[TensorEntry, ...]:
        """The stored tensors it is made of."""
        return (self.codes, self.scales)

    @property
    def num_elements(self) -> int:
        """Elements of the weight."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, scales included."""
        return self.codes.nbytes + self.scales.nbytes

    @property
    def is_float(self) -> bool:
        """Whether it is converted to what a stage computes in: always."""
        return True


Weight = TensorEntry | QuantizedTensor
"""A weight of the model as a checkpoint has it."""


class StoredFormat(Protocol):
    """How a checkpoint stores its weights."""

    @property
    def dtype(self) -> str | None:
        """The float type that the config names for the whole model, as headers write it, where that decides."""
        ...

    def group(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Name of each weight → names of the stored tensors that it is made of."""
        ...

    def join(self, name: str, parts: tuple[TensorEntry, ...]) -> Weight:
        """One weight, from the tensors that `group` named for it.

        Raises:
            ModelUnavailable: `weights_corrupt`, naming the tensor that is missing or does not fit.
        """
        ...


@dataclass(frozen=True, slots=True)
class Plain:
    """Every tensor is a weight."""

    dtype: str | None = None

    def group(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Each by itself."""
        return {name: (name,) for name in names}

    def join(self, name: str, parts: tuple[TensorEntry, ...]) -> Weight:  # noqa: ARG002 - it is the tensor's own
        """The tensor itself; numbers of 8 bits are none without a word on their scales."""
        (tensor,) = parts
        return require_plain(tensor)


FLOATS_8: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0"})
PLAIN: Final = Plain()


def require_plain(tensor: TensorEntry) -> TensorEntry:
    """The tensor, if it can be read without scales.

    Raises:
        ModelUnavailable: `weights_corrupt`, where it would be noise without.
    """
    if tensor.dtype in FLOATS_8:
        raise unfit(tensor.name, f"is stored as {tensor.dtype}, and nothing says by which scales to read it")
    return tensor


def check_field(field: str, value: object, allowed: tuple[object, ...]) -> None:
    """Whether a field of `quantization_config` has a value that is known.

    Raises:
        ModelUnavailable: `model_unsupported`, with those that are.
    """
    if value not in allowed:
        known = " or ".join("nothing" if each is None else str(each) for each in allowed)
        message = (
            f"the checkpoint is stored quantized, with {field} {value!r} in its config.json: {known} can be loaded"
        )
        raise ModelUnavailable("model_unsupported", message, field=field)


def unfit(name: str, what: str) -> ModelUnavailable:
    """A tensor cannot be read as its format would have it."""
    return ModelUnavailable("weights_corrupt", f"tensor {name!r} {what}", tensor=name)


def join_all(stored: StoredFormat, tensors: Iterable[TensorEntry]) -> list[Weight]:
    """The weights that these tensors make.

    Raises:
        ModelUnavailable: `weights_corrupt`.
    """
    by_name: Mapping[str, TensorEntry] = {tensor.name: tensor for tensor in tensors}
    groups = stored.group(by_name)
    return [stored.join(name, tuple(by_name[part] for part in parts)) for name, parts in groups.items()]


def stored_settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a config says of how its checkpoint is quantized, if anything."""
    nested = config.get("text_config")
    found = config.get("quantization_config") or (nested if isinstance(nested, dict) else {}).get("quantization_config")
    if found is None or isinstance(found, dict):
        return found
    raise ModelUnavailable("model_unsupported", "quantization_config in config.json is no JSON object")
