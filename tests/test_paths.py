import json
import os
from pathlib import Path, PurePosixPath, PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pathvalidate import ValidationError, validate_filename

from wangen.generator.errors import WangenError
from wangen.generator.paths import (
    Machine,
    PathError,
    automount_root,
    new_folder_problem,
    slugify,
    toml_path,
    translate,
    windows_name_problem,
)

VECTORS = json.loads((Path(__file__).parent / "vectors" / "path_vectors.json").read_text(encoding="utf-8"))
WINDOWS = Machine(kind="windows", distro="Ubuntu")
WSL = Machine(kind="wsl", distro="Ubuntu")
LINUX = Machine(kind="linux")

components = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"), exclude_characters="/\\"), min_size=1, max_size=20
)


def outcome(path, source, target, *, toml=False):
    try:
        written = translate(path, source, target)
    except PathError as error:
        return {"error": error.code, **({} if error.where and error.cure else {"silent": True})}
    return {"path": toml_path(written, target) if toml else written}


@pytest.mark.parametrize("row", VECTORS["rows"], ids=lambda row: str(row["id"]))
def test_every_row_of_the_vectors(row):
    source, wsl = Machine(**row["input_profile"]), Machine(**row["wsl_target"])
    assert {
        "windows": outcome(row["path"], source, WINDOWS),
        "wsl": outcome(row["path"], source, wsl),
        "linux": outcome(row["path"], source, LINUX),
        "toml_windows": outcome(row["path"], source, WINDOWS, toml=True),
    } == row["expected"]


@pytest.mark.parametrize(
    ("path", "source", "code"),
    [
        (r"%USERPROFILE%\x", WINDOWS, "unexpanded-variable"),
        ("$HOME/x", LINUX, "unexpanded-variable"),
        ("/data/${USER}/x", LINUX, "unexpanded-variable"),
        ("C:\\a\nb", WINDOWS, "control-char"),
        (r"\\nas", WINDOWS, "incomplete-share"),
        (r"C:\AI", WSL, "windows-path"),
        (r"\\wsl.localhost\Debian\home\x", WINDOWS, "other-distro"),
    ],
)
def test_unclear_paths_are_refused(path, source, code):
    assert outcome(path, source, WSL) == {"error": code}


WINDIR = Machine(kind="wsl", distro="Ubuntu", automount="/windir/")
NAMELESS = Machine(kind="wsl")


@pytest.mark.parametrize(
    ("path", "source", "target", "expected"),
    [
        # Drives: the letter alone decides, in upper case on Windows and in lower case in WSL.
        ("d:/ai\\models", WINDOWS, WSL, "/mnt/d/ai/models"),
        ("/mnt/d/ai/models", WSL, WINDOWS, r"D:\ai\models"),
        ("/mnt/d/", WSL, WINDOWS, "D:\\"),
        ("/mnt/cx/AI", WSL, WINDOWS, r"\\wsl.localhost\Ubuntu\mnt\cx\AI"),
        ("/mnt", WSL, WINDOWS, r"\\wsl.localhost\Ubuntu\mnt"),
        ("/mnt/é/AI", WSL, WINDOWS, r"\\wsl.localhost\Ubuntu\mnt\é\AI"),
        # The folder of the drives, from wsl.conf.
        (r"C:\AI", WINDOWS, WINDIR, "/windir/c/AI"),
        ("/windir/c/AI", WINDIR, WINDOWS, r"C:\AI"),
        ("/mnt/c/AI", WINDIR, WINDOWS, r"\\wsl.localhost\Ubuntu\mnt\c\AI"),
        # WSL's own files: both servers in any letter case; one distribution does not see another's.
        (r"\\WSL.LOCALHOST\ubuntu\home\me", WINDOWS, WSL, "/home/me"),
        (r"\\WSL$\UBUNTU\home\me", WINDOWS, WSL, "/home/me"),
        ("//wsl$/Ubuntu/home/me", WINDOWS, WINDOWS, r"\\wsl.localhost\Ubuntu\home\me"),
        (r"\\wsl.localhost\Ubuntu", WINDOWS, WSL, "/"),
        ("/home/me", NAMELESS, WINDOWS, "unknown-distro"),
        # Shares and extended paths.
        (r"\\?\UNC\nas\share\x", WINDOWS, WSL, "unc-needs-mount"),
        (r"\\?\d:\x\y", WINDOWS, WSL, "/mnt/d/x/y"),
        ("//nas/share/x", WINDOWS, WINDOWS, r"\\nas\share\x"),
        (r"\\nas\share", WINDOWS, LINUX, "not-visible"),
        # Links may stand before `..`; `.` and doubled separators mean nothing.
        (r"C:\a\..\b\.\\c", WINDOWS, WSL, "/mnt/c/a/../b/c"),
        ("a//./b/", LINUX, WINDOWS, r"a\b"),
        (".", LINUX, WINDOWS, "."),
        # Names that only one side can hold.
        ("/home/me/a?b", WSL, WINDOWS, "illegal-char"),
        ("/home/me/a\\b", WSL, WINDOWS, "illegal-char"),
        ("/home/me/COM¹.txt", WSL, WINDOWS, "reserved-name"),
        ("data/nul .txt", LINUX, WINDOWS, "reserved-name"),
        ("/home/me/a\\b", WSL, WSL, "/home/me/a\\b"),
        ("D:", WINDOWS, WSL, "/mnt/d"),
        ("1:\\x", WINDOWS, WINDOWS, "illegal-char"),
        ("C:\\${HOME}\\x", WINDOWS, WSL, "unexpanded-variable"),
        ("s3://bucket/x", LINUX, LINUX, "uri"),
    ],
)  # fmt: skip
def test_further_rows(path, source, target, expected):
    found = outcome(path, source, target)
    assert found == ({"error": expected} if "-" in expected or expected == "uri" else {"path": expected})


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("[automount]\nroot=/windir\n", "/windir/"),
        ('# x\n[ automount ]\n enabled = true\n Root = "/"\r\n', "/"),
        ("[network]\nroot = /other\n", "/mnt/"),
        ("[automount]\nenabled = false\n[user]\nroot = /x", "/mnt/"),
    ],
)
def test_the_folder_of_the_drives_in_wsl_conf(text, root):
    assert automount_root(text) == root


