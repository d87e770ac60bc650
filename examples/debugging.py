"""Find a wrong index: XMLA_CHECK names it, `xmla replay` repeats the call, XMLA_SHADOW watches results. Runs anywhere.

python examples/debugging.py
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: the same kernels, interpreted
# Usually set in the shell; read once, when xmla is imported.
os.environ["XMLA_CHECK"] = "1"  # validate every index, page and length before a call
os.environ["XMLA_SHADOW"] = "1"  # compute this share of rows again by the reference; 0.01 in a live service
os.environ["XMLA_LOG"] = "INFO"
os.environ["XMLA_REPRODUCER_DIR"] = tempfile.mkdtemp()

import torch

import xmla
from xmla import torch_api as xt

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
q = torch.randn(2, 8, 576, device=device).bfloat16()
cache = torch.randn(4, 16, 576, device=device).bfloat16()  # plain rows: 4 pages of 16 entries
slots = torch.tensor([[0, 5, 63], [7, 8, -1]], dtype=torch.int32, device=device)  # −1 is legal padding

out, lse = xt.sparse_mla(q, cache, slots, softmax_scale=0.1)  # logs how far it is from the reference

slots[1, 1] = 64  # one past the pool's last slot: without XMLA_CHECK it would be skipped silently
try:
    xt.sparse_mla(q, cache, slots, softmax_scale=0.1)
    raise SystemExit("the wrong slot was not noticed")
except xmla.ArgumentError as error:
    assert "sparse_mla: slots[1, 1] is 64, limit [-1, 63]" in str(error)
    print(error)

# The call is in a file: on any machine `xmla replay FILE` repeats it in every installed framework.
(file,) = Path(os.environ["XMLA_REPRODUCER_DIR"]).iterdir()
environment = {name: value for name, value in os.environ.items() if not name.startswith("XMLA_")}
command = [sys.executable, "-m", "xmla", "replay", str(file)]
again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
assert again.returncode == 1 and "slots[0, 1] is 64" in again.stdout, again.stdout + again.stderr
print(again.stdout)
print(f"out {tuple(out.shape)} {out.dtype}; replay found the same slot")
