"""What publishing makes of a training: every model, both experts, the card's preset, sample prompts."""

import re
from pathlib import Path

import pytest
from helpers import image_bytes, write_tree

from wangen import profiles
from wangen.generator import lint, scripts, workspace
from wangen.generator.bundle import bundle_steps
from wangen.generator.check import examine
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import UsageError, WangenError
from wangen.generator.memory import PLAIN_MEMORY
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.source import Source
from wangen.generator.publish.texts import prompts_texts
from wangen.generator.steps import Check, Step, Train, find_step
from wangen.generator.tasks import supported
from wangen.generator.tomls import read_dataset

PLATFORMS = {"linux": ["sh"], "wsl": ["sh"], "windows": ["bat", "ps1"], "slurm": ["sh"]}
CACHING = ["check", "cache_latents", "cache_text", "check_cache"]
SAMPLES = '[steps.train]\nsample_prompts = "{}"\nsample_every_n_epochs = 2\n'
HEAD = f"platforms = {[*PLATFORMS]}\n".replace("'", '"')


def made(folder: Path, text: str, **files: str) -> workspace.Workspace:
    """A workspace with that text in its `wangen.toml`, published for four platforms."""
    place = workspace.read(write_tree(folder, {"wangen.toml": HEAD + text, **files}))
    plan = publishing.make_plan(place, place.targets, "x", place.profile(), Source(Path("x"), [], {}, {}))
    publishing.carry_out(plan)
    return place


def spoken(place: workspace.Workspace) -> dict[str, list[Step]]:
    """The steps of every training script, parsed by their real parser."""
    found = {}
    for platform, shells in PLATFORMS.items():
        for shell in shells:
            path = place.target(platform).folder / f"train_x.{shell}"
            lines = scripts.read_steps(path.read_bytes(), shell)
            found[f"{platform} {shell}"] = [parse(find_step(words[0]), words[1:]) for words in lines]
    return found


@pytest.mark.parametrize("task", supported())
def test_every_model_is_published_with_every_flag_as_it_was_meant(tmp_path, task):
    place = made(tmp_path, f'model = "{task}"\n')
    for name, steps in spoken(place).items():
        assert steps == list(bundle_steps(place, place.target(name.split()[0]), place.profile(), "x")), name
        train = steps[-2]
        assert isinstance(train, Train)
        assert {flag: getattr(train, flag) for flag in PLAIN_MEMORY} == PLAIN_MEMORY


@pytest.mark.slow
@pytest.mark.parametrize("task", supported())
def test_the_linter_finds_nothing_in_what_is_published(tmp_path, task):
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat", "p.txt": "A cat."}
    text = f'{HEAD}model = "{task}"\n' + SAMPLES.format("p.txt")
    text += 'vram = "12"\n' if profiles.model(task).presets else ""
    if profiles.model(task).condition == "controls":
        tree["datasets/cats/controls/a.jpg"] = image_bytes()
    place = write_tree(tmp_path, {**tree, "wangen.toml": text})
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    for platform, shells in PLATFORMS.items():
        for shell in shells:
            for name in ("train", "cache"):
                assert lint.lint(lint.read(place / "published" / platform / f"{name}_cats.{shell}")) == []


def test_one_expert_alone_is_no_knob_and_a_turned_one_is_not_taken_over(tmp_path):
    """The script has the weights of that one alone: any other value would fail after hours of caching."""
    text = 'model = "t2v-A14B"\n'
    script = made(tmp_path, text).target("linux").folder / "train_x.sh"
    turned = re.sub(rb"(EXPERTS\W+)both", rb"\1high", script.read_bytes())
    assert scripts.read_knobs(turned)["EXPERTS"] == "high"
    for expert, taken in (("high", True), ("low", False)):
        script.write_bytes(turned)
        made(tmp_path, f'{text}[steps.train]\nexperts = "{expert}"\n')
        fresh = script if taken else script.with_name("train_x.sh.new")
        assert (script.read_bytes() == turned) != taken
        assert "EXPERTS" not in scripts.read_knobs(fresh.read_bytes())
        (train,) = [step for _, step in scripts.parsed_steps(fresh.read_bytes(), "sh") if isinstance(step, Train)]
        assert (train.experts, train.dit is None, train.dit_high_noise is None) == (expert, taken, not taken)


