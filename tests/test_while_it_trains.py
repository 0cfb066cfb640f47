"""Looking at a run changes no byte of it: validation, samples and logs."""

import json

from tiny import TinyRun

from wangen.runtime import train


def test_a_run_that_is_looked_at_ends_with_the_same_bytes(tiny_run: TinyRun, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red square --w 64 --h 64 --f 1 --s 2 --l 3\n")
    same = {"validation_items": 1, "network_dropout": 0.3, "ema_decay": 0.9, "max_train_steps": 4}
    weights = {"vae": tiny_run.weights["vae"], "t5": tiny_run.weights["t5"], "t5_dtype": "float32"}
    train.run(tiny_run.options(tmp_path / "quiet", **same, validation_timesteps=2, validate_every_n_steps=4))
    train.run(
        tiny_run.options(
            tmp_path / "watched",
            **same,
            **weights,
            validation_timesteps=3,
            validate_every_n_steps=1,
            keep_best=True,
            sample_prompts=prompts,
            sample_every_n_steps=2,
            sample_at_first=True,
            log_with=("tensorboard",),
        )
    )
    for name in ("lora.safetensors", "lora-ema.safetensors"):
        assert (tmp_path / "quiet" / name).read_bytes() == (tmp_path / "watched" / name).read_bytes()
    samples = sorted(path.name for path in (tmp_path / "watched" / "samples").glob("*.png"))
    assert samples == [f"lora-step{step:08d}-1.png" for step in (0, 2, 4)]
    lines = [json.loads(line) for line in (tmp_path / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    means = {line["step"]: line["validation"]["mean_adapter"] for line in lines if "validation" in line}
    assert sorted(means) == [0, 1, 2, 3, 4]
    assert (tmp_path / "watched" / "lora-best.safetensors").is_file()
