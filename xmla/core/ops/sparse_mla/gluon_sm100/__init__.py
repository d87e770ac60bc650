"""Attention over plain rows for sm_100 and sm_103, in Gluon."""
