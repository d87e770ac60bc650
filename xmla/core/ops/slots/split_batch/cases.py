import numpy as np

from xmla.core.op import Case


def _case(name: str, new: list[int], context: list[int], padding: int = 0, with_context: bool = False, **attrs) -> Case:
    def make(rng: np.random.Generator) -> dict[str, np.ndarray]:
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        lengths = np.array(new, np.int32) + np.array(context, np.int32) * rng.integers(1, 4, len(new), np.int32)
        inputs = {"query_starts": starts, "lengths": lengths}
        if with_context:
            inputs["has_context"] = (np.array(context) > 0).astype(np.int32)
        return inputs

    return Case(name, make, {"num_tokens": sum(new) + padding, **attrs})


CASES = (
    _case("mixed", [1, 2, 1, 40, 3], [100, 7, 0, 0, 9], decode_threshold=2),
    _case("short-prefill-decodes", [1, 1, 1], [5, 0, 9], padding=2),
    _case("new-is-prefill", [1, 1, 1], [5, 0, 9], with_context=True),
    _case("uniform-padded", [3, 3, 3, 0, 0], [10, 20, 30, 0, 0], decode_threshold=3, require_uniform=True, padding=6),
    _case("not-uniform", [3, 3, 2, 3], [10, 20, 30, 5], decode_threshold=3, require_uniform=True),
    _case("prefill-first", [9, 1], [0, 4], decode_threshold=4),
)