def test_a_shared_knob_that_was_turned_is_not_lost_where_it_becomes_two(tmp_path):
    script = made(tmp_path, "").target("linux").folder / "train_x.sh"
    turned = re.sub(rb"(NUM_WORKERS=)'\d+'", rb"\1'8'", script.read_bytes())
    script.write_bytes(turned)
    made(tmp_path, "[steps.cache_latents]\nnum_workers = 8\n")
    found = scripts.read_knobs(script.read_bytes())
    assert {name: value for name, value in found.items() if name.startswith("NUM_WORKERS")} == {
        "NUM_WORKERS_CACHE_LATENTS": "8", "NUM_WORKERS_CACHE_TEXT": "8",
    }  # fmt: skip
    assert not script.with_name("train_x.sh.new").exists()


def test_a_script_that_lacks_the_weights_of_an_expert_it_trains_is_refused_by_flags_alone(tmp_path):
    script = made(tmp_path, 'model = "t2v-A14B"\n').target("linux").folder / "train_x.sh"
    data = re.sub(rb"(?<=--dit )\S+", b"", script.read_bytes()).replace(b"--dit ", b"")
    found = [str(step) for _, step in scripts.parsed_steps(data, "sh") if isinstance(step, WangenError)]
    assert found
    assert all("the low-noise expert of t2v-A14B has no weights" in text for text in found)


@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B"])
def test_both_experts_are_named_where_they_are_trained_and_where_they_are_checked(tmp_path, task):
    place = made(tmp_path, f'model = "{task}"\n')
    files = {weights.flag: weights for weights in place.profile().weights}
    for steps in spoken(place).values():
        for step in (steps[0], steps[-2]):
            assert isinstance(step, Check | Train)
            for flag in ("dit", "dit_high_noise"):
                name = str(getattr(step, flag)).replace("\\", "/")
                assert name == f"models/{Path(files[flag].downloads[0].path).name}"
        assert steps[-2].experts == "both"


@pytest.mark.parametrize(("expert", "named", "left_out"), [
    ("low", "dit", "dit_high_noise"), ("high", "dit_high_noise", "dit"),
])  # fmt: skip
def test_one_expert_alone_needs_no_weights_of_the_other(tmp_path, capsys, expert, named, left_out):
    place = made(tmp_path, f'model = "t2v-A14B"\n[steps.train]\nexperts = "{expert}"\n')
    for steps in spoken(place).values():
        for step in (steps[0], steps[-2]):
            assert getattr(step, named) is not None
            assert getattr(step, left_out) is None
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat"}
    write_tree(tmp_path, tree)
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{expert}_noise" in shown
    assert f"wangen models download vae t5 {named} tokenizer --task t2v-A14B\n" in shown
    assert f"{'high' if expert == 'low' else 'low'}_noise" not in shown


def test_a_script_caches_only_where_a_step_reads_it(tmp_path):
    """Real-time training reads no cache, evaluate does; the script that only caches does so all the same."""
    live = '[steps.train]\ncache_mode = "realtime"\n'
    for text, training in (
        (live, ["check", "train"]),
        (f"{live}validation_items = 2\n[steps.evaluate]\n", [*CACHING, "train", "evaluate"]),
    ):
        place = made(tmp_path / str(len(training)), text)
        for platform, shells in PLATFORMS.items():
            for shell in shells:
                for name, wanted in (("train", [*training, "report"]), ("cache", CACHING)):
                    path = place.target(platform).folder / f"{name}_x.{shell}"
                    told = [words[0] for words in scripts.read_steps(path.read_bytes(), shell)]
                    assert told == wanted, path
                    assert "missing-step" not in {finding.kind for finding in lint.lint(lint.read(path))}


@pytest.mark.parametrize("told", ['cache_mode = "auto"', 'cache_mode = "realtime"', "cache_latents = true", ""])
def test_a_training_that_encodes_is_told_with_what(tmp_path, told):
    for steps in spoken(made(tmp_path, f"[steps.train]\n{told}\nvalidation_items = 2\n[steps.evaluate]\n")).values():
        latents, text, train = steps[1], steps[2], steps[-3]
        assert (train.vae, train.vae_dtype) == ((latents.vae, latents.vae_dtype) if told else (None, None))
        assert (train.t5, train.t5_dtype) == ((text.t5, text.t5_dtype) if told else (None, None))


