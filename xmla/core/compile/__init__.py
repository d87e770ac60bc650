"""Kernels compiled for a device. `interpreter` changes Triton when it is imported, so it is by itself."""

from xmla.core.compile.codegen import exec_function
from xmla.core.compile.compiler import (
    Compile,
    Specialization,
    as_compiled,
    begins_anywhere,
    compiled,
    compiles,
    compiling_allowed,
    serving_begins,
    source_of,
    specialize,
)
from xmla.core.compile.packs import check_steady_keys, read_pack, write_pack

__all__ = [
    "Compile",
    "Specialization",
    "as_compiled",
    "begins_anywhere",
    "check_steady_keys",
    "compiled",
    "compiles",
    "compiling_allowed",
    "exec_function",
    "read_pack",
    "serving_begins",
    "source_of",
    "specialize",
    "write_pack",
]
