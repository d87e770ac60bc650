"""Several processes on one GPU: the same bits, and no access to memory that is not theirs."""

import subprocess
import sys
from pathlib import Path

import hopper

pytestmark = hopper.ON_HOPPER
PROCESSES, SECONDS = 4, 6


def test_processes_that_share_a_gpu() -> None:
    """An mbarrier of V4's kernel that nothing used put itself in place of a pointer, in each of four processes."""
    command = [sys.executable, str(Path(__file__).parents[1] / "programs" / "shared_gpu.py"), str(SECONDS)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(PROCESSES)
    ]
    printed = [process.communicate(timeout=600)[0] for process in started]
    assert [process.returncode for process in started] == [0] * PROCESSES, "\n".join(text[-2000:] for text in printed)
