"""FlashMLA's and DeepGEMM's sparse-attention functions by their published signatures, served by xmla's ops.

    from xmla.compat import deep_gemm, flash_mla     instead of the packages, in a script
    xmla.compat.install()                            for code that imports the packages by name

Both modules replace what the package has for sparse attention. Everything else is the package's own, if it is
installed: their other attributes, and calls of the functions here that ask for something else (dense decode, MXFP8).
"""

import sys
from types import ModuleType

from xmla._frameworks import missing, needed

if missing("torch"):
    raise ImportError(needed("torch"))

from xmla.compat import deep_gemm, flash_mla

NAMES = {"flash_mla": flash_mla, "flash_mla.flash_mla_interface": flash_mla, "deep_gemm": deep_gemm}
_replaced: dict[str, ModuleType | None] = {}


def install(*, max_logits: bool = True) -> None:
    """Make `import flash_mla` and `import deep_gemm` give the modules here, until `uninstall`.

    Call it before the code that is to use them is imported: a name that was imported earlier stays what it was.

    Args:
        max_logits: False: `flash_mla_sparse_fwd` returns None for its second result, which costs another pass over
            the keys. vLLM and SGLang discard it.
    """
    flash_mla.computes_max_logits = max_logits
    for name, module in NAMES.items():
        if name not in _replaced:
            _replaced[name] = sys.modules.get(name)
        sys.modules[name] = module


def uninstall() -> None:
    """Give the names back to the packages."""
    flash_mla.computes_max_logits = True
    while _replaced:
        name, module = _replaced.popitem()
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


__all__ = ["deep_gemm", "flash_mla", "install", "uninstall"]
