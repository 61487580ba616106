"""The recipe of the conda package: as rattler-build reads it, and beside pyproject.toml."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import rattler_build
import tomlkit
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tfpar

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "conda" / "recipe.yaml"
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()


@pytest.fixture(scope="module")
def recipe():
    """The recipe with its expressions evaluated."""
    (variant,) = rattler_build.Stage0Recipe.from_file(RECIPE).render()
    return variant.recipe.to_dict()


def test_a_field_that_the_format_does_not_know_is_refused():
    written = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    for section, name in (("build", "entrypoints"), ("requirements", "runs"), ("about", "licence")):
        odd = copy.deepcopy(written)
        odd[section][name] = []
        with pytest.raises(rattler_build.RecipeParseError, match=f"unknown field '{name}'"):
            rattler_build.Stage0Recipe.from_dict(odd)


def test_it_needs_what_the_package_needs(recipe):
    python = f"python{PROJECT['project']['requires-python']}"
    asked = {Requirement(text) for text in [*PROJECT["project"]["dependencies"], python]}
    linux, *run = recipe["requirements"]["run"]
    assert linux == "__linux"
    found = {Requirement(text) for text in run}
    assert {(need.name, need.specifier) for need in found} == {
        (canonicalize_name(need.name), need.specifier) for need in asked
    }
    (backend,) = PROJECT["build-system"]["requires"]
    host = {Requirement(text) for text in recipe["requirements"]["host"][1:]}
    assert {Requirement("pip"), Requirement(backend)} == host
    assert recipe["requirements"]["host"][0] == "python 3.10.*"


def test_it_describes_the_package(recipe):
    project = PROJECT["project"]
    assert recipe["package"] == {"name": project["name"], "version": tfpar.__version__}
    scripts = [f"{name} = {program}" for name, program in project["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    about = recipe["about"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert about["repository"] == project["urls"]["Repository"]
    assert about["license_file"] == project["license-files"]
    assert (RECIPE.parent / recipe["source"][0]["path"]).resolve() == ROOT