@pytest.mark.parametrize("path", ["/data/100% of $5/x", "/data/0$0", "/data/cash$money", "/srv/$Recycle.Bin"])
def test_a_dollar_or_percent_that_is_no_variable_is_kept(path):
    assert translate(path, LINUX, LINUX) == path


def test_extended_share_prefix():
    assert translate(r"\\?\UNC\nas\share\x", WINDOWS, WINDOWS) == r"\\nas\share\x"


@given(st.lists(components, min_size=1, max_size=4), st.sampled_from("cdz"))
def test_wsl_to_windows_and_back_is_the_identity(parts, drive):
    path = str(PurePosixPath(f"/mnt/{drive}", *parts))
    there = outcome(path, WSL, WINDOWS)
    # Two percent signs may be a variable to Windows, which is refused there and legal here.
    if "path" in there and path.count("%") < 2:
        assert outcome(there["path"], WINDOWS, WSL) == {"path": path}


# Blanks around a name are legal on Windows, U+0020 at the end excepted; pathvalidate advises against them all.
# It counts bytes, Windows UTF-16 units.
@given(components)
def test_windows_names_are_judged_at_least_as_strictly_as_by_pathvalidate(name):
    try:
        validate_filename(name, platform="windows")
    except ValidationError:
        assert (
            windows_name_problem(name) is not None
            or name in (".", "..")
            or len(name.encode()) > 255
            or name != name.strip()
        )


@pytest.mark.parametrize("name", ["nul .txt", "COM¹", "lpt0.png", "CONIN$", "a:b", "x.", "x ", "é" * 256, ""])
def test_windows_cannot_hold_these_names(name):
    assert windows_name_problem(name)


@pytest.mark.parametrize("name", ["console", "com10", "..", "a&b (x86) %!^", "データ", "é" * 255])
def test_windows_can_hold_these_names(name):
    assert windows_name_problem(name) is None


@pytest.mark.parametrize("folder", ["C:", "C:x", r"\x"])
def test_a_new_folder_is_refused_that_windows_has_elsewhere_every_time(folder):
    assert "means another folder" in (new_folder_problem(PureWindowsPath(folder)) or "")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such folder")
def test_a_folder_that_is_there_may_have_any_name(tmp_path):
    (tmp_path / "a: b").mkdir()
    assert new_folder_problem(tmp_path / "a: b") is new_folder_problem(tmp_path / "a: b" / "new") is None


@given(st.text(max_size=100))
def test_a_slug_is_plain_or_refused(name):
    try:
        slug = slugify(name)
    except WangenError:
        return
    assert slug
    assert set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789_")
    assert slugify(slug) == slug


@pytest.mark.parametrize("name", ["", "日本", "---", "con", "NUL"])
def test_names_without_a_slug(name):
    with pytest.raises(WangenError):
        slugify(name)
