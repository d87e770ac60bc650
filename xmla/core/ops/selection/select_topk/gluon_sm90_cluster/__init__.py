"""Selection of few rows on Hopper by clusters of CTAs, in Gluon."""
