"""`wangen lint`: the traps of each shell, one edit of a right script at a time."""

from pathlib import Path

import pytest
from lint_samples import SHELLS, encode, expect, findings, line_of, script

from wangen.generator import lint

LATENTS, TEXT, TRAIN = "wan_cache_latents.py", "wan_cache_text_encoder_outputs.py", "wan_train_network.py"
CHECK_BAT = 'if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%\n'
CHECK_PS1 = "if ($LASTEXITCODE -ne 0) { exit $LASTEXITCODE }\n"

# shell, text of the right script, what stands there instead, kind, the line that holds this, words of the message
EDITS = [
    # exit codes
    ("sh", "set -euo pipefail\n", "", "unchecked", LATENTS, ["set -euo pipefail"]),
    ("sh", "set -euo pipefail\n", "set +e\n", "unchecked", LATENTS, ["runs all the same"]),
    ("sh", "#!/usr/bin/env bash\nset -euo pipefail\n", "#!/bin/sh\n", "unchecked", LATENTS, ["write || exit 1"]),
    ("bat", CHECK_BAT, "", "unchecked", LATENTS, ["ERRORLEVEL", "exit /b"]),
    ("ps1", CHECK_PS1, "", "unchecked", LATENTS, ["LASTEXITCODE"]),
    ("ps1", CHECK_PS1, "$ErrorActionPreference = 'Stop'\n", "unchecked", LATENTS, ["LASTEXITCODE"]),
    ("bat", CHECK_BAT, "if errorlevel 1 exit /b 1\n", "errorlevel", "if errorlevel", ["negative"]),
    ("sh", '"/ai/Wan2.1_VAE.pth"\n', '"/ai/Wan2.1_VAE.pth" | tee log.txt\n', "", "", []),
    ("bat", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" | tee log.txt\n', "pipe", "tee", ["exit code"]),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" || true\n', "unchecked", LATENTS, ["write || exit 1"]),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" || { echo bad; }\n', "unchecked", LATENTS, ["write || exit 1"]),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" || { echo bad; exit 1; }\n', "", "", []),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" || (echo bad; exit 1)\n', "", "", []),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" || exit\n', "", "", []),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" &\n', "unchecked", LATENTS, ["take the & off"]),
    ("sh", 'Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" &\nwait $!\n', "", "", []),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% neq 0 echo failed\n", "unchecked", LATENTS, ["exit /b 1 in the branch"]),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% neq 0 pause\n", "unchecked", LATENTS, ["exit /b 1 in the branch"]),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% neq 0 (\n  echo failed\n  pause\n)\n", "unchecked", LATENTS, ["in the branch"]),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% neq 0 (\n  echo failed\n  pause\n  exit /b 1\n)\n", "", "", []),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% equ 0 (echo fine) else (exit /b 1)\n", "", "", []),
    ("bat", CHECK_BAT, "echo the code is %ERRORLEVEL%\n", "unchecked", LATENTS, ["exit /b"]),
    ("bat", CHECK_BAT, "if %ERRORLEVEL% neq 0 echo failed & exit /b 1\n", "", "", []),
    ("bat", CHECK_BAT, "if not %ERRORLEVEL%==0 goto end\n", "", "", []),
    ("ps1", CHECK_PS1, 'if ($LASTEXITCODE -ne 0) { Write-Host "bad" }\n', "unchecked", LATENTS, ["write exit 1"]),
    ("ps1", CHECK_PS1, "if ($LASTEXITCODE -ne 0) { [Environment]::Exit(1) }\n", "", "", []),
    ("ps1", CHECK_PS1, "if (-not $?) { throw 'bad' }\n", "", "", []),
    # lines that go on
    ("sh", "bf16 \\\n  --optimizer", "bf16 \\ \n  --optimizer", "continuation", "n bf16 \\ ", ["blank"]),
    ("bat", "bf16 ^\n  --optimizer", "bf16 ^ \n  --optimizer", "continuation", "bf16 ^ ", ["blank"]),
    ("ps1", "bf16 `\n  --optimizer", "bf16 ` \n  --optimizer", "continuation", "bf16 ` ", ["blank"]),
    ("sh", "bf16 \\\n  --optimizer", "bf16\n  --optimizer", "continuation", "--mixed_precision bf16\n", ["end it"]),
    ("bat", "bf16 ^\n  --optimizer", "bf16\n  --optimizer", "continuation", "--mixed_precision bf16\n", ["end it"]),
    ("ps1", "bf16 `\n  --optimizer", "bf16\n  --optimizer", "continuation", "--mixed_precision bf16\n", ["end it"]),
    ("bat", "bf16 ^\n  --optimizer", "bf16 \\\n  --optimizer", "continuation", "bf16 \\", ["write ^"]),
    ("ps1", "bf16 `\n  --optimizer", "bf16 \\\n  --optimizer", "continuation", "bf16 \\", ["write `"]),
    ("sh", "bf16 \\\n  --optimizer", "bf16 ^\n  --optimizer", "continuation", "bf16 ^", ["write \\"]),
    ("sh", "bf16 \\\n  --optimizer", "bf16 \\\n\n  --optimizer", "continuation", "\n  --optimizer", ["empty line"]),
    ("bat", "bf16 ^\n  --optimizer", "bf16 ^\n\n  --optimizer", "continuation", "\n  --optimizer", ["empty line"]),
    ("sh", "bf16 \\\n  --optimizer", "bf16 \\\n  # memory\n  --optimizer", "continuation", "# memory", ["remark"]),
    ("bat", "--output_name cats\n", "--output_name cats ^\npause\n", "continuation", "cats ^", ["'pause'"]),
    # quotes
    ("sh", '"/ai/wan2.1_t2v_14B_bf16.safetensors"', "/ai/my models/wan.safetensors", "unquoted", "my models",
     ["'/ai/my'", "'models/wan.safetensors'"]),
    ("bat", '"C:\\AI\\wan2.1_t2v_14B_bf16.safetensors"', "C:\\my models\\wan.safetensors", "unquoted", "my models",
     ["'models\\wan.safetensors'", "quote the whole"]),
    ("sh", "--output_name cats", "--output_name my cats --output_dir /my out", "unquoted", "my cats", ['"/my out"']),
    ("ps1", '"C:\\AI\\wan2.1_t2v_14B_bf16.safetensors"', "C:\\my models\\wan.safetensors", "unquoted", "my models",
     ["'C:\\my'"]),
    ("bat", '"C:\\AI\\out"', '"C:\\AI\\out\\"', "quoting", "--output_dir", ["backslash"]),
    ("bat", '"C:\\AI\\out"', "'C:\\AI\\out'", "quoting", "--output_dir", ["single quotes"]),
    ("bat", "setlocal\n", 'setlocal\nset OUT="C:\\AI\\out dir"\n', "", "", []),
    ("ps1", '"C:\\AI\\out"', '"C:\\AI\\out dir\\"', "quoting", "--output_dir", ["swallows"]),
    ("bat", "--output_name cats", '--output_name "cats 100%"', "percent", "100%", ["write %%"]),
    ("bat", "--output_name cats", '--output_name "5% of 7% cats"', "percent", "5% of", ["% of 7%"]),
    ("bat", "setlocal\n", "setlocal EnableDelayedExpansion\n", "", "", []),
    ("bat", '"C:\\AI\\out"', "%%OUT%%", "placeholder", "--output_dir", ["%OUT%", "set it above"]),
    ("sh", '"/ai/out"', "%OUT_DIR%/x", "placeholder", "--output_dir", ["%OUT_DIR%", "$OUT_DIR"]),
    ("ps1", '"C:\\AI\\out"', "%OUT_DIR%\\x", "placeholder", "--output_dir", ["%OUT_DIR%", "$env:OUT_DIR"]),
    ("bat", '"C:\\AI\\out"', "${OUT}\\x", "placeholder", "--output_dir", ["${OUT}", "%OUT%"]),
    ("bat", '"C:\\AI\\out"', "$OUT\\x", "placeholder", "--output_dir", ["$OUT", "%OUT%"]),
    # tokens
    *[(shell, "--output_name cats", f"--output_name {token}", "placeholder", "--output_name", [token.strip('"')])
      for shell in SHELLS for token in ('"<NAME>"', "__LORA_NAME__", "YOUR_LORA", '"{{ slug }}"', "your_lora_name")],
    *[(shell, root, token, "placeholder", "--output_dir", [token.strip('"')[:8]])
      for shell, root in (("sh", '"/ai/out"'), ("bat", '"C:\\AI\\out"'), ("ps1", '"C:\\AI\\out"'))
      for token in ('"{models}/out"', '"@MODELS@/out"', '"[MODELS]/out"')],
    ("sh", '"/ai/out"', "/ai/{a,b}/[HD720p]/x@y/$((1))", "", "", []),
    ("sh", '"/ai/out"', "/path/to/output", "placeholder", "--output_dir", ["/path/to/output"]),
    ("sh", '"/ai/out"', "<OUTPUT>", "placeholder", "--output_dir", ["<OUTPUT>"]),
    ("bat", '"C:\\AI\\out"', "C:\\path\\to\\out", "placeholder", "--output_dir", ["path\\to"]),
    ("bat", '"C:\\AI\\out"', "<OUTPUT FOLDER>", "placeholder", "--output_dir", ["<OUTPUT FOLDER>"]),
    ("sh", "--output_name cats", '--output_name "$NAME"', "undefined", "$NAME", ["never set"]),
    ("bat", "--output_name cats", '--output_name "%NAME%"', "undefined", "%NAME%", ["never set"]),
    ("ps1", "--output_name cats", "--output_name $Name", "undefined", "$Name", ["never set"]),
    ("bat", "--output_name cats", "--output_name %", "percent", "--output_name %", ["single %"]),
    # paths of another system
    ("sh", '"/ai/out"', '"C:\\AI\\out"', "foreign-path", "--output_dir", ["/mnt/c/AI/out"]),
    ("sh", '"/ai/out"', "C:\\\\AI\\\\'my out'", "foreign-path", "--output_dir", ['"/mnt/c/AI/my out"']),
    ("sh", '"/ai/out"', "'C:\\AI'/'out'", "foreign-path", "--output_dir", ["write /mnt/c/AI/out"]),
    ("sh", "venv/bin/activate", "venv/Scripts/activate", "foreign-path", "venv/Scripts", ["venv/bin/activate"]),
    ("sh", '"/ai/out"', "C:/AI/out", "foreign-path", "--output_dir", ["/mnt/c/AI/out"]),
    ("sh", '"/ai/out"', "models\\out", "foreign-path", "--output_dir", ["modelsout"]),
    ("bat", '"C:\\AI\\out"', "/mnt/c/AI/out", "foreign-path", "--output_dir", ["C:\\AI\\out"]),
    ("bat", '"C:\\AI\\out"', "/home/me/out", "foreign-path", "--output_dir", ["Linux path"]),
    ("ps1", '"C:\\AI\\out"', "/home/me/out", "foreign-path", "--output_dir", ["Linux path"]),
    ("sh", '"/ai/out"', '"~/out"', "home", "--output_dir", ["$HOME/out"]),
    ("bat", '"C:\\AI\\out"', "~\\out", "home", "--output_dir", ["nothing replaces"]),
    # characters
    ("sh", '"/ai/out"', "“/ai/out”", "smart-character", "--output_dir", ["typographic quote"]),
    ("bat", '"C:\\AI\\out"', "“C:\\AI\\out”", "smart-character", "--output_dir", ["typographic quote"]),
    ("sh", "--sdpa", "–sdpa", "smart-character", "–sdpa", ["write --sdpa"]),
    ("bat", "--sdpa", "—sdpa", "smart-character", "—sdpa", ["write --sdpa"]),
    ("sh", "--task t2v-14B", "--task\u00a0t2v-14B", "smart-character", "--task\u00a0", ["no-break"]),
    ("bat", "--output_name cats", '--output_name "käthe"', "encoding", "käthe", ["chcp 65001"]),
    # environments
    ("sh", "source venv/bin/activate\n", "", "no-venv", LATENTS, ["source venv/bin/activate"]),
    ("bat", "call venv\\Scripts\\activate.bat\n", "", "no-venv", LATENTS, ["call venv"]),
    ("ps1", "& .\\venv\\Scripts\\Activate.ps1\n", "", "no-venv", LATENTS, ["Activate.ps1"]),
    ("sh", "venv/bin/activate\n", "venv/bin/activate\ndeactivate\n", "no-venv", LATENTS, ["no environment"]),
    ("bat", "activate.bat\n", "activate.bat\ncall deactivate\n", "no-venv", LATENTS, ["no environment"]),
    ("ps1", "Activate.ps1\n", "Activate.ps1\ndeactivate\n", "no-venv", LATENTS, ["no environment"]),
    ("sh", "source venv/bin/activate", "conda activate base", "no-venv", LATENTS, ["conda activate NAME"]),
    ("sh", "source venv/bin/activate", "conda activate wan", "", "", []),
    ("bat", "call venv", "venv", "call", "activate.bat", ["write call"]),
    ("bat", "call venv\\Scripts\\activate.bat", "conda activate wan", "call", "conda activate", ["write call"]),
    ("ps1", "& .\\venv\\Scripts\\Activate.ps1", ".\\venv\\Scripts\\activate.bat", "call", "activate.bat", ["nothing"]),
    ("sh", "source venv/bin", "./venv/bin", "call", "venv/bin/activate", ["write source"]),
    ("sh", "source venv/", "source /opt/ComfyUI/venv/", "foreign-venv", LATENTS, ["ComfyUI"]),
    ("bat", "call venv\\", "call C:\\kohya_ss\\venv\\", "foreign-venv", LATENTS, ["kohya_ss"]),
    ("ps1", "& .\\venv\\", "& C:\\ai-toolkit\\venv\\", "foreign-venv", LATENTS, ["ai-toolkit"]),
    ("bat", "python src", "C:\\ComfyUI_windows_portable\\python_embeded\\python.exe src", "foreign-venv", LATENTS,
     ["ComfyUI"]),
    # folders
    ("sh", 'cd "$(dirname "$0")"\n', "", "", "", []),
    ("bat", "cd /d", "cd", "cwd", "cd ", ["/d"]),
    # PowerShell 7
    ("ps1", 'Wan2.1_VAE.pth"\n' + CHECK_PS1, 'Wan2.1_VAE.pth" && ', "powershell-7", "&&", ["5.1"]),
]  # fmt: skip


