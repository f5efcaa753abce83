"""Kernels of our own: `kernels.ll`, compiled by LLVM for the processor at hand when a stage first asks for them.

llvmlite alone is loaded for it, and less than a second of compiling; the 70 MB of pages of its library are given back
then. Calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shard.memory_return import page_out
from shared.errors import LoadFailed

SOURCES = Path(__file__).parent
OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""What is used of the runtime that torch's own operators run on: its threads wait for work already."""
OPTIMIZE = 2

Multiply = Callable[[int, int | None, int, int, int, int, int, int, int, bool, float], None]
"""Weight, scales, inputs, scratch, outputs: addresses; outs, ins, rows, threads; whether inputs and outputs are
bfloat16, else float32; levels of quantized inputs."""
Unpack = Callable[[int, int, int, int, int], None]
"""Weight, scales, outputs: addresses; outs, ins."""
NormRows = Callable[[int, int, int, int, int, int, float, int], None]
"""Inputs, weight, scratch, outputs: addresses; rows, size; epsilon; float32 in the vectors that torch sums with."""
Rotate = Callable[[int, int, int, int, int], None]
"""Heads, cosines, sines: addresses; number of heads, half their size. In place."""
Gate = Callable[[int, int, int, int], None]
"""Gates, the activation's table, values: addresses; how many. Values are replaced."""
Add = Callable[[int, int, int], None]
"""What is added to, what is added: addresses; how many."""
BeforeAttention = Callable[[int, int, int, int, int], None]
"""`LayerParts`, hidden states, cosines, sines: addresses; threads. Gives queries, keys and values into their rooms."""
AfterAttention = Callable[[int, int, int, int, int], None]
"""`LayerParts`, hidden states, what attention gave, outputs: addresses; threads."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_MULTIPLY = (*(_POINTER,) * 5, _SIZE, _SIZE, _SIZE, ctypes.c_int32, ctypes.c_bool, ctypes.c_float)
_UNPACK = (_POINTER, _POINTER, _POINTER, _SIZE, _SIZE)
_NORM = (*(_POINTER,) * 4, _SIZE, _SIZE, ctypes.c_float, _SIZE)
_ROTATE = (*(_POINTER,) * 3, _SIZE, _SIZE)
_GATE = (*(_POINTER,) * 3, _SIZE)
_ADD = (_POINTER, _POINTER, _SIZE)
_LAYER = (*(_POINTER,) * 4, ctypes.c_int32)


class Product(ctypes.Structure):
    """`%Product` of `kernels.ll`: a matrix that a row is multiplied by."""

    _fields_ = (
        *((name, _POINTER) for name in ("multiply", "weight", "scales", "bias")),
        ("outs", _SIZE),
        ("ins", _SIZE),
        ("threads_max", ctypes.c_int32),
        ("levels", ctypes.c_float),
    )


class Norm(ctypes.Structure):
    """`%Norm`: none of a weight is no norm."""

    _fields_ = (("weight", _POINTER), ("size", _SIZE), ("epsilon", ctypes.c_float))


class LayerParts(ctypes.Structure):
    """`%Layer`: matrices, norms, table of the activation, and room for what lies between."""

    _fields_ = (
        *((name, Product) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, Norm) for name in ("norm_before", "norm_between", "norm_query", "norm_key")),
        *((name, _POINTER) for name in ("table", "row", "queries", "keys", "values", "gates", "passed", "scratch")),
        ("half_head", _SIZE),
        ("lanes", _SIZE),
    )


@dataclass(frozen=True, slots=True)
class NativeKernels:
    """What `kernels.ll` defines. Nothing is checked: a wrong address or size ends the process."""

    multiply_bf16: Multiply
    multiply_int8: Multiply
    multiply_int4: Multiply
    unpack_int4: Unpack
    norm_bf16: NormRows
    rotate_bf16: Rotate
    gate_bf16: Gate
    add_bf16: Add
    before_attention: BeforeAttention
    after_attention: AfterAttention
    _engine: Any
    """It owns the code."""


def native_kernels() -> NativeKernels:
    """The kernels; compiled once per process.

    Raises:
        LoadFailed: `kernels_missing`, where `native_absence` says why.
    """
    found = _compiled()
    if isinstance(found, str):
        raise LoadFailed("kernels_missing", f"there are no compiled kernels: {found}")
    return found


def native_absence() -> str | None:
    """Why there are no such kernels here; None if there are."""
    found = _compiled()
    return found if isinstance(found, str) else None


class _Scratch(threading.local):
    """Each thread's room for one row's scratch: it grows to the largest that was asked for."""

    def __init__(self) -> None:
        self.room = torch.empty(0)
        self.floats, self.address = 0, 0


_scratch = _Scratch()


def scratch_address(floats: int) -> int:
    """Where so many float32 may be written until this thread asks again."""
    if floats > _scratch.floats:
        _scratch.room = torch.empty(floats)
        _scratch.floats, _scratch.address = floats, _scratch.room.data_ptr()
    return _scratch.address


@cache
def _compiled() -> NativeKernels | str:
    try:
        import llvmlite.binding as llvm  # noqa: PLC0415 - 60 MB that only a stage on a CPU has a use for
    except ImportError as error:
        return f"llvmlite cannot be imported ({error})"
    try:
        kernels = _compile(llvm)
    except (AttributeError, RuntimeError) as error:  # of another release, or for a processor that LLVM does not know
        return f"llvmlite {llvm.llvm_version_info} cannot compile them ({type(error).__name__}: {error})"
    page_out("libllvmlite")
    return kernels


def _compile(llvm: Any) -> NativeKernels:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    host = {"cpu": llvm.get_host_cpu_name(), "features": llvm.get_host_cpu_features().flatten()}
    machine = llvm.Target.from_default_triple().create_target_machine(**host, opt=OPTIMIZE, jit=True)
    source = (SOURCES / "kernels.ll").read_text(encoding="utf-8")
    openmp = _openmp()
    for name, address in openmp.items():
        llvm.add_symbol(name, address)
    if not openmp:
        declared = "".join(line for line in source.splitlines(keepends=True) if not _declares_openmp(line))
        source = declared + (SOURCES / "one_thread.ll").read_text(encoding="utf-8")
    module = llvm.parse_assembly(source)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=OPTIMIZE))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def function(name: str, arguments: tuple[Any, ...]) -> Any:
        return ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name))

    return NativeKernels(
        multiply_bf16=function("multiply_bf16", _MULTIPLY),
        multiply_int8=function("multiply_int8", _MULTIPLY),
        multiply_int4=function("multiply_int4", _MULTIPLY),
        unpack_int4=function("unpack_int4", _UNPACK),
        norm_bf16=function("norm_bf16", _NORM),
        rotate_bf16=function("rotate_bf16", _ROTATE),
        gate_bf16=function("gate_bf16", _GATE),
        add_bf16=function("add_bf16", _ADD),
        before_attention=function("before_attention", _LAYER),
        after_attention=function("after_attention", _LAYER),
        _engine=engine,
    )


def _declares_openmp(line: str) -> bool:
    return line.startswith("declare") and any(f"@{name}(" in line for name in OPENMP)


def _openmp() -> dict[str, int]:
    """Addresses in the runtime that torch brings; none where it brings another, and kernels have one thread."""
    folder = Path(torch.__file__).parent
    for path in (*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))  # loaded already: this finds it
            return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in OPENMP}
    return {}
