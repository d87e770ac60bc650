"""Selection of blocks over contiguous fp8 keys on Hopper, in Gluon."""