@pytest.mark.parametrize(("shell", "old", "new", "kind", "at", "words"), EDITS)
def test_a_trap_is_named_with_its_line_and_its_cure(shell, old, new, kind, at, words):
    right = script(shell)
    assert old in right
    text = right.replace(old, new, 1)
    if not kind:
        assert findings(shell, text) == []
        return
    number = text[: text.index(at)].count("\n") + 1 if at.strip("\n") else 0
    expect(shell, text, kind, number, *words)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_torn_call_is_still_judged_as_one(shell):
    mark = {"sh": "\\", "bat": "^", "ps1": "`"}[shell]
    text = script(shell).replace(f"bf16 {mark}\n  --optimizer", "bf16\n  --optimizer")
    assert {finding.kind for finding in findings(shell, text)} == {"continuation"}


@pytest.mark.parametrize("shell", SHELLS)
def test_relative_paths_need_a_folder(shell):
    head = {"sh": 'cd "$(dirname "$0")"\n', "bat": 'cd /d "%~dp0"\n', "ps1": "Set-Location $PSScriptRoot\n"}[shell]
    text = script(shell, latents={"dataset_config": "sets/cats.toml"}).replace(head, "")
    expect(shell, text, "cwd", LATENTS, "sets/cats.toml", head.split()[0])


