"""Making videos: prompts and first frames made ready, transformers loaded once, clips sampled, decoded and written.

`generate` and the samples of a training run go the same way: `sample_prompts` -> `scenes` -> `videos.sample_latents` ->
`videos.Decoder` -> `output`. They differ in who holds the transformers: a run its trainees, everybody else a
`sampler.Sampler`, whose LoRAs can be switched between two videos.
"""
