"""What every engine of the tables has, and what all are asked."""

from dataclasses import dataclass

NEW_TOKENS = 32  # of a request
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class AnyEngine:
    """`kind` is the model's; `chunk`: tokens of a chunk of prefills; `ranks`: GPUs that share the heads; `drafts`:
    tokens that a layer of the model drafts. It is asked for `new` tokens of each request.
    """

    plugin: bool
    kind: str = "v32"
    chunk: int = 2048
    ranks: int = 1
    drafts: int = 0
    new: int = NEW_TOKENS

    def environment(self) -> dict[str, str]:
        raise NotImplementedError