def test_delayed_expansion_eats_exclamation_marks():
    text = script("bat").replace("setlocal", "setlocal EnableDelayedExpansion").replace("name cats", 'name "cats!"')
    expect("bat", text, "delayed", "cats!", "DisableDelayedExpansion")
    good = text.replace("setlocal Enable", "set N=cats\nsetlocal Enable").replace('"cats!"', "!N!")
    assert findings("bat", good) == []


@pytest.mark.parametrize("extra", [
    'setlocal EnableDelayedExpansion\nset "OUT=C:\\wow!\\out"\n',
    'set "OUT=C:\\wow!\\out"\nsetlocal EnableDelayedExpansion\n',
    'setlocal EnableDelayedExpansion\nset "M=C:\\wow!"\nset "OUT=%M%\\out"\n',
    'if not defined AGAIN set AGAIN=1& cmd /v:on /c "%~f0"& exit /b\nset "OUT=C:\\wow!\\out"\n',
])  # fmt: skip
def test_delayed_expansion_eats_exclamation_marks_of_variables(extra):
    text = script("bat").replace("setlocal\n", extra).replace('"C:\\AI\\out"', '"%OUT%"')
    expect("bat", text, "delayed", "--output_dir", "! in line", "C:\\wow")
    assert "delayed" not in {f.kind for f in findings("bat", text.replace("wow!", "wow"))}


