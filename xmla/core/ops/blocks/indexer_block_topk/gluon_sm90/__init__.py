"""Selection in blocks over ranges of contiguous fp8 keys on Hopper, in Gluon."""
