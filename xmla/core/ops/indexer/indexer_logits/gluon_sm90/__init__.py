"""Logits over contiguous fp8 keys on Hopper, in Gluon."""