def test_delayed_expansion_of_a_cmd_of_its_own():
    text = script("bat", train={"output_dir": "C:\\wow!"}).replace("accelerate", "cmd /v:on /c accelerate")
    expect("bat", text, "delayed", "--output_dir", "cmd /v:on")


def test_a_value_for_one_program_is_none_for_the_next():
    text = script("sh").replace("python src", "N=cats python src", 1).replace("name cats", "name $N")
    expect("sh", text, "undefined", "name $N", "never set")


@pytest.mark.parametrize("start", ["", "export "])
def test_a_blank_ends_the_value_of_a_variable(start):
    text = script("sh").replace("source venv", f"{start}M=/my models\nsource venv").replace('"/ai/out"', "$M/out")
    expect("sh", text, "unquoted", "M=/my models", "'models'", 'M="/my models"')
    good = text.replace("/my models", '"/my models"').replace("$M/out", '"$M/out"')
    assert findings("sh", good) == []


def test_a_blank_before_the_equals_sign_belongs_to_the_name():
    text = script("bat").replace("setlocal\n", "setlocal\nset NAME = cats\n").replace("name cats", "name %NAME%")
    assert expect("bat", text, "undefined", "%NAME%", "no blanks around = in line 3").severity == "error"


def test_quotes_in_a_variable_and_around_it_part_a_path():
    text = script("bat").replace("setlocal\n", 'setlocal\nset OUT="C:\\AI\\out dir"\n')
    text = text.replace('"C:\\AI\\out"', '"%OUT%"')
    assert {"unquoted", "stray-word"} & {finding.kind for finding in findings("bat", text)}
    assert findings("bat", text.replace('"%OUT%"', "%OUT%")) == []


