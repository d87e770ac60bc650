"""Logits over pages of fp8 keys for sm_100 and sm_103, in Gluon."""