@pytest.mark.parametrize("task", [name for name in supported() if profiles.model(name).presets])
@pytest.mark.parametrize("vram", ["8", "12", "16", "24"])
def test_the_preset_of_a_card_stands_in_the_scripts_as_flags(tmp_path, task, vram):
    text = f'{HEAD}model = "{task}"\n[steps.train]\nvram = "{vram}"\n'
    place = workspace.read(write_tree(tmp_path, {"wangen.toml": text}))
    preset = profiles.model(task).presets[int(vram)]
    for target in place.targets:
        train = bundle_steps(place, target, place.profile(), "x")[-2]
        assert isinstance(train, Train)
        assert train.vram is None
        assert {flag: getattr(train, flag) for flag in PLAIN_MEMORY} == {
            flag: getattr(preset, flag) for flag in PLAIN_MEMORY
        }


def test_what_only_training_reads_is_looked_for_by_the_first_step(tmp_path):
    told = 'network_weights = "loras/a.safetensors"\nbase_weights = ["loras/b", "loras/c"]\n'
    place = made(tmp_path, f"[steps.train]\n{told}" + 'sample_prompts = "p.txt"\n', **{"p.txt": "A cat."})
    for steps in spoken(place).values():
        reads = [Path(str(path).replace("\\", "/")).as_posix() for path in steps[0].reads]
        assert reads == ["loras/a.safetensors", "loras/b", "loras/c"]
        assert steps[0].sample_prompts == steps[-2].sample_prompts
        assert str(steps[0].sample_prompts).endswith(".txt")
    plain = spoken(made(tmp_path / "plain", ""))["linux sh"][0]
    assert (plain.reads, plain.sample_prompts) == ((), None)


def test_a_flag_that_is_given_wins_over_the_preset(tmp_path):
    place = made(tmp_path, 'model = "t2v-14B"\n[steps.train]\nvram = "12"\nblocks_to_swap = 7\nquantize = "nf4"\n')
    preset = profiles.model("t2v-14B").presets[12]
    assert (preset.quantize, preset.blocks_to_swap) != ("nf4", 7)
    for steps in spoken(place).values():
        train = steps[-2]
        assert (train.quantize, train.blocks_to_swap, train.checkpointing) == ("nf4", 7, preset.checkpointing)


def test_an_adapter_that_needs_more_memory_swaps_more_blocks_than_the_preset(tmp_path):
    place = made(tmp_path, 'model = "t2v-1.3B"\n[steps.train]\nvram = "8"\nnetwork_module = "lokr"\n')
    preset = profiles.model("t2v-1.3B").presets[8]
    for steps in spoken(place).values():
        train = steps[-2]
        assert train.blocks_to_swap > preset.blocks_to_swap
        assert train.checkpointing == preset.checkpointing


def test_auto_is_left_to_the_machine_that_trains(tmp_path):
    place = made(tmp_path, '[steps.train]\nvram = "auto"\n')
    for steps in spoken(place).values():
        train = steps[-2]
        assert train.vram == "auto"
        assert {getattr(train, flag) for flag in PLAIN_MEMORY} == {None}