def test_errorlevel_inside_a_block_is_too_early():
    text = script("bat").replace(
        "python src/musubi_tuner/wan_cache_latents.py ^\n", "if exist x (\npython a/wan_cache_latents.py ^\n"
    )
    text = text.replace(
        'if not "%ERRORLEVEL%"=="0" exit /b %ERRORLEVEL%\n', 'if not "%ERRORLEVEL%"=="0" exit /b 1\n)\n', 1
    )
    assert expect("bat", text, "errorlevel", "exit /b 1", "before the step").severity == "error"


def test_a_pipe_hides_the_exit_code_without_pipefail():
    text = (
        script("sh")
        .replace("set -euo pipefail", "set -e")
        .replace('Wan2.1_VAE.pth"\n', 'Wan2.1_VAE.pth" 2>&1 | tee log\n')
    )
    expect("sh", text, "pipe", "tee log", "set -o pipefail")


@pytest.mark.parametrize("code", [
    "python a/{} || exit 1", "if ! python a/{}; then exit 1; fi", "python a/{}\nif [ $? -ne 0 ]; then exit 1; fi",
    "python a/{} || { echo failed; exit 1; }", "python a/{} && \\\n", "run() { python \"$@\" || exit 1; }\nrun a/{}",
])  # fmt: skip
def test_looked_at_exit_codes_in_bash(code):
    words = "wan_cache_latents.py --dataset_config /x.toml --vae /v.pth"
    text = script("sh").replace("set -euo pipefail\n", "")
    first = text.index("python src")
    text = (
        text[:first]
        + code.replace("a/{}", f"a/{words}")
        + ("" if code.endswith("\\\n") else "\n")
        + text[text.index("python src", first + 9) :]
    )
    assert line_of(text, words) not in {f.line for f in findings("sh", text) if f.kind == "unchecked"}


