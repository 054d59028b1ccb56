from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmove.cli.app import verify
from ckptmove.cli.config import Config, UnknownVariable
from ckptmove.cli.config import load_config as load_config_of
from ckptmove.cli.configured import settings_of
from ckptmove.errors import UsageError


@pytest.fixture
def allowed(monkeypatch):
    """A user who allows the code of the project."""
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")


def load_config(folder, typed=()):
    return load_config_of(folder, lambda: settings_of(verify), typed)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def project(text: str | bytes):
        (tmp_path / "pyproject.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path

    return project


def test_the_table_is_read(project) -> None:
    folder = project('[tool.ckptmove]\ncheckpoints = ["runs/*/last.pth", "/abs/x.pth"]\nto = "mps"\nignore = ["D101"]')
    config = load_config(folder)
    assert (config.checkpoints, config.to) == (("runs/*/last.pth", "/abs/x.pth"), "mps")
    assert (config.ignore, config.strict) == (("D101",), False)
    assert config.path == str(folder / "pyproject.toml")
    assert set(config.sources.values()) == {config.path}


def test_globs_start_at_the_file_and_are_seen_from_the_folder(project) -> None:
    folder = project('[tool.ckptmove]\ncheckpoints = ["runs/*.pth"]') / "src" / "deep"
    folder.mkdir(parents=True)
    assert load_config(folder).checkpoints == ("../../runs/*.pth",)


def test_the_nearest_file_counts_even_without_a_table(project) -> None:
    folder = project('[tool.ckptmove]\nto = "mps"') / "inner"
    folder.mkdir()
    assert load_config(folder).to == "mps"
    (folder / "pyproject.toml").write_text("[project]\n")
    assert load_config(folder) == Config(path=str(folder / "pyproject.toml"))


def test_no_file_at_all(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ckptmove.cli.config._NAME", "no-such-name.toml")
    assert load_config(tmp_path) == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.ckptmove]\ncheckpoint = []",
            "unknown key 'checkpoint' in [tool.ckptmove]; did you mean 'checkpoints'?",
        ),
        ("[tool.ckptmove]\ncheckpoints = 'a'", "'checkpoints' in [tool.ckptmove] is not a list of strings"),
        ("[tool.ckptmove]\nignore = [1]", "'ignore' in [tool.ckptmove] is not a list of strings"),
        ("[tool.ckptmove]\nto = 1", "'to' in [tool.ckptmove] is not a string"),
        ("[tool.ckptmove]\ncase = 1", "'case' in [tool.ckptmove] is not a string"),
        (
            "[tool.ckptmove]\ncase = 'a.py:b'\nscript = 'c.py'",
            "'case' and 'script' in [tool.ckptmove] exclude each other",
        ),
        ("[tool.ckptmove]\nstrict = 1", "'strict' in [tool.ckptmove] is not a boolean"),
        ("[tool.ckptmove]\nseed = true", "'seed' in [tool.ckptmove] is not an integer"),
        ("[tool.ckptmove]\ntimeout = '9'", "'timeout' in [tool.ckptmove] is not a number"),
        ("[tool.ckptmove]\nhelp = true", "unknown key 'help' in [tool.ckptmove]; the keys are 'checkpoints' and the "),
        ("[tool.ckptmove]\nfit = '2x1GB'", "unknown key 'fit' in [tool.ckptmove]; use ckptmove inspect PATH --fit Nx"),
        ("[tool.ckptmove]\ndevice-memory = '1GB'", "in [tool.ckptmove]; use ckptmove inspect PATH --fit NxSIZE"),
        ("[tool.ckptmove]\nfixx = true", "unknown key 'fixx' in [tool.ckptmove]; the keys are 'checkpoints' and the "),
        ("[tool.ckptmove]\njson = true\nformat = 'human'", "'json' and 'format' in [tool.ckptmove] exclude each other"),
        ("[tool]\nckptmove = 1", "'tool.ckptmove' is not a table"),
        ("[tool", "not valid TOML: "),
        (b"\xff", "not valid TOML: "),
        ("a = " + "[" * 5000, "not valid TOML: "),
        ("#" * (1 << 20) + "#", "larger than 1.0 MiB"),
    ],
)
def test_what_makes_no_sense_is_said(project, text, message) -> None:
    folder = project(text)
    with pytest.raises(UsageError) as caught:
        load_config(folder)
    assert message in caught.value.message
    assert caught.value.path == str(folder / "pyproject.toml")


def test_tool_may_be_anything(project) -> None:
    assert load_config(project("tool = 1")).checkpoints == ()


def test_a_file_that_cannot_be_read(project, monkeypatch) -> None:
    folder = project("")

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    with pytest.raises(UsageError, match="Permission denied"):
        load_config(folder)


