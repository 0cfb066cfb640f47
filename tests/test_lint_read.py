"""The linter's readers: our own scripts come back word for word, and no text makes a reader stumble."""

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lint_samples import SHELLS, encode, script
from shells import bundles, wine
from shells.bash import needs_bash
from shells.drawn import VALUES, carried, drawn_steps, refuses

from wangen.generator import lint, scripts
from wangen.generator.lint import bat, sh
from wangen.generator.lint.script import HERE, MORE, UNKNOWN

drawn = settings(max_examples=12, derandomize=True, database=None,
                 suppress_health_check=list(HealthCheck))  # fmt: skip
PIECES = st.sampled_from(
    "python wan_train_network.py --dit --vae \" ' ` ^ \\ % ! $ ( ) { } [ ] @ & | ; < > # = , : ~ \n \r \t "
    "if for do fi else rem set call goto setlocal @( $( ${ <<E E foreach function $x %x% !x! && || 2>&1 {{ }} "
    "<PATH> @args $args += .Add( EOF <# #>".split(" ")
) | st.just(" ")  # fmt: skip
CODE = st.lists(PIECES | st.characters(), max_size=60).map("".join)


def parsed(shell, data):
    return lint.parse(Path(f"/nowhere/run.{shell}"), shell, data)


def argvs(shell, data):
    return [[call.name, *(word.text for word in call.args)] for call in parsed(shell, data).calls]


