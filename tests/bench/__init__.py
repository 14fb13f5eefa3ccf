"""`make bench`: how fast it is, as ratios measured in one run, each beside its target. Never asserted."""