def test_a_folder_that_is_gone_has_no_project(tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert load_config(Path()) == Config()


def test_a_file_in_a_folder_that_may_not_be_searched_is_not_this_user_s(project, monkeypatch) -> None:
    folder = project('[tool.ckptmove]\nto = "mps"') / "inner"
    folder.mkdir()
    real = os.stat

    def refuse(path, **options):
        if Path(path) == folder / "pyproject.toml":
            raise PermissionError(13, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
    assert load_config(folder).to == "mps"


@pytest.mark.parametrize(
    ("case", "seen"), [("jobs/train.py:case", "../../jobs/train.py:case"), ("jobs.train:case", "jobs.train:case")]
)
@pytest.mark.usefixtures("allowed")
def test_a_case_starts_at_the_file_too_and_a_module_is_found_by_name(project, case, seen) -> None:
    folder = project(f'[tool.ckptmove]\ncase = "{case}"') / "src" / "deep"
    folder.mkdir(parents=True)
    assert load_config(folder).values["case"] == seen


@pytest.mark.parametrize(
    ("key", "value", "seen"),
    [
        ("script", "jobs/train.py", "../jobs/train.py"),
        ("against", "old.pth", "../old.pth"),
        ("junit", "report.xml", "../report.xml"),
        ("report", ["json=a=b.json", "junit=/abs.xml"], ["json=../a=b.json", "junit=/abs.xml"]),
    ],
)
@pytest.mark.usefixtures("allowed")
def test_other_paths_start_at_the_file_too(project, key, value, seen) -> None:
    folder = project(f"[tool.ckptmove]\n{key} = {value!r}") / "src"
    folder.mkdir()
    assert load_config(folder).values == {key: seen}


#: A value for each setting, as it is written in TOML and in the environment.
SAMPLES = {str: ("'x'", "x", "x"), bool: ("true", "yes", True), int: ("3", "3", 3), float: ("0.5", "0.5", 0.5),
           list: ("['a', 'b c']", "a 'b c'", ["a", "b c"])}  # fmt: skip
WORDS = {"to": ("'mps'", "mps", "mps"), "ignore": ("['D']", "D", ["D"]), "select": ("['D']", "D", ["D"]),
         "report": ("['json=a']", "json=a", ["json=a"])}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), settings_of(verify).items(), ids=settings_of(verify))
@pytest.mark.usefixtures("allowed")
def test_every_option_of_verify_is_a_key_and_a_variable(project, monkeypatch, name, kind) -> None:
    written, text, value = WORDS.get(name, SAMPLES[kind])
    folder = project(f"[tool.ckptmove]\n{name.replace('_', '-')} = {written}")
    assert load_config(folder).values == {name: value}
    project("")
    variable = f"CKPTMOVE_{name.upper()}"
    monkeypatch.setenv(variable, text)
    config = load_config(folder)
    assert (config.values, config.sources) == ({name: value}, {name: variable})


def test_the_options_of_verify_are_found() -> None:
    kinds = settings_of(verify)
    assert {kinds[name] for name in ("to", "seed", "timeout", "strict", "script_args")} == {str, int, float, bool, list}
    assert kinds.keys() > {"against", "limit_factor", "report", "format", "json", "quiet"}
    assert not kinds.keys() & {"paths", "context", "version", "help"}


def test_the_environment_comes_before_the_file(project, monkeypatch) -> None:
    folder = project("[tool.ckptmove]\nto = 'mps'\nseed = 1\nstrict = true\ncheckpoints = ['a.pth']")
    for name, text in {"TO": "cuda:1", "STRICT": "0", "CHECKPOINTS": "b.pth 'c d.pth'", "SEED": ""}.items():
        monkeypatch.setenv(f"CKPTMOVE_{name}", text)
    config = load_config(folder)
    assert (config.to, config.strict, config.checkpoints) == ("cuda:1", False, ("b.pth", "c d.pth"))
    assert config.values["seed"] == 1
    assert config.sources["to"] == "CKPTMOVE_TO"


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("CKPTMOVE_STRIKT", "has this name; did you mean CKPTMOVE_STRICT?"),
        ("CKPTMOVE_FIT", "has this name; use ckptmove inspect PATH --fit NxSIZE"),
        ("CKPTMOVE_DEVICE_MEMORY", "has this name; use ckptmove inspect PATH --fit NxSIZE"),
        *((name, "has this name") for name in ("CKPTMOVE_FIXX", "CKPTMOVE_VERSION", "CKPTMOVE_X")),
    ],
)
def test_a_variable_of_no_option_is_a_warning(tmp_path, monkeypatch, variable, hint) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("CKPTMOVE_TO", "cpu")
    with pytest.warns(UnknownVariable, match=f"{variable} is ignored") as caught:
        config = load_config(tmp_path)
    assert str(caught[0].message).endswith(hint)
    assert config.values == {"to": "cpu"}


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("CKPTMOVE_STRICT", "maybe", "'maybe' is not a boolean"),
        ("CKPTMOVE_SEED", "1.5", "'1.5' is not an integer"),
        ("CKPTMOVE_TIMEOUT", "soon", "'soon' is not a number"),
        ("CKPTMOVE_IGNORE", "'D101", "is not a list of strings"),
        ("CKPTMOVE_IGNORE", "Z9", "'Z9'"),
        ("CKPTMOVE_TO", "gpu", "'gpu'"),
    ],
)
def test_what_makes_no_sense_in_the_environment_is_said(tmp_path, monkeypatch, variable, text, message) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path)
    assert message in caught.value.message
    assert caught.value.path == variable


