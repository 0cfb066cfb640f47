"""What `evaluate` is made of: held-out losses with intervals, paired clips, their signals, the ranking."""