def test_a_list_that_a_loop_goes_through_keeps_its_words():
    text = b"$more = @('--seed', '1')\nforeach ($word in $more) { Write-Host $word }\n"
    text += b"python -m wangen.runtime train @more $word\n"
    ((name, *words),) = argvs("ps1", text)
    assert (name, words[:2], words[2] == UNKNOWN) == ("train", ["--seed", "1"], True)


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_words_of_our_scripts_come_back(shell):
    texts = [text for text in bundles.HOSTILE + bundles.POSIX_ONLY if not refuses(shell, text)]
    assert len(texts) > 20
    steps = drawn_steps(texts, {})
    assert argvs(shell, scripts.render(bundles.bundle(shell, steps), shell, "train")) == [step.argv() for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@drawn
@given(data=st.data())
def test_drawn_words_of_our_scripts_come_back(shell, data):
    steps = drawn_steps(data.draw(carried(shell, 3)), data.draw(VALUES))
    assert argvs(shell, scripts.render(bundles.bundle(shell, steps), shell, "train")) == [step.argv() for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("shell", SHELLS)
@settings(drawn, max_examples=150)
@given(text=CODE, where=st.integers(0, 1200))
def test_no_text_makes_a_reader_stumble(shell, text, where):
    right = script(shell)
    for content in (text, right[:where] + text + right[where:]):
        taken = parsed(shell, content.encode("utf-8", "surrogatepass"))
        if taken.calls:
            assert all(1 <= finding.line <= len(taken.lines) for finding in lint.lint(taken) if not finding.file)


@pytest.mark.parametrize("shell", SHELLS)
@settings(drawn, max_examples=100)
@given(data=st.binary(max_size=80))
def test_no_bytes_make_a_reader_stumble(shell, data):
    assert isinstance(parsed(shell, data).calls, list)


def words(shell, text):
    (call,) = parsed(shell, text.encode()).calls
    return [word.text for word in call.args]


@pytest.mark.parametrize(("shell", "text", "expected"), [
    ("sh", 'A=(--vae "a b" # remark\n --t5 c)\npython wan_train_network.py "${A[@]}" $B "$@"\n',
     ["--vae", "a b", "--t5", "c", UNKNOWN]),
    ("sh", 'D="x y"\nCUDA_VISIBLE_DEVICES=0 python wan_train_network.py $D "$D"z\n', ["x", "y", "x yz"]),
    ("sh", 'H=$(cd "$(dirname "$0")" && pwd)\npython wan_train_network.py "$H/x" ${N:-7} >log 2>&1 <in\n',
     [HERE + "/x", "7"]),
    ("sh", "cat <<EOF\npython wan_train_network.py --a\nEOF\npython wan_train_network.py --b\n", ["--b"]),
    ("sh", "python wan_train_network.py a\\ b 'c'\\''d' \"e\\\"f\"\n", ["a b", "c'd", 'e"f']),
    ("sh", 'go() {\n  python wan_train_network.py --a "$@" || exit 1\n}\ngo --b "c d"\n', ["--a", "--b", "c d"]),
    ("sh", 'function go { python wan_train_network.py "$@"; }\nmain() {\n  go --b "$@"\n}\nmain "$@"\n', ["--b"]),
    ("sh", 'go() {\n  if true; then python wan_train_network.py "$@"; fi\n}\ngo a\ngo b\n', [MORE]),
    ("sh", 'go() { echo; }\nset -- a "b c"\npython wan_train_network.py "$@"\n', ["a", "b c"]),
    ("sh", 'go() (\n  echo\n)\npython wan_train_network.py "$@" b\n', ["b"]),
    ("sh", 'go() { go "$@"; python wan_train_network.py "$@"; }\n', [MORE]),
    ("sh", 'go() {\n  local name="$1"\n  shift\n  python wan_train_network.py "$@"\n}\ngo "My run" --b "c d"\n',
     ["--b", "c d"]),
    ("sh", 'go() {\n  while [ $# -gt 3 ]; do shift; done\n  python wan_train_network.py "$@"\n}\ngo a b\n', [MORE]),
    ("sh", ': "${A:=/x y}" ${B:=z}\npython wan_train_network.py "$A" $B\n', ["/x y", "z"]),
    ("sh", "((N = 3 * 2)); let M=4; printf -v P %d 5\npython wan_train_network.py $N $M $P\n", [UNKNOWN] * 3),
    ("sh", "(( 1 << 2 ))\npython wan_train_network.py --a > >(tee log) 2> >(tee err >&2) --b\n", ["--a", "--b"]),
    ("sh", 'C="python wan_train_network.py --a \\"b c\\""\nif ! eval "$C"; then exit 1; fi\n', ["--a", "b c"]),
    ("sh", "srun bash -c 'cd /x && python wan_train_network.py --a \"b c\"'\n", ["--a", "b c"]),
    ("sh", "X=$(\n  # don't\n  ls\n)\npython wan_train_network.py --a `# it's` --b\n", ["--a", "--b"]),
    ("sh", "X=$(\n  # the newest\n  ls -t | head -1\n)\npython wan_train_network.py --a \"$X\"\n", ["--a", UNKNOWN]),
    ("sh", "X=$(cat <<'E F'\nit's 1)\nE F\n)\nY=$(grep '\\' x)\npython wan_train_network.py --a\n", ["--a"]),
    ("sh", "python wan_train_network.py --a <in.txt >log.txt <your name> <x>\n", ["--a", "<your name>", "<x>"]),
    ("bat", 'set "A=x y"\nset B=z\npython wan_train_network.py "%A%" %B% 100%% ^\n  "a\\\\" b^&c >log 2>&1\n',
     ["x y", "z", "100%", "a\\", "b&c"]),
    ("bat", 'python wan_train_network.py "a\\" --b c"\n', ['a" --b c']),
    ("bat", "if exist x (python wan_train_network.py a) else (echo wan_train_network.py)\n", ["a"]),
    ("bat", 'for %%i in (1 2) do python wan_train_network.py "%~dp0x"\n', [HERE + "\\x"]),
    ("bat", 'for /l %%s in (1,1,3) do python wan_train_network.py --seed %%s "x_%%~ns" 9%%t %%d\n',
     ["--seed", UNKNOWN, f"x_{UNKNOWN}", "9%t", "%d"]),
    ("ps1", "@'\nit's $( {\n'@ | Out-File x\n$t = @\"\na \"b\n\"@\npython wan_train_network.py --a\n", ["--a"]),
    ("ps1", "$a = New-Object Collections.ArrayList\n$a.AddRange([string[]]@('--a', \"b\"))\n[void]$a.Add('c')\n"
     "python wan_train_network.py @a\n", ["--a", "b", "c"]),
    ("ps1", "$a = @('--a')\n$a += $b.Split(' ')\n$a.AddRange($c.Split(' '))\npython wan_train_network.py @a d\n",
     ["--a", MORE, MORE, "d"]),
    ("ps1", "$a = @('--vae', \"x y\"\n '--t5')\n$a += 'z'\n& python wan_train_network.py @a \"$a\" $PSScriptRoot\\q\n",
     ["--vae", "x y", "--t5", "z", "--vae x y --t5 z", HERE + "\\q"]),
    ("ps1", "$a = @('--vae', 'x'; '--t5')\n& python wan_train_network.py @a\n", ["--vae", "x", "--t5"]),
    ("ps1", 'python wan_train_network.py --% --a "b c" d\n', ["--a", "b c", "d"]),
    ("ps1", "$n = 5\npython wan_train_network.py --seed=$n ('--x=' + $n) 'it''s' `\n  \"a`\"b\" # remark\n",
     ["--seed=5", "--x=5", "it's", 'a"b']),
    ("ps1", "$d = Join-Path $PSScriptRoot 'x.toml'\nif ($true) { python wan_train_network.py $d }\n",
     [HERE + "\\x.toml"]),
])  # fmt: skip
def test_words_as_the_program_receives_them(shell, text, expected):
    assert words(shell, text) == expected


BASH_LINES = [
    "a\\ b 'c'\\''d' \"e\\\"f\" $A \"$A\" ${A} x$A,y",
    '"${L[@]}" ${L[@]} x"${L[@]}"y "$@" ${A:+"$A"} ${N:+"$N"} ${N:-z} "${N:-z z}"',
    "--a=b \\\n  --c=\"d e\"'f g' #remark\n",
    "$'q r' $\"s t\" ~x {a,b \"\\a\\$\\`\" '$A' a#b >out 2>&1 c",
    'é\u00a0x "" \'\' x=y=z ! \\\\ "a\nb"',
    "$Aé \"$A\"$A'$A'",
    "$'it\\'s\\t\\x41\\101\\\\' 2> >(cat >&2) `# it's` \"${U:=1 2}\" $U z",
]


@pytest.mark.parametrize("text", ["$a = @(\n ", "$a.AddRange( "])
def test_a_script_of_powershell_that_ends_in_a_bracket_is_read(text):
    assert argvs("ps1", text.encode()) == []


@pytest.mark.parametrize(("shell", "line"), [
    ("sh", "A=$A$A"), ("sh", 'A=("${A[@]}" "${A[@]}")'), ("bat", "set A=%A%%A%"), ("ps1", "$A = @($A; $A)"),
])  # fmt: skip
def test_a_variable_made_of_itself_has_an_end(shell, line):
    start = {"sh": "A=x y", "bat": "set A=x y", "ps1": "$A = @('x', 'y')"}[shell]
    use = {"sh": "${A[@]}", "bat": "%A%", "ps1": "@A"}[shell]
    text = "\n".join([start, *[line] * 60, f"python wan_train_network.py --a {use}\n"])
    assert words(shell, text)[0] == "--a"


@needs_bash
def test_bash_itself_reads_the_same_words(tmp_path):
    head = 'A="v w"\nL=(1 "2 3")\n'
    for line in BASH_LINES:
        code = f'exec 3>&1\nnote() {{ printf "%s\\0" "$@" END >&3; }}\n{head}note {line}\n'
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
        commands, _ = sh.read(f"{head}note {line}\n")
        (note,) = [command for command in commands if command.words and command.words[0].text == "note"]
        assert [word.text for word in note.words[1:]] == done.stdout.split("\0")[:-2], line


BAT_LINES = [
    '"a b" c^&d "e^f" 100%% "%A%" %A% "C:\\x\\\\" y', '"a\\" --b c"', '"a""b" "" """c""" d', "a,b;c=d (e) 'f g' ~",
    'a\\\\"b c" a\\"b "x\\\\\\"y"', '^"q r^" ^^ é! "!A!" {x}', '"tab\there" --a="b c"\\',
]  # fmt: skip


@pytest.mark.wine
@wine.only_with_wine
def test_cmd_and_a_windows_program_read_the_same_words(tmp_path):
    (tmp_path / "note.py").write_text(
        "import json, sys\nopen('out', 'a', encoding='utf-8').write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    python = wine.windows(wine.HOME / "python" / "python.exe")
    text = '@echo off\nset "A=v w"\n' + "".join(f'"{python}" note.py {line}\n' for line in BAT_LINES)
    (tmp_path / "run.bat").write_bytes(encode("bat", text))
    wine.run(["cmd", "/c", "run.bat"], tmp_path, {"PYTHONUTF8": "1"})
    real = [json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines()]
    commands, _ = bat.read(text)
    assert [[word.text for word in command.words[2:]] for command in commands if len(command.words) > 2] == real