def test_what_excludes_a_value_leaves_it_out(project, monkeypatch) -> None:
    folder = project("[tool.ckptmove]\nscript = 'a.py'\nscript-args = ['--x']\njson = true\nseed = 1")
    assert load_config(folder, {"case"}).values == {"json": True, "seed": 1}
    assert load_config(folder, {"script"}).values == {"json": True, "seed": 1}
    monkeypatch.setenv("CKPTMOVE_CASE", "b.py:f")
    monkeypatch.setenv("CKPTMOVE_FORMAT", "github")
    assert load_config(folder).values == {"case": "b.py:f", "format": "github", "seed": 1}
    monkeypatch.setenv("CKPTMOVE_SCRIPT", "b.py")
    with pytest.raises(UsageError, match="'case' and 'script' in the environment exclude each other"):
        load_config(folder)


@pytest.mark.usefixtures("allowed")
def test_arguments_alone_are_for_the_script_of_the_file(project, monkeypatch) -> None:
    folder = project("[tool.ckptmove]\nscript = 'a.py'\nscript-args = ['--x']")
    monkeypatch.setenv("CKPTMOVE_SCRIPT_ARGS", "--y '1 2'")
    assert load_config(folder).values == {"script": "a.py", "script_args": ["--y", "1 2"]}


@pytest.mark.parametrize(
    ("table", "kept", "withheld"),
    [
        ("case = 'a.py:f'\nfix = true\nlimit-factor = 3", {}, {"case": "--case a.py:f"}),
        ("script = 'a.py'\ndry-run = true", {}, {"script": "--script a.py"}),
        ("script = 'a b.py'\nscript-args = ['x', 'y z']", {}, {"script": "--script 'a b.py' -- x 'y z'"}),
        ("optimizer = 'os:system'", {}, {"optimizer": "--optimizer os:system"}),
        ("optimizer = 'AdamW'\nlimit-factor = 1000", {"optimizer": "AdamW"}, {}),
        ("select = ['D']", {"select": ["D", "F805", "F815", "S702"]}, {}),
    ],
)
def test_what_a_table_may_not_do_by_itself_is_left_out(project, monkeypatch, table, kept, withheld) -> None:
    folder = project(f"[tool.ckptmove]\n{table}\nseed = 1")
    for text in ("", "0"):
        monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", text)
        config = load_config(folder)
        assert (config.values, config.withheld) == ({"seed": 1, **kept}, withheld)
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "1")
    config = load_config(folder)
    assert not config.withheld
    assert len(config.values) == len(table.splitlines()) + 1


def test_code_in_the_environment_is_the_word_of_the_user(project, monkeypatch) -> None:
    folder = project("[tool.ckptmove]\ncase = 'a.py:f'")
    monkeypatch.setenv("CKPTMOVE_SCRIPT", "b.py")
    assert load_config(folder)[1::2] == ({"script": "b.py"}, {})
    assert not load_config(folder, {"case"}).withheld


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("junit = '../a.xml'", "'junit' in [tool.ckptmove] may not write outside of its folder; type --junit, or set "),
        ("report = ['json=a.json', 'html=/a.html']", "'report' in [tool.ckptmove] may not write outside"),
        ("report = ['html=link/a.html']", "'report' in [tool.ckptmove] may not write outside"),
        ("download = 'link'", "'download' in [tool.ckptmove] may not write outside"),
        ('junit = "a\\u0000"', "'junit' in [tool.ckptmove] may not write outside"),
        ("ignore = ['S']", "'ignore' in [tool.ckptmove] may not hide S702; type --ignore S702, or set "),
        ("ignore = ['ambiguous-archive']", "may not hide F805"),
    ],
)
def test_what_would_mislead_or_write_elsewhere_is_refused(project, tmp_path, monkeypatch, table, message) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to(tmp_path)
    (inner / "pyproject.toml").write_text(f"[tool.ckptmove]\n{table}")
    with pytest.raises(UsageError) as caught:
        load_config(inner)
    assert message in caught.value.message
    assert caught.value.path == str(inner / "pyproject.toml")
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "yes")
    assert len(load_config(inner).values) == 1


def test_the_permission_is_a_boolean_and_no_key(project, monkeypatch) -> None:
    monkeypatch.setenv("CKPTMOVE_PROJECT_CODE", "maybe")
    assert load_config(project("")) == Config(path=load_config(project("")).path)
    with pytest.raises(UsageError) as caught:
        load_config(project("[tool.ckptmove]\nseed = 1"))
    assert caught.value.path == "CKPTMOVE_PROJECT_CODE"
    monkeypatch.delenv("CKPTMOVE_PROJECT_CODE")
    with pytest.raises(UsageError, match="unknown key 'project-code'"):
        load_config(project("[tool.ckptmove]\nproject-code = true"))
