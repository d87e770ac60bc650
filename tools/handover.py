"""What racecheck reports about the orders that the Gluon kernels rely on, in as few lines as show them.

    compute-sanitizer --tool racecheck python -m tools.handover

Each partition is a warpgroup. PTX orders a store before a load if every thread's store comes before a barrier of its
warpgroup, that before one thread's arrival at an mbarrier, and the load after a wait for the phase which that arrival
is part of. Racecheck follows that, but reports hazards where copies arrive at the barrier too, and, in some launches,
between the first lines that Triton itself writes for partitions, whatever they do.
"""

import torch
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from xmla.core.lang.gluon import async_copy, gl, gluon

STEPS = gl.constexpr(16)
PROGRAMS = 64
PROBES = {0: "two partitions", 1: "three, of which one is idle", 2: "two arrivals", 3: "arrivals of copies"}
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def idle():
    return


@gluon.jit
def give(x_ptr, smem, copied, full, empty, COPY: gl.constexpr):
    offs = gl.arange(0, 128, layout=ONE_EACH)
    for step in range(STEPS):
        mbarrier.wait(empty, step & 1 ^ 1)
        if COPY:
            async_copy.async_load(copied, x_ptr + step * 128 + offs)
            async_copy.mbarrier_arrive(full, increment_count=False)
            smem.store(gl.full([128], 0.0, gl.float32, ONE_EACH))
        else:
            smem.store(gl.load(x_ptr + step * 128 + offs))
        mbarrier.arrive(full, count=1)
    async_copy.wait_group(0)


@gluon.jit
def take(y_ptr, smem, copied, full, empty, COPY: gl.constexpr):
    offs = gl.arange(0, 128, layout=ONE_EACH)
    for step in range(STEPS):
        mbarrier.wait(full, step & 1)
        y = smem.load(ONE_EACH)
        if COPY:
            y += copied.load(ONE_EACH)
        gl.store(y_ptr + step * 128 + offs, y)
        mbarrier.arrive(empty, count=1)


@gluon.jit
def exchange(x_ptr, y_ptr, smem, full, PART: gl.constexpr):
    """Half of a row stored by either partition, of which either then has the whole."""
    half = PART * 64 + gl.arange(0, 64, layout=ONE_EACH)
    smem.slice(PART * 64, 64, 0).store(gl.load(x_ptr + half))
    mbarrier.arrive(full, count=1)
    mbarrier.wait(full, 0)
    gl.store(y_ptr + PART * 128 + gl.arange(0, 128, layout=ONE_EACH), smem.load(ONE_EACH))


@gluon.jit
def handover_kernel(
    x_ptr,  # [programs, STEPS, 128] f32
    y_ptr,  # the same; of probe 2 only the first two rows, both the first of x
    PROBE: gl.constexpr,
):
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.float32, [128], WORDS)
    copied = gl.allocate_shared_memory(gl.float32, [128], WORDS)
    full, empty = mbarrier.allocate_mbarrier(), mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=129 if PROBE == 3 else 2 if PROBE == 2 else 1)
    mbarrier.init(empty, count=1)
    x_ptr += gl.program_id(0) * STEPS * 128
    y_ptr += gl.program_id(0) * STEPS * 128
    COPY: gl.constexpr = PROBE == 3
    if PROBE == 1:
        gl.warp_specialize(
            [
                (idle, ()),
                (take, (y_ptr, smem, copied, full, empty, COPY)),
                (give, (x_ptr, smem, copied, full, empty, COPY)),
            ],
            [4, 4],
        )
    elif PROBE == 2:
        gl.warp_specialize(
            [
                (exchange, (x_ptr, y_ptr, smem, full, gl.constexpr(0))),
                (exchange, (x_ptr, y_ptr, smem, full, gl.constexpr(1))),
            ],
            [4],
        )
    else:
        gl.warp_specialize(
            [
                (give, (x_ptr, smem, copied, full, empty, COPY)),
                (take, (y_ptr, smem, copied, full, empty, COPY)),
            ],
            [4],
        )


if __name__ == "__main__":
    wrong = False
    for probe, name in PROBES.items():
        x = torch.randn(PROGRAMS, STEPS.value, 128, device="cuda")
        y = torch.zeros_like(x)
        handover_kernel[(PROGRAMS,)](x, y, probe, num_warps=4)
        torch.cuda.synchronize()
        arrived = torch.equal(y[:, :2], x[:, :1].expand(-1, 2, -1)) if probe == 2 else torch.equal(x, y)
        wrong |= not arrived
        print(f"{name}: {'as stored' if arrived else 'something else'}", flush=True)
    raise SystemExit(int(wrong))
