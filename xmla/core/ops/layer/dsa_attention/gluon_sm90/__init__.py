"""Selection and mapping of few rows on Hopper, in Gluon."""
