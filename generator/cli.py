"""`wangen`: the commands of the workspace, and one command per step, made from the table.

Help must be quick, so that modules which only one command needs are imported inside it.
"""

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from wangen import profiles
from wangen.generator.check_command import CheckCommand, execute
from wangen.generator.commands import StepCommand
from wangen.generator.early import STOPPED
from wangen.generator.errors import WAS_STOPPED, WRONG_USAGE, UsageError, WangenError, did_you_mean, in_words
from wangen.generator.plain_command import PlainCommand
from wangen.generator.steps import STEPS, find_step
from wangen.profiles.reading import ProfileError


class Wangen(click.Group):
    """The command group: steps are found under all their spellings, unknown commands get the nearest name."""

    command_class = PlainCommand

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or of a spelling of it."""
        step = find_step(cmd_name)
        return super().get_command(ctx, step.command if step else cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Answer an unknown command with what there is."""
        known = not args or args[0].startswith("-") or self.get_command(ctx, args[0])
        if not known and not ctx.resilient_parsing:  # a shell that completes words wants no message
            cure = did_you_mean(args[0], self.list_commands(ctx), "wangen --help lists the commands")
            raise UsageError(f"there is no command {args[0]!r}", cure=cure)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The workspace's commands first, then the steps in their order."""
        return list(self.commands)


def _show_version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
        from wangen.generator.commit import version_words

        click.echo(version_words())
        ctx.exit()


@click.group(cls=Wangen, context_settings={"max_content_width": 110})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version with its commit and exit.",
)
def wangen() -> None:
    """From a folder of images and clips to a trained Wan or Qwen-Image LoRA.

    Start with `wangen demo`, or with `wangen init`, `wangen publish NAME` and the script it writes.
    """


@wangen.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("wangen-demo"), show_default=True,
              help="where the demo lives; run it again to resume")  # fmt: skip
def demo(folder: Path) -> int:
    """Make tiny weights, publish the example, train a LoRA on it and generate a clip: all for real, in a minute."""
    return int(_of_runtime("demo").run(folder))


def _of_runtime(module: str) -> Any:
    """A module of the runtime, by name: the generator imports nothing of it, and some commands are the runtime's."""
    from importlib import import_module

    from wangen.generator.session import missing_library

    try:
        return import_module(f"wangen.runtime.{module}")
    except ModuleNotFoundError as error:
        raise missing_library(error) from None


@wangen.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
def init(folder: Path) -> int:
    """Make a workspace: wangen.toml and datasets/."""
    from wangen.generator import workspace

    known = (folder / workspace.FILE).is_file()
    path = workspace.init(folder)
    click.echo(f"workspace: {path.parent.absolute()}" + ("  (wangen.toml was there and stays)" if known else ""))
    click.echo("next: make datasets/NAME/, put images and clips with .txt captions there, then: wangen publish NAME")
    return 0


_WORDS = {"token_normalize_func": lambda word: word.replace("-", "_"), "max_content_width": 110}
_IN_WORKSPACE = click.option(
    "--workspace", "folder", type=click.Path(path_type=Path), help="the workspace (default: found from here)"
)


@wangen.command(context_settings=_WORDS)
@click.argument("name")
@_IN_WORKSPACE
@click.option("--source", type=click.Path(path_type=Path), help="its folder or jsonl (default: datasets/NAME)")
@click.option(
    "--footage",
    metavar="FOLDER",
    help="long videos on the machine that trains, or below the bundle's root: "
    "its script cuts them into clips first; '' for none",
)
@click.option("--platform", "platforms", multiple=True, help="publish for this platform only; can be repeated")
@click.option("--model", help="model profile (default: the workspace's)")
@click.option("--resolution", "resolutions", multiple=True, help="512 or 832x480, can be repeated (default: model's)")
@click.option("--resize/--no_resize", default=None, help="publish smaller copies of images, as large as training needs")
@click.option("--trigger", help="word put in front of every published caption; '' for none")
@click.option("--dry_run", is_flag=True, help="say what would be done and write nothing")
@click.option("--only_scripts", is_flag=True, help="make the scripts again and touch nothing else")
@click.option("--fit/--no_fit", default=None, help="choose memory flags that fit the card (wangen plan shows them), or "
              "take the choice back")  # fmt: skip
@click.option("--gpu", metavar="CARD", help="with --fit: the card, 'RTX 4090' or 24GB (default: this machine's)")
@click.option("--long_paths", is_flag=True, help="Windows can open paths of 260 characters and more there")
def publish(**words: Any) -> int:
    """Write the bundle of a dataset: media, caches, TOML files and run scripts for each platform.

    --source, --footage, --model, --resolution, --resize, --trigger and --fit are remembered in wangen.toml.
    """
    from wangen.generator.publish.command import Request, run

    return run(Request(**words))


