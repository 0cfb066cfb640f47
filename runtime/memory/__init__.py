"""What makes a training step fit the card: a quantised base, streamed blocks, checkpointing, presets."""
