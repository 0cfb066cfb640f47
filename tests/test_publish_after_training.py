"""The steps of a script that follow the training: videos and the evaluation where asked for, and the report."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from helpers import write_tree
from test_publish_training import HEAD, made, spoken

from wangen.generator import workspace
from wangen.generator.bundle import bundle_steps
from wangen.generator.cli import main
from wangen.generator.commands import parse
from wangen.generator.errors import WangenError
from wangen.generator.publish import plan as publishing
from wangen.generator.publish.source import Source
from wangen.generator.steps import Evaluate, Generate, MakeReport, Train

ASKED = """
[steps.train]
validation_items = 4
seed = 7
save_every_n_epochs = 5

[steps.generate]
prompt = "a cat, 50% off & wild"
infer_steps = 12

[steps.evaluate]
num_videos = 2
"""


FULL = "[steps.train]\ntrain_mode = 'full'\n"


def test_the_report_comes_last_and_knows_the_run(tmp_path):
    for steps in spoken(made(tmp_path, "")).values():
        train, report = steps[-2:]
        assert isinstance(train, Train)
        assert isinstance(report, MakeReport)
        assert (report.output_dir, report.output_name) == (train.output_dir, train.output_name)
        assert report.dataset_config == train.dataset_config


@pytest.mark.parametrize("task", ["t2v-1.3B", "t2v-A14B"])
def test_videos_and_the_evaluation_follow_where_they_are_asked_for(tmp_path, task):
    for name, steps in spoken(made(tmp_path, f'model = "{task}"\n{ASKED}')).items():
        train, generate, evaluate, report = steps[-4:]
        assert isinstance(generate, Generate), name
        assert isinstance(evaluate, Evaluate)
        assert isinstance(report, MakeReport)
        assert generate.lora_weight == evaluate.lora_weight == (train.output_dir,)
        assert generate.lora_weight_high_noise == ((train.output_dir,) if task == "t2v-A14B" else ())
        assert generate.prompt == "a cat, 50% off & wild"
        assert generate.save_path.as_posix().replace("\\", "/") == "outputs/x/generated"
        assert (generate.infer_steps, generate.dit, generate.t5) == (12, train.dit, evaluate.t5)
        assert evaluate.output_dir == train.output_dir
        assert (evaluate.validation_items, evaluate.seed) == (train.validation_items, train.seed) == (4, 7)
        assert evaluate.dataset_config == train.dataset_config
        assert evaluate.dit_high_noise == train.dit_high_noise


def test_a_try_judges_and_shows_what_a_try_has_trained(tmp_path):
    steps = spoken(made(tmp_path, ASKED))["linux sh"]
    train, generate, evaluate, report = (
        type(step)(**{**vars(step), "smoke": True}).effective() if hasattr(step, "smoke") else step
        for step in steps[-4:]
    )
    assert report.output_dir == evaluate.output_dir == evaluate.lora_weight[0] == train.output_dir
    assert evaluate.validation_items == train.validation_items
    assert generate.lora_weight == (train.output_dir,)
    assert (generate.save_path.parent, generate.infer_steps, generate.num_videos) == (train.output_dir, 4, 1)


@pytest.mark.parametrize("judged_by", ["validation_items = 4", 'validation_config = "/data/val.toml"'])
def test_the_5b_is_judged_with_the_first_frames_that_it_was_trained_with(tmp_path, judged_by):
    text = f'model = "ti2v-5B"\n[steps.train]\ncondition_frames = 5\n{judged_by}\n[steps.evaluate]\nnum_videos = 0\n'
    assert spoken(made(tmp_path, text))["linux sh"][-2].condition_frames == 5


def test_a_held_out_dataset_is_judged_by_and_the_own_one_is_what_was_trained_on(tmp_path):
    text = '[steps.train]\nvalidation_config = "/data/val.toml"\n[steps.evaluate]\nnum_videos = 0\n'
    evaluate, train = (spoken(made(tmp_path, text))["linux sh"][number] for number in (-2, -3))
    assert evaluate.resolution == "all"
    assert (evaluate.dataset_config, evaluate.training_config) == (Path("/data/val.toml"), train.dataset_config)


def test_a_name_and_a_folder_of_the_run_s_own_reach_all_steps(tmp_path):
    own = '[steps.train]\noutput_dir = "elsewhere"\noutput_name = "mine"\nvalidation_items = 4\n[steps.evaluate]\n'
    steps = spoken(made(tmp_path, own))["linux sh"]
    assert {str(step.output_dir) for step in steps if hasattr(step, "output_dir")} == {"elsewhere"}
    assert {step.output_name for step in steps if hasattr(step, "output_name")} == {"mine"}
    assert {str(step.report_dir) for step in steps if getattr(step, "report_dir", None)} == {"elsewhere"}


def test_what_the_training_is_told_reaches_what_follows(tmp_path):
    text = (
        'model = "t2v-14B"\n[steps.train]\nvram = "12"\nvalidation_items = 4\noutput_dir = "elsewhere"\n'
        'sample_prompts = "/data/p.txt"\n[steps.generate]\nnum_videos = 2\n[steps.evaluate]\nnum_videos = 0\n'
    )
    train, generate, evaluate, _ = spoken(made(tmp_path, text))["linux sh"][-4:]
    assert (generate.quantize, generate.blocks_to_swap) == (train.quantize, train.blocks_to_swap)
    assert (evaluate.quantize, evaluate.blocks_to_swap) == (train.quantize, train.blocks_to_swap)
    assert generate.prompt_file == Path("/data/p.txt")
    assert generate.lora_weight == evaluate.lora_weight == (Path("elsewhere"),)
    assert evaluate.output_dir == Path("elsewhere")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[steps.generate]\nnum_videos = 2\n", "there is no prompt"),
        ('[steps.generate]\nprompt_file = "p.txt"\n', "prompt_file is not copied"),
        ('model = "i2v-14B"\n[steps.generate]\nprompt = "a cat"\n', "begins with a picture"),
        ('model = "t2v-A14B"\n[steps.train]\nexperts = "low"\n[steps.generate]\nprompt = "a"\n', "both are needed"),
        ("[steps.train]\nvalidation_items = 4\n[steps.evaluate]\nseed = 9\n", "another seed"),
        ("[steps.train]\nvalidation_items = 4\n[steps.evaluate]\nvalidation_items = 2\n", "another validation_items"),
        (f"{FULL}[steps.generate]\nprompt = 'a'\n", "all weights are trained, and it takes LoRAs"),
        (f"{FULL}validation_items = 4\n[steps.evaluate]\n", "all weights are trained, and it takes LoRAs"),
        ("[steps.train]\nshow_timesteps = 'console'\n[steps.generate]\nprompt = 'a'\n", "nothing is trained"),
        ("[steps.train]\nvalidation_items = 4\nbase_weights = ['/a']\n[steps.evaluate]\n", "by another base"),
        ("[steps.train]\ndora = true\nbase_weights = ['/a']\n[steps.generate]\nprompt = 'a'\n", "a DoRA scales"),
        ("[steps.train]\nbase_weights = ['/a']\n[steps.generate]\nprompt = 'a'\nlora_multiplier = [0.8]\n",
         "lora_multiplier is for the run's LoRA and its 1 LoRA of base_weights"),
        ("[steps.train]\nseed = -1\n", "--seed -1: a seed is a whole number from 0"),
        ("[steps.train]\ngpus = 'two'\n", "--gpus 'two' is neither"),
        ("[steps.cache_latents]\nvae_tile = 100\n", "--vae_tile 100"),
        *((f"[steps.generate]\nprompt = 'a'\n{line}\n", words) for line, words in (
            ("video_length = 4", r"--video_length 4: must be 4n\+1"), ("video_size = [100, 100]", "multiples of 16"),
            ("infer_steps = 0", "--infer_steps must be at least 1"), ("seed = -1", "--seed -1"),
            ("fps = 0", "--fps must be"), ("flow_shift = -1.0", "--flow_shift must be above 0"),
            ("blocks_to_swap = 999", "--blocks_to_swap 999: t2v-1.3B has 30 blocks"),
            ("background_color = 'red'", "a colour like"), ("lora_multiplier = [1.0, 2.0]", "1 --lora_weight and 2"),
            ("image_path = '/a.png'", "takes no first frame"), ("vae_tile = 100", "--vae_tile 100"),
            ("save_path = 'x.jpg'", "writes .mp4 and .png, not .jpg"),
            ("timestep_boundary = 0.5", "timestep_boundary"),
        )),
        *((f"[steps.train]\nvalidation_items = 4\n[steps.evaluate]\n{line}\n", words) for line, words in (
            ("validation_timesteps = 0", "--validation_timesteps must be at least 1"),
            ("num_videos = -1", "--num_videos must be at least 0"), ("infer_steps = 0", "--infer_steps"),
            ("condition_frames = 5", "--condition_frames: t2v-1.3B does not take given"),
        )),
    ],
)  # fmt: skip
def test_what_could_only_fail_after_the_training_is_refused_before(tmp_path, text, part):
    place = workspace.read(write_tree(tmp_path, {"wangen.toml": HEAD + text}))
    with pytest.raises(WangenError, match=part):
        publishing.make_plan(place, place.targets, "x", place.profile(), Source(Path("x"), [], {}, {}))


def test_an_own_prompt_wins_over_the_samples_of_the_training(tmp_path):
    text = '[steps.train]\nsample_prompts = "/data/p.txt"\n[steps.generate]\nprompt = "a cat"\n'
    generate = spoken(made(tmp_path, text))["linux sh"][-2]
    assert (generate.prompt, generate.prompt_file) == ("a cat", None)


@pytest.mark.parametrize("task", ["t2v-1.3B", "t2v-A14B"])
def test_videos_are_made_on_the_base_that_was_trained_on(tmp_path, task):
    text = f"model = '{task}'\n[steps.train]\nbase_weights = ['/a', '/b']\nbase_weights_multiplier = [0.5, 2.0]\n"
    generate = spoken(made(tmp_path, text + "[steps.generate]\nprompt = 'a cat'\n"))["linux sh"][-2]
    assert generate.lora_weight == (Path("outputs/x"), Path("/a"), Path("/b"))
    assert generate.lora_multiplier == (1.0, 0.5, 2.0)
    plain = "network_args = ['use_dora=false']\n[steps.generate]\nprompt = 'a cat'\n"
    assert spoken(made(tmp_path, text + plain))["linux sh"][-2].lora_weight == generate.lora_weight
    own = "[steps.generate]\nprompt = 'a cat'\nlora_weight = ['/mine']\nlora_multiplier = [0.8]\n"
    mine = spoken(made(tmp_path, text + own))["linux sh"][-2]
    assert (mine.lora_weight, mine.lora_multiplier) == ((Path("/mine"),), (0.8,))
    own = "[steps.generate]\nprompt = 'a cat'\nlora_multiplier = [0.8, 0.5, 2.0]\n"
    assert spoken(made(tmp_path, text + own))["linux sh"][-2].lora_multiplier == (0.8, 0.5, 2.0)
    high = (generate.lora_weight, generate.lora_multiplier) if task == "t2v-A14B" else ((), ())
    assert (generate.lora_weight_high_noise, generate.lora_multiplier_high_noise) == high


def test_both_experts_own_weights_reach_all_steps(tmp_path):
    text = "model = 't2v-A14B'\n[steps.train]\ndit = '/low'\ndit_high_noise = '/high'\nvalidation_items = 4\n"
    steps = spoken(made(tmp_path, f"{text}[steps.generate]\nprompt = 'a'\n[steps.evaluate]\n"))["linux sh"]
    told = {(step.dit, step.dit_high_noise) for step in steps if hasattr(step, "dit_high_noise")}
    assert told == {(Path("/low"), Path("/high"))}


def test_the_first_step_looks_for_what_later_ones_read(tmp_path):
    text = (
        "[steps.train]\nresume = '/state'\nbase_weights = ['/a']\nvalidation_config = '/v.toml'\n"
        "[steps.generate]\nprompt_file = '/p.txt'\n"
    )
    check = spoken(made(tmp_path, text))["linux sh"][0]
    assert {str(path) for path in check.reads} == {"/state", "/a", "/v.toml", "/p.txt"}


@pytest.mark.parametrize("path", ["~/loras", "~anna/loras", "~my-user/x", "~"])
def test_a_path_that_only_a_shell_would_know_is_refused(tmp_path, path):
    write_tree(tmp_path, {"wangen.toml": HEAD + f"[steps.train]\noutput_dir = '{path}'\n"})
    with pytest.raises(WangenError, match=f"--output_dir {path}: ~ is not known here"):
        workspace.read(tmp_path)
    assert parse(MakeReport, ["--output_dir", "a~/b", "--output_name", "~x"]).output_dir == Path("a~/b")


@pytest.mark.parametrize("name", ["CON", "aux.v1", "a|b", "a?", "a:b", "a. "])
def test_a_name_that_windows_cannot_hold_is_refused_for_windows(tmp_path, name):
    text = HEAD + f"[steps.train]\noutput_name = '{name}'\n"
    place = workspace.read(write_tree(tmp_path, {"wangen.toml": text}))
    for target in place.targets:
        refused = target.platform.kind == "windows"
        with pytest.raises(WangenError, match="Windows cannot hold this name") if refused else nullcontext():
            bundle_steps(place, target, place.profile(), "x")


def test_an_evaluation_without_anything_held_out_is_refused_before_anything_is_written(tmp_path, capsys):
    place = workspace.read(write_tree(tmp_path, {"wangen.toml": HEAD + "[steps.evaluate]\nnum_videos = 0\n"}))
    with pytest.raises(WangenError, match="holds nothing out"):
        publishing.make_plan(place, place.targets, "x", place.profile(), Source(Path("x"), [], {}, {}))
    assert not (tmp_path / "published").exists()
    (tmp_path / "wangen.toml").write_text(HEAD + "[steps.evaluate]\nnum_vdeos = 0\n", encoding="utf-8")
    assert main(["publish", "x", "--workspace", str(tmp_path)]) == 2
    assert "num_videos" in capsys.readouterr().err


OWN_SIZE = "resolution = [512, 384]\n[steps.generate]\nprompt = 'a'\nvideo_size = [256, 128]\nvideo_length = 5\n"


@pytest.mark.parametrize(
    ("said", "size", "length"),
    [
        ("", (480, 832), None),
        ("resolution = [512, 384]\nnum_frames = 17\n", (384, 512), 17),
        ("resolution = [1000, 562]\n", (560, 992), None),
        ("resolution = [256, 256]\n[dataset.x]\nresolutions = ['320x192', '512x384', '64']\n", (384, 512), None),
        (OWN_SIZE, (256, 128), 5),
    ],
)
def test_videos_are_made_as_they_are_trained(tmp_path, said, size, length):
    asked = said if "steps.generate" in said else f"{said}[steps.generate]\nprompt = 'a'\n"
    for steps in spoken(made(tmp_path, asked)).values():
        (generate,) = [step for step in steps if isinstance(step, Generate)]
        assert (generate.video_size, generate.video_length) == (size, length)


def test_the_videos_of_an_evaluation_are_as_those_that_are_trained(tmp_path):
    text = "resolution = [512, 384]\n[steps.train]\nvalidation_items = 4\n[steps.evaluate]\nnum_videos = 1\n"
    for steps in spoken(made(tmp_path, text)).values():
        (evaluate,) = [step for step in steps if isinstance(step, Evaluate)]
        assert evaluate.video_size == (384, 512)


def test_a_picture_is_edited_at_its_own_size(tmp_path):
    asked = '[steps.generate]\nprompt = "a"\ncontrol_image_path = ["/a.png"]\n'
    place = made(tmp_path, f'model = "qwen-image-edit"\nresolution = [512, 512]\n{asked}')
    for steps in spoken(place).values():
        (generate,) = [step for step in steps if isinstance(step, Generate)]
        assert generate.video_size is None