@wangen.command(context_settings=_WORDS)
@click.argument("name")
@_IN_WORKSPACE
@click.option("--platform", "platforms", multiple=True, help="look at this platform only; can be repeated")
@click.option("--resolution", "resolutions", multiple=True, help="only its media and caches; can be repeated")
@click.option("--bundle", is_flag=True, help="remove scripts, TOML files, published media and captions")
@click.option("--caches", is_flag=True, help="remove encoded latents and texts, and clips cut from footage")
@click.option("--checkpoints", is_flag=True, help="remove training states and LoRAs saved on the way")
@click.option("--outputs", is_flag=True, help="remove finished LoRAs, videos, reports and logs")
def clean(
    name: str, folder: Path | None, platforms: tuple[str, ...], resolutions: tuple[str, ...], **parts: bool
) -> int:
    """Show what wangen wrote for a dataset, or remove the parts that are named.

    Originals, and scripts and TOML files that you changed, always stay.
    """
    from wangen.generator.publish.clean_command import run
    from wangen.generator.publish.inventory import PARTS

    return run(name, folder, platforms, resolutions, [part for part in PARTS if parts[part]])


@wangen.command()
@click.argument("script", type=click.Path(path_type=Path))
@click.option("--fix", is_flag=True, help="write the bundle of wangen that does the same job, beside the script")
@click.option("--json", "as_json", is_flag=True, help="print the findings as JSON")
def lint(script: Path, fix: bool, as_json: bool) -> int:
    """Say what is wrong with a .bat, .ps1 or .sh that calls musubi-tuner or wangen, and what to write instead."""
    from wangen.generator.lint import run

    return run(script, fix=fix, as_json=as_json)


@wangen.command(context_settings=_WORDS)
@_IN_WORKSPACE
@click.option("--json", "as_json", is_flag=True, help="print the findings and all facts as one JSON object")
@click.option(
    "--real",
    metavar="[RUN]",
    is_flag=False,
    flag_value="",
    default=None,
    help="print a block for a report, without paths and names; with a run's output folder also its numbers",
)
def doctor(folder: Path | None, as_json: bool, real: str | None) -> int:
    """Say what of this machine would stop, spoil or slow down a training, each with its cure; changes nothing."""
    from wangen.generator.doctor import run

    numbers = _of_runtime("report.run_numbers").numbers(Path(real)) if real else {}
    return run(folder, as_json=as_json, real=None if real is None else numbers)


@wangen.command()
@click.argument("shell", metavar="bash|zsh|fish|powershell")
def completion(shell: str) -> int:
    """Print what makes a shell complete commands, flags and their values; docs/install.md says where it goes."""
    from wangen.generator.completion import script

    click.echo(script(shell, wangen))
    return 0


