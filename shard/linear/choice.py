"""Which kernel a stage's linear layers run on: the fastest on this machine, by a short measurement.

No property of a CPU says it: which of two kernels wins depends on its instructions, its memory and torch's version.
What was found is kept in the cache folder, under all that it depends on.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from shard.linear.floats import HalfFbgemm, OneDnn
from shard.linear.int4 import Int4Groups
from shard.linear.int8 import Int8Fbgemm, Int8OneDnn, Int8Weight
from shard.linear.native import native_absence
from shard.linear.packed import PackedLinear, pack
from shard.linear.rows import Bf16Rows, Int4Rows, Int8Rows
from shared.errors import LoadFailed
from shared.options import QUANTIZE_NONE
from shared.replace_file import replace_file

CACHE_FILE = "kernels.json"
"""Beside what is kept of the machine for joining."""
PLAIN = "plain"
"""No packing: torch's own `linear`."""

KERNELS: dict[str, tuple[type[PackedLinear], ...]] = {
    QUANTIZE_NONE: (Bf16Rows, OneDnn, HalfFbgemm),
    "int8": (Int8Rows, Int8Fbgemm, Int8OneDnn, Int8Weight),
    "int4": (Int4Rows, Int4Groups),
}
"""What may be chosen for each `--quantize`."""

SIZE, MATRICES = 2048, 6
"""Matrices of the measurement: as large as a layer's, together larger than most caches."""
ROWS_MANY = 32
"""Rows of a measured prefill: enough to be bound by arithmetic, few enough to be quick."""
REPEATS = 5
"""The shortest processor time of so many counts: waiting for other work on the machine does not."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What linear layers are packed for, in the order in which kernels are offered a matrix; none leaves them plain."""

    kernels: tuple[type[PackedLinear], ...]
    reason: str

    @property
    def name(self) -> str:
        """The first kernel's name."""
        return self.kernels[0].name if self.kernels else PLAIN


def choose_kernels(
    quantize: str, device: torch.device, dtype: torch.dtype, cache_dir: Path | None = None
) -> KernelChoice:
    """Pick the kernel for a stage's linear layers.

    Args:
        quantize: A key of `KERNELS`.
        device: Where the stage computes.
        dtype: What it computes in.
        cache_dir: Where measurements are kept; None measures anew.

    Raises:
        LoadFailed: `quantize_unsupported` for a name that is not in `KERNELS`, or without a kernel on this device.
    """
    if quantize not in KERNELS:
        message = f"quantize must be {', '.join(KERNELS)}, got {quantize!r}"
        raise LoadFailed("quantize_unsupported", message, quantize=quantize)
    candidates = [kernel for kernel in KERNELS[quantize] if device.type == "cpu" and kernel.is_available(dtype)]
    if quantize == QUANTIZE_NONE:
        return _choose_plain_or(candidates, dtype, cache_dir)
    if not candidates:
        message = f"quantize {quantize} has no kernel for {device.type} in this torch: give none, or a CPU"
        raise LoadFailed("quantize_unsupported", message, quantize=quantize, device=str(device))
    fastest, reason = _fastest(candidates, dtype, cache_dir)
    fallbacks = () if quantize == "int8" else choose_kernels("int8", device, dtype, cache_dir).kernels
    return KernelChoice((fastest, *fallbacks), reason)


def _choose_plain_or(candidates: list[type[PackedLinear]], dtype: torch.dtype, cache_dir: Path | None) -> KernelChoice:
    if not candidates:
        return KernelChoice((), "there is no other")
    fastest, reason = _fastest([PlainLinear, *candidates], dtype, cache_dir)
    return KernelChoice(() if fastest is PlainLinear else (fastest,), reason)


class PlainLinear(PackedLinear):
    """torch's own `linear`, to measure the others against."""

    name: ClassVar[str] = PLAIN
    in_blocks: ClassVar[bool] = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._weight = weight

    @staticmethod
    def packed_bytes(out_features: int, in_features: int) -> int:
        """See `PackedLinear.packed_bytes`."""
        return 4 * out_features * in_features  # in float32; no model is packed into it

    @classmethod
    def is_available(cls, dtype: torch.dtype) -> bool:
        """Always."""
        return dtype.is_floating_point

    def multiply(self, inputs: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear.multiply`."""
        return nn.functional.linear(inputs, self._weight)


def _fastest(
    candidates: Sequence[type[PackedLinear]], dtype: torch.dtype, cache_dir: Path | None
) -> tuple[type[PackedLinear], str]:
    absence = native_absence()
    without = f"; none of our own: {absence}" if absence else ""
    if len(candidates) == 1:
        return candidates[0], f"there is no other{without}"
    key = _machine_key(dtype, candidates)
    kept = _read_kept(cache_dir)
    times_us = kept.get(key)
    if times_us is None:
        times_us = {kernel.name: round(measure(kernel, dtype) * 1e6) for kernel in candidates}
        _keep(cache_dir, kept | {key: times_us})
    best = min(candidates, key=lambda kernel: times_us[kernel.name])
    return best, "the fastest of " + ", ".join(f"{name} {us} us" for name, us in times_us.items()) + without


def measure(kernel: type[PackedLinear], dtype: torch.dtype) -> float:
    """Seconds for one decoded token and one of a prompt, through one matrix."""
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    layers = [pack((kernel,), weight.clone(), None) for _ in range(MATRICES)]
    one, many = (torch.ones(rows, SIZE, dtype=dtype) for rows in (1, ROWS_MANY))
    with torch.inference_mode():
        decode_s = _shortest(lambda: [layer(one) for layer in layers]) / MATRICES
        prefill_s = _shortest(lambda: layers[0](many)) / ROWS_MANY
    return decode_s + prefill_s


def _shortest(run: Callable[[], object]) -> float:
    times_s = []
    for _ in range(REPEATS):
        started_s = time.thread_time()
        run()
        times_s.append(time.thread_time() - started_s)
    return min(times_s)


def _machine_key(dtype: torch.dtype, candidates: Sequence[type[PackedLinear]]) -> str:
    names = "+".join(kernel.name for kernel in candidates)
    machine = f"{platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{machine} torch {torch.__version__} threads {torch.get_num_threads()} {dtype} {names}"


def _read_kept(cache_dir: Path | None) -> dict[str, dict[str, int]]:
    """Earlier measurements; a file that is missing or damaged has none, and is written anew."""
    if cache_dir is None:
        return {}
    try:
        kept = json.loads((cache_dir / CACHE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _keep(cache_dir: Path | None, measurements: dict[str, dict[str, int]]) -> None:
    """Replace the file as a whole: nodes that start together may write it together. Unwritable is no fault."""
    if cache_dir is None:
        return
    with suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        replace_file(cache_dir / CACHE_FILE, json.dumps(measurements, indent=1).encode())
