"""Private names of JAX, and what xmla does if a release lacks them. The only file that imports `jax._src`.

`MISSING` lists the names that this release lacks, and a warning at import names them. Then:
  REFS False: a cache is passed as an array, whose new value is returned; a Ref is refused, since it is not an array.
  MESHES False: `jit` over several devices replicates every op; `shard_map` still partitions them.
Without `ManualAxisType` a result inside a `shard_map` does not say over which axes it varies, which asks for
`check_vma=False`. Without `TransformedRef` JAX refuses a view of a Ref, `ref.at[i]`, in words of its own.
"""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import jax

MISSING: list[str] = []


def _attributes(module: str, *names: str) -> tuple[Any, ...] | None:
    """The names of a private module; None if it lacks one of them."""
    try:
        home = import_module(f"jax._src.{module}")
        return tuple(getattr(home, name) for name in names)
    except (ImportError, AttributeError) as error:
        MISSING.append(str(error))
        return None


_types = _attributes("state.types", "AbstractRef", "ReadEffect", "WriteEffect")
_discharge = _attributes("state.discharge", "register_discharge_rule")
REFS = _types is not None and _discharge is not None
_refs: tuple[Any, ...] = _types if REFS and _types else ((), None, None)  # isinstance(x, ()) is False
AbstractRef, ReadEffect, WriteEffect = _refs
_views = _attributes("state.types", "TransformedRef")
RefView: Any = _views[0] if _views else ()


def register_discharge_rule(primitive: Any, rule: Callable[..., Any]) -> None:
    if REFS and _discharge:
        _discharge[0](primitive)(rule)


_dispatch = _attributes("dispatch", "prim_requires_devices_during_lowering")
_sharding = _attributes("sharding_impls", "ShardingContext", "SPMDAxisContext")
MESHES = _dispatch is not None and _sharding is not None
_contexts: tuple[Any, ...] = _sharding or ((), ())
ShardingContext, ManualContext = _contexts


def require_devices_during_lowering(primitive: Any) -> None:
    if _dispatch:
        _dispatch[0].add(primitive)


_apply = _attributes("dispatch", "apply_primitive")
apply_primitive: Any = _apply[0] if _apply else None


_manual = _attributes("core", "ManualAxisType")


def varying(avals: Sequence[Any]) -> dict[str, Any]:
    """The argument of a result's type that names the mesh axes it varies over in a `shard_map`, those of `avals`."""
    if not _manual:
        return {}
    return {"manual_axis_type": _manual[0](varying=frozenset[Any]().union(*(aval.mat.varying for aval in avals)))}


def vary_over_same_axes(*groups: dict[str, Any]) -> list[dict[str, Any]]:
    """The arrays, each varying over every mesh axis that one of them varies over in a `shard_map`.

    The derivative of the cast is the sum over those axes.
    """
    if not _manual:
        return list(groups)
    every = frozenset[Any]().union(*(jax.typeof(array).mat.varying for group in groups for array in group.values()))

    def cast(array: Any) -> Any:
        missing = tuple(every - jax.typeof(array).mat.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return [{name: cast(array) for name, array in group.items()} for group in groups]


if MISSING:
    logging.getLogger("xmla").warning("JAX %s lacks what xmla.jax_api takes: %s", jax.__version__, "; ".join(MISSING))
