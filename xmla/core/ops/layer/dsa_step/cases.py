from dataclasses import replace

import numpy as np

from xmla.core.op import Case
from xmla.core.ops.cases import POISON, normal
from xmla.core.ops.layer.dsa_attention.cases import CASES as ATTENTION_CASES


def _writing(case: Case) -> Case:
    """The case in which each token's own entry is not there before the call; that of a padding token is nowhere."""

    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        inputs = case.make(rng)
        cache, table, lengths = inputs["mla_cache"], inputs["block_table"], inputs["lengths"]
        tokens, entries = len(lengths), cache.shape[1]
        owners = inputs.get("request_ids", np.arange(tokens) // (tokens // len(table)))
        page, offset = np.divmod(np.maximum(lengths - 1, 0), entries)
        slots = np.where(lengths > 0, table[owners, page] * entries + offset, -1).astype(np.int32)
        written = slots[slots >= 0]
        cache[written // entries, written % entries] = POISON
        return {
            "latent": normal(rng, tokens, 512),
            "rope": normal(rng, tokens, 64),
            "index_k": normal(rng, tokens, 128),
            "entry_slots": slots,
            **inputs,
        }

    return replace(case, make=make)


CASES = tuple(map(_writing, ATTENTION_CASES))
