"""`--pack` of processes that go through the model together."""

from dataclasses import replace
from pathlib import Path

import pytest
import together as forked
from test_together import losses
from together import trained
from train_cases import TI2V, make_ti2v


@pytest.mark.slow
def test_a_given_frame_of_one_process_lets_none_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a picture no frame is given, so one process could pack where the other cannot, and would gather once."""
    monkeypatch.setattr(forked, "TIMEOUT_S", 60.0)
    cases = make_ti2v(tmp_path / "set")
    options = cases.options(
        tmp_path / "parts", dataset_config=cases.config("single", TI2V.replace("batch_size = 2", "batch_size = 1")),
        task="ti2v-5B",
        condition_frames=1, condition_dropout=0.5, pack=True, parallel="fsdp", gradient_accumulation_steps=2,
        max_train_steps=6,
    )  # fmt: skip
    trained(options, 2)
    one = replace(options, output_dir=tmp_path / "one", parallel="auto", gradient_accumulation_steps=4)
    trained(one, 1)
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
