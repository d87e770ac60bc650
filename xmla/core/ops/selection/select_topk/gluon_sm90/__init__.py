"""Selection of many rows on Hopper in one launch, in Gluon."""
