"""Programs that call ops, in every form, as XLA compiles them for an H200; no GPU is needed, and none is used.

What is compiled is xmla's own lowering, by XLA's whole pipeline, of each release of JAX that is served, but no kernel.
Of each program the optimised HLO and the assignment of its buffers are read (tests/jax_programs/hlo.py), and refused is

- a call that is made more or fewer times than the function says;
- an updated operand that is a slice inside of a fusion, or a result that is stored into a stack inside of one, where
  XLA ignores which operand a result is;
- an updated operand and its new value in two places, or in a place that is not theirs to write: an argument that was
  not donated, a constant, another operand of the call;
- in some forms, a pool that is moved though nothing asks for it.

What JAX and XLA do to a call, and the forms (tests/jax_programs/forms.py) or other tests that show that it bears it:

- slices of stacks, by constants, loop counters, both and prefixes: slices, scanned_and_used, looped, second_of_two,
  prefixes, pages; of another dtype and shape: held_otherwise;
- results stored into stacks: restacked, written_back, looped, prefix_written_back, prefix_written_beside; over the very
  part that they are computed from: stored_over;
- one array as two operands: read_and_updated; in two calls: twice_from_one; after it was updated: beside_the_old;
- donation: every form that updates runs with it and without, and those that may not copy are `in_place`;
- Refs: by_refs, refs_of_parts, one_ref_in_a_loop; loops and branches: scanned, cache_in_a_carry,
  layers_in_steps, in_branches; of unknown length: until_it_ends; double-buffered: cache_in_a_carry;
- vmap: batched, batched_parts; gradients, rematerialisation: gradient_of_slices, gradient_of_checkpoints;
- several devices: slices, scanned and written_back over tokens, which XLA partitions, and over layers, by shard_map
  (over_devices in tests/shared/stacked.py), also exchanged: handed_on;
- exports, whose kernels are custom calls of jaxlib: exported; their kernels: tests/test_lowering.py;
- callbacks: beside_a_callback; models as Flax builds them: tests/jax_programs/flax_layers.py; a training whose second
  run has the first's bits: tests/jax_programs/training.py;
- command buffers, which record the addresses that the assignment has: tests/gpu, tests/test_jax_stacks.py on a GPU;
- addresses that are none of these: launcher.cc refuses them when it runs (tests/test_launcher.py).

Each program of an op, form and donation is compiled by one of the releases, which divide them so that each has every
form with donation and without; XMLA_ALL compiles all of them by each. Layers of Flax's are whole in either.

Values are compared in tests/test_jax_stacks.py, and over two devices by tests/parallel/jax_stacks.py, on GPUs with the
launcher itself.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from conftest import EVERYTHING, HAS_GPU

from tools import releases
from xmla.core.registry import registry

TESTS = Path(__file__).parent
PARTS = 2  # of a release, each a process
# Those that update have most programs.
NAMES = [*sorted(registry(), key=lambda name: not registry()[name].mutates), "flax"]
OF_EVERY_OP = {"slices", "scanned_and_used", "looped", "scanned"}


@cache
def compiled(release: str, part: int) -> subprocess.CompletedProcess[str]:
    """A process that tells of the programs of a part of the ops; without XMLA_ALL of one release's half of them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ours = (
        releases.folder("jax", release),
        TESTS / "shared",
        TESTS.parent,
        *filter(None, [os.environ.get("PYTHONPATH")]),
    )
    environment["PYTHONPATH"] = os.pathsep.join(map(str, ours))
    share = "all" if EVERYTHING else str(releases.SERVED["jax"].index(release) % 2)
    command = [sys.executable, "-W", "ignore", str(TESTS / "jax_programs/programs.py"), share, *NAMES[part::PARTS]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


PROGRAMS = [
    pytest.param(release, place % PARTS, name, id=f"{release}-{name}",
                 marks=pytest.mark.xdist_group(f"jax-{release}-{place % PARTS}"))
    for release in releases.SERVED["jax"]
    for place, name in enumerate(NAMES)
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("release", "part", "name"), PROGRAMS)
def test_calls_are_made_once_in_memory_of_their_own(release: str, part: int, name: str) -> None:
    if not releases.installed("jax", release):
        if HAS_GPU:
            pytest.skip("each release of JAX is looked at where CI runs; tools/releases.py installs them")
        pytest.fail(f"JAX {release} is not installed: {sys.executable} -m tools.releases jax {release}")
    done = compiled(release, part)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in map(json.loads, done.stdout.splitlines()) if line["op"] == name)
    assert not line["faults"], "\n".join(line["faults"])
    assert line["jax"] == release
    assert name == "flax" or set(line["forms"]) >= OF_EVERY_OP
