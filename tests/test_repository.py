"""What a reader of the whole tree relies on: names, sizes, no stubs, versions that agree."""

import ast
import importlib.metadata
import tomllib

PACKAGES = ("pallas_kernels", "host_offload", "moejax")
GRAB_BAGS = {"utils", "util", "helpers", "common", "misc"}


def python_files(repository, *folders):
    return [path for folder in folders for path in sorted((repository / folder).rglob("*.py"))]


def test_no_file_has_a_grab_bag_name(repository):
    files = python_files(repository, *PACKAGES, "tests", "scripts")
    assert not [str(path) for path in files if path.stem in GRAB_BAGS]


def test_readme_is_short(repository):
    assert len((repository / "README.md").read_text().splitlines()) <= 120


def test_no_stubs_and_no_swallowed_errors(repository):
    found = []
    for path in python_files(repository, *PACKAGES, "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.expr() as error) if "NotImplementedError" in ast.dump(error):
                    found.append(f"{path}:{node.lineno}: NotImplementedError")
                case ast.ExceptHandler(
                    type=None | ast.Name(id="Exception" | "BaseException"), body=[ast.Pass()]
                ):
                    found.append(f"{path}:{node.lineno}: swallows every error")
    assert not found


def test_changelog_names_the_version(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    changelog = (repository / "CHANGELOG.md").read_text()
    assert f"## {project['version']}" in changelog


def test_installed_jax_is_a_supported_one():
    version = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:3])
    assert (0, 10, 2) <= version < (0, 12, 0)


def test_demo_has_its_model_card_and_nothing_unexpected(demo_dir):
    assert {path.name for path in demo_dir.iterdir() if path.suffix != ".py"} - {"__pycache__"} == {
        "MODEL_CARD.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
