"""Attention for sm_100 and sm_103, in Gluon: over plain rows and packed entries of V3.2 and V4."""