@pytest.mark.parametrize(("value", "words"), [
    ('"10"', ["no value '10'", "8, 12, 16, 24, auto"]),
    ("true", ["--vram takes one value", "True"]),
    ('"12GB"', ["no value '12GB'", "did you mean 12?"]),
])  # fmt: skip
def test_a_card_that_no_preset_is_for_is_refused(tmp_path, capsys, value, words):
    write_tree(tmp_path, {"wangen.toml": f"[steps.train]\nvram = {value}\n", "datasets/cats/a.jpg": image_bytes(),
                          "datasets/cats/a.txt": "a cat"})  # fmt: skip
    assert main(["publish", "cats", "--workspace", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert all(word in shown for word in words), shown
    assert not (tmp_path / "published").exists()


@pytest.mark.parametrize(("given", "card", "code"), [
    ('checkpointing = "none"', "24GB", 1), ("blocks_to_swap = 20", "141GB", 0),
    ("gradient_checkpointing_cpu_offload = true", "141GB", 0),
])  # fmt: skip
def test_fit_chooses_nothing_that_training_refuses_beside_the_users_own_flags(tmp_path, capsys, given, card, code):
    text = f'platforms = ["linux"]\nmodel = "t2v-14B"\n[steps.train]\n{given}\n'
    place = write_tree(tmp_path, {"wangen.toml": text, "datasets/cats/a.jpg": image_bytes(),
                                  "datasets/cats/a.txt": "a cat"})  # fmt: skip
    publish = ["publish", "cats", "--workspace", str(place)]
    assert main([*publish, "--fit", "--gpu", card]) == code, capsys.readouterr().err
    assert main(publish) == 0, "what was remembered can be published"


def test_a_dataset_larger_than_the_preset_is_made_for_is_said(tmp_path, capsys):
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat"}
    text = 'platforms = ["linux"]\nmodel = "t2v-14B"\n[steps.train]\nvram = "8"\n[dataset.cats]\nbatch_size = {}\n'
    place = write_tree(tmp_path, {**tree, "wangen.toml": text.format(16)})
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    preset = profiles.model("t2v-14B").presets[8]
    assert f"the preset for 8 GB is made for {preset.resolution[0]}x{preset.resolution[1]}" in shown
    assert "1 frame and rank 16, 16 at a time take about" in shown
    (place / "wangen.toml").write_text(text.format(1))
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    assert "take about" not in capsys.readouterr().out


# ---- sample prompts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prompts.txt", "my prompts/Cats.toml"])
def test_sample_prompts_of_the_workspace_are_published_beside_the_toml(tmp_path, name):
    text = "# mine\nA cat. --w 832\n" if name.endswith("txt") else '[prompt]\nprompt = "Ä cat"\n'
    place = made(tmp_path, SAMPLES.format(name), **{name: text})
    ending = Path(name).suffix
    for platform, suffix in (("linux", "linux"), ("wsl", "wsl"), ("windows", "win"), ("slurm", "slurm")):
        copy = place.target(platform).folder / "files" / "prompts" / f"x_{suffix}{ending}"
        assert copy.read_text(encoding="utf-8").endswith(text.removeprefix("# mine\n"))
    for key, steps in spoken(place).items():
        train = steps[-2]
        separator = "\\" if "windows" in key else "/"
        assert str(train.sample_prompts).startswith(f"files{separator}prompts{separator}x_")
        assert str(train.sample_prompts).endswith(ending)
        assert (train.vae, train.t5) == (steps[1].vae, steps[2].t5)
        assert train.vae is not None
        assert train.sample_every_n_epochs == 2


def test_without_prompts_training_is_told_no_encoder(tmp_path):
    for steps in spoken(made(tmp_path, "")).values():
        assert (steps[-2].vae, steps[-2].t5, steps[-2].tokenizer) == (None, None, None)


def test_with_continuations_training_is_told_the_vae_alone(tmp_path):
    asked = "[steps.train]\nsample_continuations = 4\nvalidation_items = 8\n"
    for steps in spoken(made(tmp_path, asked)).values():
        train = steps[-2]
        assert (train.sample_continuations, train.vae, train.vae_dtype) == (4, steps[1].vae, steps[1].vae_dtype)
        assert train.vae is not None
        assert (train.t5, train.clip, train.tokenizer) == (None, None, None)


def test_an_absolute_prompt_file_is_the_targets_own(tmp_path):
    place = made(tmp_path, SAMPLES.format("/data/prompts.json"))
    for platform in PLATFORMS:
        assert not (place.target(platform).folder / "files" / "prompts").exists()
    assert str(spoken(place)["linux sh"][-2].sample_prompts) == "/data/prompts.json"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("no.txt", None, ["there is no file", "no.txt", "begin at the workspace"]),
    ("p.json", '["A cat."]', ["p.json cannot be published", ".txt or .toml"]),
    ("p.txt", b"\xff\xfe\x00", ["not UTF-8"]),
])  # fmt: skip
def test_prompts_that_cannot_be_published_are_refused_before_anything_is_written(
    tmp_path, capsys, name, content, words
):
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat", "wangen.toml": SAMPLES.format(name)}
    place = write_tree(tmp_path, tree | ({} if content is None else {name: content}))
    assert main(["publish", "cats", "--workspace", str(place)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert all(word in shown for word in words), shown
    assert not (place / "published").exists()


@pytest.mark.parametrize(("name", "content", "words"), [
    ("p.txt", "A cat.\nA dog. --w 60 --f 16", "p.txt, line 2: width 60 is no multiple of 16; use 64"),
    ("p.txt", "A cat. --f 16", "p.txt, line 1: frame_count 16 is not 4n+1; use 17"),
    ("p.txt", "A cat. --i not_here.png --h 60", "p.txt, line 1: height 60 is no multiple of 16; use 64"),
    ("p.toml", '[prompt]\nprompt = "A cat."\nsample_steps = 0', "p.toml, prompt.subset 1: sample_steps 0 is no whole"),
])  # fmt: skip
def test_prompts_that_training_will_refuse_are_said_when_they_are_published(tmp_path, capsys, name, content, words):
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat", "wangen.toml": SAMPLES.format(name)}
    place = write_tree(tmp_path, tree | {name: content})
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    shown = capsys.readouterr().out
    assert f"  training will refuse a sample prompt: {place / words}" in shown
    assert shown.count("will refuse") == 1  # for all platforms
    (place / name).write_text("A cat. --w 64 --f 17" if name == "p.txt" else '[prompt]\nprompt = "A cat."\n')
    assert main(["publish", "cats", "--workspace", str(place)]) == 0
    assert "will refuse" not in capsys.readouterr().out


def test_prompts_are_renewed_unless_they_were_edited_and_go_with_the_bundle(tmp_path, capsys):
    tree = {"datasets/cats/a.jpg": image_bytes(), "datasets/cats/a.txt": "a cat", "prompts.txt": "A cat.\n"}
    place = write_tree(tmp_path, {**tree, "wangen.toml": 'platforms = ["linux"]\n' + SAMPLES.format("prompts.txt")})
    publish = ["publish", "cats", "--workspace", str(place)]
    copy = place / "published/linux/files/prompts/cats_linux.txt"
    assert main(publish) == 0
    stamp = copy.stat().st_mtime_ns
    assert main(publish) == 0
    assert copy.stat().st_mtime_ns == stamp
    (place / "prompts.txt").write_text("A dog.\n")
    assert main([*publish, "--only_scripts"]) == 0
    assert copy.read_text().endswith("\nA dog.\n")
    mine = copy.read_text() + "A bird.\n"
    copy.write_text(mine)
    (place / "prompts.txt").write_text("A fox.\n")
    capsys.readouterr()
    assert main(publish) == 0
    assert "cats_linux.txt was edited by hand and stays" in capsys.readouterr().out
    assert copy.read_text() == mine
    assert copy.with_name("cats_linux.txt.new").read_text().endswith("\nA fox.\n")
    copy.with_name("cats_linux.txt.new").replace(copy)
    assert main(["clean", "cats", "--workspace", str(place), "--bundle"]) == 0
    assert not copy.parent.exists()


# ---- regularisation ----------------------------------------------------------------------------------------------


def test_a_regularisation_set_is_marked_in_its_toml(tmp_path):
    tree = {"datasets/people/a.jpg": image_bytes(), "datasets/people/a.txt": "a man"}
    for is_reg in (True, False):
        text = f'platforms = ["linux"]\n[dataset.people]\nis_reg = {str(is_reg).lower()}\n'
        place = write_tree(tmp_path, {**tree, "wangen.toml": text})
        assert main(["publish", "people", "--workspace", str(place)]) == 0
        toml = place / "published/linux/files/tomls/people_linux.toml"
        assert [entry.is_reg for entry in read_dataset(toml)] == [is_reg]
        assert ("is_reg" in toml.read_text()) == is_reg


def test_prompts_that_training_would_refuse_are_refused_before_anything_is_cached(tmp_path):
    """When publishing by the line of the workspace's file, where only sizes and pictures are the target's to judge."""
    told = '[steps.train]\nsample_prompts = "p.txt"\n'
    place = made(tmp_path, told, **{"p.txt": "A cat."})
    (tmp_path / "p.txt").write_text("A cat.\nA dog. --x 5", encoding="utf-8")
    with pytest.raises(UsageError, match="--x is no option of a prompt") as error:
        prompts_texts(place, place.targets[0], place.profile(), "x")
    assert error.value.where == f"{tmp_path / 'p.txt'}, line 2"
    (tmp_path / "p.txt").write_text("A cat. --f 16", encoding="utf-8")
    assert len(prompts_texts(place, place.targets[0], place.profile(), "x")) == 1
    options = Check(dataset_config=tmp_path / "d.toml", task="t2v-1.3B", sample_prompts=tmp_path / "p.txt")
    (finding,) = examine(options, []).findings
    assert finding.where == f"{tmp_path / 'p.txt'}, line 1"
    (tmp_path / "p.txt").write_text("A cat. --f 17", encoding="utf-8")
    assert examine(options, []).findings == ()
