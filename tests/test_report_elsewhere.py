"""The page of a run in a bundle is the same wherever `wangen report` is started."""

import json
from pathlib import Path

import pytest
from helpers import make_image
from report_runs import page_of, step_line, write_metrics


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose TOML names its media from the folder of its scripts, with a run in it."""
    folder = tmp_path / "bundle"
    make_image(folder / "files" / "cats" / "tom.png", (64, 64))
    (folder / "files" / "cats" / "tom.txt").write_text("a grey cat", encoding="utf-8")
    (folder / "files" / "tomls").mkdir()
    toml = "files/tomls/cats.toml"
    text = "[general]\nresolution = [64, 64]\n[[datasets]]\nimage_directory = 'files/cats'\ncache_directory = 'cache'\n"
    (folder / toml).write_text(text, encoding="utf-8")
    run = write_metrics(folder / "outputs" / "cats", [step_line(1)])
    told = {"step": "train", "ok": True, "settings": {"output_name": "cats", "dataset_config": toml}}
    (run / "train.report.json").write_text(json.dumps(told), encoding="utf-8")
    return folder


def test_its_dataset_is_found_from_any_folder(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pages = []
    for place in (bundle, tmp_path, bundle / "outputs"):
        monkeypatch.chdir(place)
        pages.append(page_of(bundle / "outputs" / "cats"))
        assert Path.cwd() == place
    assert "a grey cat" in pages[0]
    assert pages == [pages[0]] * 3
