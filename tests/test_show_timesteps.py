"""`--show_timesteps`: what is drawn on the terminal and in the picture is what a run draws."""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from wangen import profiles
from wangen.generator.errors import WangenError
from wangen.generator.steps import Train
from wangen.runtime import train as train_step
from wangen.runtime.training.show_timesteps import draw, show, sizes_of_dataset
from wangen.runtime.training.timesteps import HIGH, LOW, Sampler

TOKENS = 1560  # 832x480
T2V, A14B = profiles.model("t2v-14B"), profiles.model("t2v-A14B")


def train(**flags) -> Train:
    here = Path("somewhere")
    return Train(dataset_config=here, output_dir=here, output_name="x", **flags)


@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_the_drawing_is_what_is_drawn(scheme):
    options = train(task="t2v-A14B", discrete_flow_shift=12.0, weighting_scheme=scheme, high_noise_share=0.4)
    drawing = draw(options, A14B, None, 20)
    assert drawing.shares == {LOW: 0.6, HIGH: 0.4}
    draws = {
        name: [Sampler(options, low, high, name).sigma((1, 0, str(n), 0), n, TOKENS) for n in range(3000)]
        for name, low, high in ((LOW, 0.0, 0.875), (HIGH, 0.875, 1.0))
    }
    for name, sigmas in draws.items():
        counted = Counter(min(int(20 * sigma), 19) for sigma in sigmas)
        expected = [drawing.shares[name] * counted[number] / 3000 for number in range(20)]
        assert drawing.bins[name] == pytest.approx(expected, abs=0.025)
    assert math.fsum(part for parts in drawing.bins.values() for part in parts) == pytest.approx(1)
    assert math.fsum(part for parts in drawing.weighted.values() for part in parts) == pytest.approx(1)
    if scheme == "none":
        assert drawing.weighted[LOW] == pytest.approx(drawing.bins[LOW])
    else:  # both weigh the clean half more than the noisy end
        assert drawing.weighted[LOW][10] > drawing.bins[LOW][10]


def test_one_expert_alone_gets_all_samples():
    drawing = draw(train(task="t2v-A14B", experts="high"), A14B, {256: 2, 1024: 1}, 40)
    assert drawing.shares == {HIGH: 1.0}
    assert math.fsum(drawing.bins[HIGH]) == pytest.approx(1)
    assert max(drawing.bins[HIGH][:35]) == 0


def test_the_boundary_of_the_flags_wins():
    options = train(task="t2v-A14B", timestep_sampling="uniform", timestep_boundary=0.25)
    assert draw(options, A14B, None, 4).bins == {LOW: [0.25, 0, 0, 0], HIGH: pytest.approx([0, 0.25, 0.25, 0.25])}


def test_the_console_shows_bars_shares_and_warnings(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    report = show(train(task="t2v-A14B", timestep_sampling="logsnr", show_timesteps="console"), A14B)
    text = capsys.readouterr().out
    assert "timesteps drawn: logsnr" in text
    assert "450 - 500" in text
    assert "█" in text
    assert "warning: the high-noise expert gets 0.005 % of the samples" in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert report.folder is None
    assert report.summary == "logsnr: low noise 100 %, high noise 0.00497 %"
    assert report.result["expert_shares"][HIGH] == pytest.approx(4.97e-5, rel=1e-3)


def test_modes_that_look_at_the_size_are_drawn_for_those_of_the_dataset(tiny_run, tmp_path, caplog, capsys):
    flags = {"timestep_sampling": "qwen_shift", "show_timesteps": "console"}
    options = tiny_run.options(tmp_path, **flags)
    assert sizes_of_dataset(options, profiles.model(options.task)) == {16: 3}  # three samples of 64x64
    assert sizes_of_dataset(dataclasses.replace(options, timestep_sampling="shift"), T2V) is None
    assert train_step.run(options).summary == "qwen_shift, at the dataset's sizes: all samples 100 %"
    nowhere = dataclasses.replace(options, dataset_config=tmp_path / "no.toml")
    assert sizes_of_dataset(nowhere, T2V) is None
    assert "drawn for the model's own resolution, not for the sizes of the dataset" in caplog.text
    assert show(nowhere, T2V).summary == "qwen_shift, at 832x480: all samples 100 %"


def test_what_is_the_other_expert_s_is_said():
    alone = show(train(task="t2v-A14B", experts="low", max_timestep=900, show_timesteps="console"), A14B)
    assert alone.result["warnings"] == [
        "the others from 0 to 900 are the other expert's, and not trained (--timestep_boundary)"
    ]
    both = show(train(task="t2v-A14B", max_timestep=900, show_timesteps="console", high_noise_share=0.5), A14B)
    assert both.result["warnings"] == []


def test_the_picture_is_one_file_that_stands_for_itself(tmp_path):
    flags = {"show_timesteps": "image", "weighting_scheme": "cosmap", "output_dir": tmp_path / "new"}
    options = dataclasses.replace(train(), **flags)
    report = show(options, T2V)
    path = tmp_path / "new" / "x-timesteps.svg"
    assert report.result["image"] == str(path)
    root = ElementTree.fromstring(path.read_bytes())
    words = " ".join(root.itertext())
    assert "shift, shift 5, weighting cosmap" in words
    assert "all samples 100 %" in words
    assert "share of the loss weight" in words
    assert not [value for element in root.iter() for value in element.attrib.values() if "://" in value]
    first = path.read_bytes()
    show(options, T2V)
    assert path.read_bytes() == first


def test_a_picture_that_cannot_be_written_is_an_error_in_words(tmp_path):
    (tmp_path / "file").write_text("in the way")
    options = dataclasses.replace(train(), output_dir=tmp_path / "file", show_timesteps="image")
    with pytest.raises(WangenError, match="cannot write"):
        show(options, T2V)
