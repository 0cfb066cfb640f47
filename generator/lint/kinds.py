"""What the linter can find: one table of kinds, and the finding itself."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

Severity = Literal["error", "warning"]


class Kind(NamedTuple):
    """A kind of finding: how grave it is as a rule, and what it is about."""

    severity: Severity
    about: str


KINDS: dict[str, Kind] = {
    # flags
    "unknown-flag": Kind("error", "a flag that the step does not have: another step's, another program's, or misspelt"),
    "dashes": Kind("error", "musubi-tuner refuses `--sage-attn` for `--sage_attn`; wangen takes both"),
    "value": Kind(
        "error", "a value outside the choices, no number where one belongs, a size or length Wan cannot have"
    ),
    "missing-flag": Kind("error", "a flag without which the step fails, perhaps only after hours (`--output_name`)"),
    "twice": Kind("warning", "a flag is given twice with different values, and the last one wins"),
    "stray-word": Kind("error", "a word that belongs to no flag"),
    "no-effect": Kind("warning", "a flag that the trainer accepts and ignores"),
    "secret": Kind("warning", "a key on the command line, where every list of processes shows it"),
    # training
    "attention": Kind("error", "no attention kernel, or two at once"),
    "sage": Kind(
        "error", "sage attention has no backward pass: musubi-tuner stops, others train nothing; wangen has one"
    ),
    "precision": Kind("error", "`--mixed_precision` is missing, or does not fit the weights or accelerate"),
    "memory": Kind("error", "memory features that exclude or need each other"),
    "saving": Kind("warning", "nothing saved before the end; `--resume` that starts again; steps and epochs at once"),
    "samples": Kind("warning", "samples without prompts do nothing; without VAE or text encoder they stop the run"),
    "weights": Kind("error", "a weight file that the tool or the model cannot use, by its name"),
    "i2v": Kind("error", "image-to-video without `--i2v` or `--clip` when caching, or these without image-to-video"),
    "clip": Kind("error", "`--clip` with Wan 2.2 A14B, which has no image encoder"),
    "timesteps": Kind("error", "an empty range, or one that the sampling mode `sigma` turns round"),
    "shift": Kind("warning", "a shift or weighting that the sampling mode ignores, or no shift where one is expected"),
    "experts": Kind("error", "the wrong weights, task or timesteps for an expert of Wan 2.2"),
    "starved": Kind("error", "a sampling mode that hardly ever trains the high-noise expert"),
    # steps
    "missing-step": Kind(
        "error", "nothing caches what training reads (a warning when the script caches nothing at all)"
    ),
    "order": Kind("error", "caching after training"),
    "foreign-step": Kind("error", "HunyuanVideo's script in the place of Wan's"),
    "differs": Kind("error", "another TOML, VAE or text encoder than in the other steps"),
    "same-output": Kind("error", "two trainings write the same files"),
    # the shell
    "unchecked": Kind("warning", "the next step runs although this one failed: nothing asks, or the branch only tells"),
    "errorlevel": Kind(
        "warning", "`if errorlevel 1` misses crashes, whose codes are negative; `%ERRORLEVEL%` in a block"
    ),
    "pipe": Kind("warning", "a pipe hides the exit code of the step"),
    "continuation": Kind("error", "a line that should go on does not, or one that should end goes on"),
    "unquoted": Kind("error", "a path with a blank that is not quoted"),
    "quoting": Kind("error", "quotes that the shell reads in another way than they look"),
    "percent": Kind("error", "a single `%` in a .bat file, which cmd takes out"),
    "delayed": Kind("error", "`!` in a value, or in a variable's, while delayed expansion is on (`cmd /v:on` too)"),
    "placeholder": Kind(
        "error", "a token that was never replaced: `<PATH>`, `{{ name }}`, `YOUR_PATH`, `{models}`, `%%X%%`"
    ),
    "undefined": Kind("warning", "a variable that the script never sets"),
    "foreign-path": Kind("error", "a path of another system than the script's"),
    "home": Kind("error", "`~` where nothing replaces it"),
    "line-ends": Kind("error", "LF in a .bat file, CRLF in a .sh file"),
    "bom": Kind("error", "a byte order mark where the shell stumbles over it, or none where PowerShell needs it"),
    "encoding": Kind("warning", "text that the shell may read in another code page"),
    "smart-character": Kind("error", "typographic quotes, dashes or blanks in a command"),
    "long-line": Kind("error", "a line longer than cmd reads (8191 characters)"),
    "call": Kind("error", "an environment activated in a way that ends the script or changes nothing"),
    "powershell-7": Kind("error", "`&&` or `||`, which Windows PowerShell 5.1 does not know"),
    "no-venv": Kind("warning", "plain `python` without an environment, or in conda's `base`"),
    "foreign-venv": Kind("warning", "the environment of another application"),
    "cwd": Kind(
        "warning", "relative paths although the script never changes to its folder; `cd` to a drive without `/d`"
    ),
    # the dataset TOML
    "toml": Kind("error", "the dataset TOML cannot be read, or has no blocks"),
    "toml-slashes": Kind("error", "backslashes in double quotes, mixed slashes, or a tab or line end inside a path"),
    "toml-key": Kind("error", "a key that the tool does not know, or that stands in the wrong table"),
    "toml-value": Kind(
        "error", "a value that the tool refuses or changes: `source_fps = 30`, lengths that are not 4n+1"
    ),
    "toml-caption": Kind("error", "no `caption_extension`, or one without its dot"),
    "toml-cache": Kind("error", "a cache folder that is missing, shared, the media folder itself, or has brackets"),
    "toml-path": Kind("error", "a path in the TOML of another system than the script's, or not where the step looks"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: a key of `KINDS`.
        line: where, from 1.
        found: what is wrong.
        cure: what to write instead.
        grave: another severity than the kind's usual one.
        file: the file it stands in, when that is not the script.
    """

    kind: str
    line: int
    found: str
    cure: str
    grave: Severity | None = None
    file: str = ""

    @property
    def severity(self) -> Severity:
        """`error`: it will fail or train wrongly. `warning`: it may, or something is lost."""
        return self.grave or KINDS[self.kind].severity

    def as_dict(self) -> dict[str, Any]:
        """The finding as `--json` prints it."""
        values = asdict(self)
        values["severity"] = self.severity
        del values["grave"]
        return values
