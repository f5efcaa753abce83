"""How fast this machine reads weights: a second's work that stands for decode and prefill steps.

A decode step multiplies one row by every matrix of the range, so it takes as long as reading them; a long prefill
step takes as long as the arithmetic. Both are tried here on a chain of the linear layers that a stage would use
(`shard.linear`), quantized or not, larger together than the processor's caches, with the node's device, element
type and threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from shard import load as _loading  # noqa: F401 - what a node imports to load a range counts as its runtime
from shard.device import DTYPES, choose_device
from shard.linear.choice import choose_kernels
from shard.linear.packed import PackedLinear, pack
from shard.machine import resident_bytes
from shard.machine_info import MachineFigures, Measured

CHAIN_BYTES = 256 * 1024 * 1024
"""Weights of the chain: beyond the caches of all but the largest server processors."""
CHAIN_BYTES_CUDA = 1024 * 1024 * 1024
"""On a GPU, so that launching kernels is not all that is measured."""
MATRIX_BYTES, MATRIX_BYTES_CUDA = 32 * 1024 * 1024, 128 * 1024 * 1024
"""One layer's; of the size of a feed-forward matrix of a model of some billion parameters."""
PREFILL_MATRIX_BYTES = 8 * 1024 * 1024
"""That of the prefill: arithmetic decides, and a processor without the element type's instructions takes long."""
TRIED_S = 0.4
"""How long each is tried; a single run that takes longer is enough."""
ATTEMPTS = 2
"""How often a disturbed measurement is made; the less disturbed one counts."""
OWN_SHARE_MIN = 0.9
"""Of the time that a measurement takes, what its thread must have had of a core."""
PREFILL_ROWS = 256
"""What a gateway gives a node at once of a long prompt, unless told otherwise."""
STEP_BUFFERS_BYTES = 128 * 1024 * 1024
"""What a step's inputs, scores and outputs take besides, on top of what the process has once everything is imported."""
RUNTIME_CUDA_BYTES = 256 * 1024 * 1024
"""What kernels' workspaces take of a GPU's memory; its context is not free memory in the first place."""


def measure_machine(device: str, dtype: str, threads: int, quantize: str) -> Measured:
    """Measure. Call it on a thread of its own: its operators keep the number of threads.

    Args:
        device: As the node's setting.
        dtype: As the node's setting; ``auto`` measures bfloat16, which nearly all checkpoints are stored in.
        threads: As the node's setting.
        quantize: As the node's setting. Bytes count as if weights were plain, as they do where layers are placed.

    Raises:
        LoadFailed: `device_unavailable`, `quantize_unsupported`.
    """
    torch.set_num_threads(threads)
    where = choose_device(device).device
    kind = DTYPES["bfloat16" if dtype == "auto" else dtype]
    kernels = choose_kernels(quantize, where, kind).kernels
    process_bytes = resident_bytes()
    with torch.inference_mode():
        is_cuda = where.type == "cuda"
        decode = _measure(
            where,
            kind,
            kernels,
            rows=1,
            matrix_bytes=MATRIX_BYTES_CUDA if is_cuda else MATRIX_BYTES,
            chain_bytes=CHAIN_BYTES_CUDA if is_cuda else CHAIN_BYTES,
        )
        prefill_bytes = MATRIX_BYTES_CUDA if is_cuda else PREFILL_MATRIX_BYTES
        prefill = _measure(
            where, kind, kernels, rows=PREFILL_ROWS, matrix_bytes=prefill_bytes, chain_bytes=prefill_bytes
        )
    figures = MachineFigures(
        device=str(where),
        runtime_bytes=RUNTIME_CUDA_BYTES if where.type == "cuda" else process_bytes + STEP_BUFFERS_BYTES,
        read_bytes_per_s=round(decode.per_s),
        prefill_bytes_per_s=round(prefill.per_s),
    )
    return Measured(figures, is_disturbed=min(decode.own_share, prefill.own_share) < OWN_SHARE_MIN)


@dataclass(frozen=True, slots=True)
class _Speed:
    """How much per second, and for what share of the time the measuring thread had a core; 1 where another computes."""

    per_s: float
    own_share: float


def _measure(
    device: torch.device,
    dtype: torch.dtype,
    kernels: Sequence[type[PackedLinear]],
    *,
    rows: int,
    matrix_bytes: int,
    chain_bytes: int,
) -> _Speed:
    """Weight bytes times rows per second, through square layers that keep the size of what passes through."""
    width = int((matrix_bytes / dtype.itemsize) ** 0.5)
    weight = torch.empty((width, width), dtype=dtype, device=device).normal_(std=width**-0.5)
    count = chain_bytes // matrix_bytes
    chain = [pack(kernels, weight, None) if kernels else _plain(weight) for _ in range(count)]
    hidden = torch.ones((1, rows, width), dtype=dtype, device=device)
    work = len(chain) * weight.nbytes * rows
    best = _Speed(0.0, -1.0)
    for _ in range(ATTEMPTS):
        seconds, own_share = _time(lambda: _run(chain, hidden), device)
        if own_share > best.own_share:
            best = _Speed(work / seconds, own_share)
        if own_share >= OWN_SHARE_MIN:
            break
    return best


def _plain(weight: torch.Tensor) -> nn.Linear:
    """A layer with a copy of its own: the same bytes again would come from a cache."""
    width = weight.shape[0]
    linear = nn.Linear(width, width, bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


def _run(chain: list[nn.Module], hidden: torch.Tensor) -> None:
    for layer in chain:
        hidden = layer(hidden)


def _time(run: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """The median of as many runs as fit, without the first, which warms up: unless it alone takes all the time.

    Beside it the share of that time for which this thread had a core; of threads that compute with it one that lacks a
    core makes it wait.
    """
    started_at, began_with_s = time.perf_counter(), time.thread_time()
    first_s = _run_once(run, device)
    times: list[float] = []
    began_at = time.perf_counter()
    while first_s + time.perf_counter() - began_at < TRIED_S:
        times.append(_run_once(run, device))
    own_share = (time.thread_time() - began_with_s) / max(1e-9, time.perf_counter() - started_at)
    return median(times or [first_s]), own_share if device.type == "cpu" else 1.0


def _run_once(run: Callable[[], None], device: torch.device) -> float:
    began_at = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - began_at
