"""The printed manifest is valid for Kubernetes, and its command for this version."""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from sharding import launch
from sharding.distributed import processes

SCHEMA = Path(__file__).with_name("job_set.yaml")
KUBERNETES = "1.31"


def manifest(capsys: pytest.CaptureFixture[str], options: str) -> dict[str, Any]:
    with pytest.raises(SystemExit, match="0"):
        launch.main(["launch", "--kubernetes", *options.split()])
    return yaml.safe_load(capsys.readouterr().out)


def check(found: dict[str, Any]) -> None:
    jsonschema.validate(found, yaml.safe_load(SCHEMA.read_text()))
    for each in found["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}}
        kubernetes_validate.validate(job | each["template"], KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "options",
    [
        "--nodes 2 -- train",
        "--nodes 16 --gpus-per-host 8 --image me/train:3 --name big --restarts 9 -- python train.py",
        "--processes 3 --devices-per-process 4 --grace 30 --step-timeout 60 --start-timeout 600 -- train",
    ],
)
def test_a_manifest_keeps_to_the_schemas(options: str, capsys: pytest.CaptureFixture[str]):
    check(manifest(capsys, options))


def test_the_schemas_reject_typos(capsys: pytest.CaptureFixture[str]):
    found = manifest(capsys, "--nodes 2 -- train")
    (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    container["comand"] = container.pop("command")
    with pytest.raises(kubernetes_validate.ValidationError, match="'comand' was unexpected"):
        check(found)
    found["spec"]["retries"] = 3
    with pytest.raises(jsonschema.ValidationError, match="'retries' was unexpected"):
        check(found)


@pytest.mark.parametrize(
    ("options", "seconds"), [("", "300"), ("--connect-timeout 20", "300"), ("--connect-timeout 900", "900")]
)
def test_pods_have_five_minutes_or_more_to_connect(options: str, seconds: str, capsys: pytest.CaptureFixture[str]):
    """Those that are scheduled first wait for images that others pull."""
    found = manifest(capsys, f"--nodes 2 {options} -- train")
    (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values[processes.CONNECT_TIMEOUT] == seconds


def test_a_manifest_has_what_a_job_set_needs(capsys: pytest.CaptureFixture[str]):
    found = manifest(capsys, "--nodes 4 --gpus-per-host 8 -- train --mesh data=-1")
    (group,) = found["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (4, 4, "Indexed")
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"][-4:] == ["--", "train", "--mesh", "data=-1"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["SHARDING_COORDINATOR"] == "sharding-workers-0-0.sharding:1234"
    # The pod runs a launch command that this version accepts.
    launch.parse(container["command"][1:])
