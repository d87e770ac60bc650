"""What the plugin does not serve is refused at start: vLLM's own kernels cannot take over in the middle of a model."""

from collections.abc import Mapping

from xmla.core.errors import UnsupportedError


def refuse(reasons: Mapping[str, bool]) -> None:
    """Raise UnsupportedError with those of `reasons` that are true."""
    found = [reason for reason, there in reasons.items() if there]
    if found:
        raise UnsupportedError(
            f"xmla.vllm: not served: {', '.join(found)}; without xmla in VLLM_PLUGINS vLLM serves with its own kernels"
        )
