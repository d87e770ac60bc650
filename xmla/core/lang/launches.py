"""What a kernel and the launches around it in a plan wait for.

By programmatic dependent launch a launch may start before the one before it has ended: when all programs of that one
are done, or have begun if they are at most OVERLAP_LIMIT. (Beside more of them, programs of the next launch would
gather on the SMs that are free first, unless they spread: `Launch.spreads`.) So each kernel of such a plan waits before
it reads what launches before it wrote. It may read the call's own arguments sooner: the first launch of a call starts
when everything before has ended. A launch that has ended has waited, so that all launches before it have ended too.
With an OVERLAP_LIMIT of 0 launches take turns.

A kernel that is PATIENT waits before it reads anything, so that as the first of a call it may start early as well. It
is the only one of its call: one after it might read the call's arguments before what wrote them has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from xmla.core.lang.gluon import gluon


def _let_next_start(OVERLAP_LIMIT):
    if OVERLAP_LIMIT:  # noqa: SIM102
        if tl.num_programs(0) <= OVERLAP_LIMIT:
            gdc_launch_dependents()


def _wait_for_earlier(OVERLAP_LIMIT):
    if OVERLAP_LIMIT:
        gdc_wait()


let_next_start, gluon_let_next_start = triton.jit(_let_next_start), gluon.jit(_let_next_start)
wait_for_earlier, gluon_wait_for_earlier = triton.jit(_wait_for_earlier), gluon.jit(_wait_for_earlier)
