"""The files for GitHub, containers and conda have the keys that these demand, and the project's versions.

GitHub publishes JSON schemas of forms and workflows. The demands on the keys that we use are repeated below.
"""

import re
import tomllib
from io import BytesIO
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
CONTAINER = (ROOT / "docs/packaging/Containerfile").read_text()
RECIPE = yaml.safe_load((ROOT / "docs/packaging/recipe.yaml").read_text())

#: The attributes of each element of a form: required ones, and allowed ones.
ELEMENTS = {
    "markdown": ({"value"}, set()),
    "input": ({"label"}, {"description", "placeholder", "value"}),
    "textarea": ({"label"}, {"description", "placeholder", "value", "render"}),
    "dropdown": ({"label", "options"}, {"description", "multiple", "default"}),
    "checkboxes": ({"label", "options"}, {"description"}),
}
STEP = {"id", "if", "name", "uses", "run", "working-directory", "shell", "with", "env", "continue-on-error", "timeout-minutes"}
JOB = {
    "name", "needs", "permissions", "runs-on", "environment", "concurrency", "outputs", "env", "defaults", "if", "steps",
    "timeout-minutes", "strategy", "continue-on-error", "container", "services",
}  # fmt: skip
TOP = {"name", "run-name", "on", "env", "defaults", "concurrency", "jobs", "permissions"}
SCOPES = {
    "actions",
    "attestations",
    "checks",
    "contents",
    "id-token",
    "issues",
    "packages",
    "pages",
    "pull-requests",
    "statuses",
}


