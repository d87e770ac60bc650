import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import BF16
from xmla.core.ops.training.indexer_scores.cases import F16, F32, make_case
from xmla.core.ops.training.indexer_target.cases import SCALE, attention
from xmla.core.ops.training.indexer_target.reference import reference as target_of

COEFF = 4.0  # gradients of order 1, for bounds that are absolute too


def _case(
    tokens: int, index_heads: int, heads: int, count: int, dim: int, dims: int, chosen: int | None = None,
    given: bool = False, dtype: np.dtype = BF16, without: tuple[str, ...] = (), padding: int = 0,
    workspace_bytes: int | None = None,
) -> Case:  # fmt: skip
    scored = make_case(tokens, index_heads, count, dim, chosen, dtype, without, padding)

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = scored.make(rng)
        columns = {name: inputs[name] for name in ("ends", "starts", "indices") if name in inputs}
        other = attention(rng, heads, count, dims, columns or {"ends": np.full(tokens, count)}, dtype, padding)
        if given:  # NaN where a column is not valid
            (target,) = target_of(**other, **columns, softmax_scale=SCALE)
            other = {"target": np.where(target == 0, np.nan, target).astype(F32)}
        names = {"q": "index_q", "k": "index_k", "weights": "index_weights"}
        return {new: inputs[name] for name, new in names.items()} | other | columns

    name = f"{scored.name}-{'target' if given else f'h{heads}-d{dims}'}{'-parts' if workspace_bytes else ''}"
    attrs: dict[str, float] = {"coeff": COEFF} if given else {"coeff": COEFF, "softmax_scale": SCALE}
    return Case(name, make, attrs | ({"workspace_bytes": workspace_bytes} if workspace_bytes else {}))


CASES = (
    _case(1, 64, 20, 70, 128, 576),
    _case(5, 3, 5, 77, 64, 512, padding=8),
    _case(4, 16, 40, 90, 32, 128, chosen=70, padding=16),
    _case(3, 20, 3, 60, 64, 64, chosen=33, dtype=F16, without=("starts",)),
    _case(4, 8, 5, 60, 32, 64, chosen=40, given=True),
    _case(3, 5, 2, 40, 32, 64, without=("starts", "ends")),
    # Few of the keys are selected, so that each token is multiplied with its own.
    _case(3, 20, 7, 150, 128, 128, chosen=17, padding=16),
    _case(4, 8, 5, 120, 32, 64, chosen=20, given=True),
    _case(3, 5, 2, 40, 32, 64, dtype=F16),
    # Two tokens at a time.
    _case(5, 7, 5, 600, 32, 64, chosen=70, workspace_bytes=157696 + 768),
    # All pairs: of a selection, then of tokens of two chains with several tiles of keys, 64 tokens at a time.
    _case(4, 20, 5, 60, 32, 64, chosen=40, given=True, padding=16),
    _case(5, 17, 3, 77, 64, 128, padding=8),
    _case(70, 20, 2, 150, 32, 64, chosen=60, workspace_bytes=110080),
    _case(70, 20, 2, 150, 32, 64, workspace_bytes=116480),
)
