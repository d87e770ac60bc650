"""Attention on Hopper in Gluon: kernel.py is launched, packed.py and plain.py attend to entries of either kind."""
