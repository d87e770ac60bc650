"""DeepSeek sparse attention of vLLM by xmla's ops: `VLLM_PLUGINS=xmla vllm serve …`.

`register` is xmla's entry point in the group `vllm.general_plugins`, which vLLM calls in each of its processes. What it
changes in vLLM is in `patches`; `backend` is V3.2's attention, `attention_v4` and `attention_v41` V4's and V4.1's, over
`attention_v4_base`, `indexer` the selection of keys, `pools` that of GLM-5.3-Flash's, `shards` that of ranks that share
keys, `gathered` what prefills read as rows, `recording` what requests select, in `rows`. At start `memory` says what to
reserve, and `warmup` compiles all kernels.
"""

import os
from importlib.metadata import version

# The releases whose engine ran in tests, by major and minor number; docs/vllm.md says with what.
TESTED = ("0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")


def register() -> None:
    """Put xmla in place of vLLM's sparse attention, if VLLM_PLUGINS names xmla; otherwise change nothing.

    vLLM loads every installed plugin while VLLM_PLUGINS is not set. That xmla is installed is no wish to serve with it.

    Raises:
        UnsupportedError: This release of vLLM lacks something that xmla replaces.
    """
    if "xmla" not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm.logger import init_logger

    from xmla.vllm import patches

    release = version("vllm")
    if ".".join(release.split(".")[:2]) not in TESTED:
        init_logger("vllm.xmla").warning("vLLM %s: xmla is tested with %s", release, ", ".join(TESTED))
    patches.install(release)
