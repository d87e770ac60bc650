"""Attention on SM12x in Gluon."""
