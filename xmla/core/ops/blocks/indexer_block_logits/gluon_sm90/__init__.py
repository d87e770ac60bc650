"""Logits of the keys in selected blocks over fp8 keys on Hopper, in Gluon."""
