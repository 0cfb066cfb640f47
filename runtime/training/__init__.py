"""What a training run is made of: its plan, what is in memory, one step, and what it leaves on disk."""
