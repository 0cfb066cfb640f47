"""`wangen plan`: what a training run will need, before it starts: memory, disk, time, and what makes it fit."""
