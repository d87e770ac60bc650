"""Logits over pages of fp8 keys on Hopper, in Gluon."""