@pytest.mark.parametrize(("code", "seen"), [
    ("if ! CALL; then echo bad; fi\n", False), ("if CALL; then echo fine; else echo bad; fi\n", False),
    ("if ! CALL; then echo bad; exit 1; fi\n", True), ("if CALL; then echo fine; else exit 1; fi\n", True),
    ("until CALL; do sleep 5; done\n", True), ("if ! CALL; then BAD=1; fi\n", True),
    ("if ! CALL; then\n  if [ -t 1 ]; then\n    exit 1\n  fi\nfi\n", True), ("CALL || RC=$?\n", True),
])  # fmt: skip
def test_a_condition_takes_the_stop_away_from_set_e(code, seen):
    right = script("sh")
    first, end = right.index("python src"), right.index('VAE.pth"\n') + len('VAE.pth"\n')
    text = right[:first] + code.replace("CALL", right[first:end].strip()) + right[end:]
    if seen:
        assert findings("sh", text) == []
    else:
        expect("sh", text, "unchecked", LATENTS, "in the branch")


def test_an_ignored_failure_is_not_looked_at():
    text = script("sh").replace("set -euo pipefail\n", "").replace('VAE.pth"\n', 'VAE.pth" || true\n')
    expect("sh", text, "unchecked", LATENTS)


@pytest.mark.parametrize(("shell", "change", "kind", "words"), [
    ("bat", lambda data: data.replace(b"\r\n", b"\n"), "line-ends", "CRLF"),
    ("sh", lambda data: data.replace(b"\n", b"\r\n"), "line-ends", "LF"),
    ("bat", lambda data: b"\xef\xbb\xbf" + data, "bom", "without"),
    ("sh", lambda data: b"\xef\xbb\xbf" + data, "bom", "without"),
    ("bat", lambda data: b"\xff\xfe" + data.decode().encode("utf-16-le"), "bom", "UTF-8"),
])  # fmt: skip
def test_bytes_that_a_shell_stumbles_over(shell, change, kind, words):
    data = change(encode(shell, script(shell)))
    (finding,) = lint.lint(lint.parse(Path(f"/nowhere/a.{shell}"), shell, data))
    assert finding.kind == kind
    assert finding.line == 1
    assert words in f"{finding.found} {finding.cure}"


def test_powershell_needs_a_byte_order_mark_for_other_letters():
    text = script("ps1", train={"output_name": "käthe"})
    assert findings("ps1", text) == []
    data = encode("ps1", text).removeprefix(b"\xef\xbb\xbf")
    (finding,) = lint.lint(lint.parse(Path("/nowhere/a.ps1"), "ps1", data))
    assert (finding.kind, finding.line, finding.severity) == ("bom", line_of(text, "käthe"), "error")


def test_cmd_cuts_long_lines():
    text = script("bat", train={"training_comment": '"' + "x " * 4200 + '"'})
    expect("bat", text, "long-line", TRAIN, "8191")


def test_git_bash_on_windows_takes_drive_letters():
    text = script("sh").replace("venv/bin", "venv/Scripts").replace('"/ai/', '"C:/ai/')
    assert findings("sh", text) == []


@pytest.mark.parametrize("runner", ["uv run python", "conda run -n wan python", "../venv/bin/python", '"$PY"'])
def test_pythons_that_are_an_environment_of_their_own(runner):
    text = (
        script("sh")
        .replace("source venv/bin/activate\n", "PY=/opt/wan/bin/python\n")
        .replace("python src", f"{runner} src")
    )
    text = text.replace("accelerate launch", "uv run accelerate launch")
    assert findings("sh", text) == []


@pytest.mark.parametrize(
    "head", ["source settings.env\n", 'while getopts "o:" x; do case $x in o) OUT=$OPTARG;; esac; done\n']
)
def test_a_variable_that_something_else_sets_is_not_undefined(head):
    text = script("sh", train={"network_dim": '"$OUT"', "seed": '"$SLURM_ARRAY_JOB_ID"'})
    assert findings("sh", text.replace("source venv", f"{head}source venv")) == []
    assert {"undefined"} == {found.kind for found in findings("sh", text)}


def test_what_is_only_printed_is_no_call():
    printed = "python wan_train_network.py --bad\n"
    more = {"sh": f"echo {printed}", "bat": f"echo {printed}rem {printed}", "ps1": f"Write-Host {printed}"}
    for shell in SHELLS:
        assert findings(shell, script(shell) + more[shell]) == []