@wangen.group(cls=Wangen, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.pass_context
def models(ctx: click.Context) -> int:
    """Show which weight files are known and found, say what a file is, and fetch what is missing.

    A TASK is what is trained (t2v-1.3B, i2v-A14B …; `wangen models list` has all), a ROLE is one of the files that it
    needs, called as the flag that takes it: vae, t5, clip, dit, dit_high_noise; and the tokenizer.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


_MODELS_DIR = click.option("--dir", "folder", type=click.Path(path_type=Path),
                           help="the models folder (default: the workspace's, else models here)")  # fmt: skip


_TASKS = ", ".join(profiles.model_names())
_WANTED = f"""\b
TASK  all that it needs: {_TASKS}
ROLE  one file of --task: {", ".join(profiles.WEIGHT_ROLES)}
FILE  one that has a + in `wangen models list`, or owner/repository/path
"""


@models.command("list", short_help="what every task needs, what is here, what is missing", context_settings=_WORDS)
@click.option("--task", metavar="TASK", help=f"only what this task needs: {_TASKS}")
@_MODELS_DIR
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def models_list(task: str | None, folder: Path | None, as_json: bool) -> int:
    """Show what every task needs, which files are here, and what is missing."""
    from wangen.generator.models.listing import run_list

    return run_list(task, folder, as_json)


@models.command("where", short_help="the file of each role of a task; where a file is", context_settings=_WORDS)
@click.argument("what", metavar="TASK|FILE")
@_MODELS_DIR
def models_where(what: str, folder: Path | None) -> int:
    """Show which file each role of a task resolves to, or where a file is; fails when something is missing."""
    from wangen.generator.models.listing import run_where

    return run_where(what, folder)


@models.command("identify", short_help="what a weight file, a LoRA or a folder is", context_settings=_WORDS)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def models_identify(files: tuple[Path, ...], as_json: bool) -> int:
    """Say what a weight file, a LoRA or a folder is, from its header alone; its name plays no part."""
    from wangen.generator.models.identify import run

    return run(files, as_json)


@models.command("download", short_help="fetch what a task needs and is missing", epilog=_WANTED,
                context_settings=_WORDS)  # fmt: skip
@click.argument("words", nargs=-1, metavar="[TASK|ROLE|FILE|tokenizer]...")
@click.option("--task", metavar="TASK", help="the task of a ROLE (default: the workspace's model)")
@_MODELS_DIR
@click.option("--dry_run", is_flag=True, help="say what would be fetched, and fetch nothing")
def models_download(words: tuple[str, ...], task: str | None, folder: Path | None, dry_run: bool) -> int:
    """Fetch what a task needs and is missing from the Hugging Face hub; run it again to go on.

    What arrives is compared with the hub's checksum before it gets its name. HF_ENDPOINT names another hub, HF_TOKEN an
    account. Without words, all that the workspace's model needs is meant.
    """
    from wangen.generator.models.download import run

    return run(words, task, folder, dry_run)


@wangen.group(cls=Wangen, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.pass_context
def cache(ctx: click.Context) -> int:
    """Show what is in a cache of latents and texts, remove entries, and move them into packs and out of them.

    Only wangen's own entries are ever removed: any other file in a cache folder stays.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    return 0


_CACHE = click.argument("place", metavar="TOML|FOLDER", type=click.Path(path_type=Path))
_KIND = click.option("--kind", metavar="KIND", help="only entries of this kind: latent, clip, text_encoder_output …")
_YES = click.option("--yes", is_flag=True, help="do not ask")


@cache.command("stats", short_help="counts and bytes by kind and encoder", context_settings=_WORDS)
@_CACHE
def cache_stats(place: Path) -> int:
    """Show how many entries of each kind and encoder a dataset's cache folders, or one folder, hold."""
    return int(_of_runtime("cache_tools").stats(place))


@cache.command("clear", short_help="remove all entries, or those of one kind", context_settings=_WORDS)
@_CACHE
@_KIND
@_YES
def cache_clear(place: Path, kind: str | None, yes: bool) -> int:
    """Show which entries there are, ask, and remove them."""
    return int(_of_runtime("cache_tools").clear(place, kind, yes=yes))


@cache.command("prune", short_help="remove entries that no item needs any more", context_settings=_WORDS)
@click.argument("dataset_config", metavar="TOML", type=click.Path(path_type=Path))
@_YES
def cache_prune(dataset_config: Path, yes: bool) -> int:
    """Remove what no item of this dataset needs, under any model, nor of another one that uses the same folders."""
    return int(_of_runtime("cache_tools").prune(dataset_config, yes=yes))


@cache.command("pack", short_help="move entries into a few large files", context_settings=_WORDS)
@_CACHE
def cache_pack(place: Path) -> int:
    """Move entries into packs, tar files of up to 1 GiB with an index, from which training reads them as they are.

    Run again it adds what is new, and writes small packs, and those of which much was removed, anew.
    """
    return int(_of_runtime("pack_tools").pack(place))


@cache.command("unpack", short_help="make every packed entry a file again", context_settings=_WORDS)
@_CACHE
def cache_unpack(place: Path) -> int:
    """Make every packed entry a file of its own again, with the same bytes."""
    return int(_of_runtime("pack_tools").unpack(place))


@cache.command("verify", short_help="read every entry and compare its digest", context_settings=_WORDS)
@_CACHE
def cache_verify(place: Path) -> int:
    """Read every entry, in packs too, and say which are damaged; nothing is changed."""
    return int(_of_runtime("pack_tools").verify(place))


@wangen.command(context_settings=_WORDS)
@click.argument("what", metavar="NAME|SCRIPT")
@_IN_WORKSPACE
@click.option("--platform", help="this platform's scripts (default: this machine's, else the first that is published)")
@click.option("--gpu", metavar="CARD", help="a card by name, 'RTX 4090' or 'A100 80GB', or by memory, 24GB "
              "(default: this machine's)")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="print it as JSON")
def plan(**words: Any) -> int:
    """Say what training a published dataset needs: memory by part, disk, time, and what to change when it does not fit.

    Nothing is started and nothing changed. The exit code is 1 when it does not fit the card.
    """
    from wangen.generator.plan.command import Request, run

    return run(Request(**words))


wangen.add_command(CheckCommand())
for _step in STEPS[1:]:
    wangen.add_command(StepCommand(_step, execute))


def main(words: Sequence[str] | None = None) -> int:
    """Run `wangen` with these words (default: the command line) and return the exit code."""
    try:
        result = wangen.main(args=None if words is None else list(words), prog_name="wangen", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except WangenError as error:
        click.echo(f"wangen: {error}", err=True)
        return error.exit_code
    except ProfileError as error:
        click.echo(f"wangen: {UsageError(error.found, where=error.where, cure=error.cure)}", err=True)
        return WRONG_USAGE
    except click.ClickException as error:
        click.echo(f"wangen: {error.format_message()}", err=True)
        if isinstance(error, click.NoSuchOption) and not error.option_name.startswith("--"):
            click.echo("  do:    put -- before the names of files that begin with -", err=True)
        return 2
    except (OSError, MemoryError) as error:
        # What was printed: the error names no file.
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EPIPE):
            if error.errno == errno.ENOSPC:
                click.echo("wangen: the output could not be written: the disk is full", err=True)
            return 1
        failure = in_words(error)
        if failure is None:
            raise
        click.echo(f"wangen: {failure}", err=True)
        return failure.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo(f"wangen: {STOPPED}", err=True)
        return WAS_STOPPED
