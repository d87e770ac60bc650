"""DeepSeek sparse attention of SGLang by xmla's ops: `SGLANG_PLUGINS=xmla sglang serve …`.

`register` is xmla's entry point in the group `sglang.srt.plugins`, which SGLang calls in each of its processes. What it
changes in SGLang is in `patches`; `indexer` selects keys, `attention` is the attention over them. With
XMLA_SGLANG_REQUIRED=1 a process that cannot have all of it ends.
"""

import logging
import os
from importlib.metadata import version

# The releases that tests read, by their first three numbers.
TESTED = ("0.5.23",)


def register() -> None:
    """Put xmla in place of SGLang's sparse attention, if SGLANG_PLUGINS names xmla; otherwise change nothing.

    SGLang loads every installed plugin while SGLANG_PLUGINS is not set. That xmla is installed is no wish to serve with
    it.

    Raises:
        UnsupportedError: This release of SGLang lacks something that xmla replaces. SGLang logs it, and serves with its
            own kernels.
        SystemExit: The same and anything else that goes wrong here, with XMLA_SGLANG_REQUIRED=1: SGLang catches every
            Exception of a plugin.
    """
    if "xmla" not in (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",")):
        return
    try:
        install()
    except Exception as error:
        # Not from the settings, whose import may be what goes wrong.
        if os.environ.get("XMLA_SGLANG_REQUIRED", "") in ("", "0"):
            raise
        raise SystemExit(f"XMLA_SGLANG_REQUIRED is set and xmla cannot serve: {error}") from error


def install() -> None:
    from xmla.sglang import patches

    release = version("sglang")
    if ".".join(release.split(".")[:3]) not in TESTED:
        logging.getLogger(__name__).warning("SGLang %s: xmla is tested with %s", release, " and ".join(TESTED))
    patches.install(release)
