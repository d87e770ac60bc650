"""A layer's step: new tokens select their keys and attend to them.

Ops made of those of other families, planned as one call.
"""

from xmla.core.ops.layer import dsa_attention, dsa_step

OPS = (dsa_step.OP, dsa_attention.OP)