class Strict(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys and reads ``on`` as text, as GitHub does."""

    yaml_implicit_resolvers = {  # noqa: RUF012  yaml's own
        sign: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:bool"]
        for sign, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"a key occurs twice: {keys}"
        return super().construct_mapping(node, deep)


def loaded(path: Path) -> dict:
    return yaml.load(path.read_text(), Strict)  # noqa: S506  a SafeLoader


def test_there_is_a_form_for_each_kind_of_issue():
    assert [path.stem for path in FORMS] == ["missing-model-or-gpu", "question", "unread-file", "wrong-number"]
    assert loaded(ROOT / ".github/ISSUE_TEMPLATE/config.yml") == {"blank_issues_enabled": "true"}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_the_keys_that_github_demands(path: Path):
    form = loaded(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "title", "labels", "assignees"}
    elements = form["body"]
    assert any(one["type"] != "markdown" for one in elements)
    for one in elements:
        must, may = ELEMENTS[one["type"]]
        assert {"type", "attributes"} <= one.keys() <= {"type", "id", "attributes", "validations"}
        assert must <= one["attributes"].keys() <= must | may
        assert one.get("validations", {}).keys() <= {"required"}
        assert one.get("validations", {}).get("required", "true") in ("true", "false")
        options = one["attributes"].get("options", ())
        assert len(options) == len(set(options))
        assert re.fullmatch(r"[a-zA-Z0-9_-]+", one["id"])
    for unique in ([one["id"] for one in elements], [one["attributes"]["label"] for one in elements]):
        assert len(unique) == len(set(unique))


def test_a_wrong_number_comes_with_its_command_line_and_the_measured_figure():
    form = loaded(next(path for path in FORMS if path.stem == "wrong-number"))
    required = {one["id"] for one in form["body"] if one.get("validations", {}).get("required") == "true"}
    assert {"command", "measured"} <= required


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_the_commands_that_a_form_names_exist(path: Path):
    from zeroplan.cli.app import COMMANDS

    assert not set(re.findall(r"zeroplan ([a-z]+) (?:-|[A-Z]|share)", path.read_text())) - COMMANDS.keys()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_the_keys_that_github_demands(path: Path):
    flow = loaded(path)
    assert {"on", "jobs", "permissions"} <= flow.keys() <= TOP
    for name, job in flow["jobs"].items():
        assert re.fullmatch(r"[a-zA-Z_][\w-]*", name)
        assert {"runs-on", "steps", "timeout-minutes"} <= job.keys() <= JOB
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= flow["jobs"].keys() - {name}
        for granted in (flow["permissions"], job.get("permissions", {})):
            assert granted.keys() <= SCOPES
            assert set(granted.values()) <= {"read", "write", "none"}
        for step in job["steps"]:
            assert step.keys() <= STEP
            assert ("uses" in step) != ("run" in step)
            assert "with" not in step or "uses" in step


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_and_no_command_holds_an_expression(path: Path):
    steps = [step for job in loaded(path)["jobs"].values() for step in job["steps"]]
    for step in steps:
        assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", step["uses"])
        assert "${{" not in step.get("run", ""), "a name of a branch or tag could be a command"
        installed = re.findall(r"pip install ((?!-)[^\n]*)", step.get("run", ""))
        assert all("==" in one or one.startswith("dist/") for line in installed for one in line.split())
    pinned = re.findall(r"uses: (\S+)@[0-9a-f]{40} # v\d+\.\d+\.\d+$", path.read_text(), re.MULTILINE)
    assert len(pinned) == sum("uses" in step for step in steps), "the release stands beside the commit"
    assert len({(step["uses"].partition("@")[0], step["uses"]) for step in steps if "uses" in step}) == len(set(pinned))


def test_a_release_is_checked_signed_and_published_without_a_secret():
    text, jobs = WORKFLOWS[0].read_text(), loaded(WORKFLOWS[0])["jobs"]
    assert "secrets." not in text
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("check", None), ("build", "check"), ("publish", "build"), ("docs", "publish"),
    ]  # fmt: skip
    may_write = {
        name: {scope for scope, how in job.get("permissions", {}).items() if how == "write"} for name, job in jobs.items()
    }
    assert may_write == {
        "check": set(), "build": {"id-token", "attestations"}, "publish": {"id-token"}, "docs": {"contents"},
    }  # fmt: skip
    used = {step["uses"].partition("@")[0] for job in jobs.values() for step in job["steps"] if "uses" in step}
    assert {"pypa/gh-action-pypi-publish", "actions/attest-build-provenance", "actions/attest-sbom"} <= used
    for command in ("twine check --strict dist/*", "cyclonedx-py environment", "mike deploy --push"):
        assert command in text
    assert (ROOT / ".ci/run").is_file()


def test_the_tag_that_starts_a_release_names_the_projects_version():
    (step,) = [one for one in loaded(WORKFLOWS[0])["jobs"]["build"]["steps"] if one.get("name") == "The tag names the version"]
    program = re.search(r"python -c '(.*)'\)", step["run"])[1]
    said: list[str] = []
    exec(program, {"print": said.append, "open": lambda name, _: BytesIO((ROOT / name).read_bytes())})  # noqa: S102  the workflow's own line
    assert said == [PROJECT["version"]]


def versions(requirements: list[str]) -> set[str]:
    """Return requirements in conda's form."""
    return {re.sub(r"\s*(>=)", r" \1", one) for one in requirements}


def test_the_recipe_asks_for_what_the_project_asks_for():
    assert RECIPE["context"]["version"] == PROJECT["version"]
    assert f">={RECIPE['context']['python_min']}" == PROJECT["requires-python"]
    assert set(RECIPE["requirements"]["run"]) == versions(PROJECT["dependencies"]) | {"python >=${{ python_min }}"}
    assert set(RECIPE["requirements"]["host"]) == versions(BUILD) | {"python ${{ python_min }}.*", "pip"}
    assert RECIPE["build"]["python"]["entry_points"] == [f"{name} = {at}" for name, at in PROJECT["scripts"].items()]
    assert RECIPE["about"]["summary"] == PROJECT["description"]
    assert RECIPE["about"]["license"] == PROJECT["license"]
    assert [RECIPE["about"]["license_file"]] == PROJECT["license-files"]
    assert (ROOT / "docs/packaging" / RECIPE["source"]["path"]).resolve() == ROOT


def test_the_container_is_of_this_version_and_copies_what_a_wheel_needs():
    label = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*?)"', CONTAINER))
    assert label == {"title": PROJECT["name"], "version": PROJECT["version"], "licenses": PROJECT["license"]}
    pythons = set(re.findall(r"^FROM \S+/python:(\d\.\d+)-slim", CONTAINER, re.MULTILINE))
    assert len(pythons) == 1
    assert f"Programming Language :: Python :: {pythons.pop()}" in PROJECT["classifiers"]
    copied = {name for line in re.findall(r"^COPY (?!--from)(.*)$", CONTAINER, re.MULTILINE) for name in line.split()[:-1]}
    assert {"pyproject.toml", "zeroplan", PROJECT["readme"], *PROJECT["license-files"]} <= copied
    assert all((ROOT / name).exists() for name in copied)
    (extras,) = re.findall(r"whl\)\[([\w,]+)\]", CONTAINER)
    assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    assert re.search(r"^USER (?!root)\w+$", CONTAINER, re.MULTILINE)
